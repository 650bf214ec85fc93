"""Sound at the borders of a pipeline: recordings in, samples and files out.

Inside, sound is a one-dimensional float32 array in [-1, 1] and its rate in Hz. Functions that read what a
caller sent raise InvalidRequest naming the field, before anything large is allocated.
"""

from __future__ import annotations

import base64
import contextlib
import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tritone.errors import InvalidRequest, Unsupported
from tritone.media import Check, unwrapped, wanted

if TYPE_CHECKING:
    import soundfile

Samples = npt.NDArray[np.float32]  # [n], mono, in [-1, 1]

ENCODINGS = ("wav", "flac", "opus")
OPUS_RATES_HZ = (8000, 12000, 16000, 24000, 48000)

_FULL_SCALE = 32768  # of 16-bit samples
_LOUDEST = 16.0  # raw samples above this are not in [-1, 1] but in another scale
_UNKNOWN_LENGTH = 0xFFFFFFFF  # in a WAV header: the data goes on to the end of the stream
_SET_OGG_PAGE_LATENCY_MS = 0x1302  # libsndfile's command number
_OGG_PAGE_MS = 100.0


@dataclass(frozen=True)
class AudioLimits:
    """What a recording may be."""

    max_seconds: float = 600.0
    min_rate_hz: int = 4000
    max_rate_hz: int = 192_000
    max_channels: int = 8


def decode_audio(
    data: bytes, limits: AudioLimits, name: str = "audio", check: Check = wanted
) -> tuple[Samples, int]:
    """The sound of an encoded file, its channels mixed, and its rate in Hz.

    data: a WAV, FLAC, MP3 or OGG file, or base64 text of one. name: the field in errors.
    """
    if not data:
        raise InvalidRequest(f"{name} is empty", "send a recording")
    with _opened(unwrapped(data), name) as file:
        rate_hz, channels = int(file.samplerate), int(file.channels)
        _check_rate(name, "has a sample rate of", rate_hz, limits)
        if channels > limits.max_channels:
            raise InvalidRequest(f"{name} has {channels} channels", f"send at most {limits.max_channels}")
        if _is_known(file.frames):
            _check_length(name, file.frames, rate_hz, limits)
        samples = _mixed(file, name, rate_hz, limits, check)
    if not len(samples):
        raise InvalidRequest(f"{name} holds no samples", "send a recording")
    _check_finite(name, samples)
    return samples, rate_hz


def check_samples(samples: Any, rate_hz: Any, limits: AudioLimits) -> tuple[Samples, int]:
    """Raw input (`audio_input`, `audio_input_rate`) as plain values."""
    if isinstance(rate_hz, bool) or not isinstance(rate_hz, int | np.integer):
        raise InvalidRequest(f"audio_input_rate is {rate_hz!r}", "send the sample rate in Hz, a whole number")
    _check_rate("audio_input_rate", "is", int(rate_hz), limits)
    array = np.asarray(samples)
    if array.ndim != 1 or array.dtype.kind != "f":
        raise InvalidRequest(
            f"audio_input is {array.dtype} of shape {list(array.shape)}", "send mono samples, float32 [n]"
        )
    if not len(array):
        raise InvalidRequest("audio_input is empty", "send samples")
    _check_length("audio_input", len(array), int(rate_hz), limits)
    _check_finite("audio_input", array)
    loudest = float(np.abs(array).max())
    if loudest > _LOUDEST:
        raise InvalidRequest(f"audio_input has samples of up to {loudest:g}", "scale them to [-1, 1]")
    return array.astype(np.float32, copy=False), int(rate_hz)


def resample(samples: Samples, from_hz: int, to_hz: int) -> Samples:
    if from_hz == to_hz:
        return samples
    import soxr

    resampled: Samples = soxr.resample(samples, from_hz, to_hz)
    return resampled


def to_s16(samples: Samples) -> npt.NDArray[np.int16]:
    """Each sample to the nearest of 16 bits, clipped; what was read from 16 bits comes back unchanged."""
    scaled: Samples = np.rint(np.asarray(samples) * np.float32(_FULL_SCALE))
    return scaled.clip(-_FULL_SCALE, _FULL_SCALE - 1).astype(np.int16)


def base64_s16(samples: Samples) -> bytes:
    """Little-endian 16-bit samples as base64 text, complete in itself."""
    return base64.b64encode(to_s16(samples).astype("<i2").tobytes())


def encode_audio(samples: Samples, sample_rate_hz: int, encoding: str) -> bytes:
    """All of `samples` as one file of a known length."""
    encoder = AudioEncoder(encoding, sample_rate_hz, num_samples=len(samples))
    return encoder.push(samples) + encoder.finish()


