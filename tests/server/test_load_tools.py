"""perf_analyzer against the fake pipeline over every protocol, and profiles of its processes meanwhile."""

import asyncio
import re
import statistics
import subprocess
import sys
from pathlib import Path

import perf_analyzer_binary
import pytest

from perf_analyzer.figures import figures
from perf_analyzer.recipe import RECIPES, Load, PerfAnalyzer, Target, inputs_of
from tritone.pipelines.fake.signal import decode, voice_of
from tritone_client import ServerFault

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]
PACED = {"text_input": ["words=10 pace_ms=20 frames_per_word=6"]}
PACE_S = 0.02


@pytest.fixture(scope="module")
def server(serve):
    return serve("fake", overrides=("profiling=true",))


@pytest.fixture(scope="module")
def analyzer(server):
    """analyzer(questions) is perf_analyzer against the server; fetched if this machine has none."""
    program = perf_analyzer_binary.fetch()
    target = Target(server.grpc_url, server.http_url.removeprefix("http://"))
    environment = perf_analyzer_binary.environment(program)
    return lambda questions: PerfAnalyzer(program, "fake", target, questions, environment)


# -- perf_analyzer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_request_of_the_ready_inputs_fails(analyzer, tmp_path, recipe):
    [level] = analyzer(inputs_of("fake")).run(recipe, Load(3, num_requests=12), tmp_path / "e.json").levels
    assert (level.mode, level.value, len(level.answers)) == ("concurrency", 3, 12)
    assert [answer.error for answer in level.answers if answer.error] == []
    assert {(answer.num_tokens, answer.audio_s) for answer in level.answers} <= {
        (40, 2.4),
        (20, 2.4),
        (10, 0.6),
        (40, 0.0),
    }


def test_nor_at_a_rate(analyzer, tmp_path):
    [level] = analyzer([PACED]).run("grpc", Load(None, 8, num_requests=12), tmp_path / "e.json").levels
    assert (level.mode, level.value) == ("request_rate", 8)
    measured = figures(level)
    assert measured.num_requests == 12 and measured.errors == {}
    sent_s = sorted(answer.sent_s for answer in level.answers)
    assert sent_s[-1] - sent_s[0] >= 0.1 * 11 / 8


def test_make_perf_prints_its_table_and_ours(server):
    words = [f"--url={server.grpc_url}", f"--http={server.http_url}", "--recipes=grpc", "--concurrency=2"]
    script = ROOT / "build" / "perf.py"
    done = subprocess.run(
        [sys.executable, script, "--pipeline=fake", *words, "--rate=0", "--requests=4"],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert "p50 latency" in done.stdout and "TTFP, ms: p50 / p90 / p99" in done.stdout
    assert re.search(r"requests / failed +4 / 0\n", done.stdout)


async def test_its_figures_are_those_of_our_own_client(server, analyzer, tmp_path):
    async def ours():
        async with server.client("fake") as client:
            return [(await client.ask(PACED["text_input"][0])).done.measured for _ in range(4)]

    measured = await ours()
    levels = analyzer([PACED]).run("grpc", Load(1, num_requests=8), tmp_path / "e.json").levels
    measured += await ours()
    theirs = figures(levels[0])
    e2el_s, ttft_s = theirs.spread["E2EL"][0], theirs.spread["TTFT"][0]
    assert e2el_s > 9 * PACE_S and ttft_s < theirs.spread["TTFP"][0] < e2el_s
    assert 0.1 < e2el_s / statistics.median(one.e2el_s for one in measured) < 10, "in one unit"
    assert 0 < theirs.spread["TPOT"][0] < e2el_s / 9
    assert {answer.audio_s for answer in levels[0].answers} == {one.audio_s for one in measured} == {1.2}
    assert theirs.spread["RTF"][0] == pytest.approx(e2el_s / 1.2)


def test_requests_that_fail_are_seen(analyzer, tmp_path):
    failing = analyzer([{"text_input": ["words=10 pace_ms=2 fail=singer@5"]}])
    for recipe in ("grpc", "http"):
        with pytest.raises(ServerFault, match="gave up: TRITONE_INTERNAL: fail@5 was ordered"):
            failing.run(recipe, Load(2, num_requests=4), tmp_path / "e.json")
    [level] = failing.run("sse", Load(2, num_requests=4), tmp_path / "e.json").levels
    assert set(figures(level).errors) == {"TRITONE_INTERNAL: fail@5 was ordered; leave it out of the prompt"}
    assert sum(figures(level).errors.values()) == 4


# -- tritone profile ---------------------------------------------------------------------------------------


@pytest.fixture
def profile(server, tmp_path):
    """await profile(file, *words): (exit status, what it says on stderr, the file's bytes)."""

    async def take(file, *words):
        out = tmp_path / file
        command = ["profile", "fake", *words, f"--out={out}", f"--pid={server.process.pid}"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tritone", *command, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(200):
            _, said = await process.communicate()
        if b"CAP_SYS_PTRACE" in said:
            pytest.skip(said.decode())
        return process.returncode, said.decode(), out.read_bytes() if out.exists() else b""

    return take


async def speak_until(server, end):
    """Ask until a task is done; every answer is exact. How many there were."""
    num_answers = 0
    async with server.client("fake") as client:
        while not end.done():
            answer = await client.ask("words=30 pace_ms=1", seed=num_answers)
            assert decode(answer.samples).faults(voice_of(num_answers), 90) == {}
            num_answers += 1
    return num_answers


async def test_an_engine_seen_by_py_spy_serves_on(server, profile):
    flames = asyncio.create_task(profile("writer.svg", "writer", "--kind=py-spy", "--seconds=2"))
    assert await speak_until(server, flames) >= 1
    status, said, data = await flames
    assert status == 0, said
    assert b"<svg" in data and b"StageLoop" in data


async def test_two_profiles_of_a_process_at_once_are_refused(server, profile):
    for seconds in (5, 20, 60):  # the two commands may start a while apart
        words = ("orchestrator", "--kind=py-spy", f"--seconds={seconds}")
        first, second = [asyncio.create_task(profile(f"{n}.json", *words)) for n in range(2)]
        both = asyncio.gather(first, second)
        await speak_until(server, both)
        statuses = sorted((status, said) for status, said, _ in await both)
        if statuses[1][0]:
            break
    assert [status for status, _ in statuses] == [0, 1]
    assert "this process is being profiled already; try again when that is done" in statuses[1][1]


async def test_the_stacks_of_doors(profile):
    for words in (("orchestrator",), ("wave", "--door")):
        status, said, data = await profile("now.txt", *words, "--kind=py-spy")
        assert status == 0 and b"triton_python_backend_stub" in data, said


async def test_an_engine_without_torch_says_so(profile):
    status, said, data = await profile("trace.json", "writer")
    assert (status, data) == (1, b"")
    assert said == (
        "tritone: kind torch needs an engine that runs on torch, and this one does not; give --kind py-spy\n"
    )
