"""smoltalk's Code2Wav: frames of many streams in, samples out, batched by Triton.

    frames [F, 131] ─┬─► latent [F, 130] ─► SpectralDecoder ─► spectra ─┐
                     └─► f0 [F] ────────────────────────────────────────┴─► PulseSynthesis ─► pcm [n]

A stream's samples come about 30 frames behind its input and are complete at each `segment_end`: all chunks of
a segment together give `samples_per_frame` samples a frame, the same ones however the segment was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import Meta

from tritone.checkpoint import read_config
from tritone.engines.base import BatchEngine, Chunk, Placement, Values, in_turns
from tritone.engines.torch_setup import prepared_torch
from tritone.errors import ConfigError, InvalidRequest, TritoneError, Unavailable, not_numbers
from tritone.ports import Array

if TYPE_CHECKING:
    from torch import Tensor

    from tritone.networks.pulse_synthesis import SynthesisState
    from tritone.networks.spectral_decoder import DecoderState

_PASS_FRAMES = (
    1024  # of all streams together; longer chunks go through in several passes, which changes nothing
)
_SEEDS = 1 << 64


@dataclass(frozen=True)
class Code2WavOptions:
    max_streams: Annotated[int, Meta(ge=1)] = 64  # more are refused UNAVAILABLE


@dataclass
class _Stream:
    decoder: DecoderState
    synthesis: SynthesisState


@dataclass
class _Share:
    """One stream's part in a batch."""

    stream: _Stream
    frames: Array  # float32 [F, latent_channels + 1]
    segment_end: bool
    samples: list[Tensor] = field(default_factory=list)

    def ends_within(self, num_frames: int) -> bool:
        return self.segment_end and len(self.frames) <= num_frames


