"""A frame of speech for each of some slots of the talker, and the two ways to make it.

    text row ──┐
               +──► decoder ─► code 0 ─► CodePredictor ─► codes 1 … 15 ──► frame [16], on the host
    embeddings ┘                                    └─► Σ embeddings, which wait for the next text row
    of the last frame ◄──────────────────────────────────┘

`EagerFrames` does it operation by operation and is the reference. `GraphFrames` (frame_graph.py) launches
the whole of it as one CUDA graph and lets the next frame begin before the host has the codes of this one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tritone.engines import sampler
from tritone.networks.decoder import Decoder
from tritone.networks.spans import Span
from tritone.networks.transfer import on_device
from tritone.pipelines.qwen3_omni.code_predictor import CodePredictor
from tritone.pipelines.qwen3_omni.config import RESERVED_CODEC_IDS
from tritone.pipelines.qwen3_omni.frame_row import NOT_A_NUMBER, FrameRow
from tritone.ports import Array
from tritone.sampling import Sampling

FIRST_CODEBOOK = 1  # number of code 0 in the draws; 0 is the thinker's


@dataclass(frozen=True)
class Codec:
    """What is special about the codes that are drawn."""

    silenced: Tensor  # bool [V], on the device: ids that are never drawn
    end: int  # the end sign, which gets no frame
    residual: Sampling  # of the codes after the first, but for seed and temperature of a greedy talker

    @classmethod
    def of(cls, vocab_size: int, end: int, residual: Sampling, device: torch.device) -> Codec:
        """Of the last ids of a vocabulary, which are signs and speakers, the end sign alone is drawn."""
        silenced = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        silenced[vocab_size - RESERVED_CODEC_IDS :] = True
        silenced[end] = False
        return cls(silenced, end, residual)

    def of_residuals(self, sampling: Sampling) -> Sampling:
        return replace(self.residual, seed=sampling.seed, temperature=self.residual_temperature(sampling))

    def residual_temperature(self, sampling: Sampling) -> float:
        """A greedy talker is greedy in all codes, as the reference is."""
        return self.residual.temperature if sampling.temperature >= sampler.GREEDY_BELOW else 0.0


class Flight(ABC):
    """Frames that were launched."""

    @abstractmethod
    def frames(self) -> Array:
        """Codes int32 [B, codebooks], waited for; code 0 is NOT_A_NUMBER where it could not be drawn.

        After an end sign or for a row that `is_last` the other codes mean nothing.
        """


class Frames(ABC):
    """Makes a frame for each of some slots."""

    overlaps: bool  # the next row of a slot may be launched before the frames of the last were asked for

    @abstractmethod
    def begin(self, slot: int) -> None:
        """A new sequence begins in a slot."""

    @abstractmethod
    def launch(self, rows: Sequence[FrameRow]) -> Flight:
        """Begin a frame for each row, of different slots, whose earlier rows are in the cache."""


class EagerFrames(Frames):
    """Operation by operation, whatever the device; what is not asked for is not computed."""

    overlaps = False

    def __init__(self, decoder: Decoder, predictor: CodePredictor, codec: Codec) -> None:
        self._decoder, self._predictor, self._codec = decoder, predictor, codec
        self._sampler = sampler
        self._spoken: dict[int, Tensor] = {}  # by slot: embeddings [H] of its last frame, added up

    def begin(self, slot: int) -> None:
        self._spoken.pop(slot, None)

    @torch.inference_mode()
    def launch(self, rows: Sequence[FrameRow]) -> Flight:
        inputs = [row.text if row.begins else self._spoken[row.slot] + row.text for row in rows]
        hidden = self._decoder.forward(
            torch.stack(inputs), [Span(row.slot, row.place) for row in rows], positions=self._positions(rows)
        ).hidden
        logits = self._decoder.logits(hidden).float()
        wrong = logits.isnan().any(-1)
        logits.masked_fill_(self._codec.silenced, float("-inf"))
        firsts = self._sampler.sample(logits, [self._first(row) for row in rows], FIRST_CODEBOOK).tolist()
        frames = np.zeros((len(rows), 1 + self._predictor.num_residuals), np.int32)
        frames[:, 0] = firsts
        going = [i for i, row in enumerate(rows) if not row.is_last and firsts[i] != self._codec.end]
        if going:
            some = [rows[i] for i in going]
            residuals, wrong[going] = self._residuals(some, hidden[going], frames[going, 0].tolist())
            frames[going, 1:] = residuals
        frames[wrong.cpu().numpy(), 0] = NOT_A_NUMBER
        return _Landed(frames)

    def _positions(self, rows: Sequence[FrameRow]) -> Tensor | None:
        """float32 [3, B], or None if all are places."""
        if all(row.position is None for row in rows):
            return None
        positions = [row.place if row.position is None else row.position for row in rows]
        return on_device(positions, torch.float32, self._decoder.device).expand(3, -1)

    def _first(self, row: FrameRow) -> sampler.Row:
        banned = (self._codec.end,) if row.bars_end else ()
        return self._sampler.Row(row.sampling, position=row.draws, penalised=row.drawn, banned=banned)

    def _residuals(
        self, rows: Sequence[FrameRow], hidden: Tensor, firsts: Sequence[int]
    ) -> tuple[Array, Tensor]:
        """Codes [B, residuals] of frames that `firsts` begin, and bool [B]: not numbers; hidden: [B, H]."""
        settings = [
            self._sampler.Row(self._codec.of_residuals(row.sampling), position=row.draws + 1) for row in rows
        ]
        codebooks = range(FIRST_CODEBOOK + 1, FIRST_CODEBOOK + 1 + self._predictor.num_residuals)
        draw = _Watched(
            self._sampler.Draw(settings, self._predictor.vocab_size, self._decoder.device, codebooks)
        )
        codes, embedded = self._predictor(hidden, self._decoder.embed(firsts), draw, codebooks)
        for row, spoken in zip(rows, embedded, strict=True):
            self._spoken[row.slot] = spoken
        return codes.cpu().numpy().astype(np.int32), draw.wrong_among(len(rows))


class _Landed(Flight):
    """Frames that are known already."""

    def __init__(self, frames: Array) -> None:
        self._frames = frames

    def frames(self) -> Array:
        return self._frames


class _Watched:
    """A draw that notes where it was given what is not a number."""

    def __init__(self, draw: sampler.Draw) -> None:
        self._draw = draw
        self._wrong: Tensor | None = None  # bool [B]

    def __call__(self, logits: Tensor, codebook: int) -> Tensor:
        wrong = logits.isnan().any(-1)
        self._wrong = wrong if self._wrong is None else self._wrong | wrong
        return self._draw(logits, codebook)

    def wrong_among(self, rows: int) -> Tensor:
        return torch.zeros(rows, dtype=torch.bool) if self._wrong is None else self._wrong
