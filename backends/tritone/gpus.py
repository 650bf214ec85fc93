"""The GPUs of this machine and their memory, as nvidia-smi tells them; none where there is no driver."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

QUERY = (
    "nvidia-smi",
    "--query-gpu=index,uuid,name,memory.total,memory.free",
    "--format=csv,noheader,nounits",
)
TIMEOUT_S = 20.0
MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """One that a server started here would see."""

    name: str
    total_bytes: int
    free_bytes: int


def find(environ: Mapping[str, str] = os.environ, query: tuple[str, ...] = QUERY) -> tuple[Gpu, ...]:
    """In the order in which `device: gpu:<number>` counts them."""
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    rows = [line.split(", ") for line in done.stdout.splitlines()] if done.returncode == 0 else []
    by_name: dict[str, Gpu] = {}
    for row in rows:
        if len(row) == 5 and row[3].strip().isdecimal() and row[4].strip().isdecimal():
            gpu = Gpu(row[2], int(row[3]) * MIB, int(row[4]) * MIB)
            by_name[row[0].strip()] = by_name[row[1].strip()] = gpu
    numbers = sorted(int(name) for name in by_name if name.isdecimal())
    shown = environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, numbers)))
    return tuple(by_name[word] for word in map(str.strip, shown.split(",")) if word in by_name)


def num_gpus(devices: Path = Path("/dev")) -> int:
    """How many a machine shows, with a driver that answers or without."""
    return sum(re.fullmatch(r"nvidia\d+", device.name) is not None for device in devices.iterdir())
