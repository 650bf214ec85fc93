"""Attention of one new row for each of some slots, over as many keys as its slot has and no more.

qkv [R, (heads + 2 kv) · D] ─► norm of heads ─► rotation ─► key, value into the cache ─► attention

qkv [R, (heads + 2 kv) · D] ─► head norms ─► rotation ─► key, value into the cache ─► attention
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritone.kernels.launch import start_next, wait_for_last
from tritone.kernels.products import Products

MOST_SHARES = 8
_FAR = tl.constexpr(-1e30)  # below every score


@triton.jit
def _attend(
    qkv, query_norm, key_norm, keys, values, slots, places, cos, sin, out, shares, sums,
    stride, turn_stride, place, context, eps, scale, R,
    BY_SLOT: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    GROUP: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr, PARTS: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    row, head, part = tl.program_id(0) // KV, tl.program_id(0) % KV, tl.program_id(1)
    d = tl.arange(0, D)
    half = (d + D // 2) % D
    g = tl.arange(0, BG)
    in_g = g < GROUP
    start_next(START)
    q_scale, q_scale_half = tl.load(query_norm + d).to(tl.float32), tl.load(query_norm + half).to(tl.float32)
    wait_for_last(START)
    if BY_SLOT:
        slot = tl.load(slots + row * stride)
        here = tl.load(places + row * stride)
    else:
        slot = row
        here = place
    c = tl.load(cos + row * turn_stride + d)
    s = tl.load(sin + row * turn_stride + d)
    mine = qkv + row * (HEADS + 2 * KV) * D
    kind = qkv.dtype.element_ty
    at = (head * GROUP + g)[:, None] * D
    query = tl.load(mine + at + d[None, :], mask=in_g[:, None], other=0.0).to(tl.float32)
    turned = tl.load(mine + at + half[None, :], mask=in_g[:, None], other=0.0).to(tl.float32)
    length = tl.rsqrt(tl.sum(query * query, 1) / D + eps)[:, None]
    query = query * q_scale[None, :] * c[None, :] + turned * q_scale_half[None, :] * s[None, :]
    query = (query * length).to(kind)
    most = tl.full([BG], _FAR, tl.float32)
    total = tl.zeros([BG], tl.float32)
    mixed = tl.zeros([BG, D], tl.float32)
    base = (slot.to(tl.int64) * KV + head) * context * D
    if part == 0:
        key = tl.load(mine + (HEADS + head) * D + d).to(tl.float32)
        other = tl.load(mine + (HEADS + head) * D + half).to(tl.float32)
        value = tl.load(mine + (HEADS + KV + head) * D + d)
        length_k = tl.rsqrt(tl.sum(key * key) / D + eps)
        k_scale, k_half = tl.load(key_norm + d).to(tl.float32), tl.load(key_norm + half).to(tl.float32)
        key = ((key * k_scale * c + other * k_half * s) * length_k).to(kind)
        tl.store(keys + base + here * D + d, key)
        tl.store(values + base + here * D + d, value)
        most = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale
        total = total + 1.0
        mixed = mixed + value.to(tl.float32)[None, :]
    share = tl.cdiv(tl.cdiv(here, PARTS), BS) * BS
    first = part * share
    last = tl.minimum(first + share, here)
    for start in range(first, last, BS):
        n = start + tl.arange(0, BS)
        known = n < last
        key_t = tl.load(keys + base + n[None, :] * D + d[:, None], mask=known[None, :], other=0.0)
        score = tl.dot(query, key_t, input_precision="ieee") * scale
        score = tl.where(known[None, :], score, _FAR)
        higher = tl.maximum(most, tl.max(score, 1))
        shrink = tl.exp(most - higher)
        weight = tl.exp(score - higher[:, None])
        some = tl.load(values + base + n[:, None] * D + d[None, :], mask=known[:, None], other=0.0)
        total = total * shrink + tl.sum(weight, 1)
        mixed = tl.dot(weight.to(kind), some, mixed * shrink[:, None], input_precision="ieee")
        most = higher
    if PARTS == 1:
        done = (mixed / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + (row * HEADS + head * GROUP + g)[:, None] * D + d[None, :], done, mask=in_g[:, None])
    else:
        to = (part * R + row) * HEADS + head * GROUP + g
        tl.store(shares + to[:, None] * D + d[None, :], mixed, mask=in_g[:, None])
        tl.store(sums + to * 2, most, mask=in_g)
        tl.store(sums + to * 2 + 1, total, mask=in_g)


@triton.jit
def _join(shares, sums, out, R, D: tl.constexpr, PARTS: tl.constexpr, START: tl.constexpr):
    row = tl.program_id(0)
    part, d = tl.arange(0, PARTS), tl.arange(0, D)
    start_next(START)
    wait_for_last(START)
    most = tl.load(sums + (part * R + row) * 2)
    total = tl.load(sums + (part * R + row) * 2 + 1)
    weight = tl.exp(most - tl.max(most))
    mixed = tl.load(shares + (part * R + row)[:, None] * D + d[None, :])
    done = tl.sum(mixed * weight[:, None], 0) / tl.sum(total * weight)
    tl.store(out + row * D + d, done.to(out.dtype.element_ty))


@dataclass(frozen=True)
class Where:
    """Slots and places of rows: by tensors, or row r in slot r and all at one place."""

    slots: Tensor | None = None  # int32 [R], any stride
    places: Tensor | None = None  # int32 [R], with the same stride
    place: int = 0


class Attention:
    """Of one decoder, with memory for `rows` rows."""

    def __init__(self, cache: Tensor, heads: int, rows: int, products: Products) -> None:
        """cache: keys and values [layers, 2, slots, kv, context, D]; D is a power of two."""
        self._cache, self._heads, self._products = cache, heads, products
        self._kv, self._context, self._size = cache.shape[3:]
        most = max(self._parts(n) * n for n in range(1, rows + 1))
        self._shares = torch.empty((most * heads, self._size), dtype=torch.float32, device=cache.device)
        self._sums = torch.empty((most * heads, 2), dtype=torch.float32, device=cache.device)

    def __call__(
        self,
        layer: int,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor],
        turns: tuple[Tensor, Tensor],
        where: Where,
        out: Tensor,
    ) -> None:
        """out [R, heads · D] of qkv [R, (heads + 2 kv) · D].

        norms: of query and key heads [D]. turns: cos and sin, float32 [R, D], or [1, D] for all rows.
        """
        rows = len(qkv)
        parts, group = self._parts(rows), self._heads // self._kv
        keys, values = self._cache[layer]
        cos, sin = turns
        by_slot = where.slots is not None
        slots, places = (where.slots, where.places) if by_slot else (cos, cos)
        assert slots is not None and places is not None
        _attend[(rows * self._kv, parts)](
            qkv, *norms, keys, values, slots, places, cos, sin, out, self._shares, self._sums,
            slots.stride(0), 0 if len(cos) == 1 else cos.stride(0), where.place, self._context,
            self._products.eps, self._size**-0.5, rows, by_slot, self._heads, self._kv, self._size, group,
            max(16, triton.next_power_of_2(group)), 32 if self._context <= 64 else 64, parts,
            num_warps=4, **self._products.launch(),
        )  # fmt: skip
        if parts > 1:
            _join[(rows * self._heads,)](
                self._shares, self._sums, out, rows * self._heads, self._size, parts,
                num_warps=1, **self._products.launch(),
            )  # fmt: skip

    def _parts(self, rows: int) -> int:
        """Programs that share the keys of a slot: more while there are few rows."""
        if self._context <= 64:
            return 1
        return min(MOST_SHARES, 1 << max(0, (128 // (rows * self._kv)).bit_length() - 1))
