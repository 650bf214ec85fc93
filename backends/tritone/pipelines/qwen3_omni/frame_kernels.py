"""The talker's frame in kernels: what `PlainProgram` computes, in a fifth of the launches.

    text, spoken ─► x [R, H] ─► layers, mixtures of experts ─► hidden [R, H] ─► scores ─► code 0 ─┐
                                                                  └────────► pair [2 R, H] ◄──────┘ embedded
    15 times: pair, later its second half ─► layers ─► scores ─► code k ─► embedded, into the second half

Rows at places are scored in float32, whatever the dtype of the weights. What the layers leave to be added up
(`Partials`) is handed from call to call and never kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tritone.kernels.attention import Attention, Where
from tritone.kernels.draws import Drawing, DrawRows, Draws
from tritone.kernels.experts import Experts
from tritone.kernels.products import MOST_SPLITS, TWO_ROWS, Partials, Products, cleared
from tritone.networks.decoder import Decoder, DecoderConfig
from tritone.networks.layer_weights import ExpertWeights, LayerWeights, MlpWeights
from tritone.pipelines.qwen3_omni.code_predictor import CodePredictor
from tritone.pipelines.qwen3_omni.frame import FIRST_CODEBOOK, Codec
from tritone.pipelines.qwen3_omni.frame_buffers import FrameBuffers


def can_run(config: DecoderConfig) -> bool:
    """Whether the kernels compute a decoder of this shape."""
    is_power = config.head_dim & (config.head_dim - 1) == 0
    return config.qk_norm and not config.qkv_bias and not config.output_bias and is_power


class KernelProgram:
    """A frame for the first rows of the buffers."""

    def __init__(
        self, buffers: FrameBuffers, decoder: Decoder, predictor: CodePredictor, codec: Codec
    ) -> None:
        """decoder: with a cache of one slot more than sessions use."""
        most = len(buffers.packed)
        # Early launches gain where weights are read in registers, and lose on tensor cores.
        self._few = _Machine(buffers, decoder, predictor, codec, rows=min(TWO_ROWS, most), pdl=True)
        self._many = (
            _Machine(buffers, decoder, predictor, codec, rows=most, pdl=False) if most > TWO_ROWS else None
        )

    @torch.inference_mode()
    def __call__(self, rows: int) -> None:
        machine = self._few if rows <= TWO_ROWS or self._many is None else self._many
        machine(rows)


class _Machine:
    """The kernels of a frame, with memory for `rows` rows."""

    def __init__(
        self,
        buffers: FrameBuffers,
        decoder: Decoder,
        predictor: CodePredictor,
        codec: Codec,
        *,
        rows: int,
        pdl: bool,
    ) -> None:
        pdl = pdl and decoder.device.type == "cuda"
        self._buffers = buffers
        self._products = Products(decoder.config.norm_eps, pdl)
        self._talker = Layers(decoder, rows, self._products)
        self._predictor = Layers(
            predictor.decoder, 2 * rows, Products(predictor.decoder.config.norm_eps, pdl)
        )
        assert decoder.head is not None and decoder.embedding is not None
        self._heads = [decoder.head, *predictor.heads]
        self._tables = [decoder.embedding, *predictor.embeddings]
        drawing = Drawing(
            seen=buffers.seen,
            silenced=codec.silenced,
            spoken=buffers.spoken,
            frames=buffers.frames,
            end=codec.end,
            first_codebook=FIRST_CODEBOOK,
            residual_top_k=codec.residual.top_k,
            residual_top_p=codec.residual.top_p,
        )
        self._draws = Draws(drawing, rows, self._products)
        like, hidden = buffers.text, decoder.config.hidden_size
        self._x = cleared(rows, hidden, like=like)
        self._pair = cleared(2 * rows, hidden, like=like)
        vocabulary = max(decoder.config.vocab_size, predictor.vocab_size)
        self._scores = cleared(rows * vocabulary, like=like, dtype=torch.float32)
        self._frequencies = decoder.rotary.frequencies
        turn = partial(cleared, rows, decoder.config.head_dim, like=like, dtype=torch.float32)
        self._angles, self._cos, self._sin = turn(), turn(), turn()
        places = torch.arange(predictor.num_residuals + 2, device=like.device).float().unsqueeze(1)
        angles = places * predictor.decoder.rotary.frequencies
        parts = (torch.split(turned, 1) for turned in (angles.cos(), angles.sin()))
        self._turns = list(zip(*parts, strict=True))

    def __call__(self, rows: int) -> None:
        column = partial(self._buffers.column, rows=rows)
        asked = DrawRows(
            slots=column("slot"),
            **{name: column(name) for name in DrawRows.__annotations__ if name != "slots"},
        )
        x, hidden, embedded = self._x[:rows], self._pair[:rows], self._pair[rows : 2 * rows]
        torch.mul(column("position").unsqueeze(1), self._frequencies, out=self._angles[:rows])
        turns = (
            torch.cos(self._angles[:rows], out=self._cos[:rows]),
            torch.sin(self._angles[:rows], out=self._sin[:rows]),
        )
        self._draws.begin(asked, self._buffers.text[:rows], x)
        where = Where(column("slot"), column("place"))
        self._talker(x, [Group(slice(None), turns, where)], hidden)
        self._draws(asked, self._score(hidden, 0), 0, self._tables[0], embedded)
        for codebook in range(1, len(self._heads)):
            if codebook == 1:
                both = [
                    Group(slice(0, rows), self._turns[0], Where(place=0)),
                    Group(slice(rows, 2 * rows), self._turns[1], Where(place=1)),
                ]
                out = self._predictor(self._pair[: 2 * rows], both)[rows:]
            else:
                one = Group(slice(None), self._turns[codebook], Where(place=codebook))
                out = self._predictor(embedded, [one])
            self._draws(asked, self._score(out, codebook), codebook, self._tables[codebook], embedded)

    def _score(self, hidden: Tensor, codebook: int) -> Tensor:
        """Scores float32 [R, V] of a codebook from normed rows [R, H]."""
        weight = self._heads[codebook].weight
        scores = self._scores[: len(hidden) * len(weight)].view(len(hidden), len(weight))
        product = self._products.gemv if len(hidden) <= TWO_ROWS else self._products.gemm
        product(hidden, weight, scores)
        return scores


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
