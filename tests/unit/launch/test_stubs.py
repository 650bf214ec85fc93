"""Stub processes are told apart by their server and model, and by whether they live."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tritone.stubs import Stubs
from waiting import PATIENCE_S

SLEEPER = "import time; print('up', flush=True); time.sleep(60)"

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def prefix() -> str:
    return f"tritone_test_{secrets.token_hex(6)}_"


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process with a stub's words: its region of shared memory and its model instance."""
    processes = []

    def run(region: str, instance: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", SLEEPER, region, "1048576", instance], stdout=subprocess.PIPE
        )
        processes.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def test_a_dead_one_is_lost_also_before_anybody_has_waited_for_it(prefix: str, start: Start) -> None:
    stubs = Stubs(prefix)
    first, other = start(f"{prefix}a", "echo_0_0"), start(f"{prefix}b", "echo_sync_0_0")
    stubs.learn(["echo", "echo_sync"])
    assert stubs.lost(["echo", "echo_sync"]) == []
    first.kill()
    first.wait()
    assert stubs.lost(["echo", "echo_sync"]) == ["echo"]
    other.kill()  # nobody waits: it stays as a zombie
    while other.poll() is None:
        pass
    assert stubs.lost(["echo", "echo_sync"]) == ["echo", "echo_sync"]


def test_one_of_two_instances_is_enough(prefix: str, start: Start) -> None:
    stubs = Stubs(prefix)
    start(f"{prefix}a", "echo_0_0")
    second = start(f"{prefix}b", "echo_0_1")
    stubs.learn(["echo"])
    second.kill()
    second.wait()
    assert stubs.lost(["echo"]) == ["echo"]
    start(f"{prefix}c", "echo_0_1")
    stubs.learn(["echo"])
    assert stubs.lost(["echo"]) == [], "what was loaded since counts"


def test_who_they_are(prefix: str, start: Start) -> None:
    stubs = Stubs(prefix)
    assert stubs.pids("echo") == []
    started = [start(f"{prefix}a", "echo_0_0"), start(f"{prefix}b", "echo_0_1")]
    start(f"{prefix}c", "echo_sync_0_0")
    stubs.learn(["echo", "echo_sync"])
    assert stubs.pids("echo") == [process.pid for process in started]
    started[0].kill()
    started[0].wait()
    assert stubs.pids("echo") == [started[1].pid]


def test_those_of_another_server_are_nothing_to_us(prefix: str, start: Start) -> None:
    stubs = Stubs(prefix)
    stranger = start("tritone_other_a", "echo_0_0")
    stubs.learn(["echo"])
    stubs.kill("echo")
    assert stranger.poll() is None


def test_kill_ends_the_stubs_of_one_model(prefix: str, start: Start) -> None:
    stubs = Stubs(prefix)
    one, other = start(f"{prefix}a", "echo_0_0"), start(f"{prefix}b", "echo_sync_0_0")
    stubs.learn(["echo", "echo_sync"])
    stubs.kill("echo")
    assert one.wait(timeout=PATIENCE_S) == -9 and other.poll() is None
