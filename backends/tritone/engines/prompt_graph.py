"""Pieces of prompts as CUDA graphs: one launch a piece, one graph for each of some lengths.

    rows [n, H], slot, places ─► buffers of the next longer graph ─► layers ─► keys and values in the cache

Rows that only fill a graph stand at the last place of the slot, which a prompt never reaches: the row that
does stand there one day is the last of its sequence, and stores its own keys before it looks at any.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tritone.engines.cuda_graphs import CudaGraphs
from tritone.engines.graph_memory import SHORTEST_GRAPH, buckets
from tritone.networks.decoder import Decoder, Span
from tritone.networks.transfer import on_device


class PromptGraphs:
    """Runs the rows of a prompt that nothing is drawn from."""

    def __init__(self, decoder: Decoder, most_rows: int) -> None:
        """decoder: with a cleared cache. most_rows: of a piece."""
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
    def read(self, rows: Tensor, span: Span, positions: Tensor | None) -> None:
        """Run rows [n, H], which stand where the span says; positions: float32 [3, n], on the host."""
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
