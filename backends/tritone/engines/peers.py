"""The orchestrators that an engine process talks to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial

from tritone import wire

MOST_WAITING_BYTES = 64 << 20  # of one inbox, on top of what its socket holds


class Peers:
    """Ways to the inboxes of orchestrators, by address. Thread-safe."""

    def __init__(
        self, own_address: str, on_lost: Callable[[str], None], on_late: Callable[[str], None]
    ) -> None:
        """on_lost: called with the address of a peer that went away.

        on_late: called, maybe again and again, with that of a peer that has not read for SEND_TIMEOUT_S, or
        leaves more than MOST_WAITING_BYTES unread. It must give it nothing more but the ends of sessions.
        """
        self.own_address = own_address
        self._on_lost, self._on_late = on_lost, on_late
        self._outboxes: dict[str, wire.Outbox] = {}
        self._connecting = threading.Lock()

    def ensure(self, address: str) -> None:
        """Connect to an inbox, which may wait: not for the thread of a stage.

        Raises Disconnected when nobody serves `address`.
        """
        with self._connecting:
            if address in self._outboxes:
                return
            channel = wire.connect(address)
            channel.send(wire.Hello(self.own_address))
            self._outboxes[address] = wire.Outbox(channel, partial(self._on_late, address))
            threading.Thread(target=self._watch, args=(address, channel), daemon=True, name="peer").start()

    def send(self, address: str, message: wire.AnyMessage) -> None:
        """What the peer does not take at once follows in order. Raises Disconnected when it went away."""
        outbox = self._outboxes.get(address)
        if outbox is None:
            raise wire.Disconnected(f"{address}: not connected")
        if outbox.waiting_bytes > MOST_WAITING_BYTES:
            self._on_late(address)
        outbox.send(message)

    def _watch(self, address: str, channel: wire.Channel) -> None:
        with contextlib.suppress(wire.Disconnected):
            while True:
                channel.receive()  # an inbox says nothing; this waits for its end
        with self._connecting:
            del self._outboxes[address]
        channel.close()
        self._on_lost(address)
