"""The next token of each of some slots as a CUDA graph: one launch a step, a graph for each of some sizes.

    rows ─► pinned ─► TokenBuffers ─► graph of the smallest bucket that holds them ─► logits, likeliest
                           ▲                                                               │
                           └── token, kept by slot ◄── TokenDraw, for those who ask ◄──────┴─► pinned ─► host

What is drawn stays on the device as the next row of its slot, so that a step can be launched before the host
knows the tokens of the one before. Greedy rows are done with the graph; what others ask for is launched
behind it, for them alone. How a step is captured and launched: step_graphs.py.

`PlainTokens` is the program in plain torch: what the one in kernels (token_kernels.py) is held to.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritone.engines.graph_memory import buckets
from tritone.engines.staging import Staging
from tritone.engines.step_graphs import Program, StepGraphs
from tritone.engines.token_buffers import OUT_OF_REACH, TokenBuffers, TokenRow, pack, pack_spare
from tritone.engines.token_draw import PlainNoise, TokenDraw
from tritone.networks.decoder import Decoder
from tritone.networks.transfer import on_device
from tritone.sampling import Sampling


class PlainTokens:
    """A step in plain torch, for the first rows of the buffers."""

    def __init__(self, buffers: TokenBuffers, decoder: Decoder) -> None:
        """decoder: with a cleared cache of one slot more than sessions use."""
        self._buffers, self._decoder = buffers, decoder

    @torch.inference_mode()
    def __call__(self, rows: int) -> None:
        buffers, decoder, some = self._buffers, self._decoder, slice(0, rows)
        places, positions = buffers.column("place", some).long(), buffers.column("position", some)
        if not decoder.rotary.is_plain:
            positions = positions.expand(3, -1)
        hidden = decoder.step(
            decoder.embed(buffers.inputs(some)),
            buffers.slots(some),
            places.unsqueeze(1),
            places + 1,
            positions,
        )
        buffers.logits[some] = decoder.logits(hidden).float()
        buffers.settle_likeliest(some)


class Drawn(NamedTuple):
    """A token that has come."""

    token: int  # or NOT_A_NUMBER
    is_other: bool  # than what the device has taken for the slot's next row


class TokenFlight:
    """Tokens that the device is drawing."""

    def __init__(
        self,
        staging: Staging,
        rows: Sequence[TokenRow],
        order: Sequence[int],
        draw: TokenDraw,
        scores: Tensor | None,
    ) -> None:
        """rows: as they stand in the buffers; order: their places in what was asked for."""
        self._staging, self._rows, self._order = staging, rows, order
        self._draw, self._scores = draw, scores

    def tokens(self) -> list[Drawn]:
        """Of each row as they were asked for; waited for."""
        tokens: list[int] = self._staging.fetched(len(self._rows)).tolist()
        others = [number for number, token in enumerate(tokens) if token == OUT_OF_REACH]
        if others:
            assert self._scores is not None
            redrawn = self._draw.redraw([self._rows[number] for number in others], self._scores[others])
            for number, token in zip(others, redrawn, strict=True):
                tokens[number] = token
        drawn = [Drawn(0, False)] * len(self._rows)
        for number, place in enumerate(self._order):
            drawn[place] = Drawn(tokens[number], number in others)
        return drawn


class TokenGraphs(StepGraphs):
    """Launches the draws behind a captured step, too."""

    def __init__(
        self,
        program: Program,
        buffers: TokenBuffers,
        draw: TokenDraw,
        *,
        slots: int,
        one_bucket: bool = False,
    ) -> None:
        """Capture the program for every bucket. slots: of sessions; the buffers have one more.

        one_bucket: the largest alone, so that the kernels, and with them the rounding, are always the same.
        """
        sizes = buckets(1, slots)[-1 if one_bucket else 0 :]
        super().__init__(program, buffers.packed, buffers.ids, pack_spare(len(buffers.packed), slots), sizes)
        self._buffers, self._draw = buffers, draw

    def warm_up(self) -> None:
        """Draw in every way once, before the first session: first calls compile."""
        for sampling in (
            Sampling(temperature=0.0),
            Sampling(temperature=1.0, top_k=0, top_p=1.0),
            Sampling(temperature=1.0, top_k=50, top_p=0.9),
        ):
            row = TokenRow(slot=0, place=0, position=None, token=0, sampling=sampling, draw=1, bars_end=True)
            self.launch([row]).tokens()

    @torch.inference_mode()
    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """The sequence of a slot, so far, is what a penalty holds for."""
        seen = self._buffers.seen[slot]
        seen.zero_()
        seen[on_device(tokens, torch.int64, seen.device)] = seen.new_ones(len(tokens))

    @torch.inference_mode()
    def launch(self, rows: Sequence[TokenRow]) -> TokenFlight:
        """Begin a token for each row, of different slots, whose earlier rows are in the cache.

        Of two flights the first must have landed before a third is launched.
        """
        order = sorted(range(len(rows)), key=lambda place: self._draw.width(rows[place]))
        rows = [rows[place] for place in order]
        count = len(rows)
        pack(rows, self._buffers.logits.shape[1], self._next_rows())
        staging = self._replay(count)
        scores = self._draw(rows)
        staging.fetch(self._buffers.ids[:count])
        return TokenFlight(staging, rows, order, self._draw, scores)


def token_graphs(
    decoder: Decoder, ends: Sequence[int], *, slots: int, kernels: bool, one_bucket: bool
) -> TokenGraphs:
    """Steps of `slots` sessions through a decoder that has one slot more, and a cleared cache.

    ends: token ids that end an answer. kernels: not in plain torch, where there are kernels for what the
    decoder computes.
    """
    buffers = TokenBuffers.of(buckets(1, slots)[-1], slots, decoder.config.vocab_size, decoder.device)
    program, draw = _program_and_draw(buffers, decoder, ends, kernels)
    return TokenGraphs(program, buffers, draw, slots=slots, one_bucket=one_bucket)


def _program_and_draw(
    buffers: TokenBuffers, decoder: Decoder, ends: Sequence[int], kernels: bool
) -> tuple[Program, TokenDraw]:
    if not kernels or not importlib.util.find_spec("triton"):
        return PlainTokens(buffers, decoder), TokenDraw(buffers, ends, PlainNoise())
    from tritone.engines.token_kernels import KernelTokens
    from tritone.kernels.layers import can_run
    from tritone.kernels.noise import KernelNoise

    program = (KernelTokens if can_run(decoder.config) else PlainTokens)(buffers, decoder)
    return program, TokenDraw(buffers, ends, KernelNoise())
