"""The CUDA stream of one stage, so that stages of one process do not wait for each other on their GPU.

    loading thread ──open──► weights, graphs, states ──leave──► all of it is there
    loop's thread ─┐
    media threads ─┴─enter──► every kernel and copy of the stage, in the order in which they are launched

All threads of a stage launch into one stream, and a stage hands nothing to another but host memory. From
that follows what else would need events:

* What one thread of a stage computes and another goes on with is in order, and a block of memory that one
  frees and another takes is free by then: torch keeps blocks by the stream that they were allocated in, which
  is why a stage is loaded in its stream too.
* A wait (`.cpu()`, `.item()`, an event, `current_stream().synchronize()`) is for this stage's work alone, and
  torch lets go of the interpreter's lock meanwhile. Only a device-wide `synchronize` waits for the others;
  it is for loading.
* Graphs are captured while loading (cuda_graphs.py). Streams and threads of other stages do nothing then.

Without `open` it is torch's default stream, and nothing here imports torch.
"""

from __future__ import annotations

from typing import Any


class StageStream:
    """Of one stage on one GPU."""

    def __init__(self, urgency: int | None = None) -> None:
        """urgency: 0 for a stage that may wait longest for the GPU's blocks; None: torch's default stream."""
        self._urgency = urgency
        self._torch: Any = None
        self._stream: Any = None
        self._before: Any = None  # of the loading thread

    def open(self, torch: Any, device: str) -> None:
        """Make the stream on "cuda:<index>", and have this thread load into it."""
        if self._urgency is None or device == "cpu":
            return
        least, greatest = torch.cuda.Stream.priority_range()  # a lower number goes first
        self._torch, self._before = torch, torch.cuda.current_stream(device)
        self._stream = torch.cuda.Stream(device, priority=max(greatest, least - self._urgency))
        self.enter()

    def enter(self) -> None:
        """Have the calling thread launch into the stream from now on, as long as it lives."""
        if self._stream is not None:
            self._torch.cuda.set_stream(self._stream)

    def leave(self) -> None:
        """Give the loading thread back the stream that it had, once all that it loaded is there."""
        if self._stream is not None:
            self._torch.cuda.synchronize(self._stream.device)
            self._torch.cuda.set_stream(self._before)
