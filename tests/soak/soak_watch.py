"""What the processes of a server hold: memory, shared memory, descriptors, threads; and whether it grows.

The pages of a process show what all of its allocators keep, free room included; the blocks that are alive in
Python's, which the server tells as a metric, show a leak of one object in twenty requests.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PROC = Path("/proc")
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") / 1024

BLOCKS = re.compile(r"^tritone_(pipeline|stage_door|stage_engine)_blocks\{(.+)\} (\S+)$", re.MULTILINE)

_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Reading:
    """One look at a process tree."""

    rss_kib: dict[str, float]  # by process, resident pages that are its own
    shm_kib: float  # files in /dev/shm that the tree has mapped
    descriptors: int
    threads: int

    @property
    def held_kib(self) -> dict[str, float]:
        """By process, and the shared memory of all."""
        return {**self.rss_kib, "/dev/shm": self.shm_kib}


def tree(root: int) -> dict[int, str]:
    """Process ids of `root` and all below it, each with a name that a reader knows."""
    parents: dict[int, int] = {}
    for entry in PROC.iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, frontier = {root}, {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return {pid: name for pid in sorted(found) if (name := _name(pid))}


def engines(root: int) -> dict[int, str]:
    """The engine processes below `root`: id to what they host."""
    return {pid: name for pid, name in tree(root).items() if name.startswith("engine ")}


def _name(pid: int) -> str:
    """ "" when the process is gone or a zombie."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    stages = next((word.partition("=")[2] for word in words if word.startswith("--stages=")), None)
    if stages is not None:
        return f"engine {stages}"
    line = " ".join(words).strip()
    if "triton_python_backend_stub" in line:
        match = re.search(r"/models/[^/ ]+/([^/ ]+)/\d+/|/([^/ ]+)/1/model\.py", line)
        return f"stub {next(filter(None, match.groups())) if match else pid}"
    for part, name in (("bin/tritonserver", "tritonserver"), ("tritone serve", "tritone serve")):
        if part in line:
            return name
    return Path(words[0]).name if line else ""


def read(root: int) -> Reading:
    """Processes that end meanwhile are left out."""
    rss, shm, descriptors, threads = {}, set[str](), 0, 0
    for pid, name in tree(root).items():
        folder = PROC / str(pid)
        with contextlib.suppress(OSError):
            resident, shared = map(int, (folder / "statm").read_text().split()[1:3])
            maps = (folder / "maps").read_text()
            descriptors += len(list((folder / "fd").iterdir()))
            threads += len(list((folder / "task").iterdir()))
            key = name if name not in rss else f"{name} {pid}"
            rss[key] = (resident - shared) * PAGE_KIB
            shm |= set(re.findall(r"/dev/shm/\S+", maps))
    sizes = [os.stat(file).st_blocks / 2 for file in shm if Path(file).exists()]
    return Reading(rss, sum(sizes), descriptors, threads)


def read_blocks(metrics_url: str) -> dict[str, float]:
    """By process: what is alive in its Python allocator. Nothing where no metrics are published."""
    with urllib.request.urlopen(metrics_url, timeout=5) as answer:
        page = answer.read().decode()
    found = {}
    for kind, labels, value in BLOCKS.findall(page):
        names = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        whose = names["model"] if kind == "pipeline" else f"{names['stage']} {names['instance']}"
        found[f"{kind.replace('_', ' ')} {whose}"] = float(value)
    return found


def processor_s(root: int) -> float:
    """Seconds of processor time that the processes below `root` that live have taken."""
    return sum(processors_s(root).values())


def processors_s(root: int) -> dict[str, float]:
    """The same by process, of those of one name together."""
    times: dict[str, float] = {}
    for pid, name in tree(root).items():
        with contextlib.suppress(OSError):
            times[name] = times.get(name, 0.0) + time.clock_gettime(_clock(pid))
    return times


def _clock(pid: int) -> int:
    """Of a process: counts its time to the nanosecond, where /proc has hundredths. Raises OSError."""
    clock = ctypes.c_int()
    fault = _libc.clock_getcpuclockid(pid, ctypes.byref(clock))
    if fault:
        raise OSError(fault, os.strerror(fault))
    return clock.value


@dataclass(frozen=True)
class Slope:
    """Growth by least squares, and its standard error."""

    per_request: float
    error: float

    def exceeds(self, allowed: float) -> bool:
        """Growth that is more than two standard errors and more than is allowed."""
        return self.per_request > max(2 * self.error, allowed)

    def __str__(self) -> str:
        return f"{self.per_request:+.3f} ± {self.error:.3f}"


def slope(requests: Iterable[float], values: Iterable[float]) -> Slope:
    """Values over the number of requests so far. Needs three points or more."""
    x, y = np.asarray(list(requests), float), np.asarray(list(values), float)
    x = x - x.mean()
    per_request = float(x @ y / (x @ x))
    left = y - y.mean() - per_request * x
    error = float(np.sqrt(left @ left / (len(x) - 2) / (x @ x)))
    return Slope(per_request, error)


def slopes(requests: list[int], readings: list[Mapping[str, float]]) -> dict[str, Slope]:
    """Of everything that was there from the first reading to the last."""
    names = set.intersection(*map(set, readings))
    return {name: slope(requests, [reading[name] for reading in readings]) for name in sorted(names)}
