"""One request as its listener saw it, and the measures of the field.

    sent    first text       last text
     │          │ token token … │
     ├──TTFT────┤               │                          TTFT  time to first token
     │          └─(tokens - 1)──┘                          TPOT  time per output token
     ├──TTFP───────┤ gap ┌ gap ┌ gap ┌ …                   TTFP  time to first packet of sound
     │           chunk chunk chunk chunk                   gap   between the arrivals of two chunks
     ├──E2EL──────────────────────────────────┤ `done`     E2EL  end-to-end latency

    TTFT   sending the request → the first text
    TPOT   (last text - first text) / (output tokens - 1); the server counts the tokens. None with one token
           or where the text comes in one piece
    ITL    between two text deltas, a delta being a token or a few (only whole characters are sent)
    TTFP   sending the request → the first chunk of sound
    E2EL   sending the request → `done`; of a modality: → its last output
    RTF    E2EL / seconds of sound: below 1 the sound is made faster than it is heard
    gap    inter-chunk gap
    leading silence    of the sound itself, before it first exceeds LOUD; a listener waits TTFP and this
    underrun           see `playback`

Times are taken when the client reads an event. A listener who reads at playback speed (`--consume playback`)
reads late on purpose: then TTFT, TTFP and underruns are the server's, and TPOT, ITL, gap, E2EL and RTF also
say how long the listener took.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from tritone_bench.playback import Arrival, play
from tritone_client.events import Samples, Usage

LOUD = 0.00316
"""Amplitude of -50 dB below full scale: what is softer counts as silence."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request has no complete answer."""

    code: str  # the contract's word, e.g. UNAVAILABLE
    message: str


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What came of one request. Times are seconds after it was sent, unless they say otherwise."""

    number: int  # in its request set
    due_s: float  # after the level began, like the next
    sent_s: float
    end_s: float  # `done`, or the failure
    text: tuple[float, ...] = ()  # each delta
    audio: tuple[Arrival, ...] = ()  # each chunk
    media: Mapping[str, float] = field(default_factory=dict)  # last image, last video
    leading_silence_s: float | None = None
    usage: Usage = field(default_factory=lambda: Usage())
    finish_reasons: Mapping[str, str] = field(default_factory=dict)  # by modality that was asked for
    timings: Mapping[str, Any] = field(default_factory=dict)  # what the server says of its stages
    failure: Failure | None = None

    @property
    def gaps_s(self) -> list[float]:
        """Between the arrivals of two chunks of sound."""
        return [later.at_s - earlier.at_s for earlier, later in pairwise(self.audio)]

    @property
    def itl_s(self) -> list[float]:
        """Between two text deltas."""
        return [later - earlier for earlier, later in pairwise(self.text)]

    def figures(self) -> Figures:
        """The measures of this request; a failed one has none but its time."""
        modalities = {
            *self.finish_reasons,
            *self.media,
            *(["text"] if self.text else []),
            *(["audio"] if self.audio else []),
        }
        if self.failure is not None:
            return Figures(
                self.number, self.sent_s, self.end_s, tuple(sorted(modalities)), failure=self.failure.code
            )
        audio_s = sum(arrival.duration_s for arrival in self.audio)
        playback = play(self.audio)
        num_tokens = self.usage.get("completion_tokens")
        writing_s = self.text[-1] - self.text[0] if self.text else 0.0
        return Figures(
            number=self.number,
            sent_s=self.sent_s,
            e2el_s=self.end_s,
            modalities=tuple(sorted(modalities)),
            ttft_s=self.text[0] if self.text else None,
            tpot_s=writing_s / (num_tokens - 1) if writing_s and num_tokens and num_tokens > 1 else None,
            longest_itl_s=max(self.itl_s, default=None),
            text_e2el_s=self.text[-1] if self.text else None,
            num_tokens=num_tokens,
            ttfp_s=self.audio[0].at_s if self.audio else None,
            longest_gap_s=max(self.gaps_s, default=None),
            audio_e2el_s=self.audio[-1].at_s if self.audio else None,
            rtf=self.end_s / audio_s if audio_s else None,
            audio_s=audio_s,
            num_chunks=playback.num_chunks,
            leading_silence_s=self.leading_silence_s,
            underrun_s=playback.underrun_s if playback.can_underrun else None,
            num_underruns=len(playback.underruns),
            media_e2el_s=dict(self.media),
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """The measures of one request; None where it has no such thing, e.g. TTFP without sound."""

    number: int  # in its request set
    sent_s: float  # after the level began
    e2el_s: float  # of a failed request: until it failed
    modalities: tuple[str, ...]  # asked for, or come
    failure: str | None = None  # the code
    ttft_s: float | None = None
    tpot_s: float | None = None
    longest_itl_s: float | None = None
    text_e2el_s: float | None = None
    num_tokens: int | None = None  # of the text, as the server counts
    ttfp_s: float | None = None
    longest_gap_s: float | None = None
    audio_e2el_s: float | None = None
    rtf: float | None = None
    audio_s: float = 0.0
    num_chunks: int = 0  # that sound
    leading_silence_s: float | None = None
    underrun_s: float | None = None  # None: no sound, or all of it in one chunk
    num_underruns: int = 0
    media_e2el_s: dict[str, float] = field(default_factory=dict)  # of images and videos


class LeadingSilence:
    """How much silence the sound of one answer begins with; fed chunk by chunk."""

    def __init__(self) -> None:
        self._silent_s = 0.0
        self._heard = False

    def add(self, samples: Samples, sample_rate_hz: int) -> None:
        """samples: int16 or float32 [n], mono."""
        if self._heard:
            return
        loud = np.abs(samples.astype(np.float32)) > LOUD * (32768 if samples.dtype == np.int16 else 1)
        self._heard = bool(loud.any())
        self._silent_s += (int(loud.argmax()) if self._heard else len(samples)) / sample_rate_hz

    @property
    def seconds(self) -> float | None:
        """None before the first sound, and of an answer that is silent throughout."""
        return self._silent_s if self._heard else None
