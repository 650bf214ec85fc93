"""The playback clock: what a listener hears who plays speech while it arrives.

    arrival    │chunk 0        │chunk 1                  │chunk 2
    playing    ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓            ▓▓▓▓▓▓▓▓▓▓▓▓
    heard      ◄─leading─►                   ◄─underrun─►             end

The first chunk starts the clock when it arrives. It stands still while there is nothing to play, so a chunk
that is late once shifts all that follows and is one underrun, not many. An answer of one chunk cannot run out
before its end: whether it would have is not known, which is not the same as no underrun.

All times are seconds of one clock, whose zero the caller chooses. Nothing here waits or reads a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

INAUDIBLE_S = 1e-6
"""A pause shorter than any sample is rounding and no underrun."""


class Arrival(NamedTuple):
    """One chunk of speech."""

    at_s: float  # when it arrived
    duration_s: float  # how long it sounds


class Silence(NamedTuple):
    """The listener hears nothing from `begin_s` to `end_s`."""

    begin_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class Playback:
    """What one listener hears of one answer."""

    begin_s: float | None  # the first sound; None of an answer without any
    end_s: float | None  # the last sound
    underruns: tuple[Silence, ...]  # between the first sound and the last
    num_chunks: int
    leading_s: float = 0.0  # silence before the first sound, where it was to be counted

    @property
    def can_underrun(self) -> bool:
        """Whether there was anything to wait for after the first sound."""
        return self.num_chunks > 1

    @property
    def underrun_s(self) -> float:
        """Silence after the first sound, in all."""
        return sum(silence.duration_s for silence in self.underruns)

    @property
    def silence_s(self) -> float:
        """All silence heard: the underruns, and what led up to the first sound if that counts."""
        return self.leading_s + self.underrun_s


def play(arrivals: Sequence[Arrival], asked_s: float | None = None) -> Playback:
    """Play chunks on the clock above; those without a sound change nothing.

    Args:
        arrivals: in the order of arrival.
        asked_s: when the listener began to wait; given, the wait for the first sound counts as silence.

    Raises:
        ValueError: a chunk is older than the one before it or than `asked_s`, or has a negative length.
    """
    _check(arrivals, asked_s)
    sounding = [arrival for arrival in arrivals if arrival.duration_s > 0]
    if not sounding:
        return Playback(None, None, (), 0)
    begin_s = played_out_s = sounding[0].at_s
    underruns = []
    for at_s, duration_s in sounding:
        if at_s - played_out_s > INAUDIBLE_S:
            underruns.append(Silence(played_out_s, at_s))
            played_out_s = at_s
        played_out_s += duration_s
    leading_s = 0.0 if asked_s is None else begin_s - asked_s
    return Playback(begin_s, played_out_s, tuple(underruns), len(sounding), leading_s)


def heard_at(arrivals: Sequence[Arrival]) -> list[tuple[float, float]]:
    """Corners of the curve "seconds of speech heard by then": (time, seconds heard), from (begin, 0) on."""
    playback = play(arrivals)
    if playback.begin_s is None or playback.end_s is None:
        return []
    corners, heard_s, at_s = [(playback.begin_s, 0.0)], 0.0, playback.begin_s
    for begin_s, end_s in playback.underruns:
        heard_s += begin_s - at_s
        corners += [(begin_s, heard_s), (end_s, heard_s)]
        at_s = end_s
    corners.append((playback.end_s, heard_s + playback.end_s - at_s))
    return corners


def _check(arrivals: Sequence[Arrival], asked_s: float | None) -> None:
    times_s = [arrival.at_s for arrival in arrivals]
    if asked_s is not None:
        times_s = [asked_s, *times_s]
    if any(later < earlier for earlier, later in pairwise(times_s)):
        raise ValueError("chunks are not in the order of arrival")
    if any(arrival.duration_s < 0 for arrival in arrivals):
        raise ValueError("a chunk has a negative length")
