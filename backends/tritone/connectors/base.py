"""What carries the output of a stage to the stages after it: the contract, and the pure halves of one.

    put ─► Outlet: sent while the window has room, else queued ─► transport ─► Inlet: in order, once ─► get
              ▲                                                                                          │
              └───────────────────────────── credit for what was taken ◄─────────────────────────────────┘

A connector moves data and signals completeness; it never chooses the next stage.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tritone.deploy import ConnectorLimits
from tritone.engines.base import Values
from tritone.errors import TritoneError, Unavailable

MAX_HELD_CHUNKS = 1024  # of one edge, behind a missing one
CHUNK_OVERHEAD_BYTES = 256  # what a chunk costs beside its values
PLAIN_VALUE_BYTES = 8

EdgeModels = tuple[str, str]
"""Triton models of the producing and of the consuming stage."""
Stream = tuple[str, EdgeModels]
"""Session and edge: what chunk numbers count in."""


@dataclass(frozen=True)
class Key:
    """Names one chunk."""

    session: str
    edge: EdgeModels
    number: int  # counts the chunks of this session on this edge from 0

    @property
    def stream(self) -> Stream:
        return self.session, self.edge

    def __str__(self) -> str:
        return f"chunk {self.number} from stage {self.edge[0]} to stage {self.edge[1]}"


@dataclass(frozen=True)
class Delivery:
    """One chunk at its consumer."""

    key: Key
    values: Values  # by input port of the consumer
    last: bool  # nothing follows on this edge
    size_bytes: int
    made_s: float = 0.0  # time.monotonic()


def size_of(values: Mapping[str, Any]) -> int:
    """What a chunk counts for in bytes; the same figure at its producer and at its consumer."""
    return CHUNK_OVERHEAD_BYTES + sum(_size_of(value) for value in values.values())


def _size_of(value: Any) -> int:
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.nbytes
    if isinstance(value, np.ndarray | list):
        return sum(len(item) for item in (value.reshape(-1) if isinstance(value, np.ndarray) else value))
    return len(value.encode()) if isinstance(value, str) else PLAIN_VALUE_BYTES


class Budget:
    """Bytes that the connectors of one process may keep waiting, all together. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._lock = threading.Lock()

    def reserve(self, size_bytes: int, stage: str) -> None:
        """Raises Unavailable, for the one who asks, when that would be too many."""
        with self._lock:
            if self.used_bytes + size_bytes > self.limit_bytes:
                raise Unavailable(
                    f"stage {stage} cannot keep {size_bytes} more bytes for a slow stage:"
                    f" connector.queued_bytes is {self.limit_bytes} and {self.used_bytes} wait already",
                    "try again later, or raise connector.queued_bytes in deploy.yaml",
                )
            self.used_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        with self._lock:
            self.used_bytes -= size_bytes


class Connector(ABC):
    """The chunks of one stage: those that it gives, and those that it gets.

    `put`, `get`, `expect`, `ignore` and `cleanup` are called on the stage's own thread and never wait for
    another process.
    """

    budget: Budget

    @abstractmethod
    def attach(
        self,
        arrived: Callable[[str], None],
        consumer_lost: Callable[[str, frozenset[str]], None],
        delivered: Callable[[str], None],
    ) -> None:
        """Once, before anything else; all are called from any thread.

        arrived: `get` has news of this session. consumer_lost: the process at this address went away, or was
        cut off, and of these sessions it will never have all that was put; until their cleanup they are not
        delivered. delivered: every chunk that was put of this session has been taken.
        """

    @abstractmethod
    def is_delivered(self, session: str) -> bool:
        """Whether every chunk that was put of a session has been taken, or nobody wants it any more."""

    @abstractmethod
    def put(self, address: str, key: Key, values: Values, last: bool) -> None:
        """Send a chunk to the process that serves `address`; `last` ends the edge.

        Numbers of a stream ascend without a gap. A chunk beyond the consumer's credit is queued. Raises
        Unavailable when the queues of this process are full: the session should fail then, no other.
        """

    @abstractmethod
    def expect(self, session: str) -> None:
        """Chunks of the session are welcome from now on; those of others are dropped and counted."""

    @abstractmethod
    def get(self, session: str) -> list[Delivery]:
        """What has come for a session since the last call: each edge in order, and no chunk twice.

        Taking a chunk gives its producer credit for another one. Raises the TritoneError of a session
        whose chunks can never be complete. Unknown session: nothing.
        """

    @abstractmethod
    def ignore(self, session: str) -> None:
        """The stage wants no more chunks of the session; what it has put still goes out."""

    @abstractmethod
    def cleanup(self, session: str) -> None:
        """Forget the session in both directions and free its bytes. Unknown session: ignored."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; nothing is called afterwards."""

    @abstractmethod
    def stats(self) -> dict[str, int | float]:
        """Figures for ping and metrics, each beginning with `connector_`."""


