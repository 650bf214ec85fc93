"""The parts of a soak run in which nothing breaks: load, limits, leaving and slow listeners."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import asdict, replace
from typing import Protocol

from soak_http import leave_at_first_sound
from soak_listener import Job, all_of, listen
from soak_report import Report, spread
from soak_watch import Reading, processor_s, read, read_blocks, slopes
from tritone.allocator import GIVE_BACK_EVERY_S
from tritone_client import AsyncTritoneClient

PIPELINE = "fake"
QUIET_S = 20.0
TRITONSERVER_KIB = 0.1  # a request: its own heap, which nothing of ours can trim, keeps what once piled up
CHUNK_2_S = 100  # codec frames


class Server(Protocol):
    """What a part needs of one."""

    process: object  # with a pid; everything of the server is below it
    http_url: str
    metrics_url: str

    def client(self, pipeline: str) -> AsyncTritoneClient: ...


def mixed_jobs(rng: random.Random, count: int, first_seed: int = 0) -> list[Job]:
    """Answers of 3 to 40 words, quick and slow, with and without ballast between the stages."""
    jobs = []
    for seed in range(first_seed, first_seed + count):
        words, frames = rng.randint(3, 40), rng.randint(1, 4)
        prompt = f"words={words} frames_per_word={frames} pace_ms={rng.choice((0, 0, 1, 5))}"
        if rng.random() < 0.3:
            prompt += f" payload_bytes={rng.choice((100, 8192, 100_000))}"
        jobs.append(Job(prompt, seed, rng.choice(("s16", "f32"))))
    return jobs


async def quiet(client: AsyncTritoneClient, report: Report, within_s: float = QUIET_S) -> float:
    """Seconds until no stage holds a session; a problem when some hold theirs for longer."""
    began = time.monotonic()
    while True:
        stages = await client.ping(within_s)
        active = {
            name: sum(engine.get("active", 0) for engine in state["engines"])
            for name, state in stages.items()
        }
        if not any(active.values()):
            return time.monotonic() - began
        if time.monotonic() - began > within_s:
            report.problems.append(f"sessions are left: {active}")
            return time.monotonic() - began
        await asyncio.sleep(0.02)


async def load(server: Server, requests: int = 2000, at_once: int = 64) -> Report:
    report = Report("a", f"{requests} requests, {at_once} at a time")
    async with server.client(PIPELINE) as client:
        began, worked_s = time.monotonic(), processor_s(server.process.pid)
        outcomes = await all_of(client, mixed_jobs(random.Random(1), requests), at_once)
        wall_s, worked_s = time.monotonic() - began, processor_s(server.process.pid) - worked_s
        await quiet(client, report)
    report.judge(outcomes)
    report.require(report.figures.get("exact") == requests, f"not {requests} exact answers")
    report.figures |= {
        "frames, each accounted for": sum(outcome.frames for outcome in outcomes),
        "wall_s": wall_s,
        "requests_per_s": requests / wall_s,
        "processor_ms_per_request": 1000 * worked_s / requests,
        "first_sound_s": spread(outcome.first_s for outcome in outcomes if outcome.first_s is not None),
        "answer_s": spread(outcome.total_s for outcome in outcomes),
    }
    return report


async def memory(
    server: Server,
    requests: int = 5000,
    aborted: int = 1000,
    warm_up: int = 500,
    at_once: int = 32,
    allowed_kib: float = 0.016,
    allowed_blocks: float = 0.05,
    num_readings: int = 20,
    settle_s: float = GIVE_BACK_EVERY_S + 4,
) -> Report:
    """allowed_kib, allowed_blocks: growth a request that is no problem, whatever its error: 20 pages and 250
    of Python's blocks in 5,000. For tritonserver itself, see TRITONSERVER_KIB.
    settle_s: before each reading, so that the processes have given back what they freed, and have said so.
    """
    report = Report("b", f"memory over {requests} requests, {aborted} of them left at random points")
    rng = random.Random(2)
    early = _left_at_times(rng, mixed_jobs(rng, warm_up), warm_up * aborted // requests)
    jobs = _left_at_times(rng, mixed_jobs(rng, requests, first_seed=warm_up), aborted)
    block = max(requests // num_readings, at_once)
    counts, readings, alive = [], list[Reading](), list[dict[str, float]]()
    async with server.client(PIPELINE) as client:
        report.judge(await all_of(client, early, at_once), ("exact", "left"))
        report.figures.clear()
        for begin in range(0, requests, block):
            outcomes = await all_of(client, jobs[begin : begin + block], at_once)
            report.judge(outcomes, ("exact", "left"))
            await quiet(client, report)
            await asyncio.sleep(settle_s)
            counts.append(begin + len(outcomes))
            readings.append(read(server.process.pid))
            alive.append(read_blocks(server.metrics_url))
    first, last = readings[0], readings[-1]
    report.series = [
        [count, {**asdict(reading), "blocks": blocks}]
        for count, reading, blocks in zip(counts, readings, alive, strict=True)
    ]
    report.require(len(alive[0]) >= 8 and alive[0].keys() == alive[-1].keys(), "live blocks are not told")
    held = [reading.held_kib for reading in readings]
    for unit, series, allowed in (("KiB", held, allowed_kib), ("blocks", alive, allowed_blocks)):
        half = len(counts) // 2
        late = slopes(counts[half:], series[half:])
        for name, found in slopes(counts, series).items():
            report.figures[f"{name}, {unit} a request"] = f"{found}; of the last half {late[name]}"
            most = max(allowed, TRITONSERVER_KIB) if name == "tritonserver" else allowed
            report.require(not found.exceeds(most), f"{name} grows by {found} {unit} a request")
    all_kib = sum(first.rss_kib.values()), sum(last.rss_kib.values())
    report.figures["all processes, MiB"] = f"{all_kib[0] / 1024:.1f} -> {all_kib[1] / 1024:.1f}"
    report.figures["/dev/shm, MiB"] = f"{first.shm_kib / 1024:.1f} -> {last.shm_kib / 1024:.1f}"
    report.figures["descriptors"] = f"{first.descriptors} -> {last.descriptors}"
    report.figures["threads"] = f"{first.threads} -> {last.threads}"
    return report


def _left_at_times(rng: random.Random, jobs: list[Job], aborted: int) -> list[Job]:
    """The same, so many of them left at random points."""
    leaving = set(rng.sample(range(len(jobs)), aborted))
    return [
        replace(job, leave_after_s=rng.uniform(0.001, 0.3)) if number in leaving else job
        for number, job in enumerate(jobs)
    ]


async def aborts(
    server: Server,
    aborted: int = 1000,
    by_http: int = 200,
    at_once: int = 16,
    free_within_s: float = 0.5,
) -> Report:
    """free_within_s: of the last leaver, for all stages; a machine that does much else needs more."""
    report = Report("c", f"{aborted} + {by_http} (HTTP) listeners leave after the first chunk, then 10 stay")
    prompt = "words=20000 pace_ms=5"
    async with server.client(PIPELINE) as client:
        began = time.monotonic()
        leavers = [Job(prompt, seed, leave_after_chunks=1) for seed in range(aborted)]
        report.judge(await all_of(client, leavers, at_once), ("left",))
        for begin in range(0, by_http, at_once):
            seeds = range(begin, min(begin + at_once, by_http))
            heard = await asyncio.gather(
                *(leave_at_first_sound(server.http_url, PIPELINE, prompt, seed) for seed in seeds)
            )
            report.require(all(heard), "a listener over HTTP heard nothing")
        report.figures["wall_s"] = time.monotonic() - began
        free_after_s = await quiet(client, report)
        report.figures["stages_free_after_s"] = free_after_s
        report.require(free_after_s < free_within_s, f"stages were not free within {free_within_s:g} s")
        report.judge(await all_of(client, mixed_jobs(random.Random(3), 10, aborted), 10))
    report.require(report.figures.get("left") == aborted, f"not {aborted} left")
    report.require(report.figures.get("exact") == 10, "not 10 exact answers after them")
    return report


async def admission(server: Server, times: int = 4) -> Report:
    """`max_in_flight` of the pipeline, and so many times as many requests at once.

    Those that are let in listen until all others were refused; then as many are answered whole.
    """
    async with server.client(PIPELINE) as client:
        limit = int((await client.limits())["max_in_flight"])
        report = Report("d", f"{times * limit} requests at once, {limit} allowed")
        leave, outcomes = asyncio.Event(), []

        async def ask(seed: int) -> None:
            outcomes.append(await listen(client, Job("words=20000 pace_ms=100", seed, leave=leave)))
            if len(outcomes) == (times - 1) * limit:
                leave.set()

        await asyncio.gather(*map(ask, range(times * limit)))
        report.figures["stages_free_after_s"] = await quiet(client, report)
        report.judge(await all_of(client, mixed_jobs(random.Random(6), limit), limit))
    report.judge(outcomes, ("left", "refused"))
    refused = [outcome for outcome in outcomes if outcome.kind == "refused"]
    report.require(report.figures.get("left") == limit, f"not {limit} were let in")
    report.require(report.figures.get("exact") == limit, f"not {limit} exact answers after them")
    named = sum(f"max_in_flight is {limit}" in outcome.detail for outcome in refused)
    report.require(named == len(refused), "a refusal does not name the limit")
    report.figures["refused_after_s"] = spread(outcome.total_s for outcome in refused)
    return report


async def paced(server: Server, listeners: int = 16, chunks: int = 5, pace: float = 1.0) -> Report:
    """pace: of a listener's clock; 1 plays sound as it is."""
    report = Report("f", f"{listeners} listeners play {chunks} chunks of 2 s")
    sizes = {"initial_codec_chunk_frames": CHUNK_2_S, "codec_chunk_frames": CHUNK_2_S}
    prompt = f"words={chunks * CHUNK_2_S // 4} frames_per_word=4 pace_ms=1"
    jobs = [Job(prompt, seed, pace=pace, parameters=sizes) for seed in range(listeners)]
    async with server.client(PIPELINE) as client:
        outcomes = await all_of(client, jobs, listeners)
        await quiet(client, report)
    report.judge(outcomes)
    report.require(report.figures.get("exact") == listeners, f"not {listeners} exact answers")
    report.figures["answer_s"] = spread(outcome.total_s for outcome in outcomes)
    report.figures["chunks"] = sum(outcome.chunks for outcome in outcomes)
    return report


