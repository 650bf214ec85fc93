"""A mixture of experts for few rows.

    x ─► + partial sums ─► norm ─► router ─► chosen [R, T], shares [R, T]
    few rows    each (row, expert) by itself: every expert is read by the rows that chose it
    more        each expert with the rows that chose it: it is read once ─► a partial sum for each choice

The expert that every row goes through is stored behind the others, in as many pieces of their size as it
takes, and chosen by every row with the share that its gate gives: T = chosen ones + pieces, rounded up to a
power of two by entries that stand for no expert.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritone.kernels.launch import start_next, wait_for_last
from tritone.kernels.products import TWO_ROWS, Partials, Products, cleared
from tritone.kernels.tiles import height, tile_of
from tritone.networks.layer_weights import ExpertWeights

PAIRS_AN_EXPERT = 0.25  # on average: up to here each pair by itself is faster, and hardly one is read twice
_RIVALS = tl.constexpr(64)  # scores that others are compared with at a time


@triton.jit
def _route(
    partials, x, norm, router, gate, y, scores, arrived, chosen, shares, eps, size,
    H: tl.constexpr, BH: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, SOME: tl.constexpr,
    TOP: tl.constexpr, PIECES: tl.constexpr, T: tl.constexpr, SUMS: tl.constexpr,
    RENORMALISE: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    # Programs of a row score SOME experts each, and the last to arrive chooses.
    row, first, programs = tl.program_id(0), tl.program_id(1) * SOME, tl.num_programs(1)
    h, some = tl.arange(0, BH), first + tl.arange(0, SOME)
    in_h = h < H
    start_next(START)
    inside = (some < E)[:, None] & in_h[None, :]
    weight = tl.load(router + some[:, None] * H + h[None, :], mask=inside, other=0.0)
    scale = tl.load(norm + h, mask=in_h, other=0.0).to(tl.float32)
    if PIECES > 0:
        opens = tl.load(gate + h, mask=in_h, other=0.0).to(tl.float32)
    wait_for_last(START)
    value = tl.load(x + row * H + h, mask=in_h, other=0.0).to(tl.float32)
    for part in tl.static_range(SUMS):
        value += tl.load(partials + part * size + row * H + h, mask=in_h, other=0.0)
    kept = value.to(x.dtype.element_ty)
    value = kept.to(tl.float32)
    normed = (value * tl.rsqrt(tl.sum(value * value) / H + eps) * scale).to(y.dtype.element_ty)
    value = normed.to(tl.float32)
    tl.store(scores + row * BE + some, tl.sum(weight.to(tl.float32) * value[None, :], 1), mask=some < E)
    tl.debug_barrier()  # all scores of this program are there before it says so
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == programs - 1:
        tl.store(arrived + row, 0)
        # Nobody reads x any more.
        if SUMS > 0:
            tl.store(x + row * H + h, kept, mask=in_h)
        tl.store(y + row * H + h, normed, mask=in_h)
        BR: tl.constexpr = min(_RIVALS, BE)
        e, t = tl.arange(0, BE), tl.arange(0, T)
        score = tl.load(scores + row * BE + e, mask=e < E, other=float("-inf"), cache_modifier=".cg")
        order = tl.where(score == score, score, float("inf"))  # what is no number has a place too
        place = tl.zeros([BE], tl.int32)
        for begin in tl.static_range(0, BE, BR):
            r = begin + tl.arange(0, BR)
            rival = tl.load(scores + row * BE + r, mask=r < E, other=float("-inf"), cache_modifier=".cg")
            rival = tl.where(rival == rival, rival, float("inf"))[None, :]
            is_before = (rival == order[:, None]) & (r[None, :] < e[:, None])
            place += tl.sum(((rival > order[:, None]) | is_before).to(tl.int32), 1)
        likeness = tl.exp(score - tl.max(score))
        is_best = place < TOP
        likeness = likeness / tl.sum(tl.where(is_best, likeness, 0.0) if RENORMALISE else likeness)
        tl.store(chosen + row * T + place, e, mask=is_best)
        tl.store(shares + row * T + place, likeness, mask=is_best)
        share = tl.zeros([T], tl.float32)
        if PIECES > 0:
            share = tl.where(t < TOP + PIECES, tl.sigmoid(tl.sum(value * opens)), share)
        tl.store(chosen + row * T + t, E + tl.minimum(t - TOP, PIECES), mask=t >= TOP)
        tl.store(shares + row * T + t, share, mask=t >= TOP)


@triton.jit
def _pair_up(
    x, gate_up, chosen, shares, inner,
    ALL: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr, T: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    in_n = n < INNER
    start_next(START)
    wait_for_last(START)
    expert = tl.load(chosen + pair).to(tl.int64)
    share = tl.load(shares + pair)
    if expert >= ALL:
        tl.store(inner + pair * INNER + n, tl.zeros([BN], inner.dtype.element_ty), mask=in_n)
    else:
        base = gate_up + expert * (2 * INNER * H)
        gate = tl.zeros([BN], tl.float32)
        up = tl.zeros([BN], tl.float32)
        for start in tl.static_range(0, H, BK):
            in_k = start + k < H
            in_both = in_n[:, None] & in_k[None, :]
            row = tl.load(x + (pair // T) * H + start + k, mask=in_k, other=0.0).to(tl.float32)
            at = base + n[:, None] * H + start + k[None, :]
            gate += tl.sum(tl.load(at, mask=in_both, other=0.0).to(tl.float32) * row[None, :], 1)
            up += tl.sum(tl.load(at + INNER * H, mask=in_both, other=0.0).to(tl.float32) * row[None, :], 1)
        out = gate * tl.sigmoid(gate) * up * share
        tl.store(inner + pair * INNER + n, out.to(inner.dtype.element_ty), mask=in_n)


@triton.jit
def _pair_down(
    inner, down, chosen, x,
    ALL: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr, T: tl.constexpr,
    BN: tl.constexpr, BI: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    b = tl.arange(0, T * BN)  # columns of y, once for each expert of the row
    n, pair = tl.program_id(0) * BN + b % BN, row * T + b // BN
    start_next(START)
    wait_for_last(START)
    expert = tl.load(chosen + pair).to(tl.int64)
    inside = (n < H) & (expert < ALL)
    sums = tl.zeros([T * BN, BI], tl.float32)
    for start in tl.static_range(0, INNER, BI):
        i = start + tl.arange(0, BI)
        both = inside[:, None] & (i < INNER)[None, :]
        at = down + (expert * H + n)[:, None] * INNER + i[None, :]
        weight = tl.load(at, mask=both, other=0.0)
        value = tl.load(inner + pair[:, None] * INNER + i[None, :], mask=both, other=0.0)
        sums += weight.to(tl.float32) * value.to(tl.float32)
    out = tl.sum(tl.reshape(tl.sum(sums, 1), [T, BN]), 0)
    c = tl.program_id(0) * BN + tl.arange(0, BN)
    out += tl.load(x + row * H + c, mask=c < H, other=0.0).to(tl.float32)
    tl.store(x + row * H + c, out.to(x.dtype.element_ty), mask=c < H)


@triton.jit
def _takers(chosen, expert, R, T: tl.constexpr, BM: tl.constexpr):
    """Rows [BM] that chose an expert, and at which of their places."""
    m, t = tl.arange(0, BM), tl.arange(0, T)
    is_mine = tl.load(chosen + m[:, None] * T + t[None, :], mask=(m < R)[:, None], other=-1) == expert
    return tl.sum(is_mine.to(tl.int32), 1) > 0, tl.sum(tl.where(is_mine, t[None, :], 0), 1)


@triton.jit
def glu(
    x, base, row, in_row, n, in_n,
    H: tl.constexpr, INNER: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What rows [BM] of x make of columns n of an expert, float32 [BM, BN]."""
    gate = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    for start in tl.range(0, H, BK, num_stages=STAGES):
        k = start + tl.arange(0, BK)
        if H % BK == 0:
            rows = tl.load(x + row[:, None] * H + k[None, :], mask=in_row[:, None], other=0.0)
            weight = tl.load(base + n[None, :] * H + k[:, None], mask=in_n[None, :], other=0.0)
            more = tl.load(base + (n + INNER)[None, :] * H + k[:, None], mask=in_n[None, :], other=0.0)
        else:
            in_k = k < H
            both = in_n[None, :] & in_k[:, None]
            rows = tl.load(x + row[:, None] * H + k[None, :], mask=in_row[:, None] & in_k[None, :], other=0.0)
            weight = tl.load(base + n[None, :] * H + k[:, None], mask=both, other=0.0)
            more = tl.load(base + (n + INNER)[None, :] * H + k[:, None], mask=both, other=0.0)
        gate = tl.dot(rows, weight, gate, input_precision="ieee")
        up = tl.dot(rows, more, up, input_precision="ieee")
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _expert_up(
    x, gate_up, chosen, shares, inner, R,
    H: tl.constexpr, INNER: tl.constexpr, T: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    start_next(START)
    wait_for_last(START)
    takes, place = _takers(chosen, expert, R, T, BM)
    if tl.sum(takes.to(tl.int32)) > 0:
        m, n = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
        in_n = n < INNER
        share = tl.load(shares + m * T + place, mask=takes, other=0.0)
        base = gate_up + expert.to(tl.int64) * (2 * INNER * H)
        out = glu(x, base, m, takes, n, in_n, H, INNER, BM, BN, BK, STAGES) * share[:, None]
        at = inner + (expert * BM + m)[:, None] * INNER + n[None, :]
        tl.store(at, out.to(inner.dtype.element_ty), mask=takes[:, None] & in_n[None, :])


@triton.jit
def _expert_down(
    inner, down, chosen, partials, R,
    H: tl.constexpr, INNER: tl.constexpr, T: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    start_next(START)
    wait_for_last(START)
    takes, place = _takers(chosen, expert, R, T, BM)
    if tl.sum(takes.to(tl.int32)) > 0:
        m, n = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
        in_n = n < H
        base = down + expert.to(tl.int64) * (H * INNER) + n[None, :] * INNER
        mine = inner + (expert * BM + m)[:, None] * INNER
        out = tl.zeros([BM, BN], tl.float32)
        for start in tl.range(0, INNER, BK, num_stages=STAGES):
            k = start + tl.arange(0, BK)
            in_k = k < INNER
            rows = tl.load(mine + k[None, :], mask=takes[:, None] & in_k[None, :], other=0.0)
            weight = tl.load(base + k[:, None], mask=in_n[None, :] & in_k[:, None], other=0.0)
            out = tl.dot(rows, weight, out, input_precision="ieee")
        at = partials + (place * R + m)[:, None] * H + n[None, :]
        tl.store(at, out, mask=takes[:, None] & in_n[None, :])


class Experts:
    """The mixtures of a decoder, with memory for `rows` rows."""

    def __init__(self, sizes: ExpertWeights, rows: int, products: Products) -> None:
        """sizes: those of any layer."""
        self._products = products
        self._experts, self._hidden = sizes.router.shape
        self._all, _, self._inner = sizes.down.shape
        self._chosen_ones = sizes.num_chosen
        used = sizes.num_chosen + self._all - self._experts
        self._entries = triton.next_power_of_2(used)
        like = sizes.down
        floats = partial(cleared, like=like, dtype=torch.float32)
        whole = partial(cleared, like=like, dtype=torch.int32)
        self._scores, self._arrived = floats(rows, triton.next_power_of_2(self._experts)), whole(rows)
        self._chosen, self._shares = whole(rows, self._entries), floats(rows, self._entries)
        self._normed = cleared(rows, self._hidden, like=like)
        self._paired_rows = paired_rows(sizes.num_chosen, self._experts)
        self._pairs = cleared(min(rows, self._paired_rows) * self._entries, self._inner, like=like)
        tall = height("experts_up", rows) if rows > self._paired_rows else 0
        self._inners = cleared(self._all * tall, self._inner, like=like)
        self._partials = floats(used, rows, self._hidden)

    def __call__(
        self, x: Tensor, norm: Tensor, weights: ExpertWeights, partials: Partials | None
    ) -> Partials | None:
        """Add to x [R, H] what is in partial sums and then the experts' output of its norm.

        What is given back is still to be added; None: nothing.
        """
        rows, launch = len(x), self._products.launch()
        normed, tile = self._normed[:rows], tile_of("router", rows, self._hidden, self._experts)
        _route[(rows, triton.cdiv(self._experts, tile.width))](
            x if partials is None else partials.values, x, norm, weights.router,
            weights.router if weights.shared_gate is None else weights.shared_gate, normed, self._scores,
            self._arrived, self._chosen, self._shares, self._products.eps, x.numel(), self._hidden,
            tile.depth, self._experts, self._scores.shape[1], tile.width,
            self._chosen_ones, self._all - self._experts, self._entries,
            0 if partials is None else partials.count, weights.renormalise, num_warps=tile.warps, **launch,
        )  # fmt: skip
        if rows <= self._paired_rows:
            self._by_pair(x, normed, weights)
            return None
        self._by_expert(normed, weights)
        return Partials(self._partials, len(self._partials))

    def _by_pair(self, x: Tensor, normed: Tensor, weights: ExpertWeights) -> None:
        rows, launch = len(x), self._products.launch()
        up = tile_of("pair_up", rows, self._hidden, self._inner)
        down = tile_of("pair_down", rows, self._inner, self._hidden)
        _pair_up[(triton.cdiv(self._inner, up.width), rows * self._entries)](
            normed, weights.gate_up, self._chosen, self._shares, self._pairs, self._all, self._hidden,
            self._inner, self._entries, up.width, up.depth, num_warps=up.warps, **launch,
        )  # fmt: skip
        _pair_down[(triton.cdiv(self._hidden, down.width), rows)](
            self._pairs, weights.down, self._chosen, x, self._all, self._hidden, self._inner, self._entries,
            down.width, down.depth, num_warps=down.warps, **launch,
        )  # fmt: skip

    def _by_expert(self, normed: Tensor, weights: ExpertWeights) -> None:
        rows, launch = len(normed), self._products.launch()
        tall = height("experts_up", rows)
        up = tile_of("experts_up", rows, self._hidden, self._inner)
        down = tile_of("experts_down", rows, self._inner, self._hidden)
        _expert_up[(triton.cdiv(self._inner, up.width), self._all)](
            normed, weights.gate_up, self._chosen, self._shares, self._inners, rows, self._hidden,
            self._inner, self._entries, tall, up.width, up.depth, up.stages, num_warps=up.warps, **launch,
        )  # fmt: skip
        _expert_down[(triton.cdiv(self._hidden, down.width), self._all)](
            self._inners, weights.down, self._chosen, self._partials, rows, self._hidden, self._inner,
            self._entries, tall, down.width, down.depth, down.stages, num_warps=down.warps, **launch,
        )  # fmt: skip


def paired_rows(num_chosen: int, experts: int) -> int:
    """Up to how many rows each (row, expert) goes by itself."""
    return max(TWO_ROWS, int(PAIRS_AN_EXPERT * experts / num_chosen))
