"""The end of a run: no process, no shared memory and no temporary folder of it is left behind.

`tritone serve` ends its run itself. When it is killed -9 it cannot, so it starts this file as a second
process, whose standard input is a pipe from it:

    line 1   the run, as JSON                    line 2   "done": the run was ended, go
                                                 end of file: `tritone serve` is gone, end its run

Standard library only: the guard of an idle server costs no more than an interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

SHM = Path("/dev/shm")
PROC = Path("/proc")
LEAVE_S = 3.0  # how long stubs and engines may take once their server is gone
KILL_WAIT_S = 5.0  # for the kernel to clear away what was killed
POLL_S = 0.05
MPS_PROGRAM = "nvidia-cuda-mps-control"
MPS_QUIT_S = 10.0  # for the daemon to end, once its clients have


@dataclass(frozen=True)
class Run:
    """What one started server owns on this machine."""

    server_pid: int
    shm_prefix: str  # unique; begins the name of its shared-memory regions
    grace_s: float  # from SIGTERM to the first SIGKILL
    folder: str = ""  # removed at the end; "" keeps it
    # Folder of its MPS daemon, which ends with it; "": none, or one that outlives this server.
    mps: str = ""

    def processes(self) -> set[int]:
        """Ids of the server, its stubs and its engines that still run.

        The command line of a server and its stubs holds the shared-memory prefix, that of an engine the
        name of its server.
        """
        marks = (self.shm_prefix.encode(), f"tritone/{self.server_pid}-".encode())
        found = set()
        for entry in PROC.iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                try:
                    line = (entry / "cmdline").read_bytes()
                except OSError:
                    continue  # it ended meanwhile
                if any(mark in line for mark in marks):
                    found.add(int(entry.name))
        return found


@dataclass(frozen=True)
class Ended:
    """What it took to end a run."""

    orderly: bool  # the server ended in its grace, and the rest after it
    killed: int  # processes that were killed
    regions: int  # of shared memory, that were removed

    def __str__(self) -> str:
        return f"{self.killed} processes killed, {self.regions} shared-memory regions removed"


def end(run: Run, patience: Callable[[], bool] = lambda: True) -> Ended:
    """End everything of `run` in order.

    patience: asked while waiting; False cuts the grace short.
    """
    known = run.processes()
    if run.server_pid in known:  # else the number may be somebody else's by now
        _send(run.server_pid, signal.SIGTERM)

    def gone() -> bool:
        # A process that is ending has no command line any more, but holds its memory for a while.
        return not run.processes() and not any(map(is_running, known))

    orderly = _wait(lambda: run.server_pid not in run.processes(), run.grace_s, patience)
    orderly = _wait(gone, LEAVE_S, patience) and orderly
    left = run.processes()
    for pid in left:
        _send(pid, signal.SIGKILL)
    if left:
        _wait(gone, KILL_WAIT_S, lambda: True)
    regions = remove_shm(run.shm_prefix)
    if run.mps:
        quit_mps(Path(run.mps))
    if run.folder:
        shutil.rmtree(run.folder, ignore_errors=True)
    return Ended(orderly and not left, len(left), regions)


def mps_folder(run_folder: Path) -> Path:
    """Of the MPS daemon of a run; see mps.py."""
    return run_folder.absolute() / "mps"


def quit_mps(folder: Path) -> None:
    """End an MPS daemon and its servers, if there is one: asked first, killed if it does not heed that."""
    pipe = folder / "pipe"
    if not pipe.is_dir() or not _mps_processes(pipe):
        return
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [MPS_PROGRAM],
            input=b"quit\n",
            env={**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(pipe)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=MPS_QUIT_S,
        )
    if not _wait(lambda: not _mps_processes(pipe), LEAVE_S, lambda: True):
        for pid in _mps_processes(pipe):
            _send(pid, signal.SIGKILL)


def _mps_processes(pipe: Path) -> list[int]:
    """Ids of the daemon with this pipe folder, and of its servers, which inherit its environment."""
    mark = f"CUDA_MPS_PIPE_DIRECTORY={pipe}".encode()
    found = []
    for entry in PROC.iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
                is_mps = b"nvidia-cuda-mps" in (entry / "cmdline").read_bytes()
                if is_mps and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def remove_shm(prefix: str) -> int:
    """Remove the shared-memory regions whose names begin with `prefix`; gives back how many."""
    regions = list(SHM.glob(f"{prefix}*"))
    for region in regions:
        region.unlink(missing_ok=True)
    return len(regions)


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie, which holds nothing but its number."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _wait(done: Callable[[], bool], limit_s: float, patience: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline or not patience():
            return False
        time.sleep(POLL_S)
    return True


class Guard:
    """The guarding process, seen from `tritone serve`; start it before the server."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            start_new_session=True,  # what kills the group of `tritone serve` must not kill its guard
        )

    def watch(self, run: Run) -> None:
        self._write(json.dumps(asdict(run)))

    def dismiss(self) -> None:
        """The run has been ended."""
        self._write("done")
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # somebody killed the guard; the run goes on without


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when `tritone serve` does, not before
    first, second = sys.stdin.readline(), sys.stdin.readline()
    if first and first.strip() != "done" and not second:
        end(Run(**json.loads(first)))


if __name__ == "__main__":
    main()
