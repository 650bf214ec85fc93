"""A door's side of one engine process: start it when it is absent, call it, restart it when it dies.

Any door of a colocated group may start the process; the one that binds the address first wins, the others
join. An engine process that dies fails its calls at once and is started again with back-off.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tritone
from tritone import wire
from tritone.engines.host import ADDRESS_TAKEN_STATUS
from tritone.errors import ConfigError, EngineLost, TritoneError, Unavailable, from_code

log = logging.getLogger("tritone.door")

CONNECT_RETRY_S = 0.05
BACKOFF_S = (0.1, 0.5, 2.0, 5.0, 15.0, 30.0)
STABLE_S = 60.0  # a process that lived this long starts the back-off anew


@dataclass(frozen=True)
class EngineSpec:
    """How to start an engine process."""

    deploy_file: Path
    stages: tuple[str, ...]
    address: str
    device: str
    threads: int
    python: str | None
    load_timeout_s: float

    def command(self, life_line: int) -> list[str]:
        return [
            self.python or default_python(),
            "-m",
            "tritone.engines.host",
            f"--deploy={self.deploy_file}",
            f"--stages={','.join(self.stages)}",
            f"--address={self.address}",
            f"--device={self.device}",
            f"--life-line={life_line}",
        ]

    def environment(self) -> dict[str, str]:
        env = dict(os.environ)
        env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = str(self.threads)
        env["TOKENIZERS_PARALLELISM"] = "false"
        env["HF_HUB_OFFLINE"] = "1"
        # The packaged server's own libraries must not replace those of the engine's interpreter.
        paths = env.get("LD_LIBRARY_PATH", "").split(":")
        env["LD_LIBRARY_PATH"] = ":".join(p for p in paths if p and not p.endswith("nvidia_pytriton.libs"))
        source = Path(tritone.__file__).resolve().parent.parent
        if source.name not in (
            "site-packages",
            "dist-packages",
        ):  # a checkout: not installed in other interpreters
            env["PYTHONPATH"] = ":".join(p for p in (str(source), env.get("PYTHONPATH", "")) if p)
        return env


def default_python() -> str:
    """The interpreter beside the running library: a Triton stub embeds Python, so sys.executable may lie."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for folder in (Path(sys.prefix) / "bin", Path(sysconfig.get_config_var("BINDIR") or "/usr/bin")):
        for name in (version, "python3"):
            if (folder / name).exists():
                return str(folder / name)
    return sys.executable


