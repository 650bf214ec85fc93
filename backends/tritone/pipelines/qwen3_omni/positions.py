"""Positions of rows: each its place, or time, height and width where a prompt holds pictures (M-RoPE)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tritone.networks.spans import Span


@dataclass(frozen=True)
class PromptPositions:
    """Positions of a prompt's rows; later rows go on one by one after the highest of them."""

    table: Tensor  # float32 [3, P]

    @cached_property
    def shift(self) -> float:
        """Position of a later row less its place."""
        return float(self.table.max()) + 1 - self.table.shape[1]

    def of(self, place: int) -> float:
        """Position of a row of text: time, height and width are one."""
        return float(self.table[0, place]) if place < self.table.shape[1] else place + self.shift


def positions_of(prompts: Sequence[PromptPositions | None], spans: Sequence[Span]) -> Tensor | None:
    """Positions float32 [3, N] of the rows of spans, or None if all are places.

    prompts: of each span's sequence, the positions that it begins with.
    """
    if all(prompt is None for prompt in prompts):
        return None
    return torch.cat([_of_span(prompt, span) for prompt, span in zip(prompts, spans, strict=True)], dim=1)


def _of_span(prompt: PromptPositions | None, span: Span) -> Tensor:
    known = 0 if prompt is None else prompt.table.shape[1]
    shift = 0.0 if prompt is None else prompt.shift
    later = (torch.arange(max(span.start, known), max(span.end, known)) + shift).float().expand(3, -1)
    if prompt is None or span.start >= known:
        return later
    return torch.cat([prompt.table[:, span.start : span.end], later], dim=1)
