"""Puts one level of load on a pipeline through the public client, and records what each listener saw.

    request set ──► closed loop: `concurrency` callers  ──┐
                └─► open loop: sent when due ─────────────┴─► client.stream ──► RequestRecord

A caller whose request failed pauses RETRY_PAUSE_S before the next, so that a server that refuses at once is
not asked thousands of times. When `duration_s` is over no request is begun; those under way are heard to the
end and count.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tritone_bench.arrivals import Load, schedule
from tritone_bench.client_cost import ClientCost, CostMeter
from tritone_bench.playback import Arrival
from tritone_bench.record import Failure, LeadingSilence, RequestRecord
from tritone_bench.request_set import Ask, RequestSet
from tritone_client.client import AsyncTritoneClient
from tritone_client.errors import TritoneError
from tritone_client.events import AudioChunk, Done, Media, TextDelta
from tritone_client.request import RequestOptions

Consume: TypeAlias = Literal["fast", "playback"]
CONSUMES: tuple[Consume, ...] = ("fast", "playback")
READ_AHEAD_S = 0.5
"""A listener at playback speed reads the next chunk when so much is still to be played."""
RETRY_PAUSE_S = 0.1
LOST_S = 900.0
"""A request is given up after so long without an end; servers end theirs much earlier."""

OnRecord: TypeAlias = Callable[[RequestRecord], None]


@dataclass(frozen=True, slots=True)
class LevelRun:
    """What came of one level."""

    records: tuple[RequestRecord, ...]  # in the order in which they ended
    wall_s: float  # from the first request to the last end
    cost: ClientCost


async def run_level(
    client: AsyncTritoneClient,
    load: Load,
    requests: RequestSet,
    *,
    consume: Consume = "fast",
    duration_s: float | None = None,
    seed: int = 0,
    on_record: OnRecord = lambda record: None,
) -> LevelRun:
    """Run one level. Failed requests are recorded, not raised.

    Args:
        duration_s: begin no request after so long; the request set or this must have an end.
        seed: of a random schedule.
        on_record: told of every request as it ends.
    """
    if requests.num_requests is None and duration_s is None:
        raise ValueError("neither the request set nor the duration has an end")
    level = _Level(client, requests, consume, duration_s, on_record)
    async with CostMeter() as meter:
        level.began_s = time.perf_counter()
        if load.concurrency is not None:
            await level.closed(load.concurrency)
        else:
            assert load.request_rate_per_s is not None and load.arrival is not None
            await level.open(schedule(load.request_rate_per_s, load.arrival, seed))
        wall_s = time.perf_counter() - level.began_s
    return LevelRun(tuple(level.records), wall_s, meter.cost)


async def warm_up(client: AsyncTritoneClient, requests: RequestSet, count: int) -> None:
    """Ask the first requests, one after the other and unmeasured.

    Raises:
        TritoneError: one of them fails.
    """
    for number in range(count):
        ask = requests[number]
        await client.ask(ask.prompt, **ask.options)


class _Level:
    """One level while it runs."""

    def __init__(
        self,
        client: AsyncTritoneClient,
        requests: RequestSet,
        consume: Consume,
        duration_s: float | None,
        on_record: OnRecord,
    ):
        self.records: list[RequestRecord] = []
        self.began_s = 0.0
        self._client = client
        self._requests = requests
        self._consume = consume
        self._duration_s = duration_s
        self._on_record = on_record

    async def closed(self, concurrency: int) -> None:
        """`concurrency` callers, each asks, listens to the end and asks again."""
        waiting = enumerate(self._requests)

        async def call_in_turn() -> None:
            for number, ask in waiting:
                if self._is_over(self._elapsed_s()):
                    return
                record = await self._record(number, ask, due_s=self._elapsed_s())
                if record.failure is not None:
                    await asyncio.sleep(RETRY_PAUSE_S)

        async with asyncio.TaskGroup() as callers:
            for _ in range(concurrency):
                callers.create_task(call_in_turn())

    async def open(self, due_times_s: Iterator[float]) -> None:
        """Each request when it is due, however many are under way."""
        async with asyncio.TaskGroup() as listeners:
            for (number, ask), due_s in zip(enumerate(self._requests), due_times_s, strict=False):
                if self._is_over(due_s):
                    return
                await asyncio.sleep(due_s - self._elapsed_s())
                listeners.create_task(self._record(number, ask, due_s))

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self.began_s

    def _is_over(self, at_s: float) -> bool:
        return self._duration_s is not None and at_s >= self._duration_s

    async def _record(self, number: int, ask: Ask, due_s: float) -> RequestRecord:
        record = await _listen(self._client, ask, number, due_s, self.began_s, self._consume)
        self.records.append(record)
        self._on_record(record)
        return record


async def _listen(
    client: AsyncTritoneClient, ask: Ask, number: int, due_s: float, began_s: float, consume: Consume
) -> RequestRecord:
    """Ask, and listen to the end."""
    text: list[float] = []
    audio: list[Arrival] = []
    media: dict[str, float] = {}
    silence = LeadingSilence()
    done: Done | None = None
    failure: Failure | None = None
    end_s: float | None = None  # the stream itself is closed a moment later
    options: RequestOptions = {**ask.options, "return_timings": True}
    events = client.stream(ask.prompt, **options)
    pace = _Pace() if consume == "playback" else None
    sent_s = time.perf_counter()
    try:
        async with asyncio.timeout(LOST_S), aclosing(events):
            async for event in events:
                at_s = time.perf_counter() - sent_s
                match event:
                    case TextDelta():
                        text.append(at_s)
                    case AudioChunk():
                        audio.append(Arrival(at_s, event.duration_s))
                        silence.add(event.samples, event.sample_rate_hz)
                        if pace is not None:
                            await pace.hear(event.duration_s)
                    case Media():
                        media[event.modality] = at_s
                    case Done():
                        done, end_s = event, at_s
    except TritoneError as error:
        failure = Failure(error.code, str(error))
    except TimeoutError:
        failure = Failure("LOST", f"no end within {LOST_S:g} s; see whether the server still runs")
    return RequestRecord(
        number=number,
        due_s=due_s,
        sent_s=sent_s - began_s,
        end_s=time.perf_counter() - sent_s if end_s is None or failure is not None else end_s,
        text=tuple(text),
        audio=tuple(audio),
        media=media,
        leading_silence_s=silence.seconds,
        usage=done.usage if done else {},
        finish_reasons=done.finish_reasons if done else {},
        timings=done.info.get("timings", {}) if done else {},
        failure=failure,
    )


class _Pace:
    """A listener who takes the next chunk only when little is left to be played."""

    def __init__(self) -> None:
        self._played_out_s = 0.0  # on the clock of time.perf_counter

    async def hear(self, duration_s: float) -> None:
        """Take a chunk, and come back when the next one is wanted."""
        now_s = time.perf_counter()
        self._played_out_s = max(self._played_out_s, now_s) + duration_s
        await asyncio.sleep(self._played_out_s - READ_AHEAD_S - now_s)
