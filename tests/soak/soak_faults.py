"""The parts of a soak run in which something breaks: who is told what, how soon, and when all is well."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence

from soak_listener import Job, Outcome, all_of, listen
from soak_load import PIPELINE, Server, mixed_jobs, quiet
from soak_report import Report, spread
from soak_server import SoakServer
from soak_watch import engines, tree
from tritone_client import AsyncTritoneClient

STAGES = ("writer", "singer", "wave")
RECOVERY_S = 60.0
PATIENCE_S = 45.0
CLEAR = ("UNAVAILABLE",)  # codes with which a request may end when its engine dies


async def until_well(client: AsyncTritoneClient, seed: int, report: Report) -> float:
    """Seconds until a short answer is exact again."""
    began = time.monotonic()
    while True:
        outcome = await listen(client, Job("words=2 pace_ms=0", seed), PATIENCE_S)
        took_s = time.monotonic() - began
        if outcome.kind == "exact":
            return took_s
        if outcome.kind not in ("error", "refused") or took_s > RECOVERY_S:
            report.problems.append(
                f"not well {took_s:.1f} s after the fault: {outcome.kind} {outcome.detail}"
            )
            return took_s
        await asyncio.sleep(0.02)


async def one_fault(
    server: Server,
    kind: str,
    stage: str,
    repeats: int = 5,
    bystanders: int = 4,
    told_within_s: float = PATIENCE_S,
) -> Report:
    """A request breaks a stage at its middle, while others are under way."""
    report = Report("i", f"{kind} in {stage}, {repeats} times")
    words, pace_ms, strike = 40, 20, 20
    at = strike * (3 if stage == "wave" else 1)
    told, well, others = list[float](), list[float](), Counter[str]()
    async with server.client(PIPELINE) as client:
        for number in range(repeats):
            calm = f"words={words} pace_ms={pace_ms}"
            jobs = [Job(f"{calm} {kind}={stage}@{at}", 10 * number)]
            jobs += [Job(calm, 10 * number + other) for other in range(1, bystanders + 1)]
            faulty, *rest = await asyncio.gather(*(listen(client, job, PATIENCE_S) for job in jobs))
            well.append(await until_well(client, 10 * number, report))
            told.append(faulty.total_s - strike * pace_ms / 1000)
            report.judge([faulty], ("error",))
            report.judge(rest, ("exact", "error"))
            others.update(_end(outcome) for outcome in rest)
        await quiet(client, report)
    report.require(max(told) < told_within_s, f"it was told after {max(told):.2f} s")
    report.figures = {
        "told_after_s": spread(told),
        "well_again_after_s": spread(well),
        "others": dict(others),
        "message": faulty.detail,
    }
    return report


def _end(outcome: Outcome) -> str:
    return f"{outcome.kind} {outcome.code}".strip()


async def doors(server: SoakServer, repeats: int = 3, told_within_s: float = 5.0) -> Report:
    """kill -9 of the stub of each model under load: health must follow, and all be well again."""
    models = [PIPELINE, *(f"{PIPELINE}_{stage}" for stage in STAGES)]
    report = Report("l", f"kill -9 of the stub of each of {len(models)} models, {repeats} times")
    told, well = list[float](), list[float]()
    async with server.client(PIPELINE) as client:
        for number, model in enumerate(models * repeats):
            jobs = [Job("words=2000 pace_ms=20", seed) for seed in range(4)]
            listening = [asyncio.create_task(listen(client, job, RECOVERY_S)) for job in jobs]
            await asyncio.sleep(0.5)
            report.require(await asyncio.to_thread(is_healthy, server), f"not well before {model} is killed")
            [pid] = [pid for pid, name in tree(server.process.pid).items() if name == f"stub {model}"]
            os.kill(pid, signal.SIGKILL)
            began = time.monotonic()
            while await asyncio.to_thread(is_healthy, server) and time.monotonic() - began < RECOVERY_S:
                await asyncio.sleep(0.01)
            told.append(time.monotonic() - began)
            well.append(await until_well(client, number, report))
            while not await asyncio.to_thread(is_healthy, server) and time.monotonic() - began < RECOVERY_S:
                await asyncio.sleep(0.01)
            report.require(await asyncio.to_thread(is_healthy, server), f"health stays away after {model}")
            # Streams that the stub has no part in go on.
            for listener in listening:
                listener.cancel()
            ended = await asyncio.gather(*listening, return_exceptions=True)
            report.judge([end for end in ended if isinstance(end, Outcome)], ("error",))
    report.require(max(told) < told_within_s, f"health told it after {max(told):.1f} s")
    report.figures |= {"health_told_after_s": spread(told), "well_again_after_s": spread(well)}
    return report


def is_healthy(server: SoakServer) -> bool:
    try:
        with urllib.request.urlopen(f"{server.health_url}/ready", timeout=5):
            return True
    except urllib.error.HTTPError:
        return False


async def kills(
    server: Server,
    seconds: float = 60.0,
    at_once: int = 8,
    part: str = "h",
    allowed: Sequence[str] = ("exact", "left", "error", "refused"),
    least_kills: int = 1,
) -> Report:
    """Mixed traffic, and now and then one engine is killed -9. allowed: how its requests may end.

    least_kills: it goes on until so many were killed, however long that takes.
    """
    report = Report(part, f"mixed traffic for {seconds:g} s with random kills of engines")
    rng = random.Random(5)
    end = time.monotonic() + seconds
    outcomes, recoveries, killed = list[Outcome](), list[float](), list[tuple[float, str]]()

    def goes_on() -> bool:
        return time.monotonic() < end or len(killed) < least_kills

    async def traffic(client: AsyncTritoneClient, number: int) -> None:
        seeds = iter(range(number * 1_000_000, (number + 1) * 1_000_000))
        while goes_on():
            [job] = mixed_jobs(rng, 1, next(seeds))
            if rng.random() < 0.1:
                job = Job(job.prompt, job.seed, leave_after_s=rng.uniform(0.01, 0.3))
            outcomes.append(await listen(client, job, PATIENCE_S))
            if outcomes[-1].kind == "error":
                await asyncio.sleep(0.1)

    async def killer(client: AsyncTritoneClient) -> None:
        while goes_on():
            pid, name = rng.choice(list(engines(server.process.pid).items()))
            os.kill(pid, signal.SIGKILL)
            killed.append((time.monotonic(), name))
            recoveries.append(await until_well(client, 77, report))
            await asyncio.sleep(rng.uniform(1, 4))

    async with server.client(PIPELINE) as client:
        async with asyncio.TaskGroup() as group:
            for number in range(1, at_once + 1):
                group.create_task(traffic(client, number))
            group.create_task(killer(client))
        await until_well(client, 78, report)
        report.figures["stages_free_after_s"] = await quiet(client, report)
        report.judge(await all_of(client, mixed_jobs(rng, 10), 10))
    report.judge(outcomes, allowed)
    errors = [outcome for outcome in outcomes if outcome.kind == "error"]
    for outcome in errors:
        report.require(outcome.code in CLEAR, f"an error is not clear: {outcome.code} {outcome.detail}")
    report.figures |= {
        "kills": dict(Counter(name for _, name in killed)),
        "errors": dict(Counter(outcome.detail.partition(";")[0] for outcome in errors)),
        "told_after_s": spread(_delays(errors, [at for at, _ in killed])),
        "well_again_after_s": spread(recoveries),
    }
    return report


def _delays(errors: list[Outcome], killed_s: list[float]) -> list[float]:
    """From the last kill before an error to it, for requests that were under way when it happened."""
    delays = []
    for outcome in errors:
        ended_s = outcome.began_s + outcome.total_s
        before = [at for at in killed_s if outcome.began_s < at < ended_s]
        if before:
            delays.append(ended_s - before[-1])
    return delays
