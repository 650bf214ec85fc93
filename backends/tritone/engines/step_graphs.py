"""A step over static buffers as CUDA graphs: one launch a step, a graph for each of some numbers of rows.

    rows ─► pinned ─► packed int32 [B, COLUMNS] ─► graph of the smallest bucket that holds them ─► pinned

A captured step is a program: a function of how many rows it has, over buffers at fixed addresses. Rows beyond
those that were asked for work in a spare slot. The host writes the rows of one step while the device works on
the one before: two sets of pinned buffers are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from tritone.engines.cuda_graphs import CudaGraphs
from tritone.engines.staging import Staging
from tritone.ports import Array

Program = Callable[[int], None]


class StepGraphs:
    """Launches a captured program; on a CPU, which has no graphs, calls it."""

    def __init__(
        self, program: Program, packed: Tensor, drawn: Tensor, spare: Array, sizes: Sequence[int]
    ) -> None:
        """Capture the program for every one of the rising sizes.

        packed, drawn: on the device, what the program reads of the host's and what it draws, of the largest
        size. spare: as many packed rows that only fill a bucket.
        """
        self._program = program  # holds the weights, of which a graph knows no more than the addresses
        self._packed, self._spare, self._buckets = packed, spare, sizes
        self._staging = [Staging.beside(packed, drawn) for _ in range(2)]
        # The largest first: the others then live in the memory that it has taken.
        captured = CudaGraphs(packed.device)
        self._replays = {rows: captured(partial(program, rows)) for rows in reversed(sizes)}

    def _next_rows(self) -> Array:
        """Where the rows of the next step are to be written: int32 [B, COLUMNS], pinned."""
        self._staging.reverse()
        rows: Array = self._staging[0].packed.numpy()
        return rows

    def _replay(self, count: int) -> Staging:
        """Launch a step of the first `count` rows that were written; where to fetch what it draws.

        Of two steps the first must have been fetched before a third is written.
        """
        bucket = next(size for size in self._buckets if size >= count)
        staging = self._staging[0]
        staging.packed.numpy()[count:bucket] = self._spare[count:bucket]
        self._packed[:bucket].copy_(staging.packed[:bucket], non_blocking=True)
        self._replays[bucket]()
        return staging
