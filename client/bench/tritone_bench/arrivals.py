"""When requests come: as callers get free, or on a schedule that does not wait for answers.

    concurrency 2    ├─request─┤├──request──┤├─request─┤          closed loop: two callers, each asks,
                     ├───request────┤├─request─┤                  listens to the end, and asks again

    1 request/s      ├──request──┤                                open loop: sent when it is due, however
                        ├────────request─────────┤                many are still under way
                           ├─request──┤

An open loop shows what a closed one hides: a server that is too slow does not slow its load down.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from tritone_client.errors import InvalidRequest

ArrivalProcess: TypeAlias = Literal["poisson", "constant"]
ARRIVALS: tuple[ArrivalProcess, ...] = ("poisson", "constant")


@dataclass(frozen=True, slots=True)
class Load:
    """One level of load: either so many callers, or so many requests a second."""

    concurrency: int | None = None
    request_rate_per_s: float | None = None
    arrival: ArrivalProcess | None = None  # of a request rate

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.request_rate_per_s is None):
            raise InvalidRequest("a level has a concurrency or a request rate; give one of the two")
        if self.concurrency is not None and self.concurrency < 1:
            raise InvalidRequest(f"the concurrency is {self.concurrency}; give numbers from 1 on")
        rate = self.request_rate_per_s
        if rate is not None and not (rate > 0 and math.isfinite(rate)):
            raise InvalidRequest(f"the request rate is {rate}; give positive numbers of requests a second")

    @property
    def value(self) -> float:
        """The place of this level on the axis of its plots."""
        number = self.request_rate_per_s if self.concurrency is None else self.concurrency
        assert number is not None
        return number

    @property
    def unit(self) -> str:
        """What `value` counts, for the axis."""
        if self.concurrency is not None:
            return "concurrency (requests at a time)"
        return f"request rate (requests/s, {self.arrival})"

    def __str__(self) -> str:
        if self.concurrency is not None:
            return f"concurrency {self.concurrency}"
        return f"{self.request_rate_per_s:g} requests/s {self.arrival}"


def schedule(rate_per_s: float, arrival: ArrivalProcess, seed: int) -> Iterator[float]:
    """Without end: when the requests are due, in seconds after the first one, which is due at 0.

    poisson: the gaps are drawn from an exponential distribution of mean 1 / rate, as from many callers who do
    not know of each other. The same seed gives the same schedule; another rate stretches it.
    """
    draw = np.random.default_rng(seed)
    gaps = (float(draw.exponential()) if arrival == "poisson" else 1.0 for _ in itertools.count())
    return (units / rate_per_s for units in itertools.accumulate(gaps, initial=0.0))
