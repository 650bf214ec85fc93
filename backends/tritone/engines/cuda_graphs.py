"""Functions as CUDA graphs: what they launch is recorded once and launched as one from then on.

Recording is for loading, before any loop of the process runs: it waits for the whole device, and a wait of
another thread for the device, or for a context, would spoil it. Launches and allocations of other threads
would not (`thread_local`).

What is recorded in one stream shares the workspace that cuBLAS has for this stream, whichever graph it is
in. Graphs of two stages may run at the same time, so each has a stream of its own to record in, and not the
one that torch would take for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class CudaGraphs:
    """Makes graphs whose intermediate results share memory: they never run at the same time."""

    _WARM_UPS = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = None
        self._stream: Any = None
        if device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
            # A kernel of a graph may keep the priority of the stream that it was recorded in.
            priority = torch.cuda.current_stream(device).priority
            self._stream = torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]

    def __call__(self, program: Callable[[], object]) -> Callable[[], object]:
        """What launches the program, or on a CPU is it; it has run before: first calls compile.

        The program must live as long as what is given back: a graph knows no more than addresses.
        """
        if self._pool is None:
            program()
            return program
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(self._WARM_UPS):
                    program()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                program()
        replay: Callable[[], object] = graph.replay
        return replay
