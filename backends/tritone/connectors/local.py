"""Chunks between the stages of one machine: the sockets and shared memory of wire/, credit on the way back.

    stage's thread ─put─► Outlet ─► Lane ══ Piece ══► reader ─receive─► Receiver ─get─► consumer's thread
                            ▲                                                                  │
                            └────── lane's reader ◄══ Credit ══════════════════════ Lane ◄─────┘

No lane waits inside `put` or `get`: what the peer does not take at once stays in its queue until a thread
that waits for the socket says that it may go. All state is under one lock, held for no longer than a copy.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tritone import wire
from tritone.connectors.base import (
    Budget,
    Connector,
    Delivery,
    EdgeModels,
    Key,
    Outlet,
    Receiver,
    Stream,
    size_of,
)
from tritone.deploy import ConnectorLimits
from tritone.engines.base import Values
from tritone.errors import EngineLost

CLOSE_TIMEOUT_S = 1.0


@dataclass
class _Producer:
    """The way back to a process that sends us chunks."""

    lane: wire.Lane
    credits: dict[Stream, wire.Credit] = field(default_factory=dict)  # not sent yet; the newest says it all

    def flush(self) -> None:
        while self.credits:
            stream = next(iter(self.credits))
            if not self.lane.send(wire.encode(self.credits[stream])):
                return
            del self.credits[stream]


class LocalConnector(Connector):
    """The connector of one stage over local sockets."""

    def __init__(self, address: str, stage: str, limits: ConnectorLimits, budget: Budget) -> None:
        """address: where this process listens. stage: Triton model. budget: of the whole process."""
        self.budget = budget
        self._address = address
        self._stage = stage
        self._limits = limits
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)  # a lane that was followed
        self._lanes: dict[str, wire.Lane] = {}  # by address of the consumer
        self._followed: set[wire.Lane] = set()  # by a thread each
        self._outlets: dict[Stream, tuple[Outlet, wire.Lane]] = {}
        self._receiver = Receiver(limits)
        self._producers: dict[wire.Channel, _Producer] = {}
        self._lost: set[str] = set()  # sessions of which a consumer will never take all, until their cleanup
        self._origins: dict[Stream, wire.Channel] = {}  # where the streams of expected sessions come from
        self._num_put = 0
        self._is_closed = False
        self._arrived: Callable[[str], None] = _tell_nobody
        self._consumer_lost: Callable[[str, frozenset[str]], None] = _tell_nobody
        self._delivered: Callable[[str], None] = _tell_nobody

    def attach(
        self,
        arrived: Callable[[str], None],
        consumer_lost: Callable[[str, frozenset[str]], None],
        delivered: Callable[[str], None],
    ) -> None:
        self._arrived, self._consumer_lost, self._delivered = arrived, consumer_lost, delivered

    def is_delivered(self, session: str) -> bool:
        with self._lock:
            return self._has_gone(session)

    def _has_gone(self, session: str) -> bool:
        return session not in self._lost and not any(name == session for name, _ in self._outlets)

    # -- what the stage gives --------------------------------------------------------------------------------

    def put(self, address: str, key: Key, values: Values, last: bool) -> None:
        size_bytes = size_of(values)
        piece = wire.Piece(key.session, *key.edge, key.number, dict(values), last, time.monotonic())
        packet = wire.encode(piece)
        with self._lock:
            outlet, lane = self._outlets.get(key.stream) or self._new_outlet(address, key.stream)
            if last:
                outlet.note_last(key.number)
            if not outlet.is_closed:
                if outlet.may_send(size_bytes) and lane.send(packet):
                    outlet.note_sent(key.number, size_bytes)
                else:
                    self.budget.reserve(size_bytes, self._stage)
                    outlet.queue(key.number, size_bytes, packet)
                self._num_put += 1
            if outlet.is_done:
                del self._outlets[key.stream]

    def _new_outlet(self, address: str, stream: Stream) -> tuple[Outlet, wire.Lane]:
        lane = self._lanes.get(address)
        if lane is None:
            lane = wire.Lane(self._resume)
            self._lanes[address] = lane
            self._followed.add(lane)
            _thread.start_new_thread(self._follow, (address, lane))
        self._outlets[stream] = Outlet(self._limits), lane
        return self._outlets[stream]

    def _follow(self, address: str, lane: wire.Lane) -> None:
        """The thread of a lane to a consumer: open it, then take the credit that comes back."""
        channel = None
        with contextlib.suppress(wire.Disconnected):
            channel = wire.connect(address)
            channel.send(wire.Hello(self._address))
            with self._lock:
                if self._is_closed:
                    channel.shutdown()
                lane.open(channel)
            self._resume(lane)
            while True:
                message = channel.receive()
                if isinstance(message, wire.Credit):
                    self._credit(message)
        if channel is not None:
            channel.close()
        self._lose(address, lane)

    def _resume(self, lane: wire.Lane) -> None:
        with self._lock:
            for outlet, its_lane in self._outlets.values():
                if its_lane is lane:
                    self.budget.release(outlet.pump(lane.send))

    def _credit(self, message: wire.Credit) -> None:
        stream: Stream = (message.session, (message.source, message.stage))
        with self._lock:
            if stream not in self._outlets:
                return
            outlet, lane = self._outlets[stream]
            outlet.credit(message.number)
            self.budget.release(outlet.close() if message.closed else outlet.pump(lane.send))
            if not outlet.is_done:
                return
            del self._outlets[stream]
            has_gone = self._has_gone(message.session)
        if has_gone:
            self._delivered(message.session)

    def _lose(self, address: str, lane: wire.Lane) -> None:
        with self._lock:
            if self._lanes.get(address) is lane:
                del self._lanes[address]
            self._followed.discard(lane)
            self._ended.notify_all()
            streams = {stream: outlet for stream, (outlet, its) in self._outlets.items() if its is lane}
            lost = frozenset(session for (session, _), outlet in streams.items() if not outlet.is_closed)
            self._drop_outlets(list(streams))
            if self._is_closed:
                return
            self._lost |= lost
        self._consumer_lost(address, lost)

    def _drop_outlets(self, streams: list[Stream]) -> None:
        for stream in streams:
            outlet, _ = self._outlets.pop(stream)
            self.budget.release(outlet.close())

    # -- what the stage gets ---------------------------------------------------------------------------------

    def receive(self, piece: wire.Piece, channel: wire.Channel) -> None:
        """Take in what came over a channel; called by the thread that reads it."""
        edge: EdgeModels = (piece.source, piece.stage)
        key = Key(piece.session, edge, piece.number)
        with self._lock:
            if self._is_closed:
                return
            delivery = Delivery(key, piece.values, piece.last, size_of(piece.values), piece.made_s)
            if not self._receiver.accept(delivery):
                self._answer(channel, key, closed=True)
                return
            self._origins[key.stream] = channel
        self._arrived(piece.session)

    def producer_lost(self, channel: wire.Channel) -> None:
        """Nothing more comes over a channel; called by the thread that read it."""
        failed = []
        with self._lock:
            self._producers.pop(channel, None)
            for stream in [stream for stream, origin in self._origins.items() if origin is channel]:
                del self._origins[stream]
                session, (source, _) = stream
                error = EngineLost(f"the engine of stage {source} died before its output ended", "try again")
                if self._receiver.end_of(stream, error):
                    failed.append(session)
        for session in failed:
            self._arrived(session)

    def expect(self, session: str) -> None:
        with self._lock:
            self._receiver.expect(session)

    def get(self, session: str) -> list[Delivery]:
        with self._lock:
            taken = self._receiver.take(session)
            for key in self._receiver.credits(session) if taken else ():
                if key.stream in self._origins:
                    self._answer(self._origins[key.stream], key)
            return taken

    def ignore(self, session: str) -> None:
        with self._lock:
            self._ignore(session)

    def _ignore(self, session: str) -> None:
        for key in self._receiver.forget(session):
            if key.stream in self._origins:
                self._answer(self._origins[key.stream], key, closed=True)
        for stream in [stream for stream in self._origins if stream[0] == session]:
            del self._origins[stream]

    def _answer(self, channel: wire.Channel, key: Key, closed: bool = False) -> None:
        producer = self._producers.get(channel)
        if producer is None:
            producer = _Producer(wire.Lane(lambda _: self._flush(channel), channel))
            self._producers[channel] = producer
        producer.credits[key.stream] = wire.Credit(key.session, *key.edge, key.number, closed)
        producer.flush()

    def _flush(self, channel: wire.Channel) -> None:
        with self._lock:
            producer = self._producers.get(channel)
            if producer is not None:
                producer.flush()

    # -- both ------------------------------------------------------------------------------------------------

    def cleanup(self, session: str) -> None:
        with self._lock:
            self._ignore(session)
            self._drop_outlets([stream for stream in self._outlets if stream[0] == session])
            self._lost.discard(session)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._drop_outlets(list(self._outlets))
            self._receiver = Receiver(self._limits)
            self._producers.clear()
            self._origins.clear()
            for lane in self._lanes.values():
                if lane.channel is not None:
                    lane.channel.shutdown()
            self._ended.wait_for(lambda: not self._followed, CLOSE_TIMEOUT_S)

    def stats(self) -> dict[str, int | float]:
        with self._lock:
            outlets = [outlet for outlet, _ in self._outlets.values()]
            return {
                "connector_streams": len(outlets) + self._receiver.num_sessions,
                "connector_chunks_put": self._num_put,
                "connector_queued_bytes": sum(outlet.queued_bytes for outlet in outlets),
                "connector_in_flight_bytes": sum(outlet.in_flight_bytes for outlet in outlets),
                "connector_chunks_received": self._receiver.num_chunks,
                "connector_chunks_taken": self._receiver.num_taken,
                "connector_bytes_taken": self._receiver.bytes_taken,
                "connector_latency_s": self._receiver.latency_s,
                "connector_duplicates": self._receiver.num_duplicates,
                "connector_late": self._receiver.num_late,
            }


def _tell_nobody(*_: object) -> None:
    """Until the stage's loop attaches itself."""
