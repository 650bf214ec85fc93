"""A whole run: warm-up, then every level, as often as wanted.

    warm-up │ level 1  level 2  level 3 │ level 1  level 2  level 3 │ …      --repeats
            └───────── one sweep ───────┘

Repeats take turns with the levels, so that a machine which slows down meanwhile slows all levels alike and
shows as spread.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tritone_bench.arrivals import Load
from tritone_bench.level import LevelReport, summarize
from tritone_bench.load import Consume, run_level, warm_up
from tritone_bench.record import RequestRecord
from tritone_bench.request_set import RequestSet
from tritone_client.client import AsyncTritoneClient
from tritone_client.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to run."""

    loads: tuple[Load, ...]  # one level each, in this order
    requests: RequestSet  # of every level
    consume: Consume = "fast"
    duration_s: float | None = None  # of a level: no request is begun after it
    num_warmup_requests: int = 1  # before the first level, not measured
    num_repeats: int = 1  # of the whole sweep
    bounds: Mapping[str, float] = field(default_factory=dict)  # of the goodput

    def __post_init__(self) -> None:
        if not self.loads:
            raise InvalidRequest("there is no level; give a concurrency or a request rate")
        if self.requests.num_requests is None and self.duration_s is None:
            raise InvalidRequest("a level has no end; give a number of requests or a duration")
        if self.duration_s is not None and not (self.duration_s > 0 and math.isfinite(self.duration_s)):
            raise InvalidRequest(f"the duration is {self.duration_s}; give a positive number of seconds")
        if self.num_warmup_requests < 0:
            raise InvalidRequest(f"the warm-up has {self.num_warmup_requests} requests; give 0 or more")
        if self.num_repeats < 1:
            raise InvalidRequest(f"the sweep runs {self.num_repeats} times; give at least 1")


class Watcher(Protocol):
    """Whoever wants to know how far a run is."""

    def warming_up(self, plan: BenchPlan) -> None: ...

    def level_begins(self, load: Load, repeat: int) -> None: ...

    def request_ends(self, record: RequestRecord) -> None: ...

    def level_ends(self, report: LevelReport) -> None: ...


class Unwatched:
    """Nobody does."""

    def warming_up(self, plan: BenchPlan) -> None:
        return None

    def level_begins(self, load: Load, repeat: int) -> None:
        return None

    def request_ends(self, record: RequestRecord) -> None:
        return None

    def level_ends(self, report: LevelReport) -> None:
        return None


UNWATCHED = Unwatched()


async def run_bench(
    client: AsyncTritoneClient, plan: BenchPlan, watcher: Watcher = UNWATCHED
) -> AsyncIterator[LevelReport]:
    """Run the plan and yield a report after each level. Failed requests are counted, not raised.

    Raises:
        TritoneError: already the warm-up fails.
    """
    watcher.warming_up(plan)
    await warm_up(client, plan.requests, plan.num_warmup_requests)
    for repeat in range(plan.num_repeats):
        for load in plan.loads:
            watcher.level_begins(load, repeat)
            run = await run_level(
                client,
                load,
                plan.requests,
                consume=plan.consume,
                duration_s=plan.duration_s,
                seed=plan.requests.first_seed + repeat,
                on_record=watcher.request_ends,
            )
            report = summarize(load, repeat, run, plan.bounds)
            watcher.level_ends(report)
            yield report
