"""Convolutions over what lies behind, in rows of channels, for streams of which each brings some columns.

    joined [B, tail + T, K] ─► taps · W ─► + bias ─► + kept ─► 0 before the first sample ─┬─► kept
       ▲                                                                                  └─► snake ─► joined
       └─ carry: the tail of each stream, from its slot and back

Columns of a stream are rows here, so that a convolution is a product whose rows are read `dilation` apart,
and one that gives r columns for each is a product whose rows are r columns long: nothing is laid out anew.
What a stream does not bring, though its batch has room for it, the convolutions do not compute.

Snake: Ziyin et al. 2020 (arXiv 2006.08195), in the form of BigVGAN (arXiv 2206.04658).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritone.kernels.tiles import convolution_tile

_CARRIED = 64  # channels of a program of carry
_SAMPLES = 64  # columns of a program of convolve_to_one


class Streams(NamedTuple):
    """Of a pass; int32 [B] each, on the device."""

    slots: Tensor
    valid: Tensor  # frames that each brings
    ages: Tensor  # frames that each has brought before; 0 where it starts
    starts: Tensor  # 1: whatever its slot holds is another's


class Taps(NamedTuple):
    """Weights of a convolution, for products."""

    weight: Tensor  # [taps, r · C, K], K contiguous: the oldest column first; of r columns the first first
    bias: Tensor  # [C]
    dilation: int = 1
    rate: int = 1  # r, columns for each

    @property
    def tail(self) -> int:
        """Columns that it looks back."""
        return (len(self.weight) - 1) * self.dilation


class Snake(NamedTuple):
    """`x + gain · sin²(α x)`, [C] each."""

    alpha: Tensor
    gain: Tensor


@triton.jit
def _sine_squared(x):
    """Within 4e-7 for |x| up to 1e5, and never above 1: its period is π, and in it a polynomial does."""
    turns = tl.floor(x * 0.3183098861837907 + 0.5)
    x = x - turns * 3.140625
    x = x - turns * 9.676535897932384e-4
    x = tl.where(x > 1.6, 1.6, tl.where(x < -1.6, -1.6, x))  # what is not a number stays none
    s = x * x
    p = -2.5052108385441720e-8 * s + 2.7557319223985893e-6
    p = p * s - 1.9841269841269841e-4
    p = p * s + 8.3333333333333332e-3
    p = p * s - 1.6666666666666666e-1
    sine = p * s * x + x
    return sine * sine


@triton.jit(do_not_specialize=["taps", "dilation", "rate", "columns", "length", "lead", "head"])
def _convolve(
    x, w, bias, kept, alpha, gain, y, valid, ages,
    K, N, C, taps, dilation, rate, columns, length, lead, head,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, ADD: tl.constexpr, KEEP: tl.constexpr, ACTIVE: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(2)
    used = tl.load(valid + b) * columns
    if tl.program_id(1) * BM < used:
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        t = tl.program_id(1) * BM + tl.arange(0, BM)
        k = tl.arange(0, BK)
        tail = (taps - 1) * dilation
        rows = x + (b.to(tl.int64) * (tail + length) + tl.minimum(t, length - 1))[:, None] * K + k[None, :]
        weights = w + tl.minimum(n, N - 1)[None, :] * K + k[:, None]
        blocks = tl.cdiv(K, BK)
        total = tl.zeros([BM, BN], tl.float32)
        for step in tl.range(0, taps * blocks, num_stages=STAGES):
            tap, first = step // blocks, (step % blocks) * BK
            if EVEN:
                row = tl.load(rows + tap * dilation * K + first)
                weight = tl.load(weights + tap * N * K + first)
            else:
                in_k = first + k < K
                row = tl.load(rows + tap * dilation * K + first, mask=in_k[None, :], other=0.0)
                weight = tl.load(weights + tap * N * K + first, mask=in_k[:, None], other=0.0)
            total = tl.dot(row, weight, total, input_precision="ieee")
        inside = (t < used)[:, None] & (n < N)[None, :]
        channel = n % C
        total += tl.load(bias + channel).to(tl.float32)[None, :]
        at = b.to(tl.int64) * length * N + t[:, None] * N + n[None, :]
        if ADD:
            total += tl.load(kept + at, mask=inside, other=0.0).to(tl.float32)
        silent = lead - tl.load(ages + b) * columns * rate
        total = tl.where(t[:, None] * rate + (n // C)[None, :] < silent, 0.0, total)
        if KEEP:
            tl.store(kept + at, total.to(kept.dtype.element_ty), mask=inside)
        if ACTIVE:
            a, g = tl.load(alpha + channel).to(tl.float32), tl.load(gain + channel).to(tl.float32)
            total += _sine_squared(total * a[None, :]) * g[None, :]
        to = y + at + (b.to(tl.int64) + 1) * head * C
        tl.store(to, total.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tail", "columns", "length", "place"])
def _carry(
    joined, memory, slots, valid, starts, tail, columns, length, C, size, place,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    used = tl.load(valid + b) * columns
    if used > 0:
        i, c = tl.arange(0, BT)[:, None], tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
        mine = joined + b.to(tl.int64) * (tail + length) * C
        state = memory + tl.load(slots + b).to(tl.int64) * size + place
        inside = (i < tail) & (c < C)
        known = inside & (tl.load(starts + b) == 0)
        before = tl.load(state + i * C + c, mask=known, other=0.0)
        later = i + used
        still = tl.load(state + later * C + c, mask=known & (later < tail), other=0.0)
        new = tl.load(mine + later * C + c, mask=inside & (later >= tail), other=0.0)
        tl.debug_barrier()  # all has been read before anything is written
        tl.store(mine + i * C + c, before, mask=inside)
        tl.store(state + i * C + c, tl.where(later < tail, still, new), mask=inside)


@triton.jit(do_not_specialize=["columns", "length"])
def _convolve_to_one(
    x, w, bias, y, valid, columns, length, C,
    TAPS: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1)
    used = tl.load(valid + b) * columns
    if tl.program_id(0) * BM < used:
        t, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BC)
        inside = (t < used)[:, None] & (c < C)[None, :]
        rows = x + (b.to(tl.int64) * (TAPS - 1 + length) + t)[:, None] * C + c[None, :]
        products = tl.zeros([BM, BC], tl.float32)
        for tap in tl.static_range(TAPS):
            weight = tl.load(w + tap * C + c, mask=c < C, other=0.0).to(tl.float32)
            products += tl.load(rows + tap * C, mask=inside, other=0.0).to(tl.float32) * weight[None, :]
        total = tl.sum(products, 1) + tl.load(bias).to(tl.float32)
        # what is not a number stays none: a comparison with it is false
        total = tl.where(total > 1.0, 1.0, tl.where(total < -1.0, -1.0, total))
        tl.store(y + b.to(tl.int64) * length + t, total.to(y.dtype.element_ty), mask=t < used)


@triton.jit(do_not_specialize=["length"])
def _depthwise_norm(
    x, w, bias, scale, shift, y, eps, length, C,
    TAPS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    t, b = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, BC)
    inside = c < C
    rows = x + (b.to(tl.int64) * (TAPS - 1 + length) + t) * C + c
    total = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS):
        weight = tl.load(w + tap * C + c, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(rows + tap * C, mask=inside, other=0.0).to(tl.float32) * weight
    apart = tl.where(inside, total - tl.sum(total, 0) / C, 0.0)
    normed = apart * tl.rsqrt(tl.sum(apart * apart, 0) / C + eps)
    normed = normed * tl.load(scale + c, mask=inside, other=0.0).to(tl.float32)
    normed += tl.load(shift + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + (b.to(tl.int64) * length + t) * C + c, normed.to(y.dtype.element_ty), mask=inside)


def carry(x: Tensor, tail: int, columns: int, memory: Tensor, place: int, streams: Streams) -> None:
    """Put each stream's tail in front of what it brings, in x [B, tail + T, C], and keep its new one.

    columns: a frame. memory: [slots, size], contiguous; a tail [tail, C] lies in it from `place` on.
    """
    if not tail:
        return
    batch, length, channels = x.shape[0], x.shape[1] - tail, x.shape[2]
    some = min(_CARRIED, triton.next_power_of_2(channels))
    _carry[(batch, triton.cdiv(channels, some))](
        x, memory, streams.slots, streams.valid, streams.starts, tail, columns, length, channels,
        memory.shape[1], place, triton.next_power_of_2(tail), some, num_warps=4,
    )  # fmt: skip


def convolve(
    x: Tensor,
    taps: Taps,
    columns: int,
    streams: Streams,
    y: Tensor,
    *,
    kept: Tensor | None = None,
    add: bool = False,
    keep: bool = False,
    snake: Snake | None = None,
    lead: int = 0,
) -> None:
    """What x [B, tail + T, K] gives, through `snake`, into the last T · r columns of y [B, …, C].

    columns: that come in with a frame. y: not x. kept: [B, T · r, C], what is added before the snake if
    `add`, and where the sum goes if `keep`. lead: columns before a stream's first sample, which are zero.
    """
    batch, length, inner = x.shape[0], x.shape[1] - taps.tail, x.shape[2]
    count, outer = taps.weight.shape[:2]
    channels = outer // taps.rate
    head = y.shape[1] - length * taps.rate
    tile = convolution_tile(batch, length, inner, outer, x.element_size())
    grid = (triton.cdiv(outer, tile.width), triton.cdiv(length, tile.rows), batch)
    _convolve[grid](
        x, taps.weight, taps.bias, y if kept is None else kept,
        taps.bias if snake is None else snake.alpha, taps.bias if snake is None else snake.gain, y,
        streams.valid, streams.ages, inner, outer, channels, count, taps.dilation, taps.rate, columns, length,
        lead, head, tile.rows, tile.width, tile.depth, tile.stages, inner % tile.depth == 0, add, keep,
        snake is not None, num_warps=tile.warps,
    )  # fmt: skip


def convolve_to_one(x: Tensor, taps: Taps, columns: int, streams: Streams, y: Tensor) -> None:
    """The one channel of x [B, tail + T, C], within [-1, 1], into y [B, T]."""
    batch, length, channels = x.shape[0], x.shape[1] - taps.tail, x.shape[2]
    _convolve_to_one[(triton.cdiv(length, _SAMPLES), batch)](
        x, taps.weight, taps.bias, y, streams.valid, columns, length, channels, len(taps.weight),
        _SAMPLES, triton.next_power_of_2(channels), num_warps=8,
    )  # fmt: skip


def depthwise_norm(x: Tensor, taps: Taps, norm: tuple[Tensor, Tensor], eps: float) -> Tensor:
    """A convolution of each channel of x [B, tail + T, C] by itself, then a layer norm: [B, T, C]."""
    batch, length, channels = x.shape[0], x.shape[1] - taps.tail, x.shape[2]
    y = torch.empty((batch, length, channels), dtype=x.dtype, device=x.device)
    _depthwise_norm[(length, batch)](
        x, taps.weight, taps.bias, *norm, y, eps, length, channels, len(taps.weight),
        triton.next_power_of_2(channels), num_warps=4,
    )  # fmt: skip
    return y
