"""Attention of pieces of prompts: many rows at once, of one sequence or of several.

    qkv [N, (heads + 2 kv) · D] ─► norms of heads, turns ─┬─► queries [N, heads · D]
                                                          └─► keys and values, into the slots' cache
    queries, by tile ─► keys of the tile's slot, up to each row's own ─► out [N, heads · D]

A tile is some neighbouring rows of one slot, with all the query heads that share a key head: keys are read
once for all of them. The host says which tiles there are; what is launched depends on no number of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from tritone.kernels.products import Products, cleared
from tritone.kernels.tiles import INTERPRETED, TILE_NUMBERS, tile_rows
from tritone.networks.spans import Span
from tritone.ports import Array

_FAR = tl.constexpr(-1e30)  # below every score


class Packed(NamedTuple):
    """Rows of several sequences, one span after the other; int32 on the device."""

    num_rows: Tensor  # [1], rows that there are; those behind them only fill a graph
    slots: Tensor  # [N]
    places: Tensor  # [N]
    tiles: Tensor  # [most, TILE_NUMBERS]; those that only fill a graph have no rows


@triton.jit
def _turn(
    qkv, query_norm, key_norm, keys, values, count, slots, places, cos, sin, out, context, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    if row < tl.load(count):
        d, g = tl.arange(0, D), tl.arange(0, BG)
        half = (d + D // 2) % D
        in_g = (g < GROUP)[:, None]
        c, s = tl.load(cos + row * D + d), tl.load(sin + row * D + d)
        mine = qkv + row.to(tl.int64) * ((HEADS + 2 * KV) * D)
        at = (head * GROUP + g)[:, None] * D
        query = tl.load(mine + at + d[None, :], mask=in_g, other=0.0).to(tl.float32)
        other = tl.load(mine + at + half[None, :], mask=in_g, other=0.0).to(tl.float32)
        scale = tl.load(query_norm + d).to(tl.float32) * c
        scale_half = tl.load(query_norm + half).to(tl.float32) * s
        length = tl.rsqrt(tl.sum(query * query, 1) / D + eps)[:, None]
        query = (query * scale[None, :] + other * scale_half[None, :]) * length
        to = out + row.to(tl.int64) * (HEADS * D) + at + d[None, :]
        tl.store(to, query.to(out.dtype.element_ty), mask=in_g)
        key = tl.load(mine + (HEADS + head) * D + d).to(tl.float32)
        other_key = tl.load(mine + (HEADS + head) * D + half).to(tl.float32)
        value = tl.load(mine + (HEADS + KV + head) * D + d)
        scale_key = tl.load(key_norm + d).to(tl.float32) * c
        scale_key_half = tl.load(key_norm + half).to(tl.float32) * s
        length_key = tl.rsqrt(tl.sum(key * key) / D + eps)
        key = (key * scale_key + other_key * scale_key_half) * length_key
        place = (tl.load(slots + row).to(tl.int64) * KV + head) * context + tl.load(places + row)
        tl.store(keys + place * D + d, key.to(keys.dtype.element_ty))
        tl.store(values + place * D + d, value)


@triton.jit
def _attend(
    queries, keys, values, tiles, out, context, scale,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, BG: tl.constexpr,
    ROWS: tl.constexpr, BS: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    tile, head = tiles + tl.program_id(0) * NUMBERS, tl.program_id(1)
    rows = tl.load(tile + 1)
    if rows > 0:
        first, slot, place = tl.load(tile), tl.load(tile + 2), tl.load(tile + 3)
        m, d, s = tl.arange(0, ROWS * BG), tl.arange(0, D), tl.arange(0, BS)
        row, of_group = m // BG, m % BG
        in_m = ((row < rows) & (of_group < GROUP))[:, None]
        at = ((first + row).to(tl.int64) * HEADS + head * GROUP + of_group)[:, None] * D + d[None, :]
        query = tl.load(queries + at, mask=in_m, other=0.0)
        base = (slot.to(tl.int64) * KV + head) * context * D
        most = tl.full([ROWS * BG], _FAR, tl.float32)
        total = tl.zeros([ROWS * BG], tl.float32)
        mixed = tl.zeros([ROWS * BG, D], tl.float32)
        for start in range(0, place + rows, BS):
            n = start + s
            known = n < place + rows
            key = tl.load(keys + base + n[None, :] * D + d[:, None], mask=known[None, :], other=0.0)
            score = tl.dot(query, key, input_precision="ieee") * scale
            score = tl.where(n[None, :] <= place + row[:, None], score, _FAR)
            higher = tl.maximum(most, tl.max(score, 1))
            shrink = tl.exp(most - higher)
            weight = tl.exp(score - higher[:, None])
            value = tl.load(values + base + n[:, None] * D + d[None, :], mask=known[:, None], other=0.0)
            total = total * shrink + tl.sum(weight, 1)
            mixed = tl.dot(weight.to(value.dtype), value, mixed * shrink[:, None], input_precision="ieee")
            most = higher
        tl.store(out + at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=in_m)


class PromptAttention:
    """Of one decoder, with memory for `rows` rows."""

    def __init__(self, cache: Tensor, heads: int, rows: int, products: Products) -> None:
        """cache: keys and values [layers, 2, slots, kv, context, D]; D is a power of two, 16 or more."""
        self._cache, self._heads, self._products = cache, heads, products
        self._kv, self._context, self._size = cache.shape[3:]
        self._group = triton.next_power_of_2(heads // self._kv)
        self.tile_rows = tile_rows(heads // self._kv)
        self._queries = cleared(rows, heads * self._size, like=cache)

    def store(
        self,
        layer: int,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor],
        turns: tuple[Tensor, Tensor],
        packed: Packed,
    ) -> None:
        """Put the keys and values of the rows into the cache, and their queries aside, for `attend`.

        qkv: [N, (heads + 2 kv) · D]. norms: of query and key heads [D]. turns: cos and sin, float32 [N, D].
        """
        keys, values = self._cache[layer]
        _turn[(len(qkv), self._kv)](
            qkv, *norms, keys, values, packed.num_rows, packed.slots, packed.places, *turns, self._queries,
            self._context, self._products.eps, self._heads, self._kv, self._size, self._heads // self._kv,
            self._group, num_warps=1,
        )  # fmt: skip

    def attend(self, layer: int, packed: Packed, out: Tensor) -> None:
        """out [N, heads · D], of the rows that were stored last."""
        keys, values = self._cache[layer]
        _attend[(len(packed.tiles), self._kv)](
            self._queries, keys, values, packed.tiles, out, self._context, self._size**-0.5,
            self._heads, self._kv, self._size, self._heads // self._kv, self._group, self.tile_rows,
            32 if INTERPRETED or self._queries.element_size() > 2 else 64, TILE_NUMBERS, num_warps=8,
            num_stages=2,
        )  # fmt: skip


def tiles_of(spans: Sequence[Span], tall: int, most: int) -> Array:
    """int32 [most, TILE_NUMBERS] of the rows of spans, one after the other."""
    tiles, first = np.zeros((most, TILE_NUMBERS), np.int32), 0
    numbers = []
    for span in spans:
        for start in range(0, span.count, tall):
            numbers.append((first + start, min(tall, span.count - start), span.slot, span.start + start))
        first += span.count
    tiles[: len(numbers)] = numbers
    return tiles
