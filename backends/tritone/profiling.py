"""Profiles of the processes of a running server, taken while they serve.

    `tritone profile` ──Profile──► desk ──► Profiler ──TraceTorch──► engine          kind torch
                                               └────── py-spy ─────► engine or stub  kind py-spy

Off unless deploy.yaml says `profiling: true`, and to be had by the user who runs the server only: the way
leads over sockets that turn others away, and over no port. A profile holds names of functions and operations,
with times; no values, and nothing of a request.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

from tritone import wire
from tritone.deploy import Deploy
from tritone.engines.torch_trace import MAX_SECONDS, PROFILING_CURE, PROFILING_OFF
from tritone.errors import (
    ConfigError,
    InvalidRequest,
    NotFound,
    TritoneError,
    Unavailable,
    Unsupported,
    from_code,
    suggestion,
)
from tritone.inbox import listening
from tritone.stubs import Stubs

ORCHESTRATOR = "orchestrator"  # in place of a stage: the door of the pipeline model
FORMS: Mapping[str, tuple[str, ...]] = {
    "torch": ("json.gz", "json"),  # a Chrome trace
    "py-spy": ("svg", "json", "txt"),  # a flame graph, a speedscope file, the stacks of this moment
}
MARGIN_S = 120.0  # to begin a profile, to end it and to write it
SAMPLES_HZ = 100

_Process = TypeVar("_Process", int, str)  # by its id, or by the address of its socket


class Profiler:
    """Takes profiles of the processes of one `tritone serve`, one of each process at a time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy: set[int] = set()  # processes that are being profiled

    def take(self, order: wire.Profile, deploy: Deploy, server_pid: int, stubs: Stubs) -> wire.Profiled:
        """Returns when it is taken. Raises TritoneError where there can be none.

        deploy: of the pipeline, as it is served. server_pid, stubs: of the server that serves it.
        """
        if not deploy.profiling:
            raise Unsupported(PROFILING_OFF, PROFILING_CURE)
        check(order)
        known = [ORCHESTRATOR, *deploy.stages]
        if order.stage not in known:
            raise NotFound(f"there is no stage '{order.stage}'", suggestion(order.stage, known))
        if order.door or order.stage == ORCHESTRATOR:
            if order.kind == "torch":
                raise Unsupported("a door runs no torch", "give --kind py-spy, or a stage and no --door")
            model = deploy.pipeline.name if order.stage == ORCHESTRATOR else deploy.stage(order.stage).model
            pid = _pick(order, stubs.pids(model))
            with self._alone(pid):
                return sample(order, pid)
        address = _pick(order, engine_addresses(deploy, order.stage, server_pid))
        with _engine(address, order.stage) as channel, self._alone(channel.peer_pid):
            if order.kind == "torch":
                return _trace_torch(channel, order)
            return sample(order, channel.peer_pid)

    @contextlib.contextmanager
    def _alone(self, pid: int) -> Iterator[None]:
        with self._lock:
            if pid in self._busy:
                raise Unavailable("this process is being profiled already", "try again when that is done")
            self._busy.add(pid)
        try:
            yield
        finally:
            with self._lock:
                self._busy.discard(pid)


def check(order: wire.Profile) -> None:
    """Raises InvalidRequest unless such a profile can be asked for."""
    if order.kind not in FORMS:
        raise InvalidRequest(f"there is no kind '{order.kind}'", suggestion(order.kind, FORMS))
    if order.form not in FORMS[order.kind]:
        ends = " or ".join(f".{form}" for form in FORMS[order.kind])
        raise InvalidRequest(f"kind {order.kind} cannot write a .{order.form} file", f"end --out with {ends}")
    if not 1 <= order.seconds <= MAX_SECONDS:
        raise InvalidRequest(f"--seconds is {order.seconds}", f"give 1 to {MAX_SECONDS}")


