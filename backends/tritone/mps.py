"""NVIDIA's Multi-Process Service for one run of `tritone serve`: kernels of several engines at one time.

    tritone serve ─► nvidia-cuda-mps-control -d ─► its server, a GPU context for all
                       ▲  <run folder>/mps/pipe        ▲
                       └─ quit, at the end             └─ engines, which inherit CUDA_MPS_PIPE_DIRECTORY

The daemon is private to the run: other programs on the GPU neither use it nor are disturbed. guard.py ends
it when `tritone serve` is killed -9 while a server of it runs; one that was left is ended by the next run in
the same folder. Nothing starts it again when it dies itself: engines then do not load.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tritone import guard
from tritone.deploy import Deploy
from tritone.errors import ConfigError

START_TIMEOUT_S = 20.0


def is_wanted(pipelines: Iterable[Deploy]) -> bool:
    """Whether one of them asks for it. ConfigError when this machine has no program for it."""
    wanted = any(deploy.mps for deploy in pipelines)
    if wanted and shutil.which(guard.MPS_PROGRAM) is None:
        raise ConfigError(
            f"`mps` is true, but {guard.MPS_PROGRAM} is not on PATH",
            "install it (it comes with NVIDIA's driver for Linux), or give mps: false",
        )
    return wanted


@contextmanager
def daemon(run_folder: Path) -> Iterator[Mapping[str, str]]:
    """The environment of programs that use it, while it runs. ConfigError when it does not start."""
    folder = guard.mps_folder(run_folder)
    env = environment(folder)
    for name in env.values():
        Path(name).mkdir(parents=True, exist_ok=True)
    # It would count GPUs anew from 0, and engines name theirs as nvidia-smi does: it is to see all of them.
    seen = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    said = folder / "log" / "start.log"  # not a pipe, which would stay open as long as the daemon lives
    try:
        with said.open("wb") as output:
            status = subprocess.run(
                [guard.MPS_PROGRAM, "-d"],
                env={**seen, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=START_TIMEOUT_S,
                start_new_session=True,  # a Ctrl-C ends the server first, and the daemon after it
            ).returncode
        reason = " ".join(said.read_text(errors="replace").split())
    except (OSError, subprocess.TimeoutExpired) as error:
        status, reason = 1, str(error)
    try:
        if status:
            raise ConfigError(
                f"{guard.MPS_PROGRAM} does not start: {reason or status}",
                "give mps: false, or look whether this user may use the GPU and another daemon serves it",
            )
        yield env
    finally:
        guard.quit_mps(folder)


def environment(folder: Path) -> dict[str, str]:
    """What a program is to be started with."""
    return {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
    }
