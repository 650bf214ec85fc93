"""Two things measured in turns: how many times as much the second takes, and how sure that is.

Within a round both meet the same machine, so what counts is the ratio of each round. Their trimmed mean
forgets the rounds that something else disturbed; its interval is Yuen's, from the winsorized spread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

TRIM = 0.2  # of the rounds, at either end
QUANTILE = 2.0  # of an interval that holds the truth 19 times in 20


@dataclass(frozen=True)
class Ratio:
    """B / A, and the interval that holds it 19 times in 20."""

    mean: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, pairs: Iterable[tuple[float, float]]) -> Ratio:
        """pairs: A and B of each round; three or more."""
        logs = sorted(math.log(b / a) for a, b in pairs)
        count, cut = len(logs), int(TRIM * len(logs))
        kept = logs[cut : count - cut]
        mean = sum(kept) / len(kept)
        winsorized = [kept[0]] * cut + kept + [kept[-1]] * cut
        centre = sum(winsorized) / count
        squares = sum((value - centre) ** 2 for value in winsorized)
        half = QUANTILE * math.sqrt(squares / (len(kept) * (len(kept) - 1)))
        return cls(math.exp(mean), math.exp(mean - half), math.exp(mean + half), count)

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} - {self.high:.3f}, 95 %, {self.rounds} rounds)"
