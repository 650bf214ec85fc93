"""Speech recognition with a Whisper checkpoint of CTranslate2.

    recording ─► mono 16 kHz ─► speech only ─► windows of up to 30 s ─► text

One recording at a time, oldest first. A step is one segment of it (a few seconds of speech), so that an abort
takes effect soon even in a long recording.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from tritone.audio import AudioLimits, Samples, check_samples, decode_audio, resample
from tritone.engines.base import QUEUED, Delta, Engine, Placement, Value, Values
from tritone.errors import ConfigError, InvalidRequest, Unavailable

LISTEN = "listen"  # phase of a session, for each recording

_FILES = ("model.bin", "config.json", "tokenizer.json")


@dataclass(frozen=True)
class WhisperOptions:
    beam_size: Annotated[int, Meta(ge=1, le=10)] = 1  # transcripts that are followed; 1: greedy
    language: str | None = None  # left out: found out; a checkpoint of one language needs none
    compute_type: str = "int8"  # of CTranslate2: int8, float16, float32 …
    max_waiting: Annotated[int, Meta(ge=1)] = 16  # requests held, the running one included; more: UNAVAILABLE


@dataclass
class _Session:
    name: str
    recordings: deque[Samples]  # mono at the model's rate; the first one is being heard
    audio_seconds: float
    segments: Iterator[Any] | None = None  # of the first recording, as they are recognised
    words: list[str] = field(default_factory=list)  # of its segments so far
    heard: bool = False  # any recording so far held speech


class WhisperEngine(Engine):
    """inputs: `audio`, the bytes of one encoded file or a list of several; or `audio_input` float32 [n] with
    `audio_input_rate` int, Hz. settings: `max_audio_s`, of all recordings of the request together.
    outputs: `transcript` str, one delta a recording, in order.
    """

    Options = WhisperOptions

    def __init__(self, placement: Placement, options: WhisperOptions) -> None:
        for name in _FILES:
            if not (placement.checkpoint / name).is_file():
                # Without its tokenizer the library would look for one on the network.
                raise ConfigError(f"'{placement.checkpoint}' has no {name}", "build the checkpoint again")
        os.environ["HF_HUB_OFFLINE"] = "1"
        from faster_whisper import WhisperModel

        device, _, index = placement.device.partition(":")
        try:
            self._model = WhisperModel(
                str(placement.checkpoint),
                device=device,
                device_index=int(index or 0),
                compute_type=options.compute_type,
                cpu_threads=placement.threads,
                local_files_only=True,
            )
        except (RuntimeError, ValueError) as fault:
            raise ConfigError(
                f"whisper cannot start from '{placement.checkpoint}' on '{placement.device}': {fault}",
                "see its options device and compute_type",
            ) from None
        self._options = options
        self._rate_hz: int = self._model.feature_extractor.sampling_rate
        self._waiting: deque[_Session] = deque()
        self._audio_seconds = 0.0
        self._warm_up()

    def add_request(self, session: str, inputs: Values, settings: Mapping[str, Any]) -> None:
        if len(self._waiting) >= self._options.max_waiting:
            raise Unavailable(f"{len(self._waiting)} recordings wait to be heard", "try again shortly")
        limits = AudioLimits(max_seconds=settings.get("max_audio_s", AudioLimits.max_seconds))
        sounds = self._sounds(inputs, limits)
        recordings = [resample(samples, rate_hz, self._rate_hz) for samples, rate_hz in sounds]
        seconds = sum(map(len, recordings)) / self._rate_hz
        self._waiting.append(_Session(session, deque(recordings), seconds))
        self.note_phase(session, QUEUED)

    def push(self, session: str, inputs: Values, last: bool) -> None:
        """Recordings come whole with the request: nothing can follow."""

    def step(self) -> list[Delta]:
        if not self._waiting:
            return []
        session = self._waiting[0]
        if session.segments is None:
            self.note_phase(session.name, LISTEN)
            session.segments = self._listen(session.recordings[0])
        segment = next(session.segments, None)
        if segment is not None:
            session.words.append(segment.text.strip())
            return []
        return [self._end_recording(session)]

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def abort(self, session: str) -> None:
        self._waiting = deque(waiting for waiting in self._waiting if waiting.name != session)

    def stats(self) -> dict[str, int | float]:
        return {"active": len(self._waiting), "audio_seconds": self._audio_seconds}

    def _sounds(self, inputs: Values, limits: AudioLimits) -> list[tuple[Samples, int]]:
        """Every recording of a request with its rate in Hz, checked, within the limit together."""
        sounds: list[tuple[Samples, int]] = []
        left_s = limits.max_seconds
        files = _files(inputs.get("audio"))
        for number, data in enumerate(files):
            name = "audio" if len(files) == 1 else f"audio[{number}]"
            samples, rate_hz = decode_audio(data, limits, name)
            left_s -= len(samples) / rate_hz
            if left_s < 0:
                raise InvalidRequest(
                    f"audio lasts more than {limits.max_seconds:g} s in all", "send shorter recordings"
                )
            sounds.append((samples, rate_hz))
        raw, rate = inputs.get("audio_input"), inputs.get("audio_input_rate")
        if raw is not None:
            sounds.append(check_samples(raw, rate, limits))
        if not sounds:
            raise InvalidRequest("audio is missing", "send audio, or audio_input with audio_input_rate")
        return sounds

    def _listen(self, samples: Samples) -> Iterator[Any]:
        """Segments of `samples`, recognised one by one as they are asked for."""
        segments, _ = self._model.transcribe(
            samples,
            language=self._options.language,
            beam_size=self._options.beam_size,
            temperature=0.0,  # the same recording gives the same words
            condition_on_previous_text=False,  # a slip in one window would run through all later ones
            vad_filter=True,  # without it, silence is heard as words
        )
        return iter(segments)

    def _end_recording(self, session: _Session) -> Delta:
        transcript = " ".join(filter(None, session.words))
        session.heard = session.heard or bool(transcript)
        session.recordings.popleft()
        session.segments, session.words = None, []
        if session.recordings:
            return Delta(session.name, {"transcript": transcript})
        self._waiting.popleft()
        self._audio_seconds += session.audio_seconds
        if not session.heard:
            error = InvalidRequest("no speech was recognised in the audio", "speak louder, or send text")
            return Delta(session.name, error=error)
        usage = {"audio_seconds": round(session.audio_seconds, 3)}
        return Delta(session.name, {"transcript": transcript}, "stop", usage)

    def _warm_up(self) -> None:
        """The library loads its speech detector on first use: let no caller wait for it."""
        noise = np.random.default_rng(0).normal(0, 0.05, self._rate_hz).astype(np.float32)
        list(self._listen(noise))


def _files(audio: Value | Sequence[bytes] | None) -> list[bytes]:
    """`audio` as a list of encoded files: one, an array of objects, or a list."""
    if audio is None:
        return []
    files = [audio] if isinstance(audio, bytes | bytearray | str) else list(audio)  # type: ignore[arg-type]
    return [file.encode() if isinstance(file, str) else bytes(file) for file in files]
