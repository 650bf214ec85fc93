"""The memory of this machine, or of the container that this runs in."""

from __future__ import annotations

import re
from pathlib import Path

from tritone.memory_plan import CPU, Place


def ram(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Place:
    """What there is, and what a new process may use of it."""
    text = (proc / "meminfo").read_text()
    total, available = _kilobytes("MemTotal", text), _kilobytes("MemAvailable", text)
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        limit = "max"
    if limit != "max":
        total, available = min(total, int(limit)), min(available, max(0, int(limit) - used))
    return Place(CPU, "RAM", total, available)


def _kilobytes(name: str, text: str) -> int:
    """A value of /proc/meminfo in bytes."""
    match = re.search(rf"{name}:\s+(\d+) kB", text)
    return int(match.group(1)) * 1024 if match else 0
