"""`tritone serve`: render, check, start a server, wait until each pipeline answers, watch it, end it cleanly.

    targets ──► deploy files ──► checks ──► run folder ──► tritonserver ──► ready ──► watched ──► ended

    <run folder>/models/<pipeline>/   the rendered model repository
                 backends/            see server.compose
                 server.log           what the server and its engines say
                 ready.json           the addresses, written when everything answers

The stage doors restart their engines themselves. A server that dies is not started again here: the command
ends with a reason and status 1, so that whatever runs it decides.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Protocol

from tritone import deploy as deploys
from tritone import doctor, guard, inbox, pbtxt, repository, server_log
from tritone import server as servers
from tritone.deploy import Deploy
from tritone.errors import ConfigError, TritoneError
from tritone.server import Interpreter, Listen, Server

LOG_NAME = "server.log"
READY_NAME = "ready.json"
OWN_ENTRIES = ("models", "backends", LOG_NAME, READY_NAME)
POLL_S = 0.2
PING_EVERY_S = 5.0
PING_DEADLINE_S = 5.0
LOAD_MARGIN_S = 30.0  # of the server, on top of the slowest stage
DRAIN_S = 5.0  # for the requests that run when the end is asked for
GRACE_S = servers.EXIT_TIMEOUT_S + 5.0
STUB_PATIENCE_S = 12.0  # two more pings


@dataclass(frozen=True)
class ServeOptions:
    """What `tritone serve` is told."""

    targets: tuple[str, ...]  # pipelines, or folders with a deploy.yaml
    overrides: tuple[str, ...] = ()  # "key.path=value", or "<pipeline>:key.path=value"
    listen: Listen = field(default_factory=Listen)  # port 0 takes a free one
    run_folder: Path | None = None  # None: a fresh temporary one
    log: str | None = None  # "stderr" or a file; None: in the run folder
    load_timeout_s: float | None = None  # None: what the slowest stage is given, and some seconds
    check_only: bool = False
    extra: tuple[str, ...] = ()  # options for the server


class Asked:
    """Whether somebody asked for the end: once for an orderly one, twice for a quick one."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.times = 0

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self.note)

    def note(self, *_: object) -> None:
        self.times += 1
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        return self._event.wait(timeout_s)


def serve(options: ServeOptions, say: Callable[[str], None], asked: Asked) -> int:
    """Serve until asked to end; returns the exit status. Raises TritoneError when the server fails.

    say: takes each line for the user.
    """
    pipelines = load_pipelines(options.targets, options.overrides)
    python = Interpreter.current()
    server, findings = doctor.machine(python)
    findings += doctor.for_pipelines(pipelines, options.listen, options.extra)
    for finding in findings:
        if options.check_only or finding.level is not doctor.Level.OK:
            say(str(finding))
    problems = sum(finding.level is doctor.Level.PROBLEM for finding in findings)
    if problems or server is None:
        raise ConfigError(f"{problems} problem(s) in the way, listed above", "mend them and try again")
    if options.check_only:
        say("all checks passed")
        return 0
    say(f"server {server}")
    options = replace(options, listen=choose_ports(options.listen))
    with run_folder(options.run_folder) as (folder, keep):
        run = RunningServer(server, python, pipelines, folder, options)
        try:
            run.start(say)
            run.wait_ready(say, asked)
            run.watch(say, asked)
            return 0
        except TritoneError:
            keep(run.log_file)
            raise
        finally:
            run.end(say, asked)


# -- before the start ----------------------------------------------------------------------------------------


def load_pipelines(targets: Sequence[str], overrides: Sequence[str]) -> list[Deploy]:
    """The deploys of all targets with the overrides that are meant for them."""
    folders = [repository.find(target) for target in targets]
    plain = [override for override in overrides if _addressee(override) is None]
    found: dict[str, Deploy] = {}
    for folder in folders:
        file = folder / repository.DEPLOY
        name = deploys.load(file).pipeline.name
        own = [override.partition(":")[2] for override in overrides if _addressee(override) == name]
        if name in found:
            raise ConfigError(f"pipeline '{name}' is named twice", "name each pipeline once")
        found[name] = deploys.load(file, [*plain, *own])
    for override in overrides:
        if _addressee(override) not in (None, *found):
            raise ConfigError(
                f"override '{override}' is for pipeline '{_addressee(override)}'",
                f"served are {', '.join(found)}",
            )
    return list(found.values())


def _addressee(override: str) -> str | None:
    """The pipeline that an override names, as in "smoltalk:max_in_flight=4"."""
    path = override.partition("=")[0]
    return path.partition(":")[0] if ":" in path else None


def choose_ports(listen: Listen) -> Listen:
    """`listen` with free ports in place of 0. They are held until all are chosen, so that they differ."""
    with ExitStack() as stack:
        chosen = {}
        for name, port in listen.ports().items():
            if port == 0:
                chosen[name] = stack.enter_context(doctor.bind(listen.host, 0)).getsockname()[1]
        return replace(listen, **chosen)


