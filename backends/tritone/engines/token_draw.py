"""The draw of `sampler` for rows whose logits the host has not seen: it waits for nothing.

    logits ─► penalty, banned ids ─► ÷ temperature ─► min-p ─► scores
    scores ─┬─► the likeliest ─► top-k ─► top-p ─► + noise ─┬─► argmax
            ├─► all, where nothing limits them ─► + noise ──┤
            └─► greedy ─────────────────────────────────────┘

Rows that are drawn alike stand together, so that each group is a slice. Noise is made for what it is added
to and for no more. Where top-p may reach beyond the likeliest, the host learns that with the token and draws
once more from all, as `sampler` does: rare, and exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from tritone.engines import sampler
from tritone.engines.sampler import GREEDY_BELOW, NUCLEUS_WIDTH, keep_top_p
from tritone.engines.static_draw import penalise
from tritone.engines.token_buffers import NOT_A_NUMBER, OUT_OF_REACH, TokenBuffers, TokenRow

ALL = 0.0  # width of rows that nothing limits
ONE = float(1 << 62)  # width of rows whose highest score is it
NONE = math.inf  # width of rows that need no draw: the highest logit is it


class Noise(Protocol):
    """Standard Gumbel noise, float64, of tokens at the places of draws; seeds and positions: int64 [B]."""

    def of(self, tokens: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """[B, K] of tokens int64 [B, K]."""

    def highest(self, scores: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """int64 [B]: where scores float32 [B, V] with the noise of all tokens are highest."""


class PlainNoise:
    """In plain torch."""

    def of(self, tokens: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        return sampler.gumbel(tokens, seeds, positions)

    def highest(self, scores: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        return (sampler.gumbel_of_all(scores.shape[-1], seeds, positions) + scores).argmax(-1)


class TokenDraw:
    """Draws over the buffers of captured steps, behind each of them."""

    def __init__(self, buffers: TokenBuffers, ends: Sequence[int], noise: Noise) -> None:
        """ends: token ids that must not come where a row `bars_end`."""
        self._buffers, self._noise = buffers, noise
        self._vocab_size = buffers.logits.shape[1]
        self._ends = tuple(ends)

    def width(self, row: TokenRow) -> float:
        """Among how many of the likeliest tokens a row is drawn: what rows are to be ordered by."""
        sampling, most = row.sampling, min(NUCLEUS_WIDTH, self._vocab_size)
        if sampling.temperature < GREEDY_BELOW:
            return ONE if row.bars_end or sampling.repetition_penalty != 1.0 else NONE
        if NUCLEUS_WIDTH < sampling.top_k < self._vocab_size:
            return min(1 << (sampling.top_k - 1).bit_length(), self._vocab_size)
        return most if 0 < sampling.top_k < self._vocab_size or sampling.top_p < 1.0 else ALL

    @torch.inference_mode()
    def __call__(self, rows: Sequence[TokenRow]) -> Tensor | None:
        """Draw for rows in rising order of `width`, which stand first in the buffers, those of NONE last.

        What is given back, scores float32 [B, V], is to be kept for `redraw`; None: nothing will want it.
        """
        groups = [(width, len(list(some))) for width, some in groupby(map(self.width, rows)) if width < NONE]
        count = sum(size for _, size in groups)
        if not count:
            return None
        drawn = slice(0, count)
        scores = self._scores(rows[:count], drawn)
        reaches_on = any(row.sampling.top_p < 1.0 for row in rows[:count])
        tokens, first = [], 0
        in_reach: list[Tensor] = []
        for width, size in groups:
            group = slice(first, first + size)
            some, found = self._among(scores[group], group, width, reaches_on)
            tokens.append(some)
            in_reach.append(found)
            first = group.stop
        self._settle(drawn, torch.cat(tokens), torch.cat(in_reach))
        return scores if reaches_on else None

    def redraw(self, rows: Sequence[TokenRow], scores: Tensor) -> list[int]:
        """The tokens of rows that were OUT_OF_REACH, of their scores float32 [B, V]."""
        tokens = sampler.draw_whole(scores, [sampler.Row(row.sampling, row.draw) for row in rows])
        return [int(token) for token in tokens.tolist()]

    def _scores(self, rows: Sequence[TokenRow], drawn: slice) -> Tensor:
        """Logits float32 [B, V] of rows, with all that comes before a limit."""
        buffers = self._buffers
        scores = buffers.logits[drawn]
        if any(row.sampling.repetition_penalty != 1.0 for row in rows):
            scores = penalise(scores, buffers.seen[buffers.slots(drawn)], buffers.column("penalty", drawn))
        if any(row.bars_end for row in rows):
            bars = buffers.column("bars_end", drawn).bool()
            for end in self._ends:
                scores[:, end].masked_fill_(bars, -math.inf)
        temperature = buffers.column("temperature", drawn)
        scores = scores / temperature.masked_fill(temperature < GREEDY_BELOW, 1.0).unsqueeze(1)
        if any(row.sampling.min_p for row in rows):
            least = scores.amax(-1, keepdim=True) + buffers.column("log_min_p", drawn).unsqueeze(1)
            scores.masked_fill_(scores < least, -math.inf)
        return scores

    def _among(self, scores: Tensor, rows: slice, wide: float, reaches_on: bool) -> tuple[Tensor, Tensor]:
        """Tokens int64 [B] of scores [B, V], and bool [B]: whether each is certain."""
        buffers = self._buffers
        seeds, positions = buffers.seeds(rows), buffers.column("draw", rows).long()
        if wide in (ALL, ONE):
            tokens = scores.argmax(-1) if wide == ONE else self._noise.highest(scores, seeds, positions)
            return tokens, torch.ones_like(tokens, dtype=torch.bool)
        width = int(wide)
        ranked, tokens = _likeliest(scores, width)
        limit = buffers.column("top_k", rows).unsqueeze(1)
        ranked = ranked.masked_fill(torch.arange(width, device=scores.device) >= limit, -math.inf)
        total = ranked.logsumexp(-1, keepdim=True)
        is_limited = limit <= width
        if reaches_on:
            total = torch.where(is_limited, total, scores.logsumexp(-1, keepdim=True))
        ranked = keep_top_p(ranked, total, buffers.column("top_p", rows).unsqueeze(1))
        noise = self._noise.of(tokens, seeds, positions)
        chosen = tokens.gather(-1, (noise + ranked).argmax(-1, keepdim=True)).squeeze(-1)
        in_reach = is_limited | (ranked[:, -1:] == -math.inf)
        return chosen, in_reach.squeeze(1) | (width == self._vocab_size)

    def _settle(self, rows: slice, tokens: Tensor, in_reach: Tensor) -> None:
        buffers, slots = self._buffers, self._buffers.slots(rows)
        wrong = buffers.ids[rows] == NOT_A_NUMBER  # as the step has found
        told = torch.where(in_reach, tokens, OUT_OF_REACH).masked_fill(wrong, NOT_A_NUMBER)
        buffers.ids[rows] = told.int()
        buffers.last[slots] = tokens
        buffers.seen[slots, tokens] = torch.ones_like(wrong)


def _likeliest(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The highest scores [B, width] of each row of [B, V], falling, and their tokens; of equal ones the first
    comes first, so that it never depends on how many rows are looked at."""
    best = scores.topk(width)
    tokens, order = best.indices.sort(-1)
    ranked, order = best.values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return ranked, tokens.gather(-1, order)
