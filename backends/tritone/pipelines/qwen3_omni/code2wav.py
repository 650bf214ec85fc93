"""Qwen3-Omni's Code2Wav: codec frames of many streams in, samples out, batched by Triton.

    frames [F, codebooks] ─► in range? ─► Waves, with the state in the stream's slot ─► pcm [n]

All chunks of a stream together give the samples of the reference's whole decode, however the stream was cut:
`samples_per_frame` a frame, less the codec's `missing_samples`, by which the first chunk is shorter.

Reference: `Qwen3OmniMoeCode2Wav` in `transformers`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from tritone.checkpoint import read_config
from tritone.engines.base import BatchEngine, Chunk, Placement, Values, in_turns
from tritone.engines.memory import Ground, LoadFormat, Term
from tritone.engines.torch_setup import prepared_torch
from tritone.errors import ConfigError, InvalidRequest, TritoneError, Unavailable, not_numbers
from tritone.networks.waveform_config import WaveformConfig
from tritone.pipelines.qwen3_omni.code2wav_memory import code2wav_terms
from tritone.pipelines.qwen3_omni.wave_steps import Buckets
from tritone.pipelines.qwen3_omni.waves import EagerWaves, Share, Waves
from tritone.ports import Array

_WARM_UP_FRAMES = (4, 4)  # a stream's first pass and a later one take different ways


@dataclass(frozen=True)
class Code2WavOptions:
    load_format: LoadFormat = "auto"  # dummy: random weights in the shapes of config.json, to measure with
    max_streams: Annotated[int, Meta(ge=1)] = 64  # more are refused UNAVAILABLE
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of weights, states and arithmetic
    cuda_graphs: bool = True  # on a GPU: each pass one launch, of chunks padded to one of a few sizes
    kernels: bool = True  # of those, convolutions in kernels of our own; else in plain torch


class WaveEngine(BatchEngine):
    """Streams in slots, whatever computes.

    inputs: `frames` int32 [F, num_codebooks], each code in [0, codebook_size); absent or empty: no frames.
    outputs: `pcm` float32 [n], mono, in [-1, 1].
    settings: none.
    """

    def __init__(self, placement: Placement, options: Any) -> None:
        """options: with `max_streams`. ConfigError when the folder has no codec, or one that does not fit."""
        self._waves = self._make_waves(placement, options)
        self._config = self._waves.config
        self._max_streams = options.max_streams
        self._slots: dict[str, int] = {}  # by session
        self._free = list(reversed(range(options.max_streams)))
        self._codec_frames = 0
        self._warm_up()

    @classmethod
    @abstractmethod
    def _make_waves(cls, placement: Placement, options: Any) -> Waves:
        """What computes; ConfigError when it cannot."""

    @property
    def samples_per_frame(self) -> int:
        return self._config.samples_per_frame

    @property
    def missing_samples(self) -> int:
        """By how much the samples of a stream are fewer than samples_per_frame times its frames."""
        return self._config.missing_samples

    @property
    def num_codebooks(self) -> int:
        return self._config.num_quantizers

    @property
    def codebook_size(self) -> int:
        return self._config.codebook_size

    def run(self, chunks: Sequence[Chunk]) -> list[Values | TritoneError]:
        return in_turns(chunks, self._take_turn)

    def abort(self, session: str) -> None:
        slot = self._slots.pop(session, None)
        if slot is not None:
            self._waves.end(slot)
            self._free.append(slot)

    def stats(self) -> dict[str, int | float]:
        active = len(self._slots)
        return {
            "active": active,
            "codec_frames": self._codec_frames,
            "state_bytes": active * self._waves.state_bytes,
        }

    def _take_turn(self, turn: list[tuple[int, Chunk]]) -> dict[int, Values | TritoneError]:
        """Answers by number to chunks of different streams."""
        answers: dict[int, Values | TritoneError] = {}
        shares: dict[int, Share] = {}
        for number, chunk in turn:
            try:
                frames = self._frames(chunk.inputs.get("frames"))
                shares[number] = Share(self._slot(chunk), frames)
            except TritoneError as error:
                self.abort(chunk.session)
                answers[number] = error
        try:
            samples = self._decode(list(shares.values()))
        except BaseException:
            for number, chunk in turn:
                if number in shares:
                    self.abort(chunk.session)  # its state is between two frames
            raise
        for (number, share), pcm in zip(shares.items(), samples, strict=True):
            if np.isfinite(pcm).all():
                answers[number] = {"pcm": pcm}
            else:
                answers[number] = not_numbers(f"code2wav's samples for {len(share.frames)} frames")
        for number, chunk in turn:
            if chunk.end or isinstance(answers[number], TritoneError):
                self.abort(chunk.session)
        return answers

    def _slot(self, chunk: Chunk) -> int:
        if chunk.start:
            self.abort(chunk.session)
            if not self._free:
                raise Unavailable(
                    f"code2wav holds {self._max_streams} streams, its limit", "try again shortly"
                )
            self._slots[chunk.session] = slot = self._free.pop()
            self._waves.begin(slot)
        elif chunk.session not in self._slots:
            raise InvalidRequest(
                f"stream '{chunk.session}' is not open", "send its first chunk with the start flag"
            )
        return self._slots[chunk.session]

    def _frames(self, frames: Any) -> Array:
        """Codes int32 [F, num_codebooks]; InvalidRequest when they are none."""
        array = np.asarray([] if frames is None else frames)
        if not array.size:
            return np.zeros((0, self.num_codebooks), np.int32)
        if array.dtype.kind not in "iu" or array.ndim != 2 or array.shape[1] != self.num_codebooks:
            raise InvalidRequest(
                f"frames is {array.dtype} of shape {list(array.shape)}",
                f"send int32 [F, {self.num_codebooks}]",
            )
        outside = (array < 0) | (array >= self.codebook_size)
        if outside.any():
            frame, codebook = np.argwhere(outside)[0]
            raise InvalidRequest(
                f"frames has the code {array[frame, codebook]} in frame {frame}, codebook {codebook}",
                f"send codes from 0 to {self.codebook_size - 1}",
            )
        return array.astype(np.int32)

    def _decode(self, shares: Sequence[Share]) -> list[Array]:
        """Advance every stream by its frames; its new samples, float32 [n]."""
        samples = self._waves.decode(shares)
        self._codec_frames += sum(len(share.frames) for share in shares)
        return samples

    def _warm_up(self) -> None:
        """The first passes of a process allocate and choose kernels: let no listener wait for it."""
        self._waves.begin(0)
        for num_frames in _WARM_UP_FRAMES:
            self._decode([Share(0, np.zeros((num_frames, self.num_codebooks), np.int32))])
        self._waves.end(0)
        self._codec_frames = 0


class Code2Wav(WaveEngine):
    """In torch, the whole network."""

    Options = Code2WavOptions

    @classmethod
    def memory(cls, ground: Ground, options: Code2WavOptions) -> list[Term]:
        return code2wav_terms(ground, options)

    @classmethod
    def _make_waves(cls, placement: Placement, options: Code2WavOptions) -> Waves:
        torch = prepared_torch(placement)

        from tritone.networks.waveform_decoder import WaveformDecoder
        from tritone.pipelines.qwen3_omni.checkpoint_weights import open_weights

        dtype = getattr(torch, options.dtype)
        decoder = WaveformDecoder(
            codec_config(placement.checkpoint),
            open_weights(placement, options.load_format, dtype),
            prefix="code2wav.",
            device=placement.device,
            dtype=dtype,
        )
        if not cls._has_graphs(placement, options):
            return EagerWaves(decoder)
        from tritone.pipelines.qwen3_omni.wave_graph import GraphWaves

        buckets = step_buckets(placement, options.max_streams)
        return GraphWaves(decoder, buckets, options.max_streams, options.kernels)

    @staticmethod
    def _has_graphs(placement: Placement, options: Code2WavOptions) -> bool:
        return options.cuda_graphs and placement.device != "cpu"


def codec_config(folder: Path) -> WaveformConfig:
    """The codec of a checkpoint; ConfigError when it has none, or one that is not computed here."""
    config = read_config(folder).get("code2wav_config")
    if not isinstance(config, dict):
        raise ConfigError(
            f"config.json in '{folder}' has no code2wav_config", "name the folder of a model that speaks"
        )
    return WaveformConfig.from_hf(config)


def step_buckets(placement: Placement, max_streams: int) -> Buckets:
    """The shapes of passes that the stage's batches and chunks are worth."""
    return Buckets.of(min(max_streams, placement.max_batch_size), placement.chunk_frames)
