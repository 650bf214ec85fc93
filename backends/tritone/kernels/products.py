"""Products with a weight for few rows, and the norms between them.

    up to TWO_ROWS    gemv: norm ─► x Wᵀ ─► GLU ─► + residual, in one kernel and in registers
    more              norm_add ─► gemm on tensor cores, split along K into partial sums ─► norm_add

All sums are float32. Weights: [N, K], with GLU [2 N, K], the gates first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritone.kernels.launch import Start, start_next, wait_for_last
from tritone.kernels.tiles import Tile, height, tile_of

TWO_ROWS = 2  # up to here registers are faster than tensor cores; measured on an H200, where 4 rows are not


# Weights of few rows are read in registers, and can be asked for ahead; what runs on tensor cores needs room.
FEW_ROWS, MANY_ROWS = Start.AHEAD, Start.NEXT


@dataclass(frozen=True)
class Partials:
    """A sum that nobody has added up yet."""

    values: Tensor  # [count, R, H], contiguous; maybe more behind; float32, or of prompts the model's dtype
    count: int


@triton.jit
def _gemv(
    x, norm, w, residual, y, eps, N,
    M: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NORM: tl.constexpr, GLU: tl.constexpr, RESIDUAL: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    in_k, in_n = k < K, n < N
    in_both = in_n[:, None] & in_k[None, :]
    start_next(START)
    weight = tl.load(w + n[:, None] * K + k[None, :], mask=in_both, other=0.0)
    if GLU:
        up_weight = tl.load(w + (n + N)[:, None] * K + k[None, :], mask=in_both, other=0.0)
    if NORM:
        scale = tl.load(norm + k, mask=in_k, other=0.0).to(tl.float32)
    wait_for_last(START)
    for m in tl.static_range(M):
        row = tl.load(x + m * K + k, mask=in_k, other=0.0).to(tl.float32)
        if NORM:
            row = row * tl.rsqrt(tl.sum(row * row) / K + eps) * scale
        out = tl.sum(weight.to(tl.float32) * row[None, :], 1)
        if GLU:
            out = out * tl.sigmoid(out) * tl.sum(up_weight.to(tl.float32) * row[None, :], 1)
        if RESIDUAL:
            out += tl.load(residual + m * N + n, mask=in_n, other=0.0).to(tl.float32)
        tl.store(y + m * N + n, out.to(y.dtype.element_ty), mask=in_n)


@triton.jit
def _gemm(
    x, w, y, M, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GLU: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(2)
    PART: tl.constexpr = (K + SPLIT - 1) // SPLIT
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    in_m, in_n = m < M, n < N
    start_next(START)
    wait_for_last(START)
    out = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    for start in tl.range(0, PART, BK, num_stages=STAGES):
        k = split * PART + start + tl.arange(0, BK)
        if (PART % BK == 0) and (K % SPLIT == 0):
            rows = tl.load(x + m[:, None] * K + k[None, :], mask=in_m[:, None], other=0.0)
            weight = tl.load(w + n[None, :] * K + k[:, None], mask=in_n[None, :], other=0.0)
        else:
            in_k = k < tl.minimum(K, (split + 1) * PART)
            rows = tl.load(x + m[:, None] * K + k[None, :], mask=in_m[:, None] & in_k[None, :], other=0.0)
            weight = tl.load(w + n[None, :] * K + k[:, None], mask=in_n[None, :] & in_k[:, None], other=0.0)
        out = tl.dot(rows, weight, out, input_precision="ieee")
        if GLU:
            if (PART % BK == 0) and (K % SPLIT == 0):
                more = tl.load(w + (n + N)[None, :] * K + k[:, None], mask=in_n[None, :], other=0.0)
            else:
                in_k = k < tl.minimum(K, (split + 1) * PART)
                more = tl.load(
                    w + (n + N)[None, :] * K + k[:, None], mask=in_n[None, :] & in_k[:, None], other=0.0
                )
            up = tl.dot(rows, more, up, input_precision="ieee")
    if GLU:
        out = out * tl.sigmoid(out) * up
    place = y + split * M * N + m[:, None] * N + n[None, :]
    tl.store(place, out.to(y.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def _norm_add(
    partials, x, norm, y, eps, R,
    H: tl.constexpr, BH: tl.constexpr, PARTS: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BH)
    inside = h < H
    start_next(START)
    scale = tl.load(norm + h, mask=inside, other=0.0).to(tl.float32)
    wait_for_last(START)
    value = tl.load(x + row * H + h, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        for part in tl.static_range(PARTS):
            value += tl.load(partials + (row + part * R) * H + h, mask=inside, other=0.0)
        kept = value.to(x.dtype.element_ty)
        tl.store(x + row * H + h, kept, mask=inside)
        value = kept.to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value) / H + eps) * scale
    tl.store(y + row * H + h, value.to(y.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Products:
    """Launches them. start: of each kernel's next."""

    eps: float
    start: Start = Start.BEHIND

    def gemv(
        self,
        x: Tensor,
        weight: Tensor,
        y: Tensor,
        *,
        norm: Tensor | None = None,
        residual: Tensor | None = None,
        glu: bool = False,
    ) -> None:
        """y [R, N] of x [R, K], R up to TWO_ROWS; y may be the residual."""
        rows, inner = x.shape
        outer = len(weight) // (2 if glu else 1)
        tile = tile_of("gemv", rows, inner, outer)
        _gemv[(triton.cdiv(outer, tile.width),)](
            x, x if norm is None else norm, weight, x if residual is None else residual, y, self.eps, outer,
            rows, inner, tile.width, triton.next_power_of_2(inner),
            norm is not None, glu, residual is not None, num_warps=tile.warps, **self.launch(),
        )  # fmt: skip

    def gemm(self, x: Tensor, weight: Tensor, y: Tensor, *, glu: bool = False) -> None:
        """y [R, N] of x [R, K], R above TWO_ROWS."""
        self._gemm(x, weight, y, glu, tile_of("gemm", len(x), x.shape[1], len(weight) // (2 if glu else 1)))

    def gemm_parts(self, x: Tensor, weight: Tensor, into: Tensor) -> Partials:
        """As `gemm`, in partial sums; into: float32, as many as `MOST_SPLITS` of [R, N]."""
        tile = tile_of("gemm_parts", len(x), x.shape[1], len(weight))
        self._gemm(x, weight, into, glu=False, tile=tile)
        return Partials(into, tile.split)

    def norm_add(self, x: Tensor, norm: Tensor, y: Tensor, partials: Partials | None = None) -> None:
        """Add partial sums to x [R, H], and give y [R, H], its norm."""
        rows, hidden = x.shape
        _norm_add[(rows,)](
            x if partials is None else partials.values, x, norm, y, self.eps, rows, hidden,
            triton.next_power_of_2(hidden), 0 if partials is None else partials.count,
            num_warps=4, **self.launch(),
        )  # fmt: skip

    def launch(self) -> dict[str, int | bool]:
        """Arguments of every launch."""
        return self.start.arguments

    def _gemm(self, x: Tensor, weight: Tensor, y: Tensor, glu: bool, tile: Tile) -> None:
        rows, inner = x.shape
        outer = len(weight) // (2 if glu else 1)
        tall = height("gemm", rows)
        _gemm[(triton.cdiv(outer, tile.width), triton.cdiv(rows, tall), tile.split)](
            x, weight, y, rows, outer, inner, tall, tile.width, tile.depth, glu, tile.split, tile.stages,
            num_warps=tile.warps, **self.launch(),
        )  # fmt: skip


def cleared(*shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros beside a tensor."""
    return torch.zeros(shape, dtype=dtype or like.dtype, device=like.device)
