"""What measuring cost: a client that is busy itself measures itself.

cpu_share near 1 means that this process filled a core, and lag that its loop came late to what had arrived.
Both stand in every report, so that a figure can be doubted.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from types import TracebackType

from tritone_bench.percentiles import percentile

BUSY_CPU_SHARE = 0.8
"""From here on the client may be what limits the figures."""
TICK_S = 0.02


@dataclass(frozen=True, slots=True)
class ClientCost:
    """This process while one level ran."""

    cpu_share: float  # of one core, all threads together
    loop_lag_p99_s: float | None  # how late the event loop woke; None for a level shorter than a tick
    load_average: float  # of the machine, over the last minute, when the level began

    @property
    def is_bottleneck(self) -> bool:
        """Whether the client may have been slower than what it measured."""
        return self.cpu_share > BUSY_CPU_SHARE


class CostMeter:
    """Measures from entering to leaving; an asynchronous context manager."""

    def __init__(self) -> None:
        self._lags_s: list[float] = []

    async def __aenter__(self) -> CostMeter:
        self._load_average = os.getloadavg()[0]
        self._began_s, self._began_cpu_s = time.perf_counter(), time.process_time()
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ticking.cancel()
        self._wall_s = time.perf_counter() - self._began_s
        self._cpu_s = time.process_time() - self._began_cpu_s

    @property
    def cost(self) -> ClientCost:
        """After leaving."""
        return ClientCost(self._cpu_s / self._wall_s, percentile(self._lags_s, 99), self._load_average)

    async def _tick(self) -> None:
        while True:
            due_s = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            self._lags_s.append(max(0.0, time.perf_counter() - due_s))
