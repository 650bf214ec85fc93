"""The orchestrators that an engine process talks to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from tritone import wire


class Peers:
    """Channels to the inboxes of orchestrators, by address, opened when first needed. Thread-safe."""

    def __init__(self, own_address: str, on_lost: Callable[[str], None]) -> None:
        self.own_address = own_address
        self._on_lost = on_lost  # called with the address of a peer that went away
        self._channels: dict[str, wire.Channel] = {}
        self._lock = threading.Lock()

    def ensure(self, address: str) -> wire.Channel:
        """Raises Disconnected when nobody serves `address`."""
        with self._lock:
            channel = self._channels.get(address)
            if channel is None:
                channel = wire.connect(address)
                channel.send(wire.Hello(self.own_address))
                self._channels[address] = channel
                threading.Thread(
                    target=self._watch, args=(address, channel), daemon=True, name="peer"
                ).start()
            return channel

    def send(self, address: str, message: wire.AnyMessage) -> None:
        self.ensure(address).send(message)

    def _watch(self, address: str, channel: wire.Channel) -> None:
        with contextlib.suppress(wire.Disconnected):
            while True:
                channel.receive()  # an inbox says nothing; this waits for its end
        with self._lock:
            if self._channels.get(address) is channel:
                del self._channels[address]
        channel.close()
        self._on_lost(address)
