"""The two servers: each started for a measurement, waited for, and ended with all that belongs to it.

ours   tritone serve qwen3_omni --profile … --checkpoint DIR        ready.json, then gRPC
peer   PYTHON -m vllm_omni.entrypoints.cli.main serve DIR --omni …   /health, then HTTP
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from comparison.peer_client import MODEL, PeerClient
from tritone_client.client import AsyncTritoneClient

ROOT = Path(__file__).parents[4]
SOURCES = ("backends", "client", "client/bench")
PIPELINE = "qwen3_omni"
OURS, PEER = "ours", "peer"
END_S = 90.0


class NotReady(RuntimeError):
    """A server took longer to start than it was given."""


@dataclass(frozen=True)
class Served:
    """One that answers."""

    side: str  # ours or peer
    url: str
    pid: int  # all its other processes are below it
    start_s: float  # how long it took

    def client(self) -> Any:
        """An async context manager that the benchmark can ask."""
        return AsyncTritoneClient(self.url, PIPELINE) if self.side == OURS else PeerClient(self.url)


class KeptServers:
    """Servers that a command left running for the next ones, a file a side."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def note(self, served: Served) -> None:
        self._file(served.side).write_text(json.dumps(asdict(served)))

    def find(self, side: str) -> Served | None:
        """One that still runs."""
        file = self._file(side)
        served = Served(**json.loads(file.read_text())) if file.is_file() else None
        return served if served is not None and is_running(served.pid) else None

    def end(self, side: str) -> None:
        served = self.find(side)
        if served is not None:
            end(served.pid)
        self._file(side).unlink(missing_ok=True)

    def _file(self, side: str) -> Path:
        return self._folder / f"{side}-kept.json"


@dataclass(frozen=True)
class OurStart:
    """How ours is started."""

    checkpoint: Path
    profile: str | None
    overrides: tuple[str, ...] = ()

    def words(self, run_folder: Path) -> list[str]:
        return [
            *(sys.executable, "-m", "tritone", "serve", PIPELINE),
            f"--checkpoint={self.checkpoint}",
            f"--run-dir={run_folder}",
            *(f"--{kind}-port=0" for kind in ("http", "grpc", "metrics")),
            *([f"--profile={self.profile}"] if self.profile else []),
            *(f"--set={override}" for override in self.overrides),
        ]


@dataclass(frozen=True)
class PeerStart:
    """How the peer is started."""

    checkpoint: Path
    python: str
    arguments: tuple[str, ...] = ()  # of its own, behind those that are given here

    def words(self, deploy: Path, port: int) -> list[str]:
        return [
            *(self.python, "-m", "vllm_omni.entrypoints.cli.main", "serve", str(self.checkpoint)),
            *("--omni", "--trust-remote-code", f"--served-model-name={MODEL}"),
            *(f"--deploy-config={deploy}", "--host=127.0.0.1", f"--port={port}"),
            *self.arguments,
        ]


@contextlib.contextmanager
def our_server(start: OurStart, folder: Path, timeout_s: float, keep: bool = False) -> Iterator[Served]:
    """folder: for its run and its log; RuntimeError with the end of the log if it does not start.

    keep: leave it running at the end.
    """
    run_folder = folder / "run"
    ready = run_folder / "ready.json"
    ready.unlink(missing_ok=True)
    began_s = time.monotonic()
    with _process(start.words(run_folder), folder / "ours.log", checkout(), keep) as process:
        _until(ready.exists, process, [folder / "ours.log", run_folder / "server.log"], timeout_s)
        facts = json.loads(ready.read_text())
        yield Served(OURS, facts["grpc"], process.pid, time.monotonic() - began_s)


@contextlib.contextmanager
def peer_server(start: PeerStart, folder: Path, timeout_s: float, keep: bool = False) -> Iterator[Served]:
    """As `our_server`."""
    folder.mkdir(parents=True, exist_ok=True)
    deploy = folder / "peer_deploy.yaml"
    deploy.write_text(json.dumps(peer_deploy()))  # JSON is YAML
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    env = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
    began_s = time.monotonic()
    with _process(start.words(deploy, port), folder / "peer.log", env, keep) as process:
        _until(lambda: _answers(f"{url}/health"), process, [folder / "peer.log"], timeout_s)
        yield Served(PEER, url, process.pid, time.monotonic() - began_s)


def checkout() -> dict[str, str]:
    """Environment in which a Python finds this checkout, installed or not."""
    paths = [str(ROOT / source) for source in SOURCES]
    return {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}


def peer_deploy() -> dict[str, Any]:
    """All three stages on the one GPU, random weights, chunks as ours by default: 4 frames, then 25."""
    shared = {"max_num_seqs": 64, "load_format": "dummy", "trust_remote_code": True, "devices": "0"}
    shared |= {"enable_prefix_caching": False}
    text = {
        **shared,
        "max_num_batched_tokens": 32768,
        "max_model_len": 8192,
        "limit_mm_per_prompt": {"audio": 0, "image": 0, "video": 0},
    }
    connector = "connector_of_shared_memory"
    chunks = {"initial_codec_chunk_frames": 4, "codec_chunk_frames": 25, "codec_left_context_frames": 25}
    talked = {"temperature": 0.9, "top_k": 50, "max_tokens": 4096, "seed": 42, "repetition_penalty": 1.05}
    return {
        "async_chunk": True,
        "connectors": {connector: {"name": "SharedMemoryConnector", "extra": chunks}},
        "stages": [
            {
                **text,
                "stage_id": 0,
                "gpu_memory_utilization": 0.60,
                "default_sampling_params": {"temperature": 0.0, "max_tokens": 2048},
            },
            {
                **text,
                "stage_id": 1,
                "gpu_memory_utilization": 0.18,
                "input_connectors": {"from_stage_0": connector},
                "default_sampling_params": talked,
            },
            {
                **shared,
                "stage_id": 2,
                "max_num_batched_tokens": 65536,
                "gpu_memory_utilization": 0.1,
                "enforce_eager": False,
                "enable_chunked_prefill": False,
                "async_scheduling": False,
                "input_connectors": {"from_stage_1": connector},
                "default_sampling_params": {"temperature": 0.0, "max_tokens": 65536, "seed": 42},
            },
        ],
    }


@contextlib.contextmanager
def _process(
    words: Sequence[str], log: Path, env: Mapping[str, str], keep: bool
) -> Iterator[subprocess.Popen[bytes]]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            env={**os.environ, **env},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that nothing of it outlives the measurement
        )
    kept = False
    try:
        yield process
        kept = keep
    finally:
        if not kept:
            end(process.pid)


def end(pid: int) -> None:
    """End a server, whoever started it, and all that belongs to it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        deadline_s = time.monotonic() + END_S
        while is_running(pid) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        os.killpg(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # a child of ours that has ended is gone then
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _until(
    ready: Callable[[], bool], process: subprocess.Popen[bytes], logs: Sequence[Path], timeout_s: float
) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        is_late = time.monotonic() > deadline
        if process.poll() is not None or is_late:
            tails = "".join(log.read_text(errors="replace")[-2000:] for log in logs if log.exists())
            if process.returncode is None:
                raise NotReady(f"the server is not ready after {timeout_s:g} s:\n{tails}")
            raise RuntimeError(f"the server ended with status {process.returncode}:\n{tails}")
        time.sleep(0.2)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
