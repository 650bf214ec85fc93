"""How long a call takes on the device that it runs on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

CALLS = {"cpu": 3, "cuda": 40}
WARM_UPS = {"cpu": 1, "cuda": 5}


def milliseconds(run: Callable[[], Any], device: str = "cuda:0") -> float:
    """Median of CALLS, behind WARM_UPS: on a CPU by the clock, on a GPU by events around each call."""
    kind = torch.device(device).type
    for _ in range(WARM_UPS[kind]):
        run()
    if kind == "cpu":
        spans_ms = []
        for _ in range(CALLS[kind]):
            began_s = time.perf_counter()
            run()
            spans_ms.append(1e3 * (time.perf_counter() - began_s))
        return statistics.median(spans_ms)
    spans = []
    for _ in range(CALLS[kind]):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in spans)
