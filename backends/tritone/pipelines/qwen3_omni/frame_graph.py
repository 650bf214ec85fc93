"""Frames of the talker as CUDA graphs: one launch a frame, one graph for each of some batch sizes.

    rows ─► pinned ─► FrameBuffers ─► graph of the smallest bucket that holds them ─► frames ─► pinned ─► host
                                        └─ decoder, draws, code predictor, embeddings: nothing waits

The host writes the rows of one frame while the device makes the one before, and reads its codes while it
makes the next. How a frame is captured and launched: engines/step_graphs.py.

`PlainProgram` is the program in plain torch: what the one in kernels (frame_kernels.py) is held to.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tritone.engines.graph_memory import buckets
from tritone.engines.sampler import gumbel_of_all, gumbel_of_frame
from tritone.engines.staging import Staging
from tritone.engines.static_draw import DrawSettings, draw, penalise
from tritone.engines.step_graphs import Program, StepGraphs
from tritone.networks.decoder import Decoder
from tritone.pipelines.qwen3_omni.code_predictor import CodePredictor
from tritone.pipelines.qwen3_omni.frame import FIRST_CODEBOOK, Codec, Flight, Frames
from tritone.pipelines.qwen3_omni.frame_buffers import FrameBuffers, pack, pack_spare
from tritone.pipelines.qwen3_omni.frame_row import NOT_A_NUMBER, FrameRow
from tritone.ports import Array


class PlainProgram:
    """A frame in plain torch, for the first rows of the buffers."""

    def __init__(
        self, buffers: FrameBuffers, decoder: Decoder, predictor: CodePredictor, codec: Codec
    ) -> None:
        """decoder: with a cleared cache of one slot more than sessions use."""
        self._buffers, self._decoder, self._predictor, self._codec = buffers, decoder, predictor, codec
        first = FIRST_CODEBOOK + 1
        self._codebooks = range(first, first + predictor.num_residuals)
        self._codebook_ids = torch.arange(first, self._codebooks.stop, device=decoder.device)

    @torch.inference_mode()
    def __call__(self, rows: int) -> None:
        buffers, column = self._buffers, partial(self._buffers.column, rows=rows)
        slots = column("slot").long()
        begins = column("begins").bool().unsqueeze(-1)
        inputs = buffers.text[:rows] + buffers.spoken[slots].masked_fill(begins, 0.0)
        places = column("place").long()
        positions = column("position")
        if not self._decoder.rotary.is_plain:
            positions = positions.expand(3, -1)
        hidden = self._decoder.step(inputs, slots, places.unsqueeze(1), places + 1, positions)
        logits = self._decoder.logits(hidden).float()
        wrong = logits.isnan().any(-1)
        firsts = self._draw_first(logits, slots, rows)
        buffers.seen[slots, firsts] = torch.ones_like(firsts, dtype=torch.bool)
        residual = self._codec.residual
        settings = DrawSettings(
            temperature=column("residual_temperature"),
            top_k=torch.full_like(slots, residual.top_k or self._predictor.vocab_size),
            top_p=torch.full_like(column("position"), residual.top_p),
            log_min_p=torch.full_like(column("position"), float("-inf")),
        )
        seeds, positions = buffers.seeds(rows), column("draws").long() + 1
        noise = gumbel_of_frame(self._predictor.vocab_size, seeds, positions, self._codebook_ids)

        def draw_residual(scores: Tensor, codebook: int) -> Tensor:
            wrong.logical_or_(scores.isnan().any(-1))
            return self._draw(scores, settings, noise[:, codebook - self._codebooks.start], codebook)

        embedded = self._decoder.embed(firsts)
        residuals, spoken = self._predictor(hidden, embedded, draw_residual, self._codebooks)
        buffers.spoken[slots] = spoken
        buffers.frames[:rows, 0] = firsts.masked_fill(wrong, NOT_A_NUMBER)
        buffers.frames[:rows, 1:] = residuals

    def _draw_first(self, logits: Tensor, slots: Tensor, rows: int) -> Tensor:
        """Code 0, int64 [rows], of logits float32 [rows, V]."""
        column = partial(self._buffers.column, rows=rows)
        logits = logits.masked_fill(self._codec.silenced, float("-inf"))
        logits = penalise(logits, self._buffers.seen[slots], column("penalty"))
        end = self._codec.end
        logits[:, end] = logits[:, end].masked_fill(column("bars_end").bool(), float("-inf"))
        noise = gumbel_of_all(
            logits.shape[-1], self._buffers.seeds(rows), column("draws").long(), FIRST_CODEBOOK
        )
        settings = DrawSettings(
            **{name: column(name) for name in ("temperature", "top_k", "top_p", "log_min_p")}
        )
        return self._draw(logits, settings, noise, FIRST_CODEBOOK)

    def _draw(self, logits: Tensor, settings: DrawSettings, noise: Tensor, codebook: int) -> Tensor:
        return draw(logits, settings, noise)


class GraphFrames(StepGraphs, Frames):
    """Launches a captured frame, which reads the rows to speak beside what the host packs."""

    def __init__(
        self,
        program: Program,
        buffers: FrameBuffers,
        codec: Codec,
        *,
        slots: int,
        overlaps: bool,
        one_bucket: bool = False,
    ) -> None:
        """Capture the program for every bucket. slots: of sessions; the buffers have one more.

        one_bucket: the largest alone, so that the kernels, and with them the rounding, are always the same.
        """
        most = len(buffers.packed)
        sizes = buckets(1, most)[-1 if one_bucket else 0 :]
        super().__init__(program, buffers.packed, buffers.frames, pack_spare(most, slots), sizes)
        self.overlaps = overlaps
        self._buffers, self._codec = buffers, codec
        self._vocab_size = buffers.seen.shape[1]

    def begin(self, slot: int) -> None:
        self._buffers.seen[slot] = False

    @torch.inference_mode()
    def launch(self, rows: Sequence[FrameRow]) -> Flight:
        count, buffers = len(rows), self._buffers
        pack(rows, self._codec, self._vocab_size, self._next_rows())
        torch.stack([row.text for row in rows], out=buffers.text[:count])
        staging = self._replay(count)
        staging.fetch(buffers.frames[:count])
        return _Flying(staging, count)


class _Flying(Flight):
    """Frames that the device is making."""

    def __init__(self, staging: Staging, count: int) -> None:
        self._staging, self._count = staging, count

    def frames(self) -> Array:
        frames: Array = self._staging.fetched(self._count).numpy().copy()
        return frames


def graph_frames(
    decoder: Decoder,
    predictor: CodePredictor,
    codec: Codec,
    *,
    slots: int,
    overlaps: bool,
    kernels: bool,
    one_bucket: bool,
) -> GraphFrames:
    """Frames of `slots` sessions through a decoder that has one slot more, and a cleared cache.

    kernels: not in plain torch, where there are kernels for what the decoder computes.
    """
    buffers = FrameBuffers.of(
        rows=buckets(1, slots)[-1],
        slots=slots,
        hidden_size=decoder.config.hidden_size,
        vocab_size=decoder.config.vocab_size,
        codebooks=1 + predictor.num_residuals,
        device=decoder.device,
        dtype=decoder.dtype,
    )
    program = _program_class(decoder, predictor, kernels)(buffers, decoder, predictor, codec)
    return GraphFrames(program, buffers, codec, slots=slots, overlaps=overlaps, one_bucket=one_bucket)


def _program_class(decoder: Decoder, predictor: CodePredictor, kernels: bool) -> Any:
    if not kernels or not importlib.util.find_spec("triton"):
        return PlainProgram
    from tritone.kernels.layers import can_run
    from tritone.pipelines.qwen3_omni.frame_kernels import KernelProgram

    can = can_run(decoder.config) and can_run(predictor.decoder.config)
    return KernelProgram if can else PlainProgram
