"""The orchestrator's inbox: engines connect to it and push what their sessions produce.

Runs on the orchestrator's event loop. An engine whose connection ends is reported at once, so its sessions
fail in milliseconds and not at a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

from tritone import wire

log = logging.getLogger("tritone.inbox")


class Inbox:
    """A listening socket and the connections made to it."""

    def __init__(
        self, address: str, deliver: Callable[[Any], None], engine_lost: Callable[[str], None]
    ) -> None:
        """deliver: called with every Piece, Finished, Failed; engine_lost: with a lost engine's address."""
        self.address = address
        self._deliver = deliver
        self._engine_lost = engine_lost
        self._server = wire.listen(address)
        self._server.setblocking(False)
        self._channels: dict[wire.Channel, str] = {}  # to the engine's own address
        self._outgoing: dict[str, wire.Channel] = {}  # to engines, for cancels
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._server, self._accept)

    def tell(self, address: str, message: wire.AnyMessage) -> None:
        """Send to an engine; one that is gone needs no telling."""
        for _ in range(2):  # the kept channel may be of an engine that restarted
            try:
                if address not in self._outgoing:
                    self._outgoing[address] = wire.connect(address)
                    self._outgoing[address].send(wire.Hello(""))
                self._outgoing[address].send(message)
                return
            except wire.Disconnected:
                stale = self._outgoing.pop(address, None)
                if stale is not None:
                    stale.close()

    def close(self) -> None:
        self._loop.remove_reader(self._server)
        self._server.close()
        for channel in list(self._channels):
            self._drop(channel)
        for channel in self._outgoing.values():
            channel.close()

    def _accept(self) -> None:
        try:
            channel = wire.accept(self._server)
        except BlockingIOError:
            return
        self._channels[channel] = ""
        self._loop.add_reader(channel.fileno(), self._read, channel)

    def _read(self, channel: wire.Channel) -> None:
        try:
            while True:
                message = channel.receive(socket.MSG_DONTWAIT)
                if isinstance(message, wire.Hello):
                    self._channels[channel] = message.address
                else:
                    self._deliver(message)
        except BlockingIOError:
            pass
        except wire.Disconnected:
            address = self._channels.get(channel, "")
            self._drop(channel)
            if address:
                self._engine_lost(address)

    def _drop(self, channel: wire.Channel) -> None:
        self._loop.remove_reader(channel.fileno())
        self._channels.pop(channel, None)
        channel.close()
