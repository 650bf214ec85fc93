"""A mixture of experts for many rows: every expert with the rows that chose it, a tile of them at a time.

    normed [N, H] ─► router ─► chosen, shares [N, U] ─sort─► rows by expert ─► up, GLU ─► inner [N · U, I]
                                                                                            │
    partial sums [U, N, H], a choice each ◄──────────────────────── down ◄──────────────────┘

U: experts that a row goes through, the one that all rows go through in as many pieces as it is stored in.
What is launched depends on no choice: there are as many tiles as there can be, and those behind the last do
nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritone.kernels.experts import glu
from tritone.kernels.products import Partials, cleared
from tritone.kernels.tiles import height, tile_of
from tritone.networks.layer_weights import ExpertWeights

_FAR = tl.constexpr(-1e30)
_CHOOSING_ROWS = 16  # of a program that chooses


@triton.jit
def _choose(
    normed, router, gate, count, chosen, shares, N,
    H: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    TOP: tl.constexpr, PIECES: tl.constexpr, BT: tl.constexpr, RENORMALISE: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    e, t = tl.arange(0, BE), tl.arange(0, BT)
    in_n, in_e = m < N, e < E
    sums = tl.zeros([BM, BE], tl.float32)
    opened = tl.zeros([BM], tl.float32)
    for start in range(0, H, BK):
        k = start + tl.arange(0, BK)
        in_k = k < H
        rows = tl.load(normed + m[:, None] * H + k[None, :], mask=in_n[:, None] & in_k[None, :], other=0.0)
        weight = tl.load(router + e[None, :] * H + k[:, None], mask=in_e[None, :] & in_k[:, None], other=0.0)
        sums = tl.dot(rows, weight, sums, input_precision="ieee")
        if PIECES > 0:
            opens = tl.load(gate + k, mask=in_k, other=0.0).to(tl.float32)
            opened += tl.sum(rows.to(tl.float32) * opens[None, :], 1)
    scores = tl.where(in_e[None, :], sums, _FAR)
    highest = tl.max(scores, 1)
    everything = tl.sum(tl.exp(scores - highest[:, None]), 1)
    best = tl.zeros([BM, BT], tl.int32)
    share = tl.zeros([BM, BT], tl.float32)
    for place in tl.static_range(TOP):
        winner = tl.argmax(scores, 1)
        value = tl.exp(tl.max(scores, 1) - highest)
        best = tl.where(t[None, :] == place, tl.minimum(winner, E - 1).to(tl.int32)[:, None], best)
        share = tl.where(t[None, :] == place, value[:, None], share)
        scores = tl.where(e[None, :] == winner[:, None], _FAR, scores)
    share = share / (tl.sum(share, 1) if RENORMALISE else everything)[:, None]
    if PIECES > 0:
        is_piece = (t >= TOP)[None, :]
        best = tl.where(is_piece, (E + t - TOP)[None, :], best)
        share = tl.where(is_piece, tl.sigmoid(opened)[:, None], share)
    USED: tl.constexpr = TOP + PIECES
    best = tl.where((m < tl.load(count))[:, None], best, E + PIECES)
    at = m[:, None] * USED + t[None, :]
    inside = in_n[:, None] & (t < USED)[None, :]
    tl.store(chosen + at, best, mask=inside)
    tl.store(shares + at, share, mask=inside)


@triton.jit
def _tile(firsts, ALL: tl.constexpr, BA: tl.constexpr, BM: tl.constexpr):
    """Expert, first and last pair of this program's tile; the expert is ALL behind the last tile."""
    e = tl.arange(0, BA)
    first = tl.load(firsts + e, mask=e < ALL, other=0)
    end = tl.load(firsts + e + 1, mask=e < ALL, other=0)
    tiles = (end - first + BM - 1) // BM
    ends = tl.cumsum(tiles, 0)
    number = tl.program_id(1)
    expert = tl.sum(((ends <= number) & (e < ALL)).to(tl.int32))
    is_mine = e == expert
    start = tl.sum(tl.where(is_mine, first + (number - ends + tiles) * BM, 0))
    return expert, start, tl.sum(tl.where(is_mine, end, 0))


