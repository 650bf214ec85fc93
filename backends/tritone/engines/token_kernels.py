"""A step of tokens in kernels: what `PlainTokens` computes, in a third of the launches.

    token ─► embedding ─► x [R, H] ─► layers ─► hidden [R, H] ─► head ─► logits, in float32 ─► the likeliest

Attention reads the keys that a slot has and no more, and a mixture of experts the experts that were chosen.
"""

from __future__ import annotations

from functools import partial

import torch

from tritone.engines.token_buffers import TokenBuffers
from tritone.kernels.attention import Where
from tritone.kernels.launch import Start
from tritone.kernels.layers import Group, Layers
from tritone.kernels.products import FEW_ROWS, MANY_ROWS, TWO_ROWS, Products, cleared
from tritone.networks.decoder import Decoder


class KernelTokens:
    """A step for the first rows of the buffers."""

    def __init__(self, buffers: TokenBuffers, decoder: Decoder) -> None:
        """decoder: with a cache of one slot more than sessions use."""
        most = len(buffers.packed)
        self._few = _Machine(buffers, decoder, rows=min(TWO_ROWS, most), start=FEW_ROWS)
        self._many = _Machine(buffers, decoder, rows=most, start=MANY_ROWS) if most > TWO_ROWS else None

    @torch.inference_mode()
    def __call__(self, rows: int) -> None:
        machine = self._few if rows <= TWO_ROWS or self._many is None else self._many
        machine(rows)


class _Machine:
    """The kernels of a step, with memory for `rows` rows."""

    def __init__(self, buffers: TokenBuffers, decoder: Decoder, *, rows: int, start: Start) -> None:
        assert decoder.head is not None and decoder.embedding is not None
        self._buffers, self._table, self._head = buffers, decoder.embedding, decoder.head
        self._products = Products(decoder.config.norm_eps, start.on(decoder.device))
        self._layers = Layers(decoder, rows, self._products)
        self._x = cleared(rows, decoder.config.hidden_size, like=decoder.cache)
        self._hidden = torch.zeros_like(self._x)
        self._frequencies = decoder.rotary.frequencies
        turn = partial(cleared, rows, decoder.config.head_dim, like=self._x, dtype=torch.float32)
        self._angles, self._cos, self._sin = turn(), turn(), turn()

    def __call__(self, rows: int) -> None:
        some = slice(0, rows)
        column = partial(self._buffers.column, rows=some)
        x, hidden = self._x[some], self._hidden[some]
        torch.index_select(self._table, 0, self._buffers.inputs(some), out=x)
        # A row of text is turned by one position: time, height and width are the same.
        torch.mul(column("position").unsqueeze(1), self._frequencies, out=self._angles[some])
        turns = (
            torch.cos(self._angles[some], out=self._cos[some]),
            torch.sin(self._angles[some], out=self._sin[some]),
        )
        self._layers(x, [Group(slice(None), turns, Where(column("slot"), column("place")))], hidden)
        product = self._products.gemv if rows <= TWO_ROWS else self._products.gemm
        product(hidden, self._head.weight, self._buffers.logits[some])
        self._buffers.settle_likeliest(some)
