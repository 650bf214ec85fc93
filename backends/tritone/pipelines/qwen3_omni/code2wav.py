"""Qwen3-Omni's Code2Wav: codec frames of many streams in, samples out, batched by Triton.

    frames [F, codebooks] ─► in range? ─► WaveformDecoder, with the stream's state ─► pcm [n]

All chunks of a stream together give the samples of the reference's whole decode, however the stream was cut:
`samples_per_frame` a frame, less the codec's `missing_samples`, by which the first chunk is shorter.

Reference: `Qwen3OmniMoeCode2Wav` in `transformers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from tritone.checkpoint import read_config
from tritone.engines.base import BatchEngine, Chunk, Placement, Values, in_turns
from tritone.engines.memory import Ground, LoadFormat, Term
from tritone.engines.torch_setup import prepared_torch
from tritone.errors import ConfigError, InvalidRequest, TritoneError, Unavailable
from tritone.pipelines.qwen3_omni.memory import code2wav_terms
from tritone.ports import Array

if TYPE_CHECKING:
    from tritone.networks.waveform_decoder import WaveformState

_WARM_UP_FRAMES = (4, 4)  # a stream's first pass and a later one take different ways


@dataclass(frozen=True)
class Code2WavOptions:
    load_format: LoadFormat = "auto"  # dummy: random weights in the shapes of config.json, to measure with
    max_streams: Annotated[int, Meta(ge=1)] = 64  # more are refused UNAVAILABLE
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of weights, states and arithmetic


class Code2Wav(BatchEngine):
    """inputs: `frames` int32 [F, num_codebooks], each code in [0, codebook_size); absent or empty: no frames.
    outputs: `pcm` float32 [n], mono, in [-1, 1].
    settings: none.
    """

    Options = Code2WavOptions

    def __init__(self, placement: Placement, options: Code2WavOptions) -> None:
        """ConfigError when the folder's config.json has no code2wav_config or its weights do not fit it."""
        torch = prepared_torch(placement)

        from tritone.networks.waveform_decoder import Piece, WaveformConfig, WaveformDecoder
        from tritone.pipelines.qwen3_omni.checkpoint_weights import open_weights

        self._torch, self._piece = torch, Piece
        folder = placement.checkpoint
        config = read_config(folder).get("code2wav_config")
        if not isinstance(config, dict):
            raise ConfigError(
                f"config.json in '{folder}' has no code2wav_config", "name the folder of a model that speaks"
            )
        dtype = getattr(torch, options.dtype)
        self._decoder = WaveformDecoder(
            WaveformConfig.from_hf(config),
            open_weights(placement, options.load_format, dtype),
            prefix="code2wav.",
            device=placement.device,
            dtype=dtype,
        )
        self._max_streams = options.max_streams
        self._streams: dict[str, WaveformState] = {}
        self._codec_frames = 0
        self._warm_up()

    @classmethod
    def memory(cls, ground: Ground, options: Code2WavOptions) -> list[Term]:
        return code2wav_terms(ground, options)

    @property
    def samples_per_frame(self) -> int:
        return self._decoder.samples_per_frame

    @property
    def missing_samples(self) -> int:
        """By how much the samples of a stream are fewer than samples_per_frame times its frames."""
        return self._decoder.missing_samples

    @property
    def num_codebooks(self) -> int:
        return self._decoder.num_codebooks

    @property
    def codebook_size(self) -> int:
        return self._decoder.codebook_size

    def run(self, chunks: Sequence[Chunk]) -> list[Values | TritoneError]:
        return in_turns(chunks, self._take_turn)

    def abort(self, session: str) -> None:
        self._streams.pop(session, None)

    def stats(self) -> dict[str, int | float]:
        active = len(self._streams)
        return {
            "active": active,
            "codec_frames": self._codec_frames,
            "state_bytes": active * self._decoder.state_bytes,
        }

    def _take_turn(self, turn: list[tuple[int, Chunk]]) -> dict[int, Values | TritoneError]:
        """Answers by number to chunks of different streams."""
        answers: dict[int, Values | TritoneError] = {}
        shares: dict[int, tuple[Array, WaveformState]] = {}
        for number, chunk in turn:
            try:
                shares[number] = self._frames(chunk.inputs.get("frames")), self._state(chunk)
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
        for number, pcm in zip(shares, samples, strict=True):
            answers[number] = {"pcm": pcm}
        for _, chunk in turn:
            if chunk.end:
                self.abort(chunk.session)
        return answers

    def _state(self, chunk: Chunk) -> WaveformState:
        if chunk.start:
            self.abort(chunk.session)
            if len(self._streams) >= self._max_streams:
                raise Unavailable(
                    f"code2wav holds {self._max_streams} streams, its limit", "try again shortly"
                )
            self._streams[chunk.session] = self._decoder.new_state()
        elif chunk.session not in self._streams:
            raise InvalidRequest(
                f"stream '{chunk.session}' is not open", "send its first chunk with the start flag"
            )
        return self._streams[chunk.session]

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

    def _decode(self, shares: Sequence[tuple[Array, WaveformState]]) -> list[Array]:
        """Advance every stream by its frames; its new samples, float32 [n]."""
        if not shares:
            return []
        samples = self._decoder.forward(
            [self._piece(self._torch.from_numpy(frames), state) for frames, state in shares]
        )
        self._codec_frames += sum(len(frames) for frames, _ in shares)
        lengths = [len(mine) for mine in samples]
        # One transfer from the device, whatever the number of streams.
        joined = self._torch.cat(samples).float().cpu().numpy()
        return np.split(joined, np.cumsum(lengths)[:-1])

    def _warm_up(self) -> None:
        """The first passes of a process allocate and choose kernels: let no listener wait for it."""
        state = self._decoder.new_state()
        for num_frames in _WARM_UP_FRAMES:
            self._decode([(np.zeros((num_frames, self.num_codebooks), np.int32), state)])
        self._codec_frames = 0
