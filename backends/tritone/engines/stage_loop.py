"""The loop of a stage whose engine batches: mailbox in, messages out.

mailbox ─► drain ─► step ─► deliver: chunks to the connector, pieces and the end to the inbox
   ▲
   └─ a task a call of a door, and a task whenever the connector has something for a session
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import numpy as np

from tritone import wire
from tritone.connectors.base import Connector, Delivery, Key
from tritone.engines.base import Delta, Engine, Value
from tritone.engines.busy_log import BusyLog
from tritone.engines.loop import Answer, Loop
from tritone.engines.peers import Peers
from tritone.engines.seat import NO_USAGE, Seat
from tritone.engines.stage_stream import StageStream
from tritone.errors import Cancelled, EngineLost, TritoneError, Unavailable
from tritone.stream import FrameGate
from tritone.tracing import Tracer

log = logging.getLogger("tritone.engine")

MAX_FAILED_STEPS = 3  # in a row; then the engine's state is given up, and its door starts a new process


def _turn_once() -> None:
    """A task that does nothing but end the wait for tasks."""


class StageLoop(Loop):
    """The loop of a stage whose engine batches."""

    def __init__(
        self,
        model: str,
        engine: Engine,
        peers: Peers,
        connector: Connector,
        lease_s: float,
        tracer: Tracer | None = None,
        stream: StageStream | None = None,
    ) -> None:
        super().__init__(model, lease_s, tracer, stream)
        self.connector = connector
        connector.attach(
            arrived=lambda session: self.post(partial(self.take, session)),
            consumer_lost=lambda address, sessions: self.post(partial(self.output_lost, address, sessions)),
            delivered=lambda session: self.post(partial(self.delivered, session)),
        )
        self._engine = engine
        self._engine.wake = partial(self.post, _turn_once)
        self._engine.note_phase = self._note_phase
        self._peers = peers
        self._seats: dict[str, Seat] = {}
        # Of sessions that have finished here, while some of their output is still to be taken: it dies with
        # this process, and with the one after it.
        self._undelivered: dict[str, Seat] = {}
        self._busy = BusyLog()
        self._failed_steps = 0
        self._outbox: dict[str, list[wire.Piece]] = {}  # by inbox: what goes out with the step's other pieces

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "sessions": len(self._seats), **self.connector.stats()}

    def _turn(self) -> None:
        self._drain(block=not self._engine.has_work)
        self._beat_s = time.monotonic()
        if self._engine.has_work:
            began_s = time.monotonic()
            deltas = self._step()
            self._busy.note(began_s, time.monotonic())
            self._num_batches += bool(deltas)
            self._num_batched += len(deltas)
            self._note_batch(deltas)
            self._deliver(deltas)
        self._drop_expired()
        self._stats = dict(self._engine.stats())

    def _step(self) -> list[Delta]:
        try:
            deltas = self._engine.step()
            self._failed_steps = 0
            return deltas
        except Exception as error:  # the engine's state is unknown now: no session on it can be trusted
            log.exception("stage %s: step failed", self.model)
            self._failed_steps += 1
            fault = self._fault(error)
            self._deliver([Delta(session, error=fault) for session in list(self._seats)])
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise
            return []

    def _note_batch(self, deltas: list[Delta]) -> None:
        sessions = {delta.session for delta in deltas if delta.outputs}
        for session in sessions & self._seats.keys():
            self._seats[session].steps += 1
            self._seats[session].companions += len(sessions)

    def _note_phase(self, session: str, phase: str) -> None:
        seat = self._seats.get(session)
        if seat is not None:
            seat.phases.append((phase, time.monotonic()))

    # -- tasks that reader threads post ---------------------------------------------------------------------

    def open(self, message: wire.Open, answer: Answer) -> None:
        if message.session in self._seats:
            what = f"session '{message.session}' is open already"
            answer(wire.Refused(message.call, "INVALID_ARG", what, "use another id"))
            return
        self.connector.expect(message.session)
        now = time.monotonic()
        self._seats[message.session] = Seat(
            message.inbox,
            message.routes,
            message.sources,
            now,
            now,
            gates={
                index: FrameGate(route.frame_sizes)
                for index, route in enumerate(message.routes)
                if route.frame_sizes
            },
            whole=message.whole,
            span=self._tracer.child(f"session {self.model}", message.trace, began_s=now),
        )
        try:
            self._engine.add_request(message.session, message.inputs, message.settings)
        except Exception as error:
            fault = error if isinstance(error, TritoneError) else self._logged(error, "add_request")
            self._leave(message.session, fault.code)
            self._engine.abort(message.session)
            self.connector.ignore(message.session)
            answer(wire.Refused(message.call, fault.code, fault.what, fault.cure))
        else:
            answer(wire.Opened(message.call))
            if message.sources == 0:
                self._push(message.session, {}, last=True)

    def take(self, session: str) -> None:
        """The connector has something for a session, or knows that it never will."""
        try:
            deliveries = self.connector.get(session)
            for delivery in deliveries:
                self._feed(session, delivery)
        except TritoneError as error:
            self._deliver([Delta(session, error=error)])

    def delivered(self, session: str) -> None:
        """The connector's consumers have taken all of a session, or all that it had given by then."""
        if not self.connector.is_delivered(session):
            return
        seat = self._undelivered.pop(session, None)
        if seat is not None:
            with contextlib.suppress(wire.Disconnected):  # the orchestrator is gone: nobody waits for it
                self._peers.send(seat.inbox, wire.Delivered(session, self.model))

    def cancel(self, session: str, error: str = Cancelled.code) -> None:
        self._undelivered.pop(session, None)
        self.connector.cleanup(session)
        if self._leave(session, error):
            self._engine.abort(session)

    def peer_lost(self, address: str) -> None:
        for session, seat in [*self._seats.items(), *self._undelivered.items()]:
            if seat.inbox == address:
                self.cancel(session)

    def peer_late(self, address: str) -> None:
        """The orchestrator at this address leaves unread what it is sent: its sessions end, no others."""
        late = [session for session, seat in self._seats.items() if seat.inbox == address]
        if late:
            what = f"the orchestrator does not read what stage {self.model} gives it"
            log.error("stage %s: %s does not read; ending %d sessions", self.model, address, len(late))
            error = Unavailable(what, "try again, with fewer requests at once")
            self._deliver([Delta(session, error=error) for session in late])

    def output_lost(self, address: str, sessions: Collection[str]) -> None:
        """Of these sessions the consumer at this address will never have all that they gave it."""
        for session in sessions:
            seat = self._seats.get(session) or self._undelivered.get(session)
            if seat is None:
                self.connector.cleanup(session)
                continue
            lost = next(route.stage for route in seat.routes if route.address == address)
            error = EngineLost(f"the engine of stage {lost} died under the request", "try again")
            self.cancel(session, error.code)
            with contextlib.suppress(wire.Disconnected):  # the orchestrator is gone: nobody waits for it
                self._peers.send(seat.inbox, wire.Failed(session, lost, error.code, error.what, error.cure))

    # -- inside the thread ----------------------------------------------------------------------------------

    def _feed(self, session: str, delivery: Delivery) -> None:
        """Raises Unavailable when what waits for the end of the input is too much."""
        seat = self._seats.get(session)
        if seat is None:
            return  # what came before this failed
        seat.fed_s = time.monotonic()
        seat.sources_left -= delivery.last
        has_all = seat.sources_left <= 0
        if not seat.whole:
            self._push(session, delivery.values, last=has_all)
            return
        self.connector.budget.reserve(delivery.size_bytes, self.model)
        seat.held.append(delivery)
        if has_all:
            held = self._release(seat)
            for number, earlier in enumerate(held, start=1):
                self._push(session, earlier.values, last=number == len(held))

    def _release(self, seat: Seat) -> list[Delivery]:
        """What the seat held; it counts no longer."""
        held, seat.held = seat.held, []
        self.connector.budget.release(sum(delivery.size_bytes for delivery in held))
        return held

    def _leave(self, session: str, error: str = "", usage: Mapping[str, int | float] = NO_USAGE) -> bool:
        """Whether the session had a seat; now it has none. error: TritoneError.code, "" if it is done."""
        seat = self._seats.pop(session, None)
        if seat is not None:
            self._release(seat)
            seat.end_spans(error, usage)
        return seat is not None

    def _push(self, session: str, values: Mapping[str, Value], last: bool) -> None:
        try:
            self._engine.push(session, values, last)
        except Exception as error:
            fault = error if isinstance(error, TritoneError) else self._logged(error, "push")
            self._deliver([Delta(session, error=fault)])

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            seat = self._seats.get(delta.session)
            if seat is None:
                continue
            try:
                self._send(delta, seat)
            except wire.Disconnected:  # the orchestrator is gone
                self.cancel(delta.session)
            except TritoneError as error:  # the connector takes no more of this session
                self._deliver([Delta(delta.session, error=error)])
        for address in list(self._outbox):
            self._flush(address)

    def _flush(self, address: str) -> None:
        """Send what waits for an inbox: one packet, whatever the number of sessions."""
        pieces = self._outbox.pop(address, [])
        if pieces:
            try:
                self._peers.send(address, wire.Pieces(pieces) if len(pieces) > 1 else pieces[0])
            except wire.Disconnected:  # the orchestrator is gone
                for session in dict.fromkeys(piece.session for piece in pieces):
                    self.cancel(session)

    def _send(self, delta: Delta, seat: Seat) -> None:
        if delta.error is not None:
            self.cancel(delta.session, delta.error.code)
            self._flush(seat.inbox)
            self._peers.send(seat.inbox, self._failed(delta.session, delta.error))
            return
        now = time.monotonic()
        last = delta.finish_reason is not None
        if delta.outputs:
            seat.first_output_s = seat.first_output_s or now
            seat.last_output_s = now
        for index, route in enumerate(seat.routes):
            values = {
                target: delta.outputs[port] for port, target in route.ports.items() if port in delta.outputs
            }
            if index in seat.gates:
                values = self._gated(seat.gates[index], route, values, last, now)
            if not values and not last:
                continue
            number = seat.numbers.get(index, 0)
            seat.numbers[index] = number + 1
            if route.stage:
                key = Key(delta.session, (self.model, route.stage), number)
                self.connector.put(route.address, key, values, last)
            else:
                piece = wire.Piece(delta.session, self.model, "", number, values, last)
                self._outbox.setdefault(route.address, []).append(piece)
        if last:
            self._leave(delta.session, usage=delta.usage)
            self.connector.ignore(delta.session)
            is_delivered = self.connector.is_delivered(delta.session)
            if not is_delivered:
                self._undelivered[delta.session] = seat
            self._flush(seat.inbox)
            self._peers.send(seat.inbox, self._finished(delta, seat, now, is_delivered))

    def _gated(
        self, gate: FrameGate, route: wire.Route, values: dict[str, Value], last: bool, now: float
    ) -> dict[str, Value]:
        [port] = route.ports.values()
        frames = gate.push(np.asarray(values[port]) if port in values else None, last, now)
        return {} if frames is None else {port: frames}

    def _finished(self, delta: Delta, seat: Seat, now: float, is_delivered: bool) -> wire.Finished:
        reason, usage = delta.finish_reason or "stop", dict(delta.usage)
        busy = self._busy.since(seat.opened_s)
        return wire.Finished(delta.session, self.model, reason, usage, seat.times(now), busy, is_delivered)

    def _failed(self, session: str, error: TritoneError) -> wire.Failed:
        return wire.Failed(session, self.model, error.code, error.what, error.cure)

    def _drop_expired(self) -> None:
        """End a session whose input never comes: its producer and orchestrator are gone unnoticed."""
        cutoff = time.monotonic() - self._lease_s
        for session, seat in list(self._seats.items()):
            if seat.sources_left > 0 and seat.fed_s < cutoff:
                what = f"stage {self.model} was given nothing for {self._lease_s:g} s"
                self._deliver([Delta(session, error=Unavailable(what, "try again"))])

    def _logged(self, error: Exception, where: str) -> TritoneError:
        log.exception("stage %s: %s failed", self.model, where)
        return self._fault(error)

    def _fault(self, error: Exception) -> TritoneError:
        return TritoneError(
            f"stage {self.model} failed: {error}", "try again; the server log has the details"
        )