@triton.jit
def _up(
    normed, gate_up, shares, order, firsts, inner,
    USED: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr, ALL: tl.constexpr, BA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    expert, start, end = _tile(firsts, ALL, BA, BM)
    if expert < ALL:
        m, n = start + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
        in_m, in_n = m < end, n < INNER
        pair = tl.load(order + m, mask=in_m, other=0)
        share = tl.load(shares + pair, mask=in_m, other=0.0)
        base = gate_up + expert.to(tl.int64) * (2 * INNER * H)
        row = (pair // USED).to(tl.int64)
        out = glu(normed, base, row, in_m, n, in_n, H, INNER, BM, BN, BK, STAGES) * share[:, None]
        to = inner + m.to(tl.int64)[:, None] * INNER + n[None, :]
        tl.store(to, out.to(inner.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def _down(
    inner, down, order, firsts, parts, N,
    USED: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr, ALL: tl.constexpr, BA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    expert, start, end = _tile(firsts, ALL, BA, BM)
    if expert < ALL:
        m, n = start + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
        in_m, in_n = m < end, n < H
        pair = tl.load(order + m, mask=in_m, other=0)
        base = down + expert.to(tl.int64) * (H * INNER)
        at = inner + m.to(tl.int64)[:, None] * INNER
        out = tl.zeros([BM, BN], tl.float32)
        for first in tl.range(0, INNER, BK, num_stages=STAGES):
            k = first + tl.arange(0, BK)
            in_k = k < INNER
            rows = tl.load(at + k[None, :], mask=in_m[:, None] & in_k[None, :], other=0.0)
            weight = tl.load(
                base + n[None, :] * INNER + k[:, None], mask=in_n[None, :] & in_k[:, None], other=0.0
            )
            out = tl.dot(rows, weight, out, input_precision="ieee")
        to = parts + ((pair % USED).to(tl.int64) * N + pair // USED)[:, None] * H + n[None, :]
        tl.store(to, out.to(parts.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


class GroupedExperts:
    """The mixtures of a decoder, with memory for `rows` rows."""

    def __init__(self, sizes: ExpertWeights, rows: int) -> None:
        """sizes: those of any layer."""
        self._experts, self._hidden = sizes.router.shape
        self._all, _, self._inner = sizes.down.shape
        self._top = sizes.num_chosen
        self._used = sizes.num_chosen + self._all - self._experts
        like, pairs = sizes.down, rows * self._used
        self._chosen = cleared(pairs, like=like, dtype=torch.int32)
        self._shares = cleared(pairs, like=like, dtype=torch.float32)
        self._inners = cleared(pairs, self._inner, like=like)
        self._parts = cleared(pairs * self._hidden, like=like)
        self._numbers = torch.arange(self._all + 1, dtype=torch.int32, device=like.device)

    def __call__(self, normed: Tensor, weights: ExpertWeights, count: Tensor) -> Partials:
        """What is to be added up, in their dtype, of normed rows [N, H], of which `count` are computed."""
        rows, used, hidden, inner = len(normed), self._used, self._hidden, self._inner
        pairs = rows * used
        gate = weights.router if weights.shared_gate is None else weights.shared_gate
        tall = _CHOOSING_ROWS
        _choose[(triton.cdiv(rows, tall),)](
            normed, weights.router, gate, count, self._chosen, self._shares, rows, hidden, self._experts,
            max(16, triton.next_power_of_2(self._experts)), tall, min(64, triton.next_power_of_2(hidden)),
            self._top, used - self._top, triton.next_power_of_2(used), weights.renormalise, num_warps=4,
        )  # fmt: skip
        chosen, order = torch.sort(self._chosen[:pairs], stable=True)
        firsts = torch.searchsorted(chosen, self._numbers, out_int32=True)
        an_expert = pairs // self._all
        tall = height("grouped_up", an_expert)
        tiles, bins = pairs // tall + self._all, triton.next_power_of_2(self._all)
        item = normed.element_size()
        up = tile_of("grouped_up", an_expert, hidden, inner, item)
        down = tile_of("grouped_down", an_expert, inner, hidden, item)
        _up[(triton.cdiv(inner, up.width), tiles)](
            normed, weights.gate_up, self._shares, order, firsts, self._inners, used, hidden, inner,
            self._all, bins, tall, up.width, up.depth, up.stages, num_warps=up.warps,
        )  # fmt: skip
        _down[(triton.cdiv(hidden, down.width), tiles)](
            self._inners, weights.down, order, firsts, self._parts, rows, used, hidden, inner, self._all,
            bins, tall, down.width, down.depth, down.stages, num_warps=down.warps,
        )  # fmt: skip
        return Partials(self._parts, used)
