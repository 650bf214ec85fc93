"""`tritone serve` mends what dies or hangs, tells the truth meanwhile, and cuts no stream when it changes."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from pathlib import Path

import numpy as np
import pytest
import yaml

from echo import expected_pcm
from tritone_client import AudioChunk, Done, TritoneError, Unavailable
from waiting import PATIENCE_S, until

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]
READY_LIMIT_S = PATIENCE_S  # within which health must follow; on a machine of its own it takes 5 s at most
RECOVERY_LIMIT_S = 6 * PATIENCE_S
PACED = ["stage.writer.engine.step_s=0.02", "stage.writer.call_timeout_s=5"]
LONG = "word " * 250  # 5 s of streaming
ENDLESS = "word " * 3000  # a minute


@pytest.fixture(scope="module")
def server(serve, echo_folder):
    return serve(echo_folder, overrides=PACED)


def facts(server):
    return json.loads((server.folder / "ready.json").read_text())


def next_facts(server, before):
    """Those of another server, once it is ready; None until then."""
    try:
        after = facts(server)
    except FileNotFoundError:
        return None
    return after if after["pid"] != before["pid"] else None


def get(url, **options):
    """HTTP status and JSON body."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, **options), timeout=PATIENCE_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def stub_pids(server, model):
    """Stubs of a model that run; the name of its instance is one of their words."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_text().split("\0")
            except OSError:
                continue
            ours = any(str(server.folder) in word for word in words)
            if ours and any(re.fullmatch(rf"{model}(_\d+)+", word) for word in words):
                found.add(int(entry.name))
    return found


def sound(text):
    """Of a whole answer: the pipeline says each word with a blank after it."""
    return expected_pcm(f"{text} ")


async def answer(client, text):
    """The samples of a whole answer."""
    samples = []
    async for event in client.stream(text, audio_format="f32"):
        if isinstance(event, AudioChunk):
            samples.append(event.samples)
    return np.concatenate(samples)


async def begun(client, count, text=ENDLESS):
    """Answers that have begun to arrive; each tells in the end whether it is what it must be."""
    heard = asyncio.Semaphore(0)

    async def ask(number):
        samples = []
        async for event in client.stream(f"{number} {text}", audio_format="f32", max_tokens=4000):
            if isinstance(event, AudioChunk):
                samples.append(event.samples)
                if len(samples) == 1:
                    heard.release()
            if isinstance(event, Done):
                return np.array_equal(np.concatenate(samples), sound(f"{number} {text}"))

    async def all_heard():
        for _ in range(count):
            await heard.acquire()

    tasks = [asyncio.create_task(ask(number)) for number in range(count)]
    first = asyncio.create_task(all_heard())
    await asyncio.wait([first, *tasks], timeout=2 * PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    assert first.done(), [task for task in tasks if task.done()]
    return tasks


async def ends(tasks):
    """What came of answers that cannot go on."""
    async with asyncio.timeout(2 * PATIENCE_S):
        return await asyncio.gather(*tasks, return_exceptions=True)


async def fault_of(server, health):
    """What health says while the pipeline is away; None if that was over sooner than anybody could look."""
    told_before = num_faults(server)

    def look():
        status, body = get(f"{health}/ready")
        return [body] if status == 503 else [None] if num_faults(server) > told_before else []

    [body] = await until(look, READY_LIMIT_S, "health says it is well")
    return body


def num_faults(server):
    """How often the log says that the pipeline is well again."""
    return server.log.read_text(errors="replace").count("echo is ready again")


async def works_again(server):
    """Until an answer is right again; ready must say so as well."""
    deadline = time.monotonic() + RECOVERY_LIMIT_S
    while True:
        try:
            async with server.client("echo") as client:
                assert np.array_equal(await answer(client, "hello again"), sound("hello again"))
                break
        except TritoneError as error:
            assert time.monotonic() < deadline, error
            await asyncio.sleep(0.1)
    # A stub that dies with a lock on the server's shared memory takes it along: then there is another.
    await until((server.folder / "ready.json").exists, RECOVERY_LIMIT_S, "no server")
    ready = f"{facts(server)['health']}/ready"
    await until(lambda: get(ready)[0] == 200, RECOVERY_LIMIT_S, "ready does not follow")


@pytest.mark.parametrize("model", ["echo_singer", "echo_wave", "echo"])
async def test_kill_9_of_a_stub_ends_its_requests_and_is_mended(server, model):
    health = facts(server)["health"]
    client = server.client("echo")
    tasks = await begun(client, 3)
    [pid] = stub_pids(server, model)
    os.kill(pid, signal.SIGKILL)
    body = await fault_of(server, health)
    stage = model.removeprefix("echo_")
    if body is not None and model != "echo":
        assert "door died" in body["pipelines"]["echo"]["stages"][stage]["fault"]
    results = await ends(tasks)
    assert all(isinstance(result, TritoneError) for result in results), "none may hang, or seem complete"
    await client.close()
    await works_again(server)
    [new] = stub_pids(server, model)
    assert new != pid and server.process.poll() is None


async def test_kill_9_of_the_server_is_followed_by_another(server):
    before = facts(server)
    old = server.all_pids() - {server.process.pid}
    client = server.client("echo")
    tasks = await begun(client, 2)
    os.kill(before["pid"], signal.SIGKILL)
    results = await ends(tasks)
    assert all(isinstance(result, TritoneError) for result in results), results
    await client.close()
    away = await until(
        lambda: ((told := get(f"{before['health']}/ready"))[0] == 503 and told) or next_facts(server, before),
        READY_LIMIT_S,
        "health says it is well",
    )
    if isinstance(away, tuple) and "retry_after_s" in away[1]:  # else another serves already
        assert 1 <= away[1]["retry_after_s"] <= RECOVERY_LIMIT_S
    assert get(f"{before['health']}/live")[0] == 200
    after = await until(lambda: next_facts(server, before), RECOVERY_LIMIT_S, "no other server")
    await works_again(server)
    assert {key: after[key] for key in ("grpc", "http", "metrics", "health")} == {
        key: before[key] for key in ("grpc", "http", "metrics", "health")
    }
    await until(lambda: not old & server.all_pids(), what="the old server left processes")
    log = server.log.read_text(errors="replace")
    assert "ended by SIGKILL while serving" in log and "server is cleaned away" in log
    regions = {
        path.name.rpartition("_")[0] for path in Path("/dev/shm").glob(f"tritone_{server.process.pid}_*")
    }
    assert len(regions) == 1, "the old server left shared memory"


async def test_admin_apis_are_closed_but_registering_shared_memory_near_is_not(server):
    http = facts(server)["http"]
    for path in ("repository/index", "repository/models/echo/unload", "logging", "trace/setting"):
        status, body = await asyncio.to_thread(get, f"{http}/v2/{path}", method="POST", data=b"{}")
        assert status == 403 and "restricted" in body["error"]
    assert (await asyncio.to_thread(get, f"{http}/v2/systemsharedmemory/status"))[0] == 200
    words = Path(f"/proc/{facts(server)['pid']}/cmdline").read_text()
    assert re.findall(r"tritone-admin=(\S)\1+\0", words) == ["*", "*"], "the key shows in the process list"


async def test_an_engine_that_hangs_is_restarted_by_its_door(server):
    async with server.client("echo") as client:
        tasks = await begun(client, 1)
        pid = server.engine_pid("writer")
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(Unavailable):
            async with asyncio.timeout(3 * PATIENCE_S):
                await tasks[0]
    await works_again(server)
    assert server.engine_pid("writer") != pid


async def test_the_end_lets_streams_finish_and_refuses_new_ones(server):
    traces, health = server.traces(), facts(server)["health"]
    async with server.client("echo") as client:
        tasks = await begun(client, 4, LONG)
        server.process.send_signal(signal.SIGTERM)
        await until(lambda: get(f"{health}/ready")[0] == 503, READY_LIMIT_S, "ready while it ends")
        with pytest.raises(Unavailable, match="shutting down"):
            while not all(task.done() for task in tasks):
                await answer(client, "too late")  # if not the first, then the next
        assert all(await asyncio.gather(*tasks)), "a stream that ran was cut"
    assert await asyncio.to_thread(server.process.wait, 3 * PATIENCE_S) == 0
    await asyncio.to_thread(server.assert_gone, traces)


@pytest.fixture(scope="module")
def two_folders(tmp_path_factory):
    """Of `echo` and of a copy that is named `second`."""
    tmp_path = tmp_path_factory.mktemp("two")
    code = (ROOT / "tests" / "pipelines" / "echo.py").read_text()
    (tmp_path / "second.py").write_text(
        code.replace('name="echo"', 'name="second"').replace('"echo:', '"second:')
    )
    folders = []
    for name, file in (
        ("echo", ROOT / "tests" / "pipelines" / "echo.py"),
        ("second", tmp_path / "second.py"),
    ):
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        pace = {"engine": {"step_s": 0.02 if name == "echo" else 0.05}}
        deploy = {"pipeline": str(file), "stages": {"writer": pace}}
        (folders[-1] / "deploy.yaml").write_text(yaml.safe_dump(deploy))
    return folders


@pytest.fixture(scope="module")
def two_pipelines(serve, two_folders):
    return serve(*two_folders)


def tritone_reload(server, pipeline):
    words = [sys.executable, "-m", "tritone", "reload", pipeline, f"--pid={server.process.pid}"]
    return subprocess.run(words, capture_output=True, text=True, timeout=6 * PATIENCE_S)


async def test_a_reload_drops_no_stream_and_touches_no_other_pipeline(two_pipelines, two_folders):
    server, deploy = two_pipelines, two_folders[0] / "deploy.yaml"
    as_it_was = deploy.read_text()
    async with server.client("echo") as echo, server.client("second") as second:
        for limit in (7, 8):
            before, logged = facts(server), server.log.stat().st_size
            others = stub_pids(server, "second") | stub_pids(server, "second_writer")
            tasks = [*await begun(echo, 2, LONG), *await begun(second, 2, LONG)]
            deploy.write_text(f"{as_it_was}max_in_flight: {limit}\n")
            done = await asyncio.to_thread(tritone_reload, server, "echo")
            log = server.log.read_bytes()[logged:].decode(errors="replace")
            if limit == 8 or "ended by SIGABRT" not in log:
                break
            # Seen once, on a very busy machine: the packaged server aborts as it unloads a model.
            warnings.warn("tritonserver aborted as it unloaded a model", stacklevel=1)
            assert "Traceback" not in log
            assert all(end is True or isinstance(end, TritoneError) for end in await ends(tasks))
            await until(lambda before=before: next_facts(server, before), RECOVERY_LIMIT_S, "no other server")
        assert done.returncode == 0 and "echo was loaded with digest" in done.stdout, done.stderr
        assert all(await asyncio.gather(*tasks)), "a stream was cut or changed"
        assert (await echo.limits())["max_in_flight"] == limit
        assert np.array_equal(await answer(echo, "as before"), sound("as before"))
        assert others == stub_pids(server, "second") | stub_pids(server, "second_writer")

        deploy.write_text(deploy.read_text() + "max_in_flite: 9\n")
        done = await asyncio.to_thread(tritone_reload, server, "echo")
        assert done.returncode == 1 and "did you mean 'max_in_flight'?" in done.stderr
        assert np.array_equal(await answer(echo, "still there"), sound("still there"))
    done = await asyncio.to_thread(tritone_reload, server, "secund")
    assert done.returncode == 1 and "did you mean 'second'?" in done.stderr


async def test_asking_twice_ends_at_once(two_pipelines):
    server, health = two_pipelines, facts(two_pipelines)["health"]
    traces = server.traces()
    async with server.client("second") as client:
        tasks = await begun(client, 2)
        server.process.send_signal(signal.SIGTERM)
        await until(lambda: get(f"{health}/ready")[0] == 503, READY_LIMIT_S, "ready while it ends")
        server.process.send_signal(signal.SIGTERM)
        results = await ends(tasks)
        assert all(isinstance(result, TritoneError) for result in results)
    assert await asyncio.to_thread(server.process.wait, 3 * PATIENCE_S) == 0
    await asyncio.to_thread(server.assert_gone, traces)
