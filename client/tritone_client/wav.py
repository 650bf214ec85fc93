"""Speech into WAV files, whole or while it arrives, and the check that no sample is missing."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tritone_client.errors import BrokenStream, InvalidRequest
from tritone_client.events import AudioChunk, Samples


class Continuity:
    """Watches the chunks of one answer: each must start where the last one ended, with its rate and dtype."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.sample_rate_hz: int | None = None
        self._dtype: np.dtype[Any] | None = None

    @property
    def audio_s(self) -> float:
        return self.num_samples / self.sample_rate_hz if self.sample_rate_hz else 0.0

    def check(self, chunk: AudioChunk) -> None:
        """Count a chunk in.

        Raises:
            BrokenStream: samples are missing or repeated before it, or its rate or dtype differs.
        """
        if chunk.sample_offset != self.num_samples:
            raise BrokenStream(
                f"an audio chunk starts at sample {chunk.sample_offset} where {self.num_samples} was due; "
                "the answer has a gap, send the request again"
            )
        if chunk.sample_rate_hz <= 0 or self.sample_rate_hz not in (None, chunk.sample_rate_hz):
            raise BrokenStream(f"the sample rate changed: {self.sample_rate_hz} to {chunk.sample_rate_hz} Hz")
        if self._dtype not in (None, chunk.samples.dtype):
            raise BrokenStream(f"the samples went from {self._dtype} to {chunk.samples.dtype}")
        self.num_samples += len(chunk.samples)
        self.sample_rate_hz = chunk.sample_rate_hz
        self._dtype = chunk.samples.dtype


class WavWriter:
    """Writes an answer's chunks to a WAV file as they arrive; a context manager.

    int16 samples become PCM 16, float32 samples become 32-bit float WAV. The chunks go into a hidden file
    beside `path`, made at once, so that a bad path is known before anything is asked. At the end:

        closed, interrupted (Ctrl-C) or cancelled    what came is at `path`, instead of a file that was there
        left by an error                             what came is at `path`, unless a file was there
        no chunk came                                nothing changes

    Raises:
        InvalidRequest: the name does not end in .wav, or belongs to something that is no file.
        OSError: the file cannot be made, or the one that is there may not be written.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = checked_wav_path(path)
        self._target = Path(os.path.realpath(self.path))  # a link stays a link
        self._draft = self._target.with_name(f".tritone-{secrets.token_hex(8)}.wav")
        if self._target.exists() and not self._target.is_file():
            raise InvalidRequest(f"{os.fspath(path)!r} is no ordinary file; give another name")
        try:
            if self._target.exists():
                self._target.open("r+b").close()
            self._file = self._draft.open("xb")
        except OSError as error:
            raise self._named(error) from None
        self._sound: Any = None  # soundfile.SoundFile, from the first chunk on, which knows rate and dtype
        self._continuity = Continuity()

    @property
    def audio_s(self) -> float:
        return self._continuity.audio_s

    def write(self, chunk: AudioChunk) -> None:
        """Append a chunk. Raises BrokenStream if it does not follow the one before."""
        self._continuity.check(chunk)
        if self._sound is None:
            self._sound = _open_sound(self._file, chunk.samples, chunk.sample_rate_hz)
        self._sound.write(chunk.samples)

    def close(self) -> None:
        """Put what came in its place; without a chunk, change nothing."""
        self._finish(replaces=True)

    def __enter__(self) -> WavWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # An interrupt or a cancelled task is no Exception: whoever stops an answer wants what was heard.
        self._finish(replaces=not isinstance(error, Exception))

    def _finish(self, replaces: bool) -> None:
        if self._file.closed:
            return
        try:
            if self._sound is not None:
                self._sound.close()
            self._file.close()
            if self._sound is not None and (replaces or not self._target.exists()):
                if self._target.exists():
                    shutil.copymode(self._target, self._draft)
                self._draft.replace(self._target)
        except OSError as error:
            raise self._named(error) from None
        finally:
            self._file.close()
            self._draft.unlink(missing_ok=True)

    def _named(self, error: OSError) -> OSError:
        """The same error about the path that the caller knows."""
        return OSError(error.errno, error.strerror, os.fspath(self.path))


def write_wav(path: str | os.PathLike[str], samples: Samples, sample_rate_hz: int) -> None:
    """Write mono samples (int16 or float32 [n]) to a WAV file. Raises as `WavWriter` does."""
    with WavWriter(path) as wav:
        wav.write(AudioChunk(samples, sample_rate_hz, sample_offset=0, index=0))


def checked_wav_path(path: str | os.PathLike[str]) -> Path:
    """The path, if it names a WAV file; InvalidRequest otherwise."""
    checked = Path(path)
    if checked.suffix.lower() != ".wav":
        raise InvalidRequest(f"{os.fspath(path)!r} does not end in .wav; only WAV files are written")
    return checked


def _open_sound(file: Any, samples: Samples, sample_rate_hz: int) -> Any:
    import soundfile  # lazy: loads a C library that text-only callers do not need

    subtype = "PCM_16" if samples.dtype == np.int16 else "FLOAT"
    return soundfile.SoundFile(file, "w", sample_rate_hz, channels=1, format="WAV", subtype=subtype)