class Code2Wav(BatchEngine):
    """inputs: `frames` float32 [F, latent_channels + 1], the last column f0 in Hz; `segment_end` bool.
    outputs: `pcm` float32 [n], mono, in [-1, 1], at `sample_rate_hz`.
    settings: `seed`, of the noise in the voice.
    """

    Options = Code2WavOptions

    def __init__(self, placement: Placement, options: Code2WavOptions) -> None:
        torch = prepared_torch(placement)
        from safetensors.torch import load_file

        from tritone.networks.pulse_synthesis import Pitch, PulseSynthesis, SignalConfig
        from tritone.networks.spectral_decoder import Piece, SpectralConfig, SpectralDecoder

        self._torch, self._piece, self._pitch = torch, Piece, Pitch
        self._device = torch.device(placement.device)
        config = read_config(placement.checkpoint)
        try:
            self._decoder = SpectralDecoder(SpectralConfig.read(config)).eval()
            self._synthesis = PulseSynthesis(SignalConfig.read(config), self._device)
            self._decoder.load_state_dict(load_file(placement.checkpoint / "model.safetensors"))
        except (KeyError, ValueError, RuntimeError, OSError) as fault:
            reason = f"{type(fault).__name__}: {fault}".splitlines()[0]
            raise ConfigError(
                f"'{placement.checkpoint}' is no code2wav checkpoint ({reason})", "build the checkpoint again"
            ) from None
        self._decoder.to(self._device)
        behind, ahead = self._decoder.config.lookahead_frames, self._synthesis.config.lookahead_frames
        if behind < ahead:
            raise ConfigError(
                f"the decoder in '{placement.checkpoint}' looks {behind} frames ahead, needs {ahead}"
            )
        self._max_streams = options.max_streams
        self._streams: dict[str, _Stream] = {}
        self._counts = {"passes": 0, "codec_frames": 0}
        self._warm_up()

    @property
    def sample_rate_hz(self) -> int:
        return self._synthesis.config.sample_rate_hz

    @property
    def frame_rate_hz(self) -> float:
        return self._synthesis.config.frame_rate_hz

    @property
    def samples_per_frame(self) -> int:
        return self._synthesis.config.hop_samples

    @property
    def frame_width(self) -> int:
        """Columns of `frames`: the latent and f0."""
        return self._decoder.config.latent_channels + 1

    def run(self, chunks: Sequence[Chunk]) -> list[Values | TritoneError]:
        return in_turns(chunks, self._take_turn)

    def abort(self, session: str) -> None:
        self._streams.pop(session, None)

    def stats(self) -> dict[str, int | float]:
        return {"active": len(self._streams), **self._counts}

    def _take_turn(self, turn: list[tuple[int, Chunk]]) -> dict[int, Values | TritoneError]:
        """Answers by number to chunks of different streams."""
        answers: dict[int, Values | TritoneError] = {}
        shares: dict[int, _Share] = {}
        for number, chunk in turn:
            try:
                shares[number] = self._share(chunk)
            except TritoneError as error:
                self.abort(chunk.session)
                answers[number] = error
        try:
            self._decode(list(shares.values()))
        except BaseException:
            for number, chunk in turn:
                if number in shares:
                    self.abort(chunk.session)  # its state is between two frames
            raise
        for number, chunk in turn:
            if number in shares:
                pcm = self._joined(shares[number].samples)
                is_sound = np.isfinite(pcm).all()
                answers[number] = {"pcm": pcm} if is_sound else not_numbers("code2wav's samples")
                if chunk.end or not is_sound:
                    self.abort(chunk.session)
        return answers

    def _share(self, chunk: Chunk) -> _Share:
        frames = self._frames(chunk.inputs.get("frames"))
        if chunk.start:
            self._streams.pop(chunk.session, None)
            seed = _seed(chunk.settings.get("seed", 0))
            if len(self._streams) >= self._max_streams:
                raise Unavailable(
                    f"code2wav holds {self._max_streams} streams, its limit", "try again shortly"
                )
            self._streams[chunk.session] = self._new_stream(seed)
        elif chunk.session not in self._streams:
            raise InvalidRequest(
                f"stream '{chunk.session}' is not open", "send its first chunk with the start flag"
            )
        segment_end = bool(chunk.inputs.get("segment_end", False)) or chunk.end
        return _Share(self._streams[chunk.session], frames, segment_end)

    def _frames(self, frames: Any) -> Array:
        array = np.asarray([] if frames is None else frames, np.float32)
        if not array.size:
            return np.zeros((0, self.frame_width), np.float32)
        if array.ndim != 2 or array.shape[1] != self.frame_width:
            raise InvalidRequest(
                f"frames has the shape {list(array.shape)}", f"send float32 [F, {self.frame_width}]"
            )
        if not np.isfinite(array).all():
            raise InvalidRequest("frames holds NaN or infinite values", "send finite values")
        return array

    def _new_stream(self, seed: int) -> _Stream:
        return _Stream(self._decoder.new_state(), self._synthesis.new_state(seed))

    def _decode(self, shares: Sequence[_Share]) -> None:
        """Advance every stream by its frames and append to its samples."""
        step = max(1, _PASS_FRAMES // max(1, len(shares)))
        for begin in range(0, max((len(share.frames) for share in shares), default=0) or 1, step):
            live = [share for share in shares if len(share.frames) > begin or not begin]
            with self._torch.inference_mode():
                self._pass(live, begin, begin + step)

    def _pass(self, shares: Sequence[_Share], begin: int, end: int) -> None:
        if not shares:
            return
        lengths = [len(share.frames[begin:end]) for share in shares]
        joined = self._torch.from_numpy(np.concatenate([share.frames[begin:end] for share in shares]))
        parts = self._torch.split(joined.to(self._device), lengths)
        ends = [share.ends_within(end) for share in shares]
        spectra, counts = self._decoder(
            [
                self._piece(part[:, :-1], share.stream.decoder, last)
                for part, share, last in zip(parts, shares, ends, strict=True)
            ]
        )
        pitches = [
            self._pitch(part[:, -1], share.stream.synthesis, last)
            for part, share, last in zip(parts, shares, ends, strict=True)
        ]
        self._counts["passes"] += 1
        self._counts["codec_frames"] += sum(lengths)
        for share, samples in zip(shares, self._synthesis(pitches, spectra, counts), strict=True):
            share.samples.append(samples)

    def _joined(self, samples: list[Tensor]) -> Array:
        joined: Array = self._torch.cat(samples).clamp_(-1, 1).cpu().numpy()
        return joined

    def _warm_up(self) -> None:
        """The first pass of a process allocates and plans transforms: let no listener wait for it."""
        silence = np.zeros((2 * self._decoder.config.lookahead_frames, self.frame_width), np.float32)
        self._decode([_Share(self._new_stream(seed=0), silence, segment_end=True)])


def _seed(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < _SEEDS:
        raise InvalidRequest(f"seed is {value!r}", "give a whole number from 0 to 2^64 - 1")
    return int(value)
