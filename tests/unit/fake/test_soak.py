"""The judge of the soak runs: a right answer passes, every wrong one is caught, growth is told from noise."""

import asyncio
import os
import subprocess
import sys
from urllib.parse import quote

import numpy as np
import pytest

from soak_listener import Job, all_of, listen
from soak_report import Report, spread
from soak_watch import Slope, processor_s, processors_s, read, read_blocks, slope, slopes, tree
from tritone.audio import to_s16
from tritone.pipelines.fake.orders import Orders
from tritone.pipelines.fake.signal import encode, voice_of
from tritone_client import AudioChunk, Done, InvalidRequest, TextDelta, Timings, Unavailable
from waiting import PATIENCE_S

SEED = 12
VOICE = voice_of(SEED)
JOB = Job("words=4 frames_per_word=2", SEED)
DONE = Done({"text": "stop", "audio": "stop"}, {}, {}, SEED, {}, Timings(None, None, 1.0, 1.0, 1.0), 9)


def sound(numbers):
    samples = encode(np.array([[VOICE, number] for number in numbers], np.int32))
    return AudioChunk(to_s16(samples), 16000, 0, 1)


def text(words=4):
    return TextDelta(Orders(words=words).text(VOICE), 0)


class Client:
    """Gives what it was told to, whatever is asked."""

    def __init__(self, *events):
        self._events = events

    async def stream(self, prompt, **options):
        for event in self._events:
            if isinstance(event, Exception):
                raise event
            await asyncio.sleep(0)
            if event == "hang":
                await asyncio.Event().wait()
            yield event


FULL = Unavailable("max_in_flight is 4 and as many requests are in flight; try again later")


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ((text(), sound(range(8)), DONE), "exact"),
        ((text(), sound(range(3)), sound(range(3, 8)), DONE), "exact"),
        ((text(), sound(range(7)), DONE), "wrong"),
        ((text(3), sound(range(8)), DONE), "wrong"),
        ((text(), sound([0, 2, 1, *range(3, 8)]), DONE), "wrong"),
        ((sound(range(3)), Unavailable("the engine died")), "error"),
        ((sound([1, 2]), Unavailable("the engine died")), "wrong"),
        ((FULL,), "refused"),
        ((InvalidRequest("no"),), "error"),
        ((sound(range(2)), "hang"), "hung"),
    ],
)
async def test_an_answer_is_judged(events, kind):
    outcome = await listen(Client(*events), JOB, patience_s=0.2 if kind == "hung" else PATIENCE_S)
    assert outcome.kind == kind, outcome


async def test_one_who_leaves_is_told_from_one_who_waits_in_vain():
    client = Client(sound(range(2)), sound(range(2, 4)), "hang")
    leaves = Job(JOB.prompt, SEED, leave_after_chunks=1)
    assert (await listen(client, leaves, PATIENCE_S)).chunks == 1
    assert (await listen(client, Job(JOB.prompt, SEED, leave_after_s=0.1), PATIENCE_S)).kind == "left"
    assert (await listen(client, JOB, 0.1)).kind == "hung"


async def test_all_jobs_end_and_not_more_than_allowed_run_at_once():
    running = most = 0

    class Counting(Client):
        async def stream(self, prompt, **options):
            nonlocal running, most
            running += 1
            most = max(most, running)
            async for event in super().stream(prompt, **options):
                yield event
            running -= 1

    outcomes = await all_of(Counting(text(), sound(range(8)), DONE), [JOB] * 20, at_once=3)
    assert [outcome.kind for outcome in outcomes] == ["exact"] * 20 and most == 3


async def test_a_report_keeps_what_must_not_be():
    good = await listen(Client(text(), sound(range(8)), DONE), JOB, PATIENCE_S)
    bad = await listen(Client(text(), DONE), JOB, PATIENCE_S)
    report = Report("a", "a part")
    report.judge([good, bad, bad])
    assert report.figures == {"exact": 1, "wrong": 2} and len(report.problems) == 2
    assert "truncated" in str(report) and "FAILED" in str(report)
    assert spread([3, 1, 2]) == "2 (1 – 3, n 3)" and spread([]) == "-"


def test_growth_is_told_from_noise():
    rng = np.random.default_rng(0)
    requests = np.arange(0, 5000, 100)
    noise = rng.normal(0, 200, len(requests))
    flat, growing = slope(requests, 5000 + noise), slope(requests, 5000 + 0.5 * requests + noise)
    assert not flat.exceeds(0.1) and growing.exceeds(0.1)
    assert growing.per_request == pytest.approx(0.5, abs=3 * growing.error) and growing.error < 0.05


def test_growth_beyond_twice_its_error_is_no_noise():
    assert Slope(0.21, 0.1).exceeds(0.01) and not Slope(0.19, 0.1).exceeds(0.01)
    assert not Slope(0.009, 0.001).exceeds(0.01) and not Slope(-0.5, 0.1).exceeds(0.01)


def test_slopes_are_of_what_was_there_all_along():
    found = slopes([0, 1, 2], [{"a": 1, "b": 5}, {"a": 3}, {"a": 5, "c": 7}])
    assert found.keys() == {"a"} and found["a"].per_request == pytest.approx(2)


def test_live_blocks_are_read_from_the_metrics_of_a_server():
    page = """# TYPE tritone_pipeline_blocks gauge
tritone_pipeline_blocks{model="fake",pipeline="fake"} 159548
tritone_pipeline_blocks{model="fake_sync",pipeline="fake"} 158154
tritone_stage_door_blocks{instance="cpu/0",pipeline="fake",stage="wave"} 155845
tritone_stage_engine_blocks{instance="cpu/0",pipeline="fake",stage="wave"} 150555
tritone_stage_sessions{instance="cpu/0",pipeline="fake",stage="wave"} 3
"""
    assert read_blocks(f"data:,{quote(page)}") == {
        "pipeline fake": 159548,
        "pipeline fake_sync": 158154,
        "stage door wave cpu/0": 155845,
        "stage engine wave cpu/0": 150555,
    }
    assert read_blocks("data:,") == {}


def test_a_tree_of_processes_is_read():
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input(1)'])"
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout.read(1) == b"1"
        found = read(process.pid)
        assert os.getpid() not in tree(process.pid)
        assert len(found.rss_kib) == 2 and min(found.rss_kib.values()) > 0 and found.threads >= 2
    finally:
        process.communicate(b"\n")


def test_the_processor_time_of_a_tree_is_that_of_all_in_it():
    busy = (
        "import time\nwhile time.process_time() < 0.3: pass\nprint(time.process_time(), flush=True)\ninput()"
    )
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        told_s = float(process.stdout.readline())
        times = processors_s(process.pid)
        assert told_s <= sum(times.values()) < told_s + 5
        assert processor_s(process.pid) >= sum(times.values())
    finally:
        process.communicate("\n")
    assert processors_s(process.pid) == {}
