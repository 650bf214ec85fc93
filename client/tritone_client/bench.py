"""Load a pipeline the way callers do, and say what they would feel.

    for each level of concurrency:  `concurrency` callers, each asks, listens to the end, asks again
                                    … until `num_requests` answers have come

Latencies and RTF are taken on the client, per request; throughput is over the whole level. Where the time
went is what the server says in `done`: see `bench_stages`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from itertools import cycle
from typing import Any, TypeAlias

from tritone_client.bench_stages import (
    StageReport,
    StageTimes,
    align,
    chain_overhead,
    percentile,
    report_stages,
)
from tritone_client.client import AsyncTritoneClient
from tritone_client.errors import InvalidRequest, TritoneError
from tritone_client.events import AudioChunk, Done, Timings
from tritone_client.request import RequestOptions

PROMPTS = (
    "What is the capital of Australia?",
    "Tell me a very short story about a lighthouse.",
    "How do I boil an egg so that the yolk stays soft?",
    "Count from one to ten.",
    "Why is the sky blue?",
    "Give me three tips against stage fright.",
    "What is the difference between weather and climate?",
    "Say good night in a friendly way.",
    "How far away is the moon?",
    "Explain what a prime number is to a child.",
    "Which instruments are in a string quartet?",
    "Recommend something to cook with tomatoes and rice.",
    "What did the Romans use concrete for?",
    "Describe the smell of rain in two sentences.",
    "How many minutes are there in a week?",
    "Read me this address: 221B Baker Street, London.",
)


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to run."""

    concurrencies: tuple[int, ...] = (1, 8)  # one level each, in this order
    num_requests: int = 32  # at every level
    prompts: tuple[str, ...] = PROMPTS  # asked in turn
    first_seed: int = 0  # every request of the run has its own seed, counted up from here
    num_warmup_requests: int = 1  # before the first level, not measured
    options: RequestOptions | None = None  # for every request, e.g. {"max_tokens": 64}

    def __post_init__(self) -> None:
        if not self.concurrencies or min(self.concurrencies) < 1:
            raise InvalidRequest(f"concurrency is {list(self.concurrencies)}; give numbers like 1,8")
        if self.num_requests < 1:
            raise InvalidRequest(f"the number of requests is {self.num_requests}; give at least 1")
        if not self.prompts:
            raise InvalidRequest("there are no prompts; give at least one")


