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
from pathlib import Path

import numpy as np
import pytest
import yaml

from echo import expected_pcm
from tritone_client import AudioChunk, Done, TritoneError, Unavailable

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]
READY_LIMIT_S = 5.0  # within which health must follow
RECOVERY_LIMIT_S = 60.0  # for a machine that does much else; figures are in docs
PACED = ["stage.writer.engine.step_s=0.02", "stage.writer.call_timeout_s=3"]
LONG = "word " * 150  # 3 s of streaming


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
        with urllib.request.urlopen(urllib.request.Request(url, **options), timeout=5) as answer:
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


async def begun(client, count, text=LONG):
    """Answers that have begun to arrive."""
    heard = asyncio.Semaphore(0)

    async def ask(number):
        samples = []
        async for event in client.stream(f"{number} {text}", audio_format="f32"):
            if isinstance(event, AudioChunk):
                samples.append(event.samples)
                heard.release()
            if isinstance(event, Done):
                return np.array_equal(np.concatenate(samples), sound(f"{number} {text}"))

    tasks = [asyncio.create_task(ask(number)) for number in range(count)]
    for _ in range(count):
        async with asyncio.timeout(20):
            await heard.acquire()
    return tasks


async def until(condition, limit_s, what):
    deadline = time.monotonic() + limit_s
    while not (value := await asyncio.to_thread(condition)):
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)
    return value


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
    await until(lambda: get(f"{facts(server)['health']}/ready")[0] == 200, 20, "ready does not follow")


@pytest.mark.parametrize("model", ["echo_singer", "echo_wave", "echo"])
async def test_kill_9_of_a_stub_ends_its_requests_and_is_mended(server, model):
    health = facts(server)["health"]
    client = server.client("echo")
    tasks = await begun(client, 3)
    [pid] = stub_pids(server, model)
    os.kill(pid, signal.SIGKILL)
    _, body = await until(
        lambda: (told := get(f"{health}/ready"))[0] == 503 and told, READY_LIMIT_S, "health says it is well"
    )
    stage = model.removeprefix("echo_")
    assert model == "echo" or "door died" in body["pipelines"]["echo"]["stages"][stage]["fault"]
    async with asyncio.timeout(20):
        results = await asyncio.gather(*tasks, return_exceptions=True)
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
    async with asyncio.timeout(10):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, TritoneError) for result in results), results
    await client.close()
    _, body = await until(
        lambda: (told := get(f"{before['health']}/ready"))[0] == 503 and told,
        READY_LIMIT_S,
        "health says it is well",
    )
    assert 1 <= body["retry_after_s"] <= RECOVERY_LIMIT_S
    assert get(f"{before['health']}/live")[0] == 200
    after = await until(lambda: next_facts(server, before), RECOVERY_LIMIT_S, "no other server")
    await works_again(server)
    assert {key: after[key] for key in ("grpc", "http", "metrics", "health")} == {
        key: before[key] for key in ("grpc", "http", "metrics", "health")
    }
    await until(lambda: not old & server.all_pids(), 5, "the old server left processes")
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
            async with asyncio.timeout(30):
                await tasks[0]
    await works_again(server)
    assert server.engine_pid("writer") != pid


async def test_the_end_lets_streams_finish_and_refuses_new_ones(server):
    traces, health = server.traces(), facts(server)["health"]
    async with server.client("echo") as client:
        tasks = await begun(client, 4)
        server.process.send_signal(signal.SIGTERM)
        await until(lambda: get(f"{health}/ready")[0] == 503, READY_LIMIT_S, "ready while it ends")
        with pytest.raises(Unavailable, match="shutting down"):
            while not all(task.done() for task in tasks):
                await answer(client, "too late")  # if not the first, then the next
        assert all(await asyncio.gather(*tasks)), "a stream that ran was cut"
    assert await asyncio.to_thread(server.process.wait, 30) == 0
    await asyncio.to_thread(server.assert_gone, traces, 5)


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
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


async def test_a_reload_drops_no_stream_and_touches_no_other_pipeline(two_pipelines, two_folders):
    server = two_pipelines
    others = stub_pids(server, "second") | stub_pids(server, "second_writer")
    async with server.client("echo") as echo, server.client("second") as second:
        tasks = [*await begun(echo, 2), *await begun(second, 2)]
        deploy = two_folders[0] / "deploy.yaml"
        deploy.write_text(deploy.read_text() + "max_in_flight: 7\n")
        done = await asyncio.to_thread(tritone_reload, server, "echo")
        assert done.returncode == 0 and "echo was loaded with digest" in done.stdout, done.stderr
        assert all(await asyncio.gather(*tasks)), "a stream was cut or changed"
        assert (await echo.limits())["max_in_flight"] == 7
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
        async with asyncio.timeout(READY_LIMIT_S):  # of 7 s of streaming
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, TritoneError) for result in results)
    assert await asyncio.to_thread(server.process.wait, 20) == 0
    await asyncio.to_thread(server.assert_gone, traces, 5)