@contextlib.contextmanager
def run_folder(given: Path | None) -> Iterator[tuple[Path, Callable[[Path | None], None]]]:
    """A folder for one run, and a function that keeps its log: a temporary one is removed at the end.

    A given folder is kept. It must be empty or of an earlier run.
    """
    if given is not None:
        _clear(given)
        yield given, lambda log: None
        return
    folder = Path(tempfile.mkdtemp(prefix="tritone-"))
    kept: list[Path] = []
    try:
        yield folder, lambda log: kept.append(log) if log is not None else None
    finally:
        if any(log.parent == folder for log in kept):
            for entry in folder.iterdir():
                if entry not in kept:
                    _remove(entry)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _clear(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    others = [entry.name for entry in folder.iterdir() if entry.name not in OWN_ENTRIES]
    if others:
        raise ConfigError(
            f"the run folder '{folder}' holds '{others[0]}', which is not of a run", "name an empty one"
        )
    for entry in folder.iterdir():
        _remove(entry)


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


# -- the run -------------------------------------------------------------------------------------------------


class Prober(Protocol):
    """Asks one pipeline whether it can serve; raises with the reason when it cannot."""

    def ping(self, deadline_s: float) -> dict[str, Any]: ...


class RunningServer:
    """One tritonserver process, from its start to the last trace of it."""

    def __init__(
        self,
        server: Server,
        python: Interpreter,
        pipelines: Sequence[Deploy],
        folder: Path,
        options: ServeOptions,
    ) -> None:
        self._server = server
        self._python = python
        self._pipelines = list(pipelines)
        self._folder = folder
        self._options = options
        self._listen = options.listen
        self._shm_prefix = f"tritone_{os.getpid()}_{secrets.token_hex(4)}_"
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: guard.Guard | None = None
        self._started_s = 0.0
        self._was_ready = False
        self._clients = ExitStack()
        self._probers: dict[str, Prober] = {}
        self.log_file = self._choose_log()

    def start(self, say: Callable[[str], None]) -> None:
        """Render, compose, and start the process in a group of its own, so that Ctrl-C reaches only us."""
        repositories = []
        for deploy in self._pipelines:
            repositories.append(self._folder / "models" / deploy.pipeline.name)
            pbtxt.write(deploy, repositories[-1])
        backends = servers.compose(self._server, self._folder / "backends")
        words = servers.command(
            self._server,
            repositories,
            backends,
            self._listen,
            self._shm_prefix,
            servers.pool_threads(self._pipelines),
            self._options.extra,
        )
        say(f"log    {self.log_file or 'stderr'}")
        self._guard = guard.Guard()
        with self._open_log() as log:
            self._process = subprocess.Popen(
                words,
                env=servers.environment(self._server, self._python),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        self._guard.watch(self._run(None if self._options.run_folder else self._folder))
        self._started_s = time.monotonic()
        say(
            f"start  pid {self._process.pid}, pipelines {', '.join(d.pipeline.name for d in self._pipelines)}"
        )

    def wait_ready(self, say: Callable[[str], None], asked: Asked) -> None:
        """Return when the server is ready and every pipeline answers a ping, or when the end is asked for.

        Raises TritoneError when the server dies or the load deadline passes.
        """
        timeout_s = self._load_timeout_s()
        deadline = time.monotonic() + timeout_s
        progress = server_log.Progress(self.log_file)
        waiting = {deploy.pipeline.name for deploy in self._pipelines}
        reason = "the server loads its models"
        while waiting and not asked.wait(POLL_S):
            self._check_alive("while loading")
            for line in progress.news():
                say(f"loaded {line} after {self._age_s():.1f} s")
            if not is_ready(self._listen.http_url):
                reason = "the server loads its models"
            else:
                for name in sorted(waiting):
                    fault = self._ping(name)
                    if fault is None:
                        waiting.discard(name)
                    else:
                        reason = f"{name}: {fault}"
            if waiting and time.monotonic() > deadline:
                what = f"not ready within {timeout_s:g} s ({reason})"
                raise TritoneError(what, f"{self._log_hint()}, or give a longer --load-timeout-s")
        if not waiting:
            self._was_ready = True
            self._announce(say)

    def watch(self, say: Callable[[str], None], asked: Asked) -> None:
        """Ping the pipelines until the end is asked for; say when one changes its state.

        Raises TritoneError when the server dies, or a pipeline is not ready for longer than loading takes.
        """
        states = {deploy.pipeline.name: State() for deploy in self._pipelines}
        next_ping = time.monotonic() + PING_EVERY_S
        while not asked.wait(POLL_S):
            self._check_alive("while serving")
            if time.monotonic() < next_ping:
                continue
            for name, state in states.items():
                news = state.note(self._ping(name))
                if news:
                    say(f"{time.strftime('%H:%M:%S')} {name} {news}")
                if state.down_s() > (STUB_PATIENCE_S if state.lost_stub else self._load_timeout_s()):
                    raise TritoneError(
                        f"{name} has not been ready for {state.down_s():.0f} s ({state.fault})",
                        self._log_hint(),
                    )
            next_ping = time.monotonic() + PING_EVERY_S

    def end(self, say: Callable[[str], None], asked: Asked) -> None:
        """End server, stubs and engines; remove shared memory. Safe to call whatever happened before."""
        self._clients.close()
        if self._process is not None:
            if self._process.poll() is None:
                say("stop   ending the server; Ctrl-C again ends it at once")
                if asked.times < 2:
                    inbox.drain_all(self._process.pid, DRAIN_S)
            gone = guard.end(self._run(), patience=lambda: asked.times < 2)
            self._process.wait()
            # A server that is still loading does not heed the signal: killing it then is nothing to report.
            killed = not gone and self._was_ready
            say(
                f"ended  after {self._age_s():.0f} s"
                + ("; some processes had to be killed" if killed else "")
            )
        if self._guard is not None:
            self._guard.dismiss()

    # -- parts -----------------------------------------------------------------------------------------------

    def _run(self, temporary_folder: Path | None = None) -> guard.Run:
        assert self._process is not None
        return guard.Run(self._process.pid, self._shm_prefix, GRACE_S, str(temporary_folder or ""))

    def _choose_log(self) -> Path | None:
        match self._options.log:
            case "stderr":
                return None
            case None:
                return self._folder / LOG_NAME
            case name:
                return Path(name).expanduser().resolve()

    def _open_log(self) -> contextlib.AbstractContextManager[IO[bytes] | None]:
        if self.log_file is None:
            return contextlib.nullcontext(None)
        try:
            return self.log_file.open("wb")
        except OSError as error:
            raise ConfigError(
                f"cannot write the log {self.log_file}: {error.strerror}", "give another --log"
            ) from None

    def _load_timeout_s(self) -> float:
        if self._options.load_timeout_s is not None:
            return self._options.load_timeout_s
        stages = [stage for deploy in self._pipelines for stage in deploy.stages.values()]
        return max(stage.load_timeout_s for stage in stages) + LOAD_MARGIN_S

    def _age_s(self) -> float:
        return time.monotonic() - self._started_s

    def _check_alive(self, when: str) -> None:
        assert self._process is not None
        status = self._process.poll()
        if status is None:
            return
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        reasons = server_log.last_errors(self.log_file)
        detail = "".join(f"\n  {line}" for line in reasons)
        raise TritoneError(
            f"the server ended {how} {when}",
            self._log_hint() + (f". Its last errors:{detail}" if detail else ""),
        )

    def _log_hint(self) -> str:
        return "see its output above" if self.log_file is None else f"its log is {self.log_file}"

    def _ping(self, name: str) -> str | None:
        """What keeps a pipeline from serving; None when nothing does."""
        try:
            self._prober(name).ping(PING_DEADLINE_S)
        except Exception as error:
            return " ".join(str(error).split())
        return None

    def _prober(self, name: str) -> Prober:
        if name not in self._probers:
            from tritone_client import (
                TritoneClient,
            )  # gRPC starts threads, which must not be there before the start

            self._probers[name] = self._clients.enter_context(
                TritoneClient(self._listen.grpc_url, pipeline=name)
            )
        return self._probers[name]

    def _announce(self, say: Callable[[str], None]) -> None:
        assert self._process is not None
        listen = self._listen
        names = [deploy.pipeline.name for deploy in self._pipelines]
        ready = {
            "pid": self._process.pid,
            "pipelines": names,
            "grpc": listen.grpc_url,
            "http": listen.http_url,
            "metrics": listen.metrics_url,
        }
        fresh = self._folder / f"{READY_NAME}.new"
        fresh.write_text(json.dumps(ready), encoding="utf-8")
        fresh.replace(self._folder / READY_NAME)
        say(f"ready  {', '.join(names)} after {self._age_s():.1f} s")
        say(f"gRPC {listen.grpc_url}   HTTP {listen.http_url}   metrics {listen.metrics_url}")
        for name in names:
            address = "" if listen.grpc_url == f"{Listen.host}:{Listen.grpc}" else f" --url {listen.grpc_url}"
            say(f'try: tritone chat "Why is the sky blue?" --pipeline {name}{address}')


@dataclass
class State:
    """How one pipeline does, from ping to ping."""

    fault: str | None = None  # None: it is ready
    down_since_s: float = 0.0  # time.monotonic()

    def note(self, fault: str | None) -> str | None:
        """Take the outcome of a ping; gives what to say about it, if it is new."""
        before, self.fault = self.fault, fault
        if fault == before:
            return None
        if before is None:
            self.down_since_s = time.monotonic()
        return "is ready again" if fault is None else f"is not ready: {fault}"

    def down_s(self) -> float:
        return 0.0 if self.fault is None else time.monotonic() - self.down_since_s

    @property
    def lost_stub(self) -> bool:
        """Whether the process of a door died, which Triton never starts again."""
        return self.fault is not None and "Stub process" in self.fault


def is_ready(http_url: str) -> bool:
    """Whether the server says that it and all its models are ready."""
    try:
        with urllib.request.urlopen(f"{http_url}/v2/health/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
