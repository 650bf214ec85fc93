"""Answers to figures: the measures of `tritone bench`, from what perf_analyzer exported.

TTFT  first text          TTFP  first packet of sound       gap   between two packets of sound
E2EL  last event          RTF   E2EL / length of speech     TPOT  per token after the first
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from perf_analyzer.export import Answer, Audio, Level, Text

MEASURES = ("TTFT", "TPOT", "TTFP", "gap", "E2EL", "RTF")
PERCENTILES = (50, 90, 99)
LOADS = {"concurrency": "concurrency {:g}", "request_rate": "{:g} requests/s"}


@dataclass(frozen=True)
class Figures:
    """One level of load. Seconds, but for RTF."""

    load: str
    num_requests: int
    errors: Mapping[str, int]  # how often each came
    spread: Mapping[
        str, tuple[float, float, float] | None
    ]  # p50, p90, p99 by measure; None: no request has it
    requests_per_s: float
    audio_s_per_s: float


def figures(level: Level) -> Figures:
    """Of the answers that are complete; those that failed are only counted.

    Throughput is from the first request to the last event: the one that perf_analyzer prints counts the
    rest of the second in which its last answer came.
    """
    complete = [answer for answer in level.answers if not answer.error]
    values: dict[str, list[float]] = {name: [] for name in MEASURES}
    for answer in complete:
        for name, measured in measures(answer).items():
            values[name] += measured
    begin_s = min((answer.sent_s for answer in complete), default=0.0)
    end_s = max((answer.sent_s + answer.end_s for answer in complete), default=0.0)
    wall_s = end_s - begin_s
    return Figures(
        load=LOADS[level.mode].format(level.value)
        if level.mode in LOADS
        else f"{level.mode} {level.value:g}",
        num_requests=len(level.answers),
        errors=Counter(answer.error for answer in level.answers if answer.error),
        spread={name: _spread(values[name]) for name in MEASURES},
        requests_per_s=len(complete) / wall_s if wall_s else 0.0,
        audio_s_per_s=sum(answer.audio_s for answer in complete) / wall_s if wall_s else 0.0,
    )


def measures(answer: Answer) -> dict[str, list[float]]:
    """What one complete answer gives to each measure; of those for a stream nothing where it was none."""
    texts_s = [arrival.at_s for arrival in answer.arrivals if isinstance(arrival, Text)]
    packets_s = [arrival.at_s for arrival in answer.arrivals if isinstance(arrival, Audio)]
    later_tokens = (answer.num_tokens or 0) - 1
    return {
        "TTFT": texts_s[:1],
        "TPOT": [(texts_s[-1] - texts_s[0]) / later_tokens] if texts_s and later_tokens > 0 else [],
        "TTFP": packets_s[:1],
        "gap": [later_s - earlier_s for earlier_s, later_s in pairwise(packets_s)],
        "E2EL": [answer.end_s],
        "RTF": [answer.end_s / answer.audio_s] if answer.audio_s else [],
    }


def _spread(values: Sequence[float]) -> tuple[float, float, float] | None:
    if not values:
        return None
    p50, p90, p99 = (float(v) for v in np.percentile(values, PERCENTILES, method="inverted_cdf"))
    return p50, p90, p99


def table(heading: str, levels: Sequence[Figures]) -> str:
    """One column for each level; heading: what they have in common, as "gRPC stream"."""
    lines = [(heading, [level.load for level in levels])]
    lines.append(("requests / failed", [_counts(level) for level in levels]))
    for name in MEASURES:
        unit = "" if name == "RTF" else ", ms"
        lines.append((f"{name}{unit}: p50 / p90 / p99", [_cell(name, level) for level in levels]))
    lines.append(("requests / s", [f"{level.requests_per_s:.2f}" for level in levels]))
    lines.append(("audio s / s", [f"{level.audio_s_per_s:.2f}" for level in levels]))
    head = max(len(name) for name, _ in lines)
    widths = [max(len(cells[column]) for _, cells in lines) for column in range(len(levels))]
    return "\n".join(
        "  ".join([name.ljust(head), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))])
        for name, cells in lines
    )


def _counts(level: Figures) -> str:
    return f"{level.num_requests} / {sum(level.errors.values())}"


def _cell(name: str, level: Figures) -> str:
    spread = level.spread[name]
    if spread is None:
        return "-"
    if name == "RTF":
        return " / ".join(f"{value:.3f}" for value in spread)
    return " / ".join(f"{value * 1000:.1f}" for value in spread)
