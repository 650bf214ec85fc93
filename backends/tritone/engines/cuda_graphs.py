"""Functions as CUDA graphs: what they launch is recorded once and launched as one from then on."""

from __future__ import annotations

from collections.abc import Callable

import torch


class CudaGraphs:
    """Makes graphs whose intermediate results share memory: they never run at the same time."""

    _WARM_UPS = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def __call__(self, program: Callable[[], None]) -> Callable[[], None]:
        """What launches the program, or on a CPU is it; it has run before: first calls compile.

        The program must live as long as what is given back: a graph knows no more than addresses.
        """
        if self._pool is None:
            program()
            return program
        with torch.cuda.device(self._device):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(self._WARM_UPS):
                    program()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                program()
        replay: Callable[[], None] = graph.replay
        return replay


def buckets_up_to(rows: int) -> list[int]:
    """Batch sizes to capture: powers of two up to one that holds `rows`."""
    sizes = [1]
    while sizes[-1] < rows:
        sizes.append(2 * sizes[-1])
    return sizes