@dataclass(frozen=True, slots=True)
class Underruns:
    """What a listener hears who starts to play the first chunk when it arrives."""

    count: int  # times that the sound stopped
    silence_s: float  # how long it was silent in all


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request of a level: timings and underruns, or the error."""

    timings: Timings | None
    underruns: Underruns
    error: TritoneError | None
    stages: StageTimes | None = None  # what the server said of its stages


@dataclass(frozen=True, slots=True)
class LevelReport:
    """One level of concurrency. A value is None where no request gave one, e.g. TTFP without audio."""

    concurrency: int
    num_requests: int
    num_errors: int
    wall_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    ttfp_p50_s: float | None
    ttfp_p99_s: float | None
    e2el_p50_s: float | None
    e2el_p99_s: float | None
    rtf_p50: float | None
    rtf_max: float | None
    requests_per_s: float
    audio_s_per_s: float  # seconds of speech made in a second
    num_underruns: int
    silence_s: float
    errors: dict[str, int]  # how often each error came, by its message
    stages: dict[str, StageReport] = field(default_factory=dict)
    chain_overhead_p50_s: float | None = None  # per audio chunk; None where the server does not say it

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


Note: TypeAlias = Callable[[str], None]


async def run_bench(
    client: AsyncTritoneClient, plan: BenchPlan, note: Note = lambda progress: None
) -> AsyncIterator[LevelReport]:
    """Run the plan and yield a report after each level. Failed requests are counted, not raised.

    Args:
        note: told how far it is whenever that changes, e.g. `concurrency 8: 3/32`.

    Raises:
        TritoneError: already the warm-up fails.
    """
    options: RequestOptions = plan.options or {}
    for number in range(plan.num_warmup_requests):
        note(f"warm-up: {number}/{plan.num_warmup_requests}")
        await client.ask(plan.prompts[number % len(plan.prompts)], **options)
    next_seed = plan.first_seed
    for concurrency in plan.concurrencies:
        seeds = range(next_seed, next_seed + plan.num_requests)
        work = list(zip(cycle(plan.prompts), seeds, strict=False))
        next_seed = seeds.stop
        yield await _run_level(client, concurrency, work, options, note)


async def _run_level(
    client: AsyncTritoneClient,
    concurrency: int,
    work: Sequence[tuple[str, int]],
    options: RequestOptions,
    note: Note,
) -> LevelReport:
    waiting = iter(work)
    records: list[RequestRecord] = []

    async def call_in_turn() -> None:
        for prompt, seed in waiting:
            records.append(await _measure(client, prompt, seed, options))
            note(f"concurrency {concurrency}: {len(records)}/{len(work)}")

    note(f"concurrency {concurrency}: 0/{len(work)}")
    start_s = time.perf_counter()
    async with asyncio.TaskGroup() as callers:
        for _ in range(concurrency):
            callers.create_task(call_in_turn())
    return summarize(concurrency, records, time.perf_counter() - start_s)


async def _measure(
    client: AsyncTritoneClient, prompt: str, seed: int, options: RequestOptions
) -> RequestRecord:
    arrivals: list[tuple[float, float]] = []
    timings, stages, error = None, None, None
    request: RequestOptions = {**options, "seed": seed, "return_timings": True}
    try:
        async with aclosing(client.stream(prompt, **request)) as events:
            async for event in events:
                if isinstance(event, AudioChunk):
                    arrivals.append((time.perf_counter(), event.duration_s))
                elif isinstance(event, Done):
                    timings, stages = event.measured, StageTimes.of(event, len(arrivals))
    except TritoneError as failure:
        error = failure
    return RequestRecord(timings, playback_underruns(arrivals), error, stages)


def playback_underruns(arrivals: Sequence[tuple[float, float]]) -> Underruns:
    """Play the chunks on a clock that starts with the first one and stops while there is nothing to play.

    Args:
        arrivals: (time of arrival, length) of each chunk, both in seconds, in order.
    """
    count, silence_s = 0, 0.0
    played_out_s = arrivals[0][0] if arrivals else 0.0
    for arrival_s, duration_s in arrivals:
        if arrival_s > played_out_s:
            count += 1
            silence_s += arrival_s - played_out_s
            played_out_s = arrival_s
        played_out_s += duration_s
    return Underruns(count, silence_s)


def summarize(concurrency: int, records: Sequence[RequestRecord], wall_s: float) -> LevelReport:
    """Percentiles over the requests that succeeded, throughput over the wall time of the level."""
    answered = [record.timings for record in records if record.timings is not None]
    ttft_s = [timings.ttft_s for timings in answered if timings.ttft_s is not None]
    ttfp_s = [timings.ttfp_s for timings in answered if timings.ttfp_s is not None]
    e2el_s = [timings.e2el_s for timings in answered]
    rtf = [timings.rtf for timings in answered if timings.rtf is not None]
    stages = [record.stages for record in records if record.stages is not None]
    errors = Counter(f"{record.error.code}: {record.error}" for record in records if record.error is not None)
    return LevelReport(
        concurrency=concurrency,
        num_requests=len(records),
        num_errors=errors.total(),
        wall_s=wall_s,
        ttft_p50_s=percentile(ttft_s, 50),
        ttft_p99_s=percentile(ttft_s, 99),
        ttfp_p50_s=percentile(ttfp_s, 50),
        ttfp_p99_s=percentile(ttfp_s, 99),
        e2el_p50_s=percentile(e2el_s, 50),
        e2el_p99_s=percentile(e2el_s, 99),
        rtf_p50=percentile(rtf, 50),
        rtf_max=max(rtf, default=None),
        requests_per_s=len(answered) / wall_s,
        audio_s_per_s=sum(timings.audio_s for timings in answered) / wall_s,
        num_underruns=sum(record.underruns.count for record in records),
        silence_s=sum(record.underruns.silence_s for record in records),
        errors=dict(errors),
        stages=report_stages(stages),
        chain_overhead_p50_s=chain_overhead(stages),
    )


def table(reports: Sequence[LevelReport]) -> str:
    """The reports side by side, one column per level of concurrency."""
    rows: list[tuple[str, list[str]]] = [
        ("concurrency", [str(report.concurrency) for report in reports]),
        ("requests", [str(report.num_requests) for report in reports]),
        ("TTFT p50 / p99 (s)", [_pair(report.ttft_p50_s, report.ttft_p99_s) for report in reports]),
        ("TTFP p50 / p99 (s)", [_pair(report.ttfp_p50_s, report.ttfp_p99_s) for report in reports]),
        ("E2EL p50 / p99 (s)", [_pair(report.e2el_p50_s, report.e2el_p99_s) for report in reports]),
        ("RTF p50 / max", [_pair(report.rtf_p50, report.rtf_max) for report in reports]),
        ("requests / s", [f"{report.requests_per_s:.2f}" for report in reports]),
        ("audio s / s", [f"{report.audio_s_per_s:.2f}" for report in reports]),
        ("underruns", [str(report.num_underruns) for report in reports]),
        ("silence (s)", [f"{report.silence_s:.3f}" for report in reports]),
        ("errors", [str(report.num_errors) for report in reports]),
    ]
    return align(rows)


def _pair(left: float | None, right: float | None) -> str:
    return " / ".join("-" if value is None else f"{value:.3f}" for value in (left, right))