class Outlet:
    """The sending half of one stream: which chunk may go now. Packets are whatever the transport sends."""

    def __init__(self, limits: ConnectorLimits) -> None:
        self.queued_bytes = 0
        self.in_flight_bytes = 0  # sent, and not known to be taken
        self.is_closed = False  # the consumer wants no more
        self._limits = limits
        self._queue: deque[tuple[int, int, bytes]] = deque()  # number, size, packet
        self._in_flight: deque[tuple[int, int]] = deque()  # number, size
        self._last: int | None = None  # number of the last chunk, once that is known

    @property
    def is_done(self) -> bool:
        """The last chunk was put, and nothing more is to be sent or to be learnt of it."""
        return self._last is not None and (self.is_closed or not (self._queue or self._in_flight))

    def note_last(self, number: int) -> None:
        self._last = number

    def may_send(self, size_bytes: int) -> bool:
        """Whether a new chunk has credit, and nothing that is queued goes before it."""
        return not self._queue and self._has_room(size_bytes)

    def note_sent(self, number: int, size_bytes: int) -> None:
        self._in_flight.append((number, size_bytes))
        self.in_flight_bytes += size_bytes

    def queue(self, number: int, size_bytes: int, packet: bytes) -> None:
        self._queue.append((number, size_bytes, packet))
        self.queued_bytes += size_bytes

    def pump(self, send: Callable[[bytes], bool], enough_bytes: int) -> int:
        """Send from the queue until credit, `send` (False: not now) or `enough_bytes` ends that.

        The bytes that went; fewer than enough: no more may go now.
        """
        went = 0
        while went < enough_bytes and self._queue and self._has_room(self._queue[0][1]):
            number, size_bytes, packet = self._queue[0]
            if not send(packet):
                break
            self._queue.popleft()
            self.queued_bytes -= size_bytes
            self.note_sent(number, size_bytes)
            went += size_bytes
        return went

    def credit(self, number: int) -> None:
        """Every chunk up to `number` was taken."""
        while self._in_flight and self._in_flight[0][0] <= number:
            self.in_flight_bytes -= self._in_flight.popleft()[1]

    def close(self) -> int:
        """Nothing more is sent; the bytes that were queued."""
        self.is_closed = True
        freed = self.queued_bytes
        self._queue.clear()
        self._in_flight.clear()
        self.queued_bytes = self.in_flight_bytes = 0
        return freed

    def _has_room(self, size_bytes: int) -> bool:
        """A consumer may owe credit for less than `credit_bytes`, so that many in flight mean nothing, and a
        chunk that is larger than the window goes alone."""
        in_flight = self.in_flight_bytes
        return in_flight <= self._limits.credit_bytes or in_flight + size_bytes <= self._limits.window_bytes


class Inlet:
    """The receiving half of one stream: in order, once, and complete or not."""

    def __init__(self, limits: ConnectorLimits) -> None:
        self.next_number = 0  # of the chunk that is due
        self.held_bytes = 0
        self.owed_bytes = 0  # taken, and not yet told to the producer
        self.is_settled = False  # the producer was told that all was taken
        self._limits = limits
        self._held: dict[int, Delivery] = {}  # by number: came before the one that is due
        self._last: int | None = None  # number of the last chunk, once that has come

    @property
    def is_complete(self) -> bool:
        """The last chunk has come, and all before it."""
        return self._last is not None and self.next_number > self._last

    def accept(self, delivery: Delivery) -> list[Delivery] | None:
        """The chunks that are in order now, maybe none; None for a duplicate, which changes nothing.

        Raises TritoneError for a chunk after the last one, Unavailable when too much waits for a missing one.
        """
        number = delivery.key.number
        if number < self.next_number or number in self._held:
            return None
        self._check_end(delivery)
        if number > self.next_number:
            self._hold(delivery)
            return []
        ready = [delivery]
        self.next_number += 1
        while self.next_number in self._held:
            ready.append(self._held.pop(self.next_number))
            self.held_bytes -= ready[-1].size_bytes
            self.next_number += 1
        return ready

    def _check_end(self, delivery: Delivery) -> None:
        number = delivery.key.number
        if self._last is not None and number > self._last:
            raise TritoneError(f"{delivery.key} came, and chunk {self._last} was the last", "try again")
        if delivery.last:
            if self._last is not None or any(held > number for held in self._held):
                raise TritoneError(f"{delivery.key} says it is the last, and is not", "try again")
            self._last = number

    def _hold(self, delivery: Delivery) -> None:
        size_bytes = self.held_bytes + delivery.size_bytes
        if len(self._held) >= MAX_HELD_CHUNKS or size_bytes > self._limits.window_bytes:
            due = Key(delivery.key.session, delivery.key.edge, self.next_number)
            raise Unavailable(f"{due} is missing, and too many have come after it", "try again")
        self._held[delivery.key.number] = delivery
        self.held_bytes = size_bytes


