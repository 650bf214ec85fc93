"""The orchestrator's inbox: engines connect to it and push what their sessions produce.

Runs on the orchestrator's event loop. An engine whose connection ends is reported at once, so its sessions
fail in milliseconds and not at a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Container, Coroutine
from pathlib import Path
from typing import Any

from tritone import wire

log = logging.getLogger("tritone.inbox")

MESSAGES_A_TURN = 64  # of one engine; then others, and deadlines, have theirs
DRAIN_POLL_S = 0.05
TAKES_CONNECTIONS = 0x10000  # __SO_ACCEPTCON, of the flags in /proc/net/unix


def address(server: str, model: str, pid: int) -> str:
    """Where the orchestrator of a pipeline model in a server (see stage_door.server_name) listens."""
    return f"tritone/{server}/inbox/{model}/{pid}"


def drain_all(
    server_pid: int,
    timeout_s: float,
    order: wire.Drain | None = None,
    models: Container[str] | None = None,
    patience: Callable[[], bool] = lambda: True,
) -> bool:
    """Have the orchestrators of a tritonserver end their requests; whether all of them have, in time.

    A server that is told to end accepts no more calls between its models, so what a stream holds in a stage
    must be freed before. timeout_s: of all together, on top of the grace of the order. models: the pipeline
    models that are meant, None: all. patience: asked while waiting; False ends the wait.
    """
    order = order or wire.Drain()
    channels = []
    for name in sorted(listening(f"tritone/{server_pid}-")):
        _, _, model = name.partition("/inbox/")
        if model and (models is None or model.rpartition("/")[0] in models):
            with contextlib.suppress(wire.Disconnected):
                channels.append(wire.connect(name))
                channels[-1].send(order)
    waiters = [threading.Thread(target=_until_hung_up, args=(channel,), daemon=True) for channel in channels]
    for waiter in waiters:
        waiter.start()
    deadline = time.monotonic() + order.grace_s + timeout_s
    while any(waiter.is_alive() for waiter in waiters) and time.monotonic() < deadline and patience():
        time.sleep(DRAIN_POLL_S)
    drained = not any(waiter.is_alive() for waiter in waiters)
    for channel in channels:
        channel.close()
    return drained


def listening(prefix: str) -> set[str]:
    """The abstract sockets of this machine that take connections and whose names begin with `prefix`.

    A connection has the name of the socket that took it, and may outlive that.
    """
    found = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        what, _, name = line.partition("@")
        if name.startswith(prefix) and int(what.split()[3], 16) & TAKES_CONNECTIONS:
            found.add(name)
    return found


def _until_hung_up(channel: wire.Channel) -> None:
    with contextlib.suppress(wire.Disconnected):
        while True:
            channel.receive()


class Inbox:
    """A listening socket and the connections made to it."""

    def __init__(
        self,
        address: str,
        deliver: Callable[[Any], None],
        engine_lost: Callable[[str], None],
        drain: Callable[[float, str], Coroutine[Any, Any, None]],
    ) -> None:
        """deliver: with every Piece, Finished, Delivered, Failed; engine_lost: with a lost engine's address;
        drain: when somebody asks for the end of all requests, with the grace in seconds and the reason."""
        self.address = address
        self._deliver = deliver
        self._engine_lost = engine_lost
        self._drain = drain
        self._server = wire.listen(address)
        self._server.setblocking(False)
        self._channels: dict[wire.Channel, str] = {}  # to the engine's own address
        self._outgoing: dict[str, wire.Channel] = {}  # to engines, for cancels
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._server, self._accept)

    def tell(self, address: str, message: wire.AnyMessage) -> None:
        """Send to an engine without waiting; one that is gone, or does not read, needs no telling."""
        for _ in range(2):  # the kept channel may be of an engine that restarted
            try:
                if address not in self._outgoing:
                    self._outgoing[address] = wire.connect(address)
                    self._outgoing[address].send(wire.Hello(""))
                self._outgoing[address].send(message, wait=False)
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
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                log.error("cannot accept an engine: %s", error)
            return
        self._channels[channel] = ""
        self._loop.add_reader(channel.fileno(), self._read, channel)

    def _read(self, channel: wire.Channel) -> None:
        try:
            for _ in range(MESSAGES_A_TURN):
                message = channel.receive(socket.MSG_DONTWAIT)
                match message:
                    case wire.Hello(address=address):
                        self._channels[channel] = address
                    case wire.Drain(grace_s=grace_s, why=why):
                        ending = self._loop.create_task(self._drain(grace_s, why))
                        ending.add_done_callback(lambda _: self._drop(channel))
                    case wire.Pieces(pieces=pieces):
                        for piece in pieces:
                            self._deliver(piece)
                    case wire.Piece() | wire.Finished() | wire.Delivered() | wire.Failed():
                        self._deliver(message)
                    case _:
                        log.warning("unexpected %s", type(message).__name__)
        except BlockingIOError:
            pass
        except wire.Disconnected:
            address = self._channels.get(channel, "")
            self._drop(channel)
            if address:
                self._engine_lost(address)

    def _drop(self, channel: wire.Channel) -> None:
        if self._channels.pop(channel, None) is not None:
            self._loop.remove_reader(channel.fileno())
            channel.close()
