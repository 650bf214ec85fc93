"""The layers of a decoder in kernels, for a step of few rows.

    x [R, H] ─► norm ─► qkv ─► attention ─► + ─► norm ─► MLP or experts ─► + ─► … ─► norm ─► hidden [R, H]

What a layer leaves to be added up (`Partials`) is handed to the next and never kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritone.kernels.attention import Attention, Where
from tritone.kernels.experts import Experts
from tritone.kernels.products import TWO_ROWS, Partials, Products, cleared
from tritone.kernels.tiles import MOST_SPLITS
from tritone.networks.decoder import Decoder
from tritone.networks.decoder_config import DecoderConfig
from tritone.networks.layer_weights import ExpertWeights, LayerWeights, MlpWeights


def can_run(config: DecoderConfig) -> bool:
    """Whether the kernels compute a decoder of this shape."""
    fits_tiles = config.head_dim >= 16 and config.head_dim & (config.head_dim - 1) == 0
    return config.qk_norm and not config.qkv_bias and not config.output_bias and fits_tiles


class Group(NamedTuple):
    """Rows of a pass that are turned and placed alike."""

    rows: slice
    turns: tuple[Tensor, Tensor]  # cos and sin, float32 [R, D] or [1, D]
    where: Where


class Layers:
    """The layers of a decoder, for up to `rows` rows of different slots or places."""

    def __init__(self, decoder: Decoder, rows: int, products: Products) -> None:
        config, cache = decoder.config, decoder.cache
        self._layers, self._last_norm = decoder.parts
        self._products = products
        self._attention = Attention(cache, config.num_heads, rows, products)
        heads, inner = config.num_heads + 2 * config.num_kv_heads, config.intermediate_size
        self._qkv = cleared(rows, heads * config.head_dim, like=cache)
        self._attended = cleared(rows, config.num_heads * config.head_dim, like=cache)
        self._inner = cleared(rows, inner, like=cache)
        self._normed = cleared(rows, config.hidden_size, like=cache)
        self._parts = cleared(MOST_SPLITS, rows, config.hidden_size, like=cache, dtype=torch.float32)
        mixtures = [layer.mlp for layer in self._layers if isinstance(layer.mlp, ExpertWeights)]
        self._experts = Experts(mixtures[0], rows, products) if mixtures else None

    def __call__(self, x: Tensor, groups: Sequence[Group], out: Tensor | None = None) -> Tensor:
        """Normed hidden states [R, H] of x [R, H], which is used up; out: where they go."""
        partials: Partials | None = None
        for number, layer in enumerate(self._layers):
            partials = self._layer(number, layer, x, groups, partials)
        out = self._normed[: len(x)] if out is None else out
        self._products.norm_add(x, self._last_norm, out, partials)
        return out

    def _layer(
        self, number: int, layer: LayerWeights, x: Tensor, groups: Sequence[Group], partials: Partials | None
    ) -> Partials | None:
        """x: what the layer before made, but for partial sums that are still to be added."""
        products, rows = self._products, len(x)
        qkv, attended, normed = self._qkv[:rows], self._attended[:rows], self._normed[:rows]
        is_few = rows <= TWO_ROWS
        if is_few:
            assert partials is None
            products.gemv(x, layer.qkv, qkv, norm=layer.input_norm)
        else:
            products.norm_add(x, layer.input_norm, normed, partials)
            products.gemm(normed, layer.qkv, qkv)
        norms = (layer.query_norm, layer.key_norm)
        for group in groups:
            some = group.rows
            self._attention(number, qkv[some], norms, group.turns, group.where, attended[some])
        if is_few:
            products.gemv(attended, layer.output, x, residual=x)
            partials = None
        else:
            partials = products.gemm_parts(attended, layer.output, self._parts)
        if isinstance(layer.mlp, ExpertWeights):
            assert self._experts is not None
            return self._experts(x, layer.mlp_norm, layer.mlp, partials)
        return self._gated(x, layer.mlp_norm, layer.mlp, partials)

    def _gated(
        self, x: Tensor, norm: Tensor, weights: MlpWeights, partials: Partials | None
    ) -> Partials | None:
        products, rows = self._products, len(x)
        inner, normed = self._inner[:rows, : weights.down.shape[1]], self._normed[:rows]
        if rows <= TWO_ROWS:
            products.gemv(x, weights.gate_up, inner, norm=norm, glu=True)
            products.gemv(inner, weights.down, x, residual=x)
            return None
        products.norm_add(x, norm, normed, partials)
        products.gemm(normed, weights.gate_up, inner, glu=True)
        return products.gemm_parts(inner, weights.down, self._parts)