@dataclass
class _Arrivals:
    """What has come for one session."""

    inlets: dict[EdgeModels, Inlet] = field(default_factory=dict)
    ready: list[Delivery] = field(default_factory=list)
    error: TritoneError | None = None


class Receiver:
    """The receiving half of a stage: its inlets, by session. Not thread-safe."""

    def __init__(self, limits: ConnectorLimits) -> None:
        self.num_chunks = self.num_duplicates = self.num_late = 0
        self.num_taken = self.bytes_taken = 0
        self.latency_s = 0.0  # of all that was taken: from its making on
        self._limits = limits
        self._sessions: dict[str, _Arrivals] = {}

    @property
    def num_sessions(self) -> int:
        """Sessions that are expected."""
        return len(self._sessions)

    def expect(self, session: str) -> None:
        self._sessions[session] = _Arrivals()

    def accept(self, delivery: Delivery) -> bool:
        """Whether the session is expected; a fault of its chunks is for `take` to raise."""
        arrivals = self._sessions.get(delivery.key.session)
        if arrivals is None:
            self.num_late += 1
            return False
        inlet = arrivals.inlets.setdefault(delivery.key.edge, Inlet(self._limits))
        try:
            ready = inlet.accept(delivery)
        except TritoneError as error:
            arrivals.error = arrivals.error or error
            return True
        if ready is None:
            self.num_duplicates += 1
        else:
            self.num_chunks += 1
            arrivals.ready += ready
        return True

    def take(self, session: str) -> list[Delivery]:
        """The chunks in order that were not taken yet. Raises the session's error."""
        arrivals = self._sessions.get(session)
        if arrivals is None:
            return []
        if arrivals.error is not None:
            raise arrivals.error
        taken, arrivals.ready = arrivals.ready, []
        now_s = time.monotonic()
        self.num_taken += len(taken)
        for delivery in taken:
            self.bytes_taken += delivery.size_bytes
            self.latency_s += now_s - delivery.made_s
            arrivals.inlets[delivery.key.edge].owed_bytes += delivery.size_bytes
        return taken

    def credits(self, session: str) -> list[Key]:
        """By edge that is owed enough credit, or has ended: the key of the last chunk taken. They are paid.

        To be asked after `take`, when nothing is ready.
        """
        paid = []
        for edge, inlet in self._sessions[session].inlets.items():
            if inlet.owed_bytes and (inlet.is_complete or inlet.owed_bytes > self._limits.credit_bytes):
                inlet.owed_bytes = 0
                inlet.is_settled = inlet.is_complete
                paid.append(Key(session, edge, inlet.next_number - 1))
        return paid

    def end_of(self, stream: Stream, error: TritoneError) -> bool:
        """The producer of a stream is gone; whether that leaves its session incomplete, with this error."""
        session, edge = stream
        arrivals = self._sessions.get(session)
        if arrivals is None or edge not in arrivals.inlets or arrivals.inlets[edge].is_complete:
            return False
        arrivals.error = arrivals.error or error
        return True

    def forget(self, session: str) -> list[Key]:
        """By edge whose producer may still wait for credit: the last chunk that came in order (-1: none)."""
        arrivals = self._sessions.pop(session, None)
        if arrivals is None:
            return []
        return [
            Key(session, edge, inlet.next_number - 1)
            for edge, inlet in arrivals.inlets.items()
            if not inlet.is_settled
        ]
