"""From Triton responses to events, and the promises that must hold between responses."""

from __future__ import annotations

import base64
import binascii
import json
import time
from typing import Any

import numpy as np

from tritone_client.errors import BrokenStream
from tritone_client.events import (
    AudioChunk,
    Done,
    EncodedAudio,
    Event,
    Media,
    Progress,
    Samples,
    TextDelta,
    Timings,
)
from tritone_client.wav import Continuity


class ResponseReader:
    """Reads the responses of one request, in order; made when the request is sent.

    It checks that no response is lost (`index` counts from 0) and that the audio has no gap, and measures
    what the caller waits for.
    """

    def __init__(self, audio_format: str | None = None):
        self._audio_format = audio_format or "s16"
        self._audio = Continuity()
        self._next_index = 0
        self._sent_s = time.perf_counter()
        self._ttft_s: float | None = None
        self._ttfp_s: float | None = None

    def read(self, result: Any) -> list[Event]:
        """The events of one response (`tritonclient.grpc.InferResult`); `Done`, if there, comes last.

        Raises:
            BrokenStream: a response or samples are missing, or a tensor is not what the contract says.
        """
        kind = _text(result, "event")
        if not kind:
            raise BrokenStream("a response has no `event`; see whether the model is a Tritone pipeline")
        index = int(_scalar(result, "index"))
        if index != self._next_index:
            raise BrokenStream(f"response {index} came where {self._next_index} was due; send it again")
        self._next_index += 1

        events: list[Event] = []
        if text := _text(result, "text_output"):
            self._ttft_s = self._elapsed_s() if self._ttft_s is None else self._ttft_s
            events.append(TextDelta(text, index))
        if (audio := self._read_audio(result, index)) is not None:
            self._ttfp_s = self._elapsed_s() if self._ttfp_s is None else self._ttfp_s
            events.append(audio)
        events += _read_media(result, index)
        if kind == "progress":
            events.append(Progress(_json_object(result, "info"), index))
        if kind == "done":
            events.append(self._read_done(result, index))
        return events

    def _read_audio(self, result: Any, index: int) -> AudioChunk | EncodedAudio | None:
        samples: Samples | None = None
        if (encoded := _bytes(result, "audio_encoded")) and self._audio_format == "s16_base64":
            samples = _base64_samples(encoded)
        elif encoded:
            return EncodedAudio(encoded, self._audio_format, index)
        else:
            samples = _tensor(result, "audio_output")
            if samples is None or not samples.size:
                samples = _tensor(result, "audio_f32")
        if samples is None or not samples.size:
            return None
        rate_hz, offset = int(_scalar(result, "sample_rate")), int(_scalar(result, "sample_offset"))
        chunk = AudioChunk(samples, rate_hz, offset, index)
        self._audio.check(chunk)
        return chunk

    def _read_done(self, result: Any, index: int) -> Done:
        info = _json_object(result, "info")
        usage = info.get("usage", {})
        return Done(
            finish_reasons=_json_object(result, "finish_reason"),
            usage=usage,
            stage_timings=info.get("timings", {}).get("stages", {}),
            seed=info.get("seed"),
            info=info,
            # An encoded file does not show its length, so the server has to say it.
            measured=self._timings(self._audio.audio_s or usage.get("audio_s", 0.0)),
            index=index,
        )

    def _timings(self, audio_s: float) -> Timings:
        e2el_s = self._elapsed_s()
        return Timings(self._ttft_s, self._ttfp_s, e2el_s, audio_s, e2el_s / audio_s if audio_s else None)

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._sent_s


def _read_media(result: Any, index: int) -> list[Event]:
    events: list[Event] = []
    frames, images = _tensor(result, "image_output"), _files(result, "image_encoded")
    if (frames is not None and frames.size) or images:
        events.append(Media("image", frames, images, index))
    if videos := _files(result, "video_encoded"):
        events.append(Media("video", None, videos, index))
    return events


def _tensor(result: Any, name: str) -> Any:
    """The output as an array, or None where this response does not carry it."""
    return result.as_numpy(name)


def _scalar(result: Any, name: str) -> Any:
    tensor = _tensor(result, name)
    if tensor is None or tensor.size != 1:
        shape = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
        raise BrokenStream(f"output `{name}` is {shape}; the contract says one value")
    return tensor.reshape(())[()]


def _files(result: Any, name: str) -> tuple[bytes, ...]:
    tensor = _tensor(result, name)
    return () if tensor is None else tuple(value for value in tensor.reshape(-1) if value)


def _bytes(result: Any, name: str) -> bytes:
    return b"".join(_files(result, name))


def _text(result: Any, name: str) -> str:
    try:
        return _bytes(result, name).decode()
    except UnicodeDecodeError:
        raise BrokenStream(f"output `{name}` is not UTF-8; the contract says whole characters") from None


def _json_object(result: Any, name: str) -> dict[str, Any]:
    """The output's JSON object; empty where the response has none."""
    text = _text(result, name)
    try:
        value = json.loads(text) if text else {}
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise BrokenStream(f"output `{name}` is not a JSON object: {text[:80]!r}")
    return value


def _base64_samples(encoded: bytes) -> Samples:
    try:
        return np.frombuffer(base64.b64decode(encoded, validate=True), dtype="<i2")
    except (binascii.Error, ValueError):
        raise BrokenStream("output `audio_encoded` is not base64 of 16-bit samples") from None
