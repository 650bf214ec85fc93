"""Minutes under load, a fifth of whose callers leave early: no error, whole answers, flat memory.

32 callers ─► ask, listen to the end ──────────────► is the answer as long as it was asked to be?
             └─ 20 %: leave at a random moment ────► the next request
memory ◄─ a sample a second
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from comparison.memory_used import MemorySampler, is_flat, thirds_mib
from comparison.servers import OURS, Served
from comparison.workload import Workload
from tritone_bench.request_set import RequestSet
from tritone_client.errors import TritoneError
from tritone_client.events import Done

FIRST_GUESS_S = 2.0  # how long an answer takes, until one has told


class Endured(msgspec.Struct):
    """What came of it."""

    side: str
    concurrency: int
    duration_s: float
    whole: int = 0
    left: int = 0
    wrong_length: int = 0  # whole answers that are not as long as was asked
    errors: dict[str, int] = msgspec.field(default_factory=dict)  # by code
    example: str = ""  # the message of one of them
    on_gpu: bool = False
    memory: list[tuple[float, float]] = msgspec.field(default_factory=list)  # seconds, MiB

    @property
    def is_good(self) -> bool:
        return not self.errors and not self.wrong_length and self.whole > 0 and is_flat(self.memory)

    def told(self) -> str:
        where = "GPU memory" if self.on_gpu else "resident memory (no GPU here)"
        thirds = ", ".join(f"{mib:.0f}" for mib in thirds_mib(self.memory))
        faults = f", e.g. {self.example}" if self.example else ""
        return (
            f"{self.side}, {self.duration_s:.0f} s at concurrency {self.concurrency}: {self.whole} whole "
            f"answers, {self.left} left early, {sum(self.errors.values())} errors{faults}, "
            f"{self.wrong_length} of the wrong length; {where} of the three thirds: {thirds} MiB, "
            f"{'flat' if is_flat(self.memory) else 'it grows'}"
        )


async def endure(
    served: Served,
    workload: Workload,
    concurrency: int,
    duration_s: float,
    abort_share: float,
    sample_s: float = 1.0,
) -> Endured:
    """Keep so many callers busy for so long."""
    endured = Endured(served.side, concurrency, duration_s)
    requests = workload.requests(None)
    async with served.client() as client, MemorySampler(served.pid, sample_s) as sampler:
        deadline_s = time.monotonic() + duration_s
        numbers = iter(range(1 << 62))
        chance = random.Random(0)
        pace = [FIRST_GUESS_S]

        async def call_in_turn() -> None:
            while time.monotonic() < deadline_s:
                leaves = chance.random() < abort_share
                leave_s = chance.uniform(0.02, 0.98) * pace[0] if leaves else None
                await _one(client, next(numbers), requests, workload, endured, leave_s, pace)

        async with asyncio.TaskGroup() as callers:
            for _ in range(concurrency):
                callers.create_task(call_in_turn())
    endured.memory, endured.on_gpu = sampler.samples, sampler.on_gpu
    return endured


async def _one(
    client: Any,
    number: int,
    requests: RequestSet,
    workload: Workload,
    endured: Endured,
    leave_s: float | None,
    pace: list[float],
) -> None:
    """One request. pace: how long the last whole answer took, in a list of one."""
    ask = requests[number]
    began_s = time.monotonic()
    done: Done | None = None
    try:
        async with asyncio.timeout(leave_s), aclosing(client.stream(ask.prompt, **ask.options)) as events:
            async for event in events:
                if isinstance(event, Done):
                    done = event
    except TimeoutError:
        endured.left += 1
        return
    except TritoneError as error:
        endured.errors = dict(Counter(endured.errors) + Counter([error.code]))
        endured.example = str(error)
        await asyncio.sleep(0.1)  # one that refuses at once is not asked thousands of times
        return
    pace[0] = time.monotonic() - began_s
    endured.whole += 1
    if endured.side == OURS and done is not None:
        usage = done.usage
        lengths = (usage.get("completion_tokens"), usage.get("codec_frames"))
        endured.wrong_length += lengths != (workload.text_tokens, workload.frames)


def write(file: Path, endured: Endured) -> None:
    file.write_bytes(msgspec.json.format(msgspec.json.encode(endured), indent=1))


def read(file: Path) -> Endured | None:
    return msgspec.json.decode(file.read_bytes(), type=Endured) if file.is_file() else None
