"""Goodput: the share of requests that were good enough for whoever waits for them.

    --goodput ttfp=0.5,underrun=0      the first sound within half a second, and no silence after it

A request is good if it was answered and meets every bound. A bound on text or sound applies to the requests
that asked for it: one that asked for sound and got none is not good, one that asked for text alone is not
judged by its sound. What an answer is too short to have, as a gap with one chunk, it meets. A bound that
applied to no request at all has judged nothing, and there is no goodput.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from tritone_bench.record import Figures
from tritone_client.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Measure:
    """What can be bounded."""

    modality: str | None  # None: of every request
    value: Callable[[Figures], float | None]
    meaning: str


MEASURES: Mapping[str, Measure] = {
    "ttft": Measure("text", lambda figures: figures.ttft_s, "s"),
    "tpot": Measure("text", lambda figures: figures.tpot_s or 0.0, "s"),
    "itl": Measure("text", lambda figures: figures.longest_itl_s or 0.0, "s, the longest"),
    "ttfp": Measure("audio", lambda figures: figures.ttfp_s, "s"),
    "gap": Measure("audio", lambda figures: figures.longest_gap_s or 0.0, "s, the longest"),
    "rtf": Measure("audio", lambda figures: figures.rtf, "ratio"),
    "underrun": Measure("audio", lambda figures: figures.underrun_s or 0.0, "s of silence in all"),
    "e2el": Measure(None, lambda figures: figures.e2el_s, "s"),
}


@dataclass(frozen=True, slots=True)
class Goodput:
    """How many requests of a level were good."""

    bounds: dict[str, float]
    num_good: int
    share: float | None  # of all requests, failed ones included; None: a bound applied to none of them
    requests_per_s: float | None  # good ones


def read_bounds(text: str) -> dict[str, float]:
    """`ttfp=0.5,underrun=0`, in seconds (rtf: a ratio).

    Raises:
        InvalidRequest: an unknown measure, one that is bounded twice, or a bound that is no number from 0 on.
    """
    bounds: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name not in MEASURES:
            close = get_close_matches(name, MEASURES, n=1)
            cure = f"did you mean {close[0]!r}?" if close else f"use {', '.join(MEASURES)}"
            raise InvalidRequest(f"goodput bounds the unknown measure {name!r}; {cure}")
        if name in bounds:
            raise InvalidRequest(f"goodput bounds {name} twice; leave one of the two out")
        try:
            bounds[name] = float(number)
        except ValueError:
            bounds[name] = math.nan
        if not (bounds[name] >= 0 and math.isfinite(bounds[name])):
            raise InvalidRequest(f"the goodput bound of {name} is {number!r}; give a number, e.g. {name}=0.5")
    return bounds


def goodput(requests: Sequence[Figures], bounds: Mapping[str, float], wall_s: float) -> Goodput | None:
    """None without bounds."""
    if not bounds:
        return None
    num_good = sum(_is_good(figures, bounds) for figures in requests)
    answered = [figures for figures in requests if figures.failure is None]
    judged = all(any(_applies(MEASURES[name], figures) for figures in answered) for name in bounds)
    if answered and not judged:
        return Goodput(dict(bounds), 0, None, None)
    share = num_good / len(requests) if requests else None
    return Goodput(dict(bounds), num_good, share, num_good / wall_s)


def _is_good(figures: Figures, bounds: Mapping[str, float]) -> bool:
    if figures.failure is not None:
        return False
    return all(_meets(MEASURES[name], figures, bound) for name, bound in bounds.items())


def _meets(measure: Measure, figures: Figures, bound: float) -> bool:
    if not _applies(measure, figures):
        return True
    if measure.modality == "audio" and not figures.num_chunks:
        return False
    if measure.modality == "text" and figures.ttft_s is None:
        return False
    value = measure.value(figures)
    return value is not None and value <= bound


def _applies(measure: Measure, figures: Figures) -> bool:
    return measure.modality is None or measure.modality in figures.modalities
