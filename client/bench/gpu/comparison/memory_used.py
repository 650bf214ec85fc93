"""How much memory a server holds while it is under load, sample by sample.

nvidia-smi: memory.used of every GPU, or without one /proc: resident memory of the server's processes
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from types import TracebackType

from tritone import gpus

MIB = 1 << 20
PAGE_BYTES = 4096
FLAT_SHARE, FLAT_MIB = 0.01, 64.0  # growth from the middle third to the last that still counts as none


class MemorySampler:
    """Samples from entering to leaving; an asynchronous context manager."""

    def __init__(self, pid: int, every_s: float) -> None:
        """pid: of the server, whose children count as well."""
        self.on_gpu = bool(gpus.find())
        self.samples: list[tuple[float, float]] = []  # seconds after the start, MiB
        self._pid, self._every_s = pid, every_s

    async def __aenter__(self) -> MemorySampler:
        self._began_s = time.monotonic()
        self._task = asyncio.create_task(self._sample())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _sample(self) -> None:
        while True:
            used = await asyncio.to_thread(self._used_mib)
            self.samples.append((round(time.monotonic() - self._began_s, 2), used))
            await asyncio.sleep(self._every_s)

    def _used_mib(self) -> float:
        if self.on_gpu:
            return sum(gpu.total_bytes - gpu.free_bytes for gpu in gpus.find()) / MIB
        return sum(resident_bytes(pid) for pid in family(self._pid)) / MIB


def family(pid: int) -> Iterator[int]:
    """A process and all below it."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError):  # it ended meanwhile
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for member in found:
        found += [child for child, parent in parents.items() if parent == member]
        yield member


def resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    return 0


def thirds_mib(samples: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Mean of each third of the time; the first one still warms up."""
    used = [mib for _, mib in samples]
    size = max(1, len(used) // 3)
    return mean(used[:size]), mean(used[size : 2 * size] or used), mean(used[-size:])


def is_flat(samples: Sequence[tuple[float, float]]) -> bool:
    """Whether the last third holds no more than the middle one, but for what is noise."""
    _, middle, last = thirds_mib(samples)
    return last - middle <= max(FLAT_MIB, FLAT_SHARE * middle)