def form_of(path: Path) -> str:
    """What a file is to hold, by the end of its name: "svg", "json.gz" …"""
    return "json.gz" if path.name.endswith(".json.gz") else path.suffix.removeprefix(".")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of `path` at the end; after a failure nothing has changed.

    Raises ConfigError at once where that cannot be written.
    """
    try:
        descriptor, fresh = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", "give another --out") from None
    try:
        with open(descriptor, "wb") as file:
            yield file
        os.replace(fresh, path)
    except BaseException:
        os.unlink(fresh)
        raise


def engine_addresses(deploy: Deploy, stage: str, server_pid: int) -> list[str]:
    """The sockets of the engine processes of a stage, in the order of its instances."""
    found = []
    for name in listening(f"tritone/{server_pid}-"):
        _, _, group, device, index = name.split("/")
        if group == deploy.engine_group(stage):
            found.append((device, int(index), name))
    return [name for _, _, name in sorted(found)]


def _pick(order: wire.Profile, processes: Sequence[_Process]) -> _Process:
    if not 0 <= order.instance < len(processes):
        what = f"'{order.stage}' has no process {order.instance} now"
        raise NotFound(what, f"it has {len(processes)}, counted from 0" if processes else "try again")
    return processes[order.instance]


# -- kind torch ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _engine(address: str, stage: str) -> Iterator[wire.Channel]:
    """Raises Unavailable where it cannot be reached, or is lost meanwhile."""
    try:
        with contextlib.closing(wire.connect(address)) as channel:
            yield channel
    except wire.Disconnected:
        raise Unavailable(f"the engine of stage {stage} ended", "try again when it is back") from None


def _trace_torch(channel: wire.Channel, order: wire.Profile) -> wire.Profiled:
    """Raises Disconnected when the engine is lost."""
    channel.send(wire.TraceTorch(1, order.seconds))
    deadline = time.monotonic() + order.seconds + MARGIN_S
    while channel.wait_readable(max(deadline - time.monotonic(), 0.0)):
        match channel.receive():
            case wire.Profiled() as profiled:
                return profiled
            case wire.Refused(_, code, what, cure):
                raise from_code(code, what, cure)
    raise Unavailable(
        f"the engine of stage {order.stage} gave no profile within {order.seconds + MARGIN_S:g} s",
        "give --kind py-spy, which needs no help of it",
    )


# -- kind py-spy ---------------------------------------------------------------------------------------------


def sample(order: wire.Profile, pid: int) -> wire.Profiled:
    """Look at a process from outside, without stopping it. Raises TritoneError when that is not possible."""
    with tempfile.TemporaryDirectory(prefix="tritone-profile-") as folder:
        file = Path(folder) / f"profile.{order.form}"
        if order.form == "txt":
            file.write_bytes(_py_spy("dump", f"--pid={pid}", "--nonblocking"))
            return wire.Profiled(file.read_bytes(), f"the stacks of process {pid}")
        _py_spy(
            "record",
            f"--pid={pid}",
            "--nonblocking",
            f"--duration={order.seconds}",
            f"--rate={SAMPLES_HZ}",
            f"--format={'flamegraph' if order.form == 'svg' else 'speedscope'}",
            f"--output={file}",
            timeout_s=order.seconds + MARGIN_S,
        )
        data = file.read_bytes()
        if order.form == "json" and not json.loads(data)["profiles"]:
            raise _idle()
        return wire.Profiled(data, f"{order.seconds} s of process {pid}")


def _idle() -> Unavailable:
    return Unavailable("the process did nothing meanwhile", "profile it while it has requests")


def _py_spy(*words: str, timeout_s: float = MARGIN_S) -> bytes:
    """What it prints. Raises TritoneError with its reason when it fails."""
    places = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)))
    program = shutil.which("py-spy", path=places)
    if program is None:
        raise ConfigError("py-spy is not installed", "install it with pip install 'tritone[profile]'")
    try:
        done = subprocess.run(
            [program, *words], stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise TritoneError(f"py-spy was not done within {timeout_s:g} s", "give fewer --seconds") from None
    if done.returncode == 0:
        return done.stdout
    said = done.stderr.decode(errors="replace")
    if "No stack counts" in said:
        raise _idle()
    if "permission" in said.lower():
        raise Unsupported(
            "this system lets py-spy look into no process that it did not start",
            "give the server CAP_SYS_PTRACE, or set kernel.yama.ptrace_scope to 0",
        )
    reasons = [line.strip() for line in said.splitlines() if line.strip()]
    reason = next((line for line in reasons if line.startswith("Error")), reasons[0] if reasons else "")
    raise TritoneError(f"py-spy failed: {reason.removeprefix('Error: ')}", "try again")
