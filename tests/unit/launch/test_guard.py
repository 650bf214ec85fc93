"""The end of a run: processes found by their mark, ended in order, shared memory removed."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tritone import guard
from tritone.guard import Ended, Guard, Run
from waiting import PATIENCE_S, wait_until

SLEEPER = "import sys, time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPER

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def prefix(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(guard, "LEAVE_S", 0.3)
    return f"tritone_test_{secrets.token_hex(6)}_"


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process whose command line holds the given mark."""
    processes = []

    def run(code: str, mark: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", code, mark], stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        return process

    yield run
    for process in processes:
        process.kill()
        process.wait()


def test_finds_server_stubs_and_engines(prefix: str, start: Start) -> None:
    server = start(SLEEPER, prefix)
    stub = start(SLEEPER, f"{prefix}region")
    engine = start(SLEEPER, f"--address=tritone/{server.pid}-123/echo_writer/0")
    start(SLEEPER, f"--address=tritone/{server.pid}9-123/echo_writer/0")
    assert Run(server.pid, prefix, 1).processes() == {server.pid, stub.pid, engine.pid}


def test_asks_first(prefix: str, start: Start) -> None:
    server = start(SLEEPER, prefix)
    assert guard.end(Run(server.pid, prefix, grace_s=5)) == Ended(True, 0, 0)
    assert server.wait() == -signal.SIGTERM


def test_kills_what_stays(prefix: str, start: Start) -> None:
    server, orphan = start(STUBBORN, prefix), start(STUBBORN, prefix)
    assert guard.end(Run(server.pid, prefix, grace_s=0.2)) == Ended(False, 2, 0)
    assert (server.wait(), orphan.wait()) == (-signal.SIGKILL, -signal.SIGKILL)


def test_impatience_cuts_the_grace(prefix: str, start: Start) -> None:
    server = start(STUBBORN, prefix)
    began = time.monotonic()
    guard.end(Run(server.pid, prefix, grace_s=10 * PATIENCE_S), patience=lambda: False)
    assert time.monotonic() - began < PATIENCE_S


def test_removes_its_shared_memory_and_folder_only(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "SHM", tmp_path)
    for name in (f"{prefix}a", f"{prefix}b", "another"):
        (tmp_path / name).touch()
    (tmp_path / "run").mkdir()
    assert guard.end(Run(2**22 + 1, prefix, 1, str(tmp_path / "run"))).regions == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["another"]


def test_leaves_a_reused_process_id_alone(prefix: str, start: Start) -> None:
    stranger = start(SLEEPER, "no mark")
    guard.end(Run(stranger.pid, prefix, 1))
    assert stranger.poll() is None


def heeds(pid: int, number: signal.Signals) -> bool:
    """Whether a process catches or ignores a signal by now."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [
        int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigIgn", "SigCgt"))
    ]
    return any(mask >> (number - 1) & 1 for mask in masks)


class TestGuard:
    def run_line(self, server: subprocess.Popen[bytes], prefix: str) -> bytes:
        run = {"server_pid": server.pid, "shm_prefix": prefix, "grace_s": 5.0, "folder": ""}
        return json.dumps(run).encode() + b"\n"

    def test_ends_the_run_when_its_master_is_gone(self, prefix: str, start: Start) -> None:
        server = start(SLEEPER, prefix)
        region = guard.SHM / f"{prefix}region"
        region.touch()
        subprocess.run(
            [sys.executable, "-I", guard.__file__],
            input=self.run_line(server, prefix),
            timeout=3 * PATIENCE_S,
        )
        assert server.wait(timeout=PATIENCE_S) == -signal.SIGTERM
        assert not region.exists()

    def test_dismissed_it_touches_nothing(self, prefix: str, start: Start) -> None:
        server = start(SLEEPER, prefix)
        watcher = Guard()
        watcher.watch(Run(server.pid, prefix, 5))
        watcher.dismiss()
        assert server.poll() is None

    def test_dismissed_before_a_run(self) -> None:
        Guard().dismiss()

    def test_survives_the_signals_of_a_terminal(self, prefix: str, start: Start) -> None:
        server = start(SLEEPER, prefix)
        process = subprocess.Popen([sys.executable, "-I", guard.__file__], stdin=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(self.run_line(server, prefix))
        process.stdin.flush()
        wait_until(lambda: heeds(process.pid, signal.SIGINT) and heeds(process.pid, signal.SIGHUP))
        os.kill(process.pid, signal.SIGINT)
        os.kill(process.pid, signal.SIGHUP)
        process.stdin.close()
        assert process.wait(timeout=PATIENCE_S) == 0
        assert server.wait(timeout=PATIENCE_S) == -signal.SIGTERM


def test_a_zombie_is_not_running(start: Start) -> None:
    process = start(SLEEPER, "any")
    assert guard.is_running(process.pid)
    process.kill()
    while guard.is_running(process.pid):  # ended, but nobody has asked for its status
        time.sleep(0.01)
    assert Path(f"/proc/{process.pid}").exists()
    process.wait()
    assert not guard.is_running(process.pid)


def test_waits_for_a_process_that_is_ending(
    prefix: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command line is gone first, so that it is not found any more."""
    monkeypatch.setattr(guard, "LEAVE_S", 10.0)
    ending = start("import time; print('up', flush=True); time.sleep(0.5)", prefix)
    answers = iter([{ending.pid}])
    monkeypatch.setattr(Run, "processes", lambda run: next(answers, set()))
    assert guard.end(Run(1 << 30, prefix, grace_s=0))
    assert not guard.is_running(ending.pid)
