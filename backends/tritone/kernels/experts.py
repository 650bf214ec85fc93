"""A mixture of experts for few rows.

    x ─► + partial sums ─► norm ─► router ─► chosen [R, T], shares [R, T]
    few rows    each (row, expert) by itself: every expert is read by the rows that chose it
    more        every active expert with all rows, at share 0 where it was not chosen: it is read once;
                or, as a tile may ask, with the rows that chose it, some at a time

The expert that every row goes through is stored behind the others, in as many pieces of their size as it
takes, and chosen by every row with the share that its gate gives: T = chosen ones + pieces, rounded up to a
power of two by entries that stand for no expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritone.kernels.products import TWO_ROWS, Partials, Products, cleared
from tritone.kernels.tiles import INTERPRETED, height, tile_of
from tritone.networks.layer_weights import ExpertWeights

PAIRS_AN_EXPERT = 0.25  # on average: up to here each pair by itself is faster, and hardly one is read twice
PARTS = 8  # in which the outputs of all experts are added up
_FAR = tl.constexpr(-1e30)


@triton.jit
def _route(
    partials, x, norm, router, gate, y, chosen, shares, eps, size,
    H: tl.constexpr, BH: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
    TOP: tl.constexpr, PIECES: tl.constexpr, T: tl.constexpr, SUMS: tl.constexpr,
    RENORMALISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    e, h, k, t = tl.arange(0, BE), tl.arange(0, BH), tl.arange(0, BK), tl.arange(0, T)
    in_h, in_e = h < H, e < E
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * H + h, mask=in_h, other=0.0).to(tl.float32)
    if SUMS > 0:
        for part in tl.static_range(SUMS):
            value += tl.load(partials + part * size + row * H + h, mask=in_h, other=0.0)
        kept = value.to(x.dtype.element_ty)
        tl.store(x + row * H + h, kept, mask=in_h)
        value = kept.to(tl.float32)
    length = tl.rsqrt(tl.sum(value * value) / H + eps)
    normed = value * length * tl.load(norm + h, mask=in_h, other=0.0).to(tl.float32)
    normed = normed.to(y.dtype.element_ty)
    tl.store(y + row * H + h, normed, mask=in_h)
    tl.debug_barrier()
    sums = tl.zeros([BE, BK], tl.float32)
    for start in tl.range(0, H, BK):
        in_k = start + k < H
        piece = tl.load(y + row * H + start + k, mask=in_k, other=0.0).to(tl.float32)
        weight = tl.load(
            router + e[:, None] * H + start + k[None, :], mask=in_e[:, None] & in_k[None, :], other=0.0
        )
        sums += weight.to(tl.float32) * piece[None, :]
    scores = tl.where(in_e, tl.sum(sums, 1), _FAR)
    everything = tl.sum(tl.exp(scores - tl.max(scores)))
    highest = tl.max(scores)
    best = tl.full([T], 0, tl.int32) + E + PIECES
    share = tl.zeros([T], tl.float32)
    for place in tl.static_range(TOP):
        winner = tl.argmax(scores, 0)
        best = tl.where(t == place, winner.to(tl.int32), best)
        share = tl.where(t == place, tl.exp(tl.max(scores) - highest), share)
        scores = tl.where(e == winner, _FAR, scores)
    share = share / (tl.sum(share) if RENORMALISE else everything)
    if PIECES > 0:
        opened = tl.sum(normed.to(tl.float32) * tl.load(gate + h, mask=in_h, other=0.0).to(tl.float32))
        piece_no = t - TOP
        is_piece = (piece_no >= 0) & (piece_no < PIECES)
        best = tl.where(is_piece, E + piece_no, best)
        share = tl.where(is_piece, tl.sigmoid(opened), share)
    tl.store(chosen + row * T + t, best)
    tl.store(shares + row * T + t, share)


@triton.jit
def _pair_up(
    x, gate_up, chosen, shares, inner,
    ALL: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr, T: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    in_n = n < INNER
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
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
    ALL: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr, BI: tl.constexpr, T: tl.constexpr,
    BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    n, i = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BI)
    in_n, in_i = n < H, i < INNER
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.zeros([BN, BI], tl.float32)
    for place in tl.static_range(T):
        expert = tl.load(chosen + row * T + place).to(tl.int64)
        inside = in_n[:, None] & in_i[None, :] & (expert < ALL)
        weight = tl.load(
            down + expert * (H * INNER) + n[:, None] * INNER + i[None, :], mask=inside, other=0.0
        )
        value = tl.load(inner + (row * T + place) * INNER + i, mask=in_i, other=0.0).to(tl.float32)
        sums += weight.to(tl.float32) * value[None, :]
    out = tl.sum(sums, 1) + tl.load(x + row * H + n, mask=in_n, other=0.0).to(tl.float32)
    tl.store(x + row * H + n, out.to(x.dtype.element_ty), mask=in_n)


@triton.jit
def _list_active(
    chosen, active, count, of_part, counts, n,
    ALL: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    entry, e = tl.arange(0, BT), tl.arange(0, BE)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    found = tl.histogram(tl.load(chosen + entry, mask=entry < n, other=ALL), BE)
    is_active = ((found > 0) & (e < ALL)).to(tl.int32)
    number = tl.cumsum(is_active, 0) - 1
    tl.store(active + number, e, mask=is_active > 0)
    tl.store(count, tl.sum(is_active))
    # An expert is always added up in the same part: what others chose then changes no row's rounding.
    in_parts = tl.reshape(is_active, [BE // PARTS, PARTS])
    place = tl.reshape(tl.cumsum(in_parts, 0), [BE]) - 1
    tl.store(of_part + (e % PARTS) * (BE // PARTS) + place, number, mask=is_active > 0)
    tl.store(counts + tl.arange(0, PARTS), tl.sum(in_parts, 0))


@triton.jit
def _active_up(
    x, gate_up, chosen, shares, active, count, inner, R,
    H: tl.constexpr, INNER: tl.constexpr, T: tl.constexpr, BM: tl.constexpr, BG: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if number < tl.load(count):
        expert = tl.load(active + number)
        m, n, t = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, T)
        in_m, in_n = m < R, n < INNER
        who = tl.load(chosen + m[:, None] * T + t[None, :], mask=in_m[:, None], other=-1)
        by = tl.load(shares + m[:, None] * T + t[None, :], mask=in_m[:, None], other=0.0)
        share = tl.sum(tl.where(who == expert, by, 0.0), 1)
        base = gate_up + expert.to(tl.int64) * (2 * INNER * H)
        into = inner + number * BM * INNER + n[None, :]
        if BG == BM:
            out = glu(x, base, m, in_m, n, in_n, H, INNER, BM, BN, BK, STAGES) * share[:, None]
            tl.store(into + m[:, None] * INNER, out.to(inner.dtype.element_ty), mask=in_n[None, :])
        else:
            g = tl.arange(0, BG)
            is_here = tl.sum((who == expert).to(tl.int32), 1)
            place = tl.cumsum(is_here, 0) - 1
            nothing = tl.zeros([BM, BN], inner.dtype.element_ty)
            tl.store(into + m[:, None] * INNER, nothing, mask=(is_here == 0)[:, None] & in_n[None, :])
            rows = tl.sum(is_here)
            for first in range(0, rows, BG):
                taken = (place[None, :] == first + g[:, None]) & (is_here > 0)[None, :]
                row = tl.sum(tl.where(taken, m[None, :], 0), 1)
                some = tl.sum(tl.where(taken, share[None, :], 0.0), 1)
                in_g = first + g < rows
                out = glu(x, base, row, in_g, n, in_n, H, INNER, BG, BN, BK, STAGES) * some[:, None]
                at = into + row[:, None] * INNER
                tl.store(at, out.to(inner.dtype.element_ty), mask=in_g[:, None] & in_n[None, :])


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
def _active_down(
    inner, down, active, of_part, counts, partials, R,
    H: tl.constexpr, INNER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    IN_PART: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    m, n = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    in_n = n < H
    PIECES: tl.constexpr = (INNER + BK - 1) // BK
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    mine = tl.load(counts + part)
    out = tl.zeros([BM, BN], tl.float32)
    for step in tl.range(0, mine * PIECES, num_stages=STAGES):
        number = tl.load(of_part + part * IN_PART + step // PIECES)
        k = (step % PIECES) * BK + tl.arange(0, BK)
        expert = tl.load(active + number).to(tl.int64)
        in_k = k < INNER
        rows = tl.load(inner + (number * BM + m)[:, None] * INNER + k[None, :], mask=in_k[None, :], other=0.0)
        weight = tl.load(
            down + expert * (H * INNER) + n[None, :] * INNER + k[:, None],
            mask=in_n[None, :] & in_k[:, None],
            other=0.0,
        )
        out = tl.dot(rows, weight, out, input_precision="ieee")
    at = partials + (part * R + m)[:, None] * H + n[None, :]
    tl.store(at, out, mask=(m < R)[:, None] & in_n[None, :])


class Experts:
    """The mixtures of a decoder, with memory for `rows` rows."""

    def __init__(self, sizes: ExpertWeights, rows: int, products: Products) -> None:
        """sizes: those of any layer."""
        self._products = products
        self._experts, self._hidden = sizes.router.shape
        self._all, _, self._inner = sizes.down.shape
        self._chosen_ones = sizes.num_chosen
        self._entries = triton.next_power_of_2(sizes.num_chosen + self._all - self._experts)
        like = sizes.down
        self._chosen = cleared(rows, self._entries, like=like, dtype=torch.int32)
        self._shares = cleared(rows, self._entries, like=like, dtype=torch.float32)
        self._normed = cleared(rows, self._hidden, like=like)
        self._paired_rows = paired_rows(sizes.num_chosen, self._experts)
        self._pairs = cleared(min(rows, self._paired_rows) * self._entries, self._inner, like=like)
        self._active = cleared(self._all, like=like, dtype=torch.int32)
        self._count = cleared(1, like=like, dtype=torch.int32)
        self._bins = max(PARTS, triton.next_power_of_2(self._all + 1))
        self._of_part = cleared(self._bins, like=like, dtype=torch.int32)  # by part, then in order
        self._counts = cleared(PARTS, like=like, dtype=torch.int32)
        self._inners = cleared(self._all * height("experts_up", rows), self._inner, like=like)
        self._partials = cleared(PARTS, rows, self._hidden, like=like, dtype=torch.float32)

    def __call__(
        self, x: Tensor, norm: Tensor, weights: ExpertWeights, partials: Partials | None
    ) -> Partials | None:
        """Add to x [R, H] what is in partial sums and then the experts' output of its norm.

        What is given back is still to be added; None: nothing.
        """
        rows, launch = len(x), self._products.launch()
        pieces = self._all - self._experts
        normed = self._normed[:rows]
        _route[(rows,)](
            x if partials is None else partials.values, x, norm, weights.router,
            weights.router if weights.shared_gate is None else weights.shared_gate, normed,
            self._chosen, self._shares, self._products.eps, x.numel(), self._hidden,
            triton.next_power_of_2(self._hidden), self._experts, triton.next_power_of_2(self._experts),
            min(64, triton.next_power_of_2(self._hidden)), self._chosen_ones, pieces, self._entries,
            0 if partials is None else partials.count, weights.renormalise, num_warps=8, **launch,
        )  # fmt: skip
        if rows <= self._paired_rows:
            self._by_pair(x, normed, weights)
            return None
        self._by_expert(normed, weights)
        return Partials(self._partials, PARTS)

    def _by_pair(self, x: Tensor, normed: Tensor, weights: ExpertWeights) -> None:
        rows, launch = len(x), self._products.launch()
        wide = 256 if INTERPRETED else 8
        _pair_up[(triton.cdiv(self._inner, wide), rows * self._entries)](
            normed, weights.gate_up, self._chosen, self._shares, self._pairs, self._all, self._hidden,
            self._inner, self._entries, wide, min(1024, triton.next_power_of_2(self._hidden)),
            num_warps=4, **launch,
        )  # fmt: skip
        _pair_down[(triton.cdiv(self._hidden, wide), rows)](
            self._pairs, weights.down, self._chosen, x, self._all, self._hidden, self._inner,
            triton.next_power_of_2(self._inner), self._entries, wide, num_warps=8, **launch,
        )  # fmt: skip

    def _by_expert(self, normed: Tensor, weights: ExpertWeights) -> None:
        rows, launch = len(normed), self._products.launch()
        tall = height("experts_up", rows)
        _list_active[(1,)](
            self._chosen, self._active, self._count, self._of_part, self._counts, rows * self._entries,
            self._all, triton.next_power_of_2(rows * self._entries), self._bins, PARTS,
            num_warps=4, **launch,
        )  # fmt: skip
        up = tile_of("experts_up", rows, self._hidden, self._inner)
        down = tile_of("experts_down", rows, self._inner, self._hidden)
        _active_up[(triton.cdiv(self._inner, up.width), self._all)](
            normed, weights.gate_up, self._chosen, self._shares, self._active, self._count, self._inners,
            rows, self._hidden, self._inner, self._entries, tall, min(tall, up.rows or tall), up.width,
            up.depth, up.stages, num_warps=up.warps, **launch,
        )  # fmt: skip
        _active_down[(triton.cdiv(self._hidden, down.width), PARTS)](
            self._inners, weights.down, self._active, self._of_part, self._counts, self._partials, rows,
            self._hidden, self._inner, tall, down.width, down.depth, self._bins // PARTS, down.stages,
            num_warps=down.warps, **launch,
        )  # fmt: skip


def paired_rows(num_chosen: int, experts: int) -> int:
    """Up to how many rows each (row, expert) goes by itself."""
    return max(TWO_ROWS, int(PAIRS_AN_EXPERT * experts / num_chosen))