async def slow(server: Server, seconds: float = 60.0, readers: int = 4) -> Report:
    """Each reads a chunk a second of a stage that makes 50 in a second: half a second of sound each."""
    report = Report("g", f"{readers} readers of a chunk a second, made at 50 a second, for {seconds:g} s")
    sizes = {"initial_codec_chunk_frames": 25, "codec_chunk_frames": 25}
    prompt = "words=100000 frames_per_word=25 pace_ms=20"
    jobs = [
        Job(prompt, seed, leave_after_s=seconds, pause_s=1.0, parameters=sizes) for seed in range(readers)
    ]
    async with server.client(PIPELINE) as client:
        report.judge(await all_of(client, mixed_jobs(random.Random(4), 8 * readers), 2 * readers))
        report.figures.clear()
        before, made = read(server.process.pid), await _frames_made(client)
        listening = asyncio.gather(*(listen(client, job) for job in jobs))
        most: dict[str, float] = {}
        while not listening.done():
            await asyncio.wait({listening}, timeout=seconds / 30)
            now = read(server.process.pid)
            for name, kib in {**now.rss_kib, "/dev/shm": now.shm_kib}.items():
                most[name] = max(most.get(name, 0.0), kib)
        outcomes = await listening
        made = await _frames_made(client) - made
        report.figures["stages_free_after_s"] = await quiet(client, report)
    report.judge(outcomes, ("left",))
    report.figures["chunks read"] = sum(outcome.chunks for outcome in outcomes)
    report.figures["chunks made"] = made // 25
    for name, held in {**before.rss_kib, "/dev/shm": before.shm_kib}.items():
        if name in most:
            report.figures[f"{name}, MiB at most"] = f"{held / 1024:.1f} -> {most[name] / 1024:.1f}"
    grown = sum(most.values()) - sum(before.rss_kib.values()) - before.shm_kib
    report.figures["growth, MiB a reader"] = grown / 1024 / readers
    return report


async def _frames_made(client: AsyncTritoneClient) -> int:
    return sum(engine["frames"] for engine in (await client.ping())["wave"]["engines"])
