"""A server for a soak run, started by `tritone serve` or plain, and ended with all that belongs to it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tritone import doctor
from tritone import server as servers
from tritone_client import AsyncTritoneClient

START_S = 120
END_S = 60


@dataclass(frozen=True)
class SoakServer:
    """One that is ready."""

    process: subprocess.Popen[bytes]  # `tritone serve`, or tritonserver itself; all others are below it
    grpc_url: str
    http_url: str
    metrics_url: str
    health_url: str = ""  # of `tritone serve`

    def client(self, pipeline: str) -> AsyncTritoneClient:
        return AsyncTritoneClient(self.grpc_url, pipeline=pipeline)


@contextlib.contextmanager
def served(target: str, folder: Path, overrides: tuple[str, ...] = ()) -> Iterator[SoakServer]:
    """By `tritone serve`. folder: of the run, kept."""
    words = [sys.executable, "-m", "tritone", "serve", target, f"--run-dir={folder}"]
    words += [f"--{kind}-port=0" for kind in servers.Listen().ports()]
    words += [f"--set={override}" for override in overrides]
    ready = folder / "ready.json"
    with _process(words, folder.with_suffix(".console")) as process:
        _until(ready.exists, process, folder / "server.log")
        facts = json.loads(ready.read_text())
        urls = [facts[kind] for kind in ("grpc", "http", "metrics", "health")]
        yield SoakServer(process, *urls)


@contextlib.contextmanager
def plain(target: str, folder: Path) -> Iterator[SoakServer]:
    """tritonserver itself on a rendered repository, with its default flags and thread pool."""
    repository = folder / "models" / target
    render = [sys.executable, "-m", "tritone", "render", target, f"--out={repository}", "--overwrite"]
    subprocess.run(render, check=True, stdout=subprocess.DEVNULL)
    found, python = servers.find(), servers.Interpreter.current()
    backends = servers.compose(found, folder / "backends")
    ports = dict(zip(("http", "grpc", "metrics"), _free_ports(3), strict=True))
    words = [str(found.binary), f"--model-repository={repository}", f"--backend-directory={backends}"]
    for kind, port in ports.items():
        words += [f"--{kind}-address=127.0.0.1", f"--{kind}-port={port}"]
    log = folder / "server.log"
    with _process(words, log, servers.environment(found, python)) as process:
        http = f"http://127.0.0.1:{ports['http']}"
        _until(lambda: _answers(f"{http}/v2/health/ready"), process, log)
        metrics = f"http://127.0.0.1:{ports['metrics']}/metrics"
        yield SoakServer(process, f"127.0.0.1:{ports['grpc']}", http, metrics)


@contextlib.contextmanager
def _process(
    words: list[str], log: Path, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(words, env=env, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start; see {log}")
        time.sleep(0.1)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(doctor.bind_free("127.0.0.1")) for _ in range(count)]
        return [probe.getsockname()[1] for probe in held]
