"""Percentiles that say when they rest on too few samples.

The p-th percentile is the smallest value seen that at least p % of the values do not exceed (numpy's method
`inverted_cdf`): a value that really occurred, not one between two. Of fewer than 1 / (1 - p/100) samples it
is merely the largest: p50 needs 2, p90 needs 10, p99 needs 100. Fewer are reported and marked as too few.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """How the values of one measure lie; all in the unit of the measure."""

    count: int
    p50: float
    p90: float
    p99: float
    mean: float
    min: float
    max: float
    too_few: tuple[int, ...]  # of 50, 90, 99: percentiles that need more samples than there were

    def percentile(self, percent: int) -> float:
        return {50: self.p50, 90: self.p90, 99: self.p99}[percent]


def spread(values: Iterable[float | None]) -> Spread | None:
    """The spread of all that is not None; None if nothing is left."""
    seen = np.array([value for value in values if value is not None], dtype=np.float64)
    if not seen.size:
        return None
    p50, p90, p99 = (float(value) for value in np.percentile(seen, PERCENTS, method="inverted_cdf"))
    return Spread(
        count=int(seen.size),
        p50=p50,
        p90=p90,
        p99=p99,
        mean=float(seen.mean()),
        min=float(seen.min()),
        max=float(seen.max()),
        too_few=tuple(percent for percent in PERCENTS if seen.size < samples_needed(percent)),
    )


def samples_needed(percent: float) -> int:
    """How many samples it takes for the percentile to be anything but the largest of them."""
    return math.ceil(round(100 / (100 - percent), 9))


def percentile(values: Sequence[float], percent: float) -> float | None:
    """One percentile of plain values; None of none."""
    return float(np.percentile(values, percent, method="inverted_cdf")) if len(values) else None


def median(values: Iterable[float | None]) -> float | None:
    """The p50 of all that is not None."""
    return percentile([value for value in values if value is not None], 50)
