"""A thread of an engine process that owns one engine: a mailbox, and turns.

    reader threads ──post──► mailbox ─► drain ─► turn
                                ▲                  │
                                └──────────────────┘

Only `post` and `stats` are called from other threads. What a turn is: stage_loop.py, batch_loop.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from tritone import wire
from tritone.allocator import num_blocks
from tritone.engines.stage_stream import StageStream
from tritone.tracing import Tracer

log = logging.getLogger("tritone.engine")

IDLE_WAIT_S = 1.0  # how often an idle loop looks at leases
GIVEN_UP_STATUS = 70  # exit status of a process whose engine's state is given up; its door starts a new one

Answer = Callable[[wire.AnyMessage], None]


class Loop(ABC):
    """One stage's thread: turns until the process ends."""

    def __init__(
        self,
        model: str,
        lease_s: float,
        tracer: Tracer | None = None,
        stream: StageStream | None = None,
    ) -> None:
        """model: Triton model name. lease_s: a session that waits longer for input is dropped.

        stream: that the engine was loaded in.
        """
        self.model = model
        self._stream = stream or StageStream()
        self._tracer = tracer or Tracer()
        self._lease_s = lease_s
        self._mailbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._beat_s = time.monotonic()
        self._stats: dict[str, Any] = {"active": 0}
        self._num_batches = self._num_batched = 0  # steps that gave something, and the shares in them

    def post(self, task: Callable[[], None]) -> None:
        """Have `task` called on the loop's thread."""
        self._mailbox.put(task)

    def stats(self) -> dict[str, Any]:
        """The figures of the last turn, and its age."""
        counts = {"batches": self._num_batches, "batched": self._num_batched, "blocks": num_blocks()}
        return {**self._stats, **counts, "beat_age_s": time.monotonic() - self._beat_s}

    def run(self) -> None:
        """A loop that ends would leave a process that looks alive: end that, the door starts a new one."""
        self._beat_s = time.monotonic()  # it was made before other stages of the process were loaded
        try:
            self._stream.enter()
            while True:
                self._turn()
        except BaseException:
            log.exception("stage %s: the loop ended", self.model)
            self._tracer.close()
            os._exit(GIVEN_UP_STATUS)

    def _drain(self, block: bool) -> None:
        """Do what the mailbox holds; wait for something first if `block`."""
        with contextlib.suppress(queue.Empty):
            task = self._mailbox.get(block=block, timeout=IDLE_WAIT_S)
            while True:
                task()
                self._beat_s = time.monotonic()  # each of many tasks may take long
                task = self._mailbox.get_nowait()

    @abstractmethod
    def _turn(self) -> None:
        """One turn; sets `_beat_s` and `_stats`."""

    @abstractmethod
    def cancel(self, session: str) -> None:
        """Forget a session. Unknown session: ignored."""

    @abstractmethod
    def peer_lost(self, address: str) -> None:
        """The orchestrator at this address went away."""
