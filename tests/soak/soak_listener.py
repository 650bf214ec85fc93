"""One request of a soak run: asked, listened to, and judged by what its sound and text say.

Every word and every frame that came is checked; what a listener did not wait for is not missed.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tritone.pipelines.fake.orders import Orders
from tritone.pipelines.fake.signal import decode, voice_of
from tritone_client import AsyncTritoneClient, AudioChunk, Done, TextDelta, TritoneError, Unavailable

PATIENCE_S = 60.0  # for one answer; then it hangs


@dataclass(frozen=True)
class Job:
    """What to ask, and how to listen."""

    prompt: str
    seed: int
    audio_format: str = "s16"
    leave_after_chunks: int | None = None  # of sound, then the listener leaves
    leave_after_s: float | None = None
    leave: asyncio.Event | None = None  # once it is set, with the next that comes
    pace: float = 0.0  # after a chunk the listener waits for so many times its length
    pause_s: float = 0.0  # and for so long
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    job: Job
    kind: str  # exact, left, refused, error; wrong and hung are never allowed
    detail: str = ""
    code: str = ""  # of an error
    chunks: int = 0
    frames: int = 0
    began_s: float = 0.0  # time.monotonic()
    first_s: float | None = None  # until the first sound
    total_s: float = 0.0


class _Left(Exception):
    """The listener has heard enough."""


class Heard:
    """What came so far."""

    def __init__(self) -> None:
        self.text = ""
        self.chunks: list[np.ndarray] = []
        self.first_s: float | None = None
        self.done: Done | None = None

    def faults(self, job: Job) -> dict[str, str]:
        """What is wrong with it; an answer without its end is judged as far as it goes."""
        orders, voice = Orders.read(job.prompt), voice_of(job.seed)
        samples = np.concatenate(self.chunks) if self.chunks else np.zeros(0, np.float32)
        faults = decode(samples).faults(voice, orders.num_frames if self.done else None)
        text = orders.text(voice)
        if self.text != (text if self.done else text[: len(self.text)]):
            faults["text"] = f"'{self.text[-60:]}'"
        if self.done and set(self.done.finish_reasons.values()) != {"stop"}:
            faults["reason"] = str(dict(self.done.finish_reasons))
        return faults


async def listen(client: AsyncTritoneClient, job: Job, patience_s: float = PATIENCE_S) -> Outcome:
    """Ask and judge; raises nothing."""
    heard, began = Heard(), time.monotonic()
    kind, detail, code = "exact", "", ""
    try:
        async with asyncio.timeout(job.leave_after_s or patience_s):
            await _hear(client, job, heard, began)
    except _Left:
        kind = "left"
    except TimeoutError:
        kind = "left" if job.leave_after_s else "hung"
    except TritoneError as error:
        kind = "refused" if isinstance(error, Unavailable) and "max_in_flight" in str(error) else "error"
        detail, code = str(error), error.code
    total_s = time.monotonic() - began
    faults = heard.faults(job)
    if faults:
        kind, detail = "wrong", f"{kind}: {faults}"
    frames = sum(map(len, heard.chunks)) // 320
    return Outcome(job, kind, detail, code, len(heard.chunks), frames, began, heard.first_s, total_s)


async def _hear(client: AsyncTritoneClient, job: Job, heard: Heard, began: float) -> None:
    options: dict[str, Any] = {"seed": job.seed, "audio_format": job.audio_format}
    async with aclosing(client.stream(job.prompt, parameters=job.parameters, **options)) as events:
        async for event in events:
            if job.leave is not None and job.leave.is_set():
                raise _Left
            match event:
                case TextDelta():
                    heard.text += event.text
                case AudioChunk():
                    if heard.first_s is None:
                        heard.first_s = time.monotonic() - began
                    heard.chunks.append(event.samples)
                    if len(heard.chunks) == job.leave_after_chunks:
                        raise _Left
                    await asyncio.sleep(job.pause_s + job.pace * event.duration_s)
                case Done():
                    heard.done = event


async def all_of(client: AsyncTritoneClient, jobs: list[Job], at_once: int) -> list[Outcome]:
    """Every outcome, in the order of the jobs' ends, with `at_once` jobs under way at a time."""
    waiting, outcomes = iter(jobs), list[Outcome]()

    async def listener() -> None:
        for job in waiting:
            outcomes.append(await listen(client, job))

    async with asyncio.TaskGroup() as listeners:
        for _ in range(at_once):
            listeners.create_task(listener())
    return outcomes
