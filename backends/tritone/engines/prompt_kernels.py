"""Pieces of the prompts of many sessions in one pass of kernels: each weight is read once for all of them.

    rows [N, H] ─► norm ─► qkv ─┬─► keys, values into the cache
                                └─► attention ─► + ─► norm ─► MLP or experts ─► + ─► next layer

Products with one weight are cuBLAS's; of the last layer no more is run than its keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tritone.engines.cuda_graphs import CudaGraphs
from tritone.engines.graph_memory import FEWEST_PACKED, buckets
from tritone.engines.prompt_graph import PromptGraphs
from tritone.kernels.grouped_experts import GroupedExperts
from tritone.kernels.products import Partials, Products, cleared
from tritone.kernels.prompt_attention import Packed, PromptAttention, tiles_of
from tritone.kernels.tiles import TILE_NUMBERS, most_tiles
from tritone.networks.decoder import Decoder
from tritone.networks.layer_weights import ExpertWeights, LayerWeights, MlpWeights
from tritone.networks.spans import Span
from tritone.networks.transfer import array_on_device


class KernelPrompts(PromptGraphs):
    """A graph for each of some numbers of rows. Rows that only fill one are computed by no kernel of ours.

    What is tapped behind the last layer, which is not run here, takes the way of `Decoder.forward`.
    """

    def __init__(self, decoder: Decoder, most_rows: int, *, slots: int, one_bucket: bool = False) -> None:
        """decoder: with a cleared cache. most_rows: of all spans of a pass; slots: as many spans.

        one_bucket: the largest graph alone, so that the products, and with them the rounding, are always the
        same.
        """
        config, like = decoder.config, decoder.cache
        self._decoder = decoder
        self._lengths = buckets(FEWEST_PACKED, most_rows)[-1 if one_bucket else 0 :]
        longest, heads = self._lengths[-1], config.num_heads * config.head_dim
        self._layers, _ = decoder.parts
        self._products = Products(config.norm_eps)
        self._attention = PromptAttention(like, config.num_heads, longest, self._products)
        mixtures = [layer.mlp for layer in self._layers if isinstance(layer.mlp, ExpertWeights)]
        self._experts = GroupedExperts(mixtures[0], longest) if mixtures else None
        self._spans = slots
        self._rows = cleared(longest, config.hidden_size, like=like)
        self._count = cleared(1, like=like, dtype=torch.int32)
        self._where = cleared(2, longest, like=like, dtype=torch.int32)  # slots, places
        self._tiles = cleared(self._most_tiles(longest), TILE_NUMBERS, like=like, dtype=torch.int32)
        self._positions = cleared(3, longest, like=like, dtype=torch.float32)
        self._x, self._normed = torch.zeros_like(self._rows), torch.zeros_like(self._rows)
        self._qkv = cleared(longest, heads + 2 * config.num_kv_heads * config.head_dim, like=like)
        self._attended = cleared(longest, heads, like=like)
        captured = CudaGraphs(decoder.device)
        self._replays = {n: captured(partial(self._program, n)) for n in reversed(self._lengths)}

    def read(self, rows: Tensor, spans: Sequence[Span], positions: Tensor | None) -> None:
        self._replays[self._take_in(rows, spans, positions)]()

    @torch.inference_mode()
    def run(
        self,
        rows: Tensor,
        spans: Sequence[Span],
        positions: Tensor | None,
        additions: Sequence[tuple[Tensor, Tensor]],
        tap: int | None,
    ) -> Tensor | None:
        if tap == len(self._layers):  # normed, behind a layer that is not run here
            return self._decoder.forward(
                rows, spans, positions=positions, additions=additions, tap=tap
            ).tapped
        tapped = self._program(self._take_in(rows, spans, positions), additions, tap)
        return None if tapped is None else tapped[: len(rows)]

    @torch.inference_mode()
    def _take_in(self, rows: Tensor, spans: Sequence[Span], positions: Tensor | None) -> int:
        """Fill the buffers; rows of the graph that holds them."""
        count = len(rows)
        length = next(length for length in self._lengths if length >= count)
        send = partial(array_on_device, device=self._decoder.device)
        where = np.zeros((2, length), np.int32)
        where[0, :count] = np.repeat([span.slot for span in spans], [span.count for span in spans])
        where[1, :count] = np.concatenate([np.arange(span.start, span.end) for span in spans])
        turned_by = where[1:, :count].astype(np.float32) if positions is None else positions.numpy()
        self._rows[:count] = rows
        self._count.copy_(send(np.asarray([count], np.int32)))
        self._where[:, :length] = send(where)
        self._positions[:, :count] = send(turned_by)
        most = self._most_tiles(length)
        self._tiles[:most] = send(tiles_of(spans, self._attention.tile_rows, most))
        return length

    def _most_tiles(self, rows: int) -> int:
        return most_tiles(rows, self._spans, self._attention.tile_rows)

    @torch.inference_mode()
    def _program(
        self, length: int, additions: Sequence[tuple[Tensor, Tensor]] = (), tap: int | None = None
    ) -> Tensor | None:
        """What is tapped [length, H]."""
        packed = Packed(
            self._count,
            self._where[0, :length],
            self._where[1, :length],
            self._tiles[: self._most_tiles(length)],
        )
        angles = self._decoder.rotary.angles(self._turned_by(length))
        turns = (angles.cos(), angles.sin())
        x = self._x[:length]
        # What fills a graph begins anew each time: else its sums would grow to what is no number.
        given = torch.arange(length, device=x.device).unsqueeze(1) < self._count
        torch.where(given, self._rows[:length], torch.zeros_like(x), out=x)
        partials: Partials | None = None
        last = len(self._layers) - 1
        tapped = x.clone() if tap == 0 else None
        for number, layer in enumerate(self._layers):
            self._project(number, layer, x, turns, packed, partials)
            if number < last:
                partials = self._finish(number, layer, x, packed)
            if tap == number + 1:
                tapped = _summed(x, partials)
            if number < len(additions):
                places, values = additions[number]
                x.index_add_(0, places.to(x.device), values.to(x.device, x.dtype))
        return tapped

    def _turned_by(self, length: int) -> Tensor:
        positions = self._positions[:, :length]
        return positions[0] if self._decoder.rotary.is_plain else positions

    def _project(
        self,
        number: int,
        layer: LayerWeights,
        x: Tensor,
        turns: tuple[Tensor, Tensor],
        packed: Packed,
        partials: Partials | None,
    ) -> None:
        """Add what is to be added up to x, and store queries, keys and values."""
        normed, qkv = self._normed[: len(x)], self._qkv[: len(x)]
        self._products.norm_add(x, layer.input_norm, normed, partials)
        torch.mm(normed, layer.qkv.t(), out=qkv)
        self._attention.store(number, qkv, (layer.query_norm, layer.key_norm), turns, packed)

    def _finish(self, number: int, layer: LayerWeights, x: Tensor, packed: Packed) -> Partials | None:
        """x and what is given back: the layer's output."""
        normed, attended = self._normed[: len(x)], self._attended[: len(x)]
        self._attention.attend(number, packed, attended)
        x.addmm_(attended, layer.output.t())
        self._products.norm_add(x, layer.mlp_norm, normed)
        if isinstance(layer.mlp, MlpWeights):
            gate, up = torch.mm(normed, layer.mlp.gate_up.t()).chunk(2, dim=1)
            x.addmm_(F.silu(gate).mul_(up), layer.mlp.down.t())
            return None
        assert self._experts is not None
        return self._experts(normed, layer.mlp, packed.num_rows)


def _summed(x: Tensor, partials: Partials | None) -> Tensor:
    """x [N, H] with what is still to be added up."""
    if partials is None:
        return x.clone()
    parts = partials.values[: partials.count * x.numel()].view(partials.count, *x.shape)
    return (x.float() + parts.sum(0, dtype=torch.float32)).to(x.dtype)
