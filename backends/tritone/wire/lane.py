"""Ways to a peer on which nobody waits: what it does not take at once goes when it has room again.

    send ─► Outbox ─┬─ nothing waits, and there is room ─► Channel
                    └─ queue ─ a thread that waits for room ─► Channel

A stage's thread must not wait for a thread to begin either, which with other work in the process takes tens
of milliseconds. So those that wait for room are started by `_thread`, and not by `Thread.start`.
"""

from __future__ import annotations

import _thread
import threading
from collections import deque
from collections.abc import Callable

from tritone.wire.channel import SEND_TIMEOUT_S, Channel, Disconnected
from tritone.wire.framing import encode
from tritone.wire.messages import AnyMessage


class Lane:
    """The way to one peer, written to only when that takes no waiting. Called under a lock of its owner."""

    def __init__(
        self,
        resume: Callable[[Lane], None],
        channel: Channel | None = None,
        late: Callable[[], None] | None = None,
    ) -> None:
        """resume: called by another thread when `send` may succeed again. channel: None until `open`.

        late: called by that thread as often as the peer has not read for SEND_TIMEOUT_S. None: it is then
        taken for dead, and its channel is shut down.
        """
        self.channel = channel
        self._resume = resume
        self._late = late
        self._is_blocked = channel is None

    def open(self, channel: Channel) -> None:
        self.channel = channel
        self._is_blocked = False

    def send(self, packet: bytes) -> bool:
        """Whether it went. A lane whose peer is gone stays blocked: the channel's reader sees its end."""
        if self._is_blocked or self.channel is None:
            return False
        try:
            if self.channel.try_send(packet):
                return True
        except Disconnected:
            self._is_blocked = True
            return False
        self._is_blocked = True  # before the thread that says when it is not
        try:
            _thread.start_new_thread(self._wait, (self.channel,))
        except RuntimeError:  # no thread is left to wait: one peer is lost, not the process
            self.channel.shutdown()
        return False

    def _wait(self, channel: Channel) -> None:
        while not channel.wait_writable(SEND_TIMEOUT_S):
            if self._late is None:
                channel.shutdown()
                return
            self._late()
        self._is_blocked = False
        self._resume(self)


class Outbox:
    """Messages to one peer, in order. Thread-safe; `send` never waits for the peer."""

    def __init__(self, channel: Channel, late: Callable[[], None] | None = None) -> None:
        """late: as for Lane, while something waits."""
        self.waiting_bytes = 0
        self._lane = Lane(self._resume, channel, late)
        self._waiting: deque[bytes] = deque()  # encoded messages
        self._lock = threading.Lock()  # held for one packet, never for a wait

    def send(self, message: AnyMessage) -> None:
        """To a peer that is gone: kept in vain, until the owner lets the outbox go."""
        packet = encode(message)
        with self._lock:
            if self._waiting or not self._lane.send(packet):
                self._waiting.append(packet)
                self.waiting_bytes += len(packet)

    def _resume(self, lane: Lane) -> None:
        while True:
            with self._lock:
                if not self._waiting or not lane.send(self._waiting[0]):
                    return
                self.waiting_bytes -= len(self._waiting.popleft())
