"""Pieces of prompts as CUDA graphs: one launch for many rows, one graph for each of some numbers of rows.

    rows [N, H], spans, positions ─► buffers of the next larger graph ─► layers ─► keys, values in the cache

`PlainPrompts` does so in plain torch, a span a launch: what the kernels (prompt_kernels.py), which take the
spans of many sequences together, are held to.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from tritone.engines.cuda_graphs import CudaGraphs
from tritone.engines.graph_memory import SHORTEST_GRAPH, buckets
from tritone.errors import ConfigError
from tritone.networks.decoder import Decoder
from tritone.networks.spans import Span
from tritone.networks.transfer import on_device


class PromptGraphs(ABC):
    """Runs the rows of prompts that nothing is drawn from."""

    takes_many = True  # spans at a time; else one after the other
    least_piece = 1  # rows that a shorter span is counted as: it takes as long

    @abstractmethod
    def read(self, rows: Tensor, spans: Sequence[Span], positions: Tensor | None) -> None:
        """Run rows [N, H], laid out span after span, each of another slot.

        positions: float32 [3, N], on the host; None: of each row its place.
        """

    @abstractmethod
    def run(
        self,
        rows: Tensor,
        spans: Sequence[Span],
        positions: Tensor | None,
        additions: Sequence[tuple[Tensor, Tensor]],
        tap: int | None,
    ) -> Tensor | None:
        """As `read`, but operation by operation, for rows that bring or leave more; see Decoder.forward.

        What is tapped [N, H]; None if nobody asked.
        """


class PlainPrompts(PromptGraphs):
    """Rows that only fill a graph stand at the last place of the slot, which a prompt never reaches: the row
    that does stand there one day is the last of its sequence, and stores its own keys before it looks at any.
    """

    takes_many = False
    least_piece = 128  # it reads all weights

    def __init__(self, decoder: Decoder, most_rows: int) -> None:
        """decoder: with a cleared cache. most_rows: of a span."""
        self._decoder = decoder
        self._lengths = buckets(SHORTEST_GRAPH, most_rows)
        longest, device = self._lengths[-1], decoder.device
        self._last = decoder.cache.shape[-2] - 1
        self._rows = torch.zeros((longest, decoder.config.hidden_size), dtype=decoder.dtype, device=device)
        self._where = torch.full((2 + longest,), self._last, device=device)  # slot, end, places
        self._where[0] = decoder.cache.shape[2] - 1  # the spare slot
        self._positions = torch.zeros((3, longest), device=device)
        captured = CudaGraphs(device)
        self._replays = {n: captured(partial(self._program, n)) for n in reversed(self._lengths)}

    @torch.inference_mode()
    def read(self, rows: Tensor, spans: Sequence[Span], positions: Tensor | None) -> None:
        first = 0
        for span in spans:
            some = slice(first, first + span.count)
            self._read(rows[some], span, None if positions is None else positions[:, some])
            first += span.count

    def run(
        self,
        rows: Tensor,
        spans: Sequence[Span],
        positions: Tensor | None,
        additions: Sequence[tuple[Tensor, Tensor]],
        tap: int | None,
    ) -> Tensor | None:
        passed = self._decoder.forward(rows, spans, positions=positions, additions=additions, tap=tap)
        return passed.tapped

    def _read(self, rows: Tensor, span: Span, positions: Tensor | None) -> None:
        length = next(length for length in self._lengths if length >= span.count)
        places = [*range(span.start, span.end), *[self._last] * (length - span.count)]
        device = self._decoder.device
        self._rows[: span.count] = rows
        self._where[: 2 + length] = on_device([span.slot, span.end, *places], torch.int64, device)
        turned_by = [places] * 3 if positions is None else positions.tolist()
        width = len(turned_by[0])
        self._positions[:, :width] = on_device(turned_by, torch.float32, device)
        self._replays[length]()

    def _program(self, length: int) -> None:
        slot, end, places = self._where[:1], self._where[1:2], self._where[2 : 2 + length]
        positions = self._positions[:, :length]
        plain = self._decoder.rotary.is_plain
        self._decoder.step(
            self._rows[:length], slot, places.unsqueeze(0), end, positions[0] if plain else positions
        )


def prompt_graphs(
    decoder: Decoder, most_rows: int, *, slots: int, kernels: bool, one_bucket: bool
) -> PromptGraphs:
    """Pieces of prompts of `slots` sessions through a decoder that has one slot more, and a cleared cache.

    kernels: not in plain torch, where there are kernels for what the decoder computes. ConfigError where the
    GPU has not what they need.
    """
    if kernels and importlib.util.find_spec("triton"):
        from triton.runtime.errors import OutOfResources

        from tritone.engines.prompt_kernels import KernelPrompts
        from tritone.kernels.layers import can_run

        if can_run(decoder.config):
            try:
                return KernelPrompts(decoder, most_rows, slots=slots, one_bucket=one_bucket)
            except OutOfResources as error:
                raise ConfigError(
                    f"this GPU is too small for the kernels: {error}", "give kernels: false"
                ) from None
    return PlainPrompts(decoder, most_rows)
