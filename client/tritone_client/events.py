"""What a pipeline answers, event by event.

    TextDelta … AudioChunk … TextDelta … AudioChunk … Done        one request, in the order of arrival

Every event carries `index`, the number of the response it came in, counted from 0. The last event is `Done`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

Samples: TypeAlias = npt.NDArray[np.int16] | npt.NDArray[np.float32]

FinishReason: TypeAlias = Literal["stop", "length", "deadline", "repetition", "cancelled"]
"""Why a modality ended. `length` of audio may also mean that it speaks a text which a limit cut."""


class Usage(TypedDict, total=False):
    """What an answer took; a count that no stage reports is left out."""

    prompt_tokens: int  # of the stage that writes the text, like the next
    completion_tokens: int
    codec_frames: int  # of the speech
    audio_s: float
    stages: Mapping[str, Mapping[str, float]]  # by stage: all that it counts


class StageTimings(TypedDict, total=False):
    """When one stage did what for one request, as far as it says; `_at_s`: since the server received it."""

    opened_at_s: float
    first_output_at_s: float
    last_output_at_s: float
    ended_at_s: float
    total_s: float  # from the opening of the stage to its end, waits included
    first_output_s: float  # from the same start
    queued_s: float  # of it in the engine's own queue, or until a call to it was computed
    busy_s: float  # it computed; other requests of the same batches ran along
    busy: Sequence[tuple[float, float]]  # when: begin and end, at most 256, with the shortest gaps filled
    tokens: int
    frames: int  # codec frames
    steps: int  # of the engine that gave it something
    batch: float  # mean number of requests, or of chunks, that were computed together
    calls: int  # of a stage that is called a chunk at a time
    calls_s: float  # in these calls, the wait for a batch included
    call_spans: Sequence[tuple[float, float, int, int]]  # begin, end, frames, batch of the first 256 calls


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of the text; whole characters, never half a UTF-8 sequence."""

    text: str
    index: int


@dataclass(frozen=True, slots=True, eq=False)
class AudioChunk:
    """The next piece of the speech, as raw mono samples."""

    samples: Samples  # int16 or float32 [n], read-only; float samples lie in [-1, 1]
    sample_rate_hz: int
    sample_offset: int  # place of samples[0] in the whole answer
    index: int

    @property
    def duration_s(self) -> float:
        return len(self.samples) / self.sample_rate_hz


@dataclass(frozen=True, slots=True)
class EncodedAudio:
    """The next piece of the speech as a file; all pieces joined are one valid file of `audio_format`."""

    data: bytes
    audio_format: str  # wav, flac or opus
    index: int


@dataclass(frozen=True, slots=True, eq=False)
class Media:
    """Pictures or video: raw frames or encoded files, as the pipeline chose."""

    modality: str  # image or video
    frames: npt.NDArray[np.uint8] | None  # uint8 [frames, height, width, 3], RGB
    files: tuple[bytes, ...]  # PNG for images, MP4 for video
    index: int


@dataclass(frozen=True, slots=True)
class Progress:
    """A long stage reports how far it is."""

    info: Mapping[str, Any]
    index: int


@dataclass(frozen=True, slots=True)
class Timings:
    """One request as its caller saw it; the clock starts when the request is sent."""

    ttft_s: float | None  # first text; None if there was none
    ttfp_s: float | None  # first packet of audio; None if there was none
    e2el_s: float  # the end of the answer
    audio_s: float  # length of the speech; 0 if there was none
    rtf: float | None  # e2el_s / audio_s: below 1 is faster than speech; None without audio


@dataclass(frozen=True, slots=True)
class Done:
    """The answer is complete."""

    finish_reasons: Mapping[str, FinishReason]  # by modality
    usage: Usage
    stage_timings: Mapping[str, StageTimings]  # by stage; empty unless return_timings was set
    seed: int | None  # repeats this answer
    info: Mapping[str, Any]  # all that the server said, including the above
    measured: Timings
    index: int


Event: TypeAlias = TextDelta | AudioChunk | EncodedAudio | Media | Progress | Done