class EngineLink:
    """The connection of one door to one engine process. Thread-safe.

    spec: how to start the process, or None to join one that another door starts (a sibling instance).
    """

    def __init__(self, address: str, spec: EngineSpec | None, call_timeout_s: float) -> None:
        self.address = address
        self._spec = spec
        self._call_timeout_s = call_timeout_s
        self._calls: dict[int, tuple[Future[Any], float]] = {}  # by number: future and monotonic deadline
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._channel: wire.Channel | None = None
        self._ready = threading.Event()
        self._failure: ConfigError | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._life_line: int | None = None
        self._load_s = 0.0  # how long the last load took
        self._started_s = time.monotonic()
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True, name=f"link {address}")
        self._keeper.start()
        threading.Thread(target=self._expire, daemon=True, name="expire").start()

    # -- for the door ----------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    @property
    def in_flight(self) -> int:
        return len(self._calls)

    def wait_ready(self, timeout_s: float) -> None:
        """Raises ConfigError when the engine refuses to load, or does not within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self._ready.wait(0.05):
            if self._failure is not None:
                raise self._failure
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"engine {self.address} did not load within {timeout_s:g} s",
                    "raise load_timeout_s in deploy.yaml",
                )

    def unavailable(self) -> Unavailable:
        """Why a call cannot be made now, with the expected time."""
        left = max(self._started_s + self._load_s - time.monotonic(), 1.0)
        return EngineLost("the stage's engine is restarting", f"try again in about {left:.0f} s")

    def call(self, make: Callable[[int], wire.AnyMessage]) -> Future[Any]:
        """Send the message that `make` builds around a call number.

        The future gives the answer message, or fails with the TritoneError that the engine or its loss means.
        """
        future: Future[Any] = Future()
        number = next(self._numbers)
        channel = self._channel
        if channel is None or not self._ready.is_set():
            future.set_exception(self.unavailable())
            return future
        with self._lock:
            self._calls[number] = (future, time.monotonic() + self._call_timeout_s)
        try:
            channel.send(make(number))
        except wire.Disconnected:
            self._settle(number, error=self.unavailable())
        return future

    def tell(self, message: wire.AnyMessage) -> None:
        """Send without an answer; a lost engine needs no telling."""
        if self._channel is not None:
            with contextlib.suppress(wire.Disconnected):
                self._channel.send(message)

    def close(self) -> None:
        """End the link, and the process if this door started it."""
        self._closing.set()
        self._end_process()
        if self._channel is not None:
            self._channel.shutdown()
        self._keeper.join(timeout=5)

    # -- the keeper thread -----------------------------------------------------------------------------------

    def _keep(self) -> None:
        failures = 0
        while not self._closing.is_set():
            self._started_s = time.monotonic()
            try:
                self._channel = self._reach()
                self._read(self._channel)
            except wire.Disconnected as reason:
                if self._ready.is_set() and not self._closing.is_set():
                    log.error("engine %s is gone (%s)", self.address, reason)
            self._ready.clear()
            self._channel = None
            self._fail_calls()
            if self._closing.is_set():
                break
            if self._spec is not None:
                self._end_process()
                failures = 0 if time.monotonic() - self._started_s > STABLE_S else failures + 1
                pause_s = BACKOFF_S[min(max(failures - 1, 0), len(BACKOFF_S) - 1)]
                log.warning("engine %s: starting again in %.1f s", self.address, pause_s)
                self._closing.wait(pause_s)
            else:
                self._closing.wait(CONNECT_RETRY_S)

    def _reach(self) -> wire.Channel:
        """Connect; start the process first when nobody serves the address."""
        while not self._closing.is_set():
            try:
                channel = wire.connect(self.address)
                channel.send(wire.Hello(""))
                return channel
            except wire.Disconnected:
                if self._spec is not None and not self._process_lives():
                    self._start()
            self._closing.wait(CONNECT_RETRY_S)
        raise wire.Disconnected("the door is closing")

    def _start(self) -> None:
        assert self._spec is not None
        self._end_process()
        read_end, self._life_line = os.pipe()
        try:
            self._process = subprocess.Popen(
                self._spec.command(read_end),
                env=self._spec.environment(),
                pass_fds=(read_end,),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C goes to the server, which ends its engines in order
            )
        finally:
            os.close(read_end)

    def _process_lives(self) -> bool:
        if self._process is None:
            return False
        status = self._process.poll()
        if status is None:
            return True
        if status != ADDRESS_TAKEN_STATUS:
            raise wire.Disconnected(f"the process ended with status {status}")
        return False

    def _end_process(self) -> None:
        if self._life_line is not None:
            os.close(self._life_line)
            self._life_line = None
        if self._process is not None:
            try:
                self._process.wait(timeout=3)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _read(self, channel: wire.Channel) -> None:
        while True:
            match channel.receive():
                case wire.Ready(load_s):
                    self._load_s = load_s
                    self._failure = None
                    self._ready.set()
                case wire.LoadFailed(what, cure):
                    self._failure = ConfigError(what, cure)
                    log.error("engine %s cannot load: %s; %s", self.address, what, cure)
                    raise wire.Disconnected("load failed")
                case wire.Refused(call, code, what, cure):
                    self._settle(call, error=from_code(code, what, cure))
                case wire.Opened(call) | wire.Ran(call) | wire.Pong(call) as answer:
                    self._settle(call, answer)
                case wire.Loading():
                    pass
                case other:
                    log.warning("unexpected %s", type(other).__name__)

    def _settle(self, number: int, answer: Any = None, error: TritoneError | None = None) -> None:
        with self._lock:
            future, _ = self._calls.pop(number, (None, 0.0))
        if future is not None:
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(answer)

    def _fail_calls(self) -> None:
        for number in list(self._calls):
            self._settle(number, error=EngineLost("the stage's engine died under the request", "try again"))

    def _expire(self) -> None:
        while not self._closing.wait(0.25):
            now = time.monotonic()
            for number, (_, deadline) in list(self._calls.items()):
                if now > deadline:
                    what = f"the stage's engine did not answer within {self._call_timeout_s:g} s"
                    self._settle(number, error=Unavailable(what, "try again; the server log may tell why"))
