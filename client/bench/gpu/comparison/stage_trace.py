"""Kernel time of a step of each stage, from torch traces that are taken under load.

tritone profile STAGE ─► Chrome trace ─► share of the time in which a kernel runs ─┐
ping before and after ─► steps a second ───────────────────────────────────────────┴─► seconds a step
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comparison.servers import PIPELINE, checkout
from comparison.stage_floors import kernel_share

SECONDS = 1
SETTLE_S = 2.0  # from the first request until all stages work


async def traced(client: Any, pid: int, stages: Sequence[str], folder: Path) -> dict[str, float]:
    """Kernel seconds a step of the stages whose trace has kernels. pid: of `tritone serve`."""
    await asyncio.sleep(SETTLE_S)
    kernels: dict[str, float] = {}
    for stage in stages:
        before, began_s = await _batches(client, stage), time.monotonic()
        file = folder / f"trace-{stage}.json"
        words = ["-m", "tritone", "profile", PIPELINE, stage, f"--seconds={SECONDS}", f"--out={file}"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *words, f"--pid={pid}", env={**os.environ, **checkout()}
        )
        if await process.wait() != 0:
            continue
        steps_per_s = (await _batches(client, stage) - before) / (time.monotonic() - began_s)
        share = kernel_share(json.loads(file.read_bytes()))
        if share is not None and steps_per_s > 0:
            kernels[stage] = share / steps_per_s
    return kernels


async def _batches(client: Any, stage: str) -> float:
    """Steps or batches of a stage's engines since they started."""
    told = await client.ping()
    return float(sum(engine.get("batches", 0) for engine in told[stage]["engines"]))
