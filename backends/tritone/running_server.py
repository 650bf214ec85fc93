"""One tritonserver process of `tritone serve`, from its start to the last trace of it.

rendered models ──► tritonserver ──► ready ──► pinged, models loaded again ──► drained ──► ended
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from tritone import admin, connections, guard, inbox, pbtxt, probe, server_key, server_log, wire
from tritone import server as servers
from tritone.asked import Asked, ServeOptions
from tritone.deploy import Deploy
from tritone.errors import ConfigError, TritoneError
from tritone.probe import Probe
from tritone.server import Interpreter, Server
from tritone.stubs import Stubs

LOG_NAME = "server.log"
READY_NAME = "ready.json"
POLL_S = 0.2
PING_DEADLINE_S = 3.5  # with the time between two pings less than 5 s, see health.py
LOAD_MARGIN_S = 30.0  # of the server, on top of the slowest stage
CLEANUP_S = 5.0  # for what ended requests leave to do
GRACE_S = servers.EXIT_TIMEOUT_S + 5.0
UNLOAD_S = 15.0  # for the doors of a model to end their engines
LOST_UNLOAD_S = 2.0  # the same of one whose stub is dead; an instance that stays then harms nobody
QUIET_S = 5.0  # a connection on which nothing comes for so long after an orchestrator died hangs


class ServerCrashed(TritoneError):
    """The process was ended by a signal: nothing that a file or an option says."""


class RunningServer:
    """One tritonserver process. `start` and `end` are called once; the rest by several threads."""

    def __init__(
        self,
        server: Server,
        python: Interpreter,
        pipelines: Sequence[Deploy],
        folder: Path,
        options: ServeOptions,
        environ: Mapping[str, str],
    ) -> None:
        """environ: what the server is started with beside what it needs anyway."""
        self._server = server
        self._environ = environ
        self._python = python
        self._pipelines = list(pipelines)
        self._folder = folder
        self._options = options
        self._listen = options.listen
        self._shm_prefix = f"tritone_{os.getpid()}_{secrets.token_hex(4)}_"
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: guard.Guard | None = None
        self._started_s = 0.0
        self._clients = ExitStack()
        self._probes: dict[str, Probe] = {}
        self.was_ready = False
        self.pool_threads = servers.pool_threads(pipelines) or servers.DEFAULT_POOL_THREADS
        self.admin = admin.Admin(self._listen.http_url, "" if options.open_admin else admin.draw_key())
        self.stubs = Stubs(self._shm_prefix)
        self.log_file = log_file(options, folder)
        self._log_begin = server_log.size(self.log_file)

    # -- start and end ---------------------------------------------------------------------------------------

    def start(self, say: Callable[[str], None]) -> None:
        """Render, compose, and start the process in a group of its own, so that Ctrl-C reaches only us."""
        repositories = []
        for deploy in self._pipelines:
            repositories.append(self._repository(deploy))
            pbtxt.write(deploy, repositories[-1])
        backends = servers.compose(self._server, self._folder / "backends")
        closed = admin.options(self.admin.key, self._listen.host) if self.admin.key else []
        words = servers.command(
            self._server,
            repositories,
            backends,
            self._listen,
            self._shm_prefix,
            servers.pool_threads(self._pipelines),
            [*closed, *self._options.extra],
            supervised=True,
        )
        self._guard = guard.Guard()
        with self._open_log() as log:
            self._process = subprocess.Popen(
                words,
                env={**servers.environment(self._server, self._python), **self._environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        own_mps = str(guard.mps_folder(self._folder)) if self._environ else ""
        self._guard.watch(self._run(None if self._options.run_folder else self._folder, own_mps))
        self._started_s = time.monotonic()
        say(
            f"start  pid {self._process.pid}, pipelines {', '.join(d.pipeline.name for d in self._pipelines)}"
        )

    def wait_ready(self, say: Callable[[str], None], asked: Asked) -> None:
        """Return when the server is ready and every pipeline answers a ping, or when the end is asked for.

        Raises TritoneError when the server dies or the load deadline passes.
        """
        timeout_s = self.load_timeout_s(self._pipelines)
        deadline = time.monotonic() + timeout_s
        progress = server_log.Progress(self.log_file, self._log_begin)
        waiting = {deploy.pipeline.name for deploy in self._pipelines}
        reason = "the server loads its models"
        while waiting and not asked.wait(POLL_S):
            self.check_alive("while loading")
            for line in progress.news():
                say(f"loaded {line} after {self.age_s:.1f} s")
            if not is_ready(self._listen.http_url):
                reason = "the server loads its models"
            else:
                for name in sorted(waiting):
                    fault = self.ping(name)
                    if fault is None:
                        waiting.discard(name)
                    else:
                        reason = f"{name}: {fault}"
            if waiting and time.monotonic() > deadline:
                what = f"not ready within {timeout_s:g} s ({reason})"
                raise TritoneError(what, f"{self._log_hint()}, or give a longer --load-timeout-s")
        if not waiting:
            self.was_ready = True
            if self.admin.key and not admin.hide(self.pid, self.admin.key):
                say("note   the key of the admin APIs shows in the process list of this machine")
            self.stubs.learn(model for deploy in self._pipelines for model in models_of(deploy))

    def end(self, say: Callable[[str], None], asked: Asked) -> guard.Ended | None:
        """End server, stubs and engines; remove shared memory. Safe to call whatever happened before.

        In order if the end is asked for; at once if not, since something has failed then.
        """
        (self._folder / READY_NAME).unlink(missing_ok=True)
        ended = None
        if self._process is not None and self._process.poll() is None and asked.times:
            self._drain(say, asked)
        self._clients.close()
        if self._process is not None:
            ended = guard.end(self._run(), lambda: 0 < asked.times < 2)
            self._process.wait()
            server_key.forget(self._process.pid)
            # A server that is still loading does not heed the signal: killing it then is nothing to report.
            killed = not ended.orderly and self.was_ready
            say(f"ended  after {self.age_s:.0f} s" + (f"; {ended}" if killed else ""))
        if self._guard is not None:
            self._guard.dismiss()
            self._guard = None
        return ended

    def _drain(self, say: Callable[[str], None], asked: Asked) -> None:
        grace_s = self._options.drain_s if asked.times < 2 else 0.0
        say(
            f"stop   no new requests; those that run may take {grace_s:g} s; "
            "ask again (Ctrl-C) to end at once"
        )
        inbox.drain_all(self.pid, CLEANUP_S, wire.Drain(grace_s), patience=lambda: asked.times < 2)

    # -- while it runs ---------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def check_alive(self, when: str) -> None:
        """Raises TritoneError with the reasons that its log gives when the process has ended.

        ServerCrashed if it did not mean to.
        """
        assert self._process is not None
        status = self._process.poll()
        if status is None:
            return
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        kind = ServerCrashed if status < 0 else TritoneError
        reasons = server_log.last_errors(self.log_file, offset=self._log_begin)
        detail = "".join(f"\n  {line}" for line in reasons)
        raise kind(
            f"the server ended {how} {when}",
            self._log_hint() + (f". Its last errors:{detail}" if detail else ""),
        )

    def ping(self, model: str) -> str | None:
        """What keeps a pipeline model from serving; None when nothing does."""
        try:
            self._probe(model).ping(PING_DEADLINE_S)
        except Exception as error:
            return " ".join(str(error).split())
        return None

    def load_again(self, models: Sequence[str], timeout_s: float) -> None:
        """Unload and load models whose stubs are dead or hang. Raises TritoneError when one does not load."""
        for model in models:
            self.stubs.kill(model)
            self.admin.unload(model)
        self.admin.wait_unloaded(models, LOST_UNLOAD_S)
        self._load(models, timeout_s)

    def hang_up(self) -> int:
        """End the connections of clients whose requests cannot end any more; how many.

        Where other pipelines are served too: only those on which nothing has come for QUIET_S. Raises
        TritoneError where the kernel forbids that, so that only a new server ends those requests.
        """
        quiet_s = QUIET_S if len(self._pipelines) > 1 else 0.0
        time.sleep(quiet_s)
        ended = connections.hang_up(self.pid, (self._listen.http, self._listen.grpc), quiet_s)
        if ended is None:
            raise TritoneError("requests hang, and this system lets nobody end their connections", "wait")
        return ended

    def exchange(self, old: Deploy, new: Deploy, timeout_s: float) -> None:
        """Unload the models of `old`, render and load those of `new`. Raises TritoneError when one does not.

        Requests of the pipeline are to be drained before; other pipelines notice nothing.
        """
        models = models_of(old)
        for model in models:
            with contextlib.suppress(TritoneError):  # one that did not load either
                self.admin.unload(model)
        if not self.admin.wait_unloaded(models, UNLOAD_S):
            for model in models:
                self.stubs.kill(model)
            self.admin.wait_unloaded(models, LOST_UNLOAD_S)
        shutil.rmtree(self._repository(old), ignore_errors=True)
        pbtxt.write(new, self._repository(new))
        self._load(models_of(new), timeout_s)

    def drain(self, deploy: Deploy, why: str) -> bool:
        """End the requests of one pipeline; whether they have all ended by themselves or been cancelled."""
        names = {deploy.pipeline.name, twin_of(deploy.pipeline.name)}
        return inbox.drain_all(self.pid, CLEANUP_S, wire.Drain(self._options.drain_s, why), names)

    def load_timeout_s(self, pipelines: Sequence[Deploy]) -> float:
        if self._options.load_timeout_s is not None:
            return self._options.load_timeout_s
        stages = [stage for deploy in pipelines for stage in deploy.stages.values()]
        return max(stage.load_timeout_s for stage in stages) + LOAD_MARGIN_S

    def announce(self, health_url: str) -> None:
        """Write ready.json."""
        listen = self._listen
        ready = {
            "pid": self.pid,
            "supervisor": os.getpid(),
            "pipelines": [deploy.pipeline.name for deploy in self._pipelines],
            "grpc": listen.grpc_url,
            "http": listen.http_url,
            "metrics": listen.metrics_url,
            "health": health_url,
        }
        fresh = self._folder / f"{READY_NAME}.new"
        fresh.write_text(json.dumps(ready), encoding="utf-8")
        fresh.replace(self._folder / READY_NAME)

    # -- parts -----------------------------------------------------------------------------------------------

    def _load(self, models: Sequence[str], timeout_s: float) -> None:
        with ThreadPoolExecutor(len(models)) as loads:
            list(loads.map(lambda model: self.admin.load(model, timeout_s), models))
        self.stubs.learn(models)

    def _repository(self, deploy: Deploy) -> Path:
        return self._folder / "models" / deploy.pipeline.name

    def _run(self, temporary_folder: Path | None = None, own_mps: str = "") -> guard.Run:
        return guard.Run(self.pid, self._shm_prefix, GRACE_S, str(temporary_folder or ""), own_mps)

    def _open_log(self) -> contextlib.AbstractContextManager[IO[bytes] | None]:
        if self.log_file is None:
            return contextlib.nullcontext(None)
        try:
            return self.log_file.open("ab")
        except OSError as error:
            raise ConfigError(
                f"cannot write the log {self.log_file}: {error.strerror}", "give another --log"
            ) from None

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._started_s

    def _log_hint(self) -> str:
        return "see its output above" if self.log_file is None else f"its log is {self.log_file}"

    def _probe(self, model: str) -> Probe:
        if model not in self._probes:
            self._probes[model] = probe.make(model, self._listen, self._options.extra, self._clients)
        return self._probes[model]


def models_of(deploy: Deploy) -> list[str]:
    """The Triton models of a pipeline, stages first."""
    return [*sorted(set(pbtxt.texts(deploy)) - pipeline_models(deploy)), *sorted(pipeline_models(deploy))]


def pipeline_models(deploy: Deploy) -> set[str]:
    """The two whose doors are orchestrators."""
    return {deploy.pipeline.name, twin_of(deploy.pipeline.name)}


def twin_of(pipeline: str) -> str:
    return f"{pipeline}_sync"


def log_file(options: ServeOptions, folder: Path) -> Path | None:
    """Where the log of a run goes; None: to stderr."""
    match options.log:
        case "stderr":
            return None
        case None:
            return folder / LOG_NAME
        case name:
            return Path(name).expanduser().resolve()


def is_ready(http_url: str) -> bool:
    """Whether the server says that it and all its models are ready."""
    try:
        with urllib.request.urlopen(f"{http_url}/v2/health/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
