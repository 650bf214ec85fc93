"""The talker's frame in kernels: what `PlainProgram` computes, in a fifth of the launches.

    text, spoken ─► x [R, H] ─► layers, mixtures of experts ─► hidden [R, H] ─► scores ─► code 0 ─┐
                                                                  └────────► pair [2 R, H] ◄──────┘ embedded
    15 times: pair, later its second half ─► layers ─► scores ─► code k ─► embedded, into the second half

Rows at places are scored in float32, whatever the dtype of the weights. What the layers leave to be added up
(`Partials`) is handed from call to call and never kept.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tritone.kernels.attention import Where
from tritone.kernels.draws import Drawing, DrawRows, Draws
from tritone.kernels.launch import Start
from tritone.kernels.layers import Group, Layers
from tritone.kernels.products import FEW_ROWS, MANY_ROWS, TWO_ROWS, Products, cleared
from tritone.networks.decoder import Decoder
from tritone.pipelines.qwen3_omni.code_predictor import CodePredictor
from tritone.pipelines.qwen3_omni.frame import FIRST_CODEBOOK, Codec
from tritone.pipelines.qwen3_omni.frame_buffers import FrameBuffers


class KernelProgram:
    """A frame for the first rows of the buffers."""

    def __init__(
        self, buffers: FrameBuffers, decoder: Decoder, predictor: CodePredictor, codec: Codec
    ) -> None:
        """decoder: with a cache of one slot more than sessions use."""
        most = len(buffers.packed)
        machine = partial(_Machine, buffers, decoder, predictor, codec)
        self._few = machine(rows=min(TWO_ROWS, most), start=FEW_ROWS)
        self._many = machine(rows=most, start=MANY_ROWS) if most > TWO_ROWS else None

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
        start: Start,
    ) -> None:
        start = start.on(decoder.device)
        self._buffers = buffers
        self._products = Products(decoder.config.norm_eps, start)
        self._talker = Layers(decoder, rows, self._products)
        self._predictor = Layers(
            predictor.decoder, 2 * rows, Products(predictor.decoder.config.norm_eps, start)
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
