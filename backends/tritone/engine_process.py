"""One engine process as its door sees it: how it is started, whether it lives, how it is ended."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tritone
from tritone import allocator
from tritone.device import visible
from tritone.engines.host import ADDRESS_TAKEN_STATUS

END_TIMEOUT_S = 3.0  # from the end of the life line to SIGKILL


class EngineEnded(Exception):
    """The process ended by itself; the message says how."""


@dataclass(frozen=True)
class EngineSpec:
    """How to start an engine process."""

    deploy_file: Path
    stages: tuple[str, ...]
    address: str
    gpus: tuple[int, ...]  # that it runs on, as this process counts them; none: it runs on the CPU
    threads: int
    python: str | None
    load_timeout_s: float
    mps_priority: int | None = None  # see Deploy.mps_priority
    env: Mapping[str, str] = field(default_factory=dict)  # beside that of this process

    def command(self, life_line: int) -> list[str]:
        return [
            self.python or default_python(),
            "-m",
            "tritone.engines.host",
            f"--deploy={self.deploy_file}",
            f"--stages={','.join(self.stages)}",
            f"--address={self.address}",
            f"--device={'cuda:0' if self.gpus else 'cpu'}",
            f"--num-gpus={max(1, len(self.gpus))}",
            f"--life-line={life_line}",
        ]

    def environment(self) -> dict[str, str]:
        """ConfigError when this process does not see the GPUs."""
        env = dict(os.environ)
        env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = str(self.threads)
        env["TOKENIZERS_PARALLELISM"] = "false"
        env["HF_HUB_OFFLINE"] = "1"
        if self.gpus:
            env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # that of nvidia-smi, whose numbers a deploy file has
            env["CUDA_VISIBLE_DEVICES"] = visible(self.gpus, os.environ)
        if self.mps_priority is not None:
            env["CUDA_MPS_CLIENT_PRIORITY"] = str(self.mps_priority)
        allocator.for_engine(env)
        env |= self.env
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


class EngineProcess:
    """The process of a spec, or none. Thread-safe."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._life_line: int | None = (
            None  # the process ends when this descriptor closes, as when the door dies
        )

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def runs(self) -> bool:
        process = self._process
        return process is not None and process.poll() is None

    def start(self) -> None:
        """Raises OSError when it cannot be started."""
        self.end()
        with self._lock:
            read_end, self._life_line = os.pipe()
            try:
                self._process = subprocess.Popen(
                    self.spec.command(read_end),
                    env=self.spec.environment(),
                    pass_fds=(read_end,),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # a Ctrl-C goes to the server, which ends its engines in order
                )
            finally:
                os.close(read_end)

    def lives(self) -> bool:
        """False if there is none, or it found that another process serves the address already.

        Raises EngineEnded once it has ended otherwise.
        """
        process = self._process
        status = process.poll() if process is not None else ADDRESS_TAKEN_STATUS
        if status is None:
            return True
        if status != ADDRESS_TAKEN_STATUS:
            raise EngineEnded(f"the engine process ended with status {status}")
        return False

    def kill(self) -> None:
        """By SIGKILL, at once: one that hangs may not heed its life line."""
        process = self._process
        if process is not None:
            process.kill()
        self.end()

    def end(self) -> None:
        """End it: by the life line, after END_TIMEOUT_S by SIGKILL."""
        with self._lock:
            life_line, self._life_line = self._life_line, None
            process, self._process = self._process, None
        if life_line is not None:
            os.close(life_line)
        if process is not None:
            try:
                process.wait(timeout=END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
