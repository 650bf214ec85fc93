"""`tritone serve` ends without a trace, however it is ended."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tritone_client import AudioChunk, TritoneError
from waiting import PATIENCE_S

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]


async def busy(server, count=6):
    """Requests that have begun to stream, and have a minute to go."""
    client = server.client("echo")
    begun = asyncio.Semaphore(0)

    async def ask():
        async for event in client.stream("word " * 3000, max_tokens=4000):
            if isinstance(event, AudioChunk):
                begun.release()

    tasks = [asyncio.create_task(ask()) for _ in range(count)]
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(count):
            await begun.acquire()
    return client, tasks


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
async def test_an_end_under_load_leaves_nothing(serve_once, echo_folder, name):
    server = serve_once(echo_folder, overrides=["stage.writer.engine.step_s=0.02"], options=["--drain-s=0"])
    if name == "SIGTERM":
        await asyncio.to_thread(check_that_its_port_is_taken, server, echo_folder)
    client, tasks = await busy(server)
    traces = server.traces()
    assert len(traces[0]) >= 9, "the server, five stubs and three engines"
    os.kill(server.process.pid, signal.Signals[name])
    status = await asyncio.to_thread(server.process.wait, 3 * PATIENCE_S)
    assert status == {"SIGTERM": 0, "SIGKILL": -9}[name]
    async with asyncio.timeout(PATIENCE_S):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, TritoneError) for result in results), results
    await client.close()
    await asyncio.to_thread(server.assert_gone, traces)


def tritone(*words):
    return subprocess.run(
        [sys.executable, "-m", "tritone", *words],
        capture_output=True,
        text=True,
        timeout=6 * PATIENCE_S,
        cwd=ROOT,
    )


def check_that_its_port_is_taken(server, echo_folder):
    """Another server on it is refused in one sentence."""
    port = server.grpc_url.rpartition(":")[2]
    done = tritone("serve", str(echo_folder), "--grpc-port", port, "--http-port=0", "--metrics-port=0")
    output = done.stdout + done.stderr
    assert done.returncode == 1 and port in output and "Traceback" not in output


def test_one_folder_too_high_is_explained():
    done = tritone("doctor", "--model-repository", "model_repository", "--http-port=0", "--grpc-port=0")
    assert done.returncode == 1 and "model_repository/smoltalk" in done.stdout


def test_a_pbtxt_of_another_deploy_file_is_refused_with_the_command(tmp_path, echo_folder):
    from tritone import deploy_reader, pbtxt

    pbtxt.write(deploy_reader.load(echo_folder / "deploy.yaml"), tmp_path / "echo")
    changed = tmp_path / "echo" / "deploy.yaml"
    changed.write_text(changed.read_text() + "max_in_flight: 3\n")
    check = (
        "import sys, types; sys.modules['triton_python_backend_utils'] = types.ModuleType('pb')\n"
        "from tritone.stage_door import load_deploy\n"
        f"folder = {str(tmp_path / 'echo' / 'echo')!r}\n"
        "parameters = {'deploy_digest': {'string_value': 'old'}}\n"
        "import json\n"
        "load_deploy({'model_config': json.dumps({'parameters': parameters}), 'model_repository': folder,"
        " 'model_name': 'echo'})"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert "was not rendered from" in done.stderr and "tritone render" in done.stderr