class AudioEncoder:
    """A file written while its sound is made: what `push` and `finish` return concatenates to one valid file.

    Its header must leave before the length is known. WAV then says the largest one and FLAC says none;
    players read both to the end. Opus may keep the last 0.1 s until more comes.
    """

    def __init__(self, encoding: str, sample_rate_hz: int, num_samples: int | None = None) -> None:
        """num_samples: of the whole file, where that is known; then its header says so."""
        if encoding not in ENCODINGS:
            raise InvalidRequest(f"audio_format is '{encoding}'", f"use one of {', '.join(ENCODINGS)}")
        if encoding == "opus" and sample_rate_hz not in OPUS_RATES_HZ:
            raise Unsupported(f"opus cannot carry {sample_rate_hz} Hz", "ask for another audio_format")
        self._sink = _Sink(holds_back=num_samples is not None)
        self._file: soundfile.SoundFile | None = None
        if encoding == "wav":
            self._sink.write(_wav_header(sample_rate_hz, num_samples))
        else:
            self._file = _new_file(self._sink, encoding, sample_rate_hz)

    def push(self, samples: Samples) -> bytes:
        """The part of the file that `samples` completes, possibly nothing."""
        if self._file is None:
            self._sink.write(to_s16(samples).astype("<i2").tobytes())
        else:
            self._file.write(to_s16(samples))
        return self._sink.drain()

    def finish(self) -> bytes:
        """The rest of the file."""
        if self._file is not None:
            self._file.close()
        self._sink.holds_back = False
        return self._sink.drain()


class _Sink:
    """A file in memory whose front has already left: writing there again has no effect."""

    def __init__(self, holds_back: bool) -> None:
        self.holds_back = holds_back  # nothing leaves yet, so that a header can still be completed
        self._held = bytearray()
        self._gone_bytes = 0
        self._position = 0

    def write(self, data: bytes) -> int:
        fresh = data[max(0, self._gone_bytes - self._position) :]
        begin = max(0, self._position - self._gone_bytes)
        self._held[begin : begin + len(fresh)] = fresh
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        end = self._gone_bytes + len(self._held)
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: end}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def drain(self) -> bytes:
        if self.holds_back:
            return b""
        data = bytes(self._held)
        self._held.clear()
        self._gone_bytes += len(data)
        return data


def _new_file(sink: _Sink, encoding: str, sample_rate_hz: int) -> soundfile.SoundFile:
    import soundfile

    kind, subtype = {"flac": ("FLAC", "PCM_16"), "opus": ("OGG", "OPUS")}[encoding]
    file = soundfile.SoundFile(sink, "w", sample_rate_hz, channels=1, format=kind, subtype=subtype)
    if encoding == "opus":
        # No public name in soundfile. Without it a page is a second long, and so is the wait for sound.
        with contextlib.suppress(AttributeError):
            latency = soundfile._ffi.new("double *", _OGG_PAGE_MS)
            size = soundfile._ffi.sizeof("double")
            soundfile._snd.sf_command(file._file, _SET_OGG_PAGE_LATENCY_MS, latency, size)
    return file


def _wav_header(sample_rate_hz: int, num_samples: int | None) -> bytes:
    """RIFF header of 16-bit mono PCM."""
    data_bytes = _UNKNOWN_LENGTH if num_samples is None else 2 * num_samples
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate_hz, 2 * sample_rate_hz, 2, 16)
    riff_bytes = min(_UNKNOWN_LENGTH, 4 + len(form) + 8 + data_bytes)
    head, data = struct.pack("<4sI4s", b"RIFF", riff_bytes, b"WAVE"), struct.pack("<4sI", b"data", data_bytes)
    return head + form + data


def _opened(data: bytes, name: str) -> soundfile.SoundFile:
    import soundfile

    class _FrontToBack(soundfile.SoundFile):  # type: ignore[misc]
        """Never seeks: a streamed FLAC has no length to seek by."""

        def seekable(self) -> bool:
            return False

    try:
        return _FrontToBack(io.BytesIO(data))
    except (soundfile.SoundFileError, TypeError):
        raise InvalidRequest(
            f"{name} is not a recording that can be read ({len(data)} bytes)",
            "send a WAV, FLAC, MP3 or OGG file, as bytes or as base64 text",
        ) from None


def _mixed(file: soundfile.SoundFile, name: str, rate_hz: int, limits: AudioLimits, check: Check) -> Samples:
    """Everything in `file`, mono; refused as soon as it is longer than its header said it may be."""
    parts: list[Samples] = []
    num_samples = 0
    for block in _blocks(file, name, rate_hz):
        check()
        num_samples += len(block)
        _check_length(name, num_samples, rate_hz, limits)
        parts.append(block[:, 0] if block.shape[1] == 1 else block.mean(axis=1))
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _blocks(file: soundfile.SoundFile, name: str, block_samples: int) -> Iterator[Samples]:
    import soundfile

    while True:
        try:
            block = file.read(block_samples, dtype="float32", always_2d=True)
        except soundfile.SoundFileError as fault:
            reason = str(fault).rstrip(".")
            raise InvalidRequest(f"{name} is damaged ({reason})", "send an undamaged recording") from None
        if not len(block):
            return
        yield block


def _is_known(num_frames: int) -> bool:
    return num_frames < 1 << 62


def _check_rate(name: str, verb: str, rate_hz: int, limits: AudioLimits) -> None:
    if not limits.min_rate_hz <= rate_hz <= limits.max_rate_hz:
        raise InvalidRequest(
            f"{name} {verb} {rate_hz} Hz", f"send sound at {limits.min_rate_hz} to {limits.max_rate_hz} Hz"
        )


def _check_length(name: str, num_samples: int, rate_hz: int, limits: AudioLimits) -> None:
    seconds = num_samples / rate_hz
    if seconds > limits.max_seconds:
        raise InvalidRequest(f"{name} lasts {seconds:.1f} s", f"send at most {limits.max_seconds:g} s")


def _check_finite(name: str, samples: npt.NDArray[Any]) -> None:
    if not np.isfinite(samples).all():
        raise InvalidRequest(f"{name} holds NaN or infinite samples", "send finite samples in [-1, 1]")
