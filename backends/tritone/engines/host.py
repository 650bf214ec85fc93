"""The engine process: hosts the engines of one or more stages, one thread each, behind one socket.

    reader threads (one a connection) ──mailbox──► stage thread: drain it, step the engine, send what came

Started by a door with `python -m tritone.engines.host`; ends when the door closes its end of the life line,
so that no engine outlives its server, also after kill -9.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tritone import deploy as deploys
from tritone import wire
from tritone.checkpoint import require_checkpoint
from tritone.deploy import Deploy
from tritone.engines.base import BatchEngine, Chunk, Delta, Engine, Placement, Value
from tritone.errors import ConfigError, InvalidRequest, TritoneError, Unavailable

log = logging.getLogger("tritone.engine")

ADDRESS_TAKEN_STATUS = 17  # exit status: another process already serves this address
IDLE_WAIT_S = 1.0  # how often an idle stage thread looks at leases


class Peers:
    """Outgoing channels to consumers, by address, opened when first needed."""

    def __init__(self, own_address: str, on_lost: Callable[[str], None]) -> None:
        self._own_address = own_address
        self._on_lost = on_lost  # called with the address of a peer that went away
        self._channels: dict[str, wire.Channel] = {}
        self._lock = threading.Lock()

    def ensure(self, address: str) -> wire.Channel:
        """Raises Disconnected when nobody serves `address`."""
        with self._lock:
            channel = self._channels.get(address)
            if channel is None:
                channel = wire.connect(address)
                channel.send(wire.Hello(self._own_address))
                self._channels[address] = channel
                threading.Thread(
                    target=self._watch, args=(address, channel), daemon=True, name="peer"
                ).start()
            return channel

    def send(self, address: str, message: wire.AnyMessage) -> None:
        self.ensure(address).send(message)

    def _watch(self, address: str, channel: wire.Channel) -> None:
        try:
            while True:
                channel.receive()  # a consumer says nothing; this waits for its end
        except wire.Disconnected:
            pass
        with self._lock:
            if self._channels.get(address) is channel:
                del self._channels[address]
        channel.close()
        self._on_lost(address)


@dataclass
class Seat:
    """One session on one stage."""

    inbox: str
    routes: list[wire.Route]
    sources_left: int  # upstream stages that have not ended
    opened_s: float  # time.monotonic()
    touched_s: float
    first_output_s: float | None = None
    numbers: dict[int, int] = field(default_factory=dict)  # pieces sent, by index of the route


class StageLoop:
    """The thread of one engine-batched stage. Only `post` is called from other threads."""

    def __init__(self, model: str, engine: Engine, peers: Peers, lease_s: float) -> None:
        self.model = model
        self._engine = engine
        self._peers = peers
        self._lease_s = lease_s
        self._mailbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._seats: dict[str, Seat] = {}
        self._beat_s = time.monotonic()
        self._stats: dict[str, Any] = {"active": 0}

    def post(self, task: Callable[[], None]) -> None:
        self._mailbox.put(task)

    def stats(self) -> dict[str, Any]:
        """Readable from any thread: the figures of the last turn, and its age."""
        return {**self._stats, "sessions": len(self._seats), "beat_age_s": time.monotonic() - self._beat_s}

    def run(self) -> None:
        while True:
            self._drain()
            self._beat_s = time.monotonic()
            if self._engine.has_work:
                self._deliver(self._step())
            self._drop_expired()
            self._stats = dict(self._engine.stats())

    def _drain(self) -> None:
        try:
            task = self._mailbox.get(block=not self._engine.has_work, timeout=IDLE_WAIT_S)
            while True:
                task()
                task = self._mailbox.get_nowait()
        except queue.Empty:
            pass

    def _step(self) -> list[Delta]:
        try:
            return self._engine.step()
        except Exception as error:  # the engine's state is unknown now: no session on it can be trusted
            log.exception("stage %s: step failed", self.model)
            fault = TritoneError(
                f"stage {self.model} failed: {error}", "try again; the server log has the details"
            )
            return [Delta(session, error=fault) for session in list(self._seats)]

    # -- tasks posted by reader threads ---------------------------------------------------------------------

    def open(self, message: wire.Open, answer: Callable[[wire.AnyMessage], None]) -> None:
        try:
            self._peers.ensure(message.inbox)
            self._engine.add_request(message.session, message.inputs, message.settings)
        except wire.Disconnected as error:
            answer(
                wire.Refused(message.call, "UNAVAILABLE", f"the orchestrator is gone ({error})", "try again")
            )
        except TritoneError as error:
            answer(wire.Refused(message.call, error.code, error.what, error.cure))
        except Exception as error:
            log.exception("stage %s: add_request failed", self.model)
            answer(
                wire.Refused(
                    message.call, "INTERNAL", f"stage {self.model} failed: {error}", "see the server log"
                )
            )
        else:
            now = time.monotonic()
            self._seats[message.session] = Seat(message.inbox, message.routes, message.sources, now, now)
            answer(wire.Opened(message.call))
            if message.sources == 0:
                self._push(message.session, {}, last=True)

    def piece(self, message: wire.Piece) -> None:
        seat = self._seats.get(message.session)
        if seat is None:
            return  # cancelled meanwhile
        seat.touched_s = time.monotonic()
        seat.sources_left -= message.last
        self._push(message.session, message.values, last=seat.sources_left <= 0)

    def cancel(self, session: str) -> None:
        if self._seats.pop(session, None) is not None:
            self._engine.abort(session)

    def cancel_inbox(self, address: str) -> None:
        """The orchestrator at `address`, or a consumer there, is gone: so are the sessions that need it."""
        for session, seat in list(self._seats.items()):
            if seat.inbox == address or any(route.address == address for route in seat.routes):
                if seat.inbox != address:
                    error = Unavailable(f"the stage after {self.model} went away", "try again")
                    self._deliver([Delta(session, error=error)])
                self.cancel(session)

    # -- inside the thread ----------------------------------------------------------------------------------

    def _push(self, session: str, values: Mapping[str, Value], last: bool) -> None:
        try:
            self._engine.push(session, values, last)
        except TritoneError as error:
            self._deliver([Delta(session, error=error)])
        except Exception as error:
            log.exception("stage %s: push failed", self.model)
            self._deliver([Delta(session, error=TritoneError(f"stage {self.model} failed: {error}"))])

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            seat = self._seats.get(delta.session)
            if seat is None:
                continue
            try:
                self._send(delta, seat)
            except wire.Disconnected:
                self.cancel(delta.session)

    def _send(self, delta: Delta, seat: Seat) -> None:
        now = time.monotonic()
        seat.touched_s = now
        if delta.error is not None:
            self._seats.pop(delta.session)
            self._engine.abort(delta.session)
            error = delta.error
            failed = wire.Failed(delta.session, self.model, error.code, error.what, error.cure)
            self._peers.send(seat.inbox, failed)
            return
        last = delta.finish_reason is not None
        if delta.outputs and seat.first_output_s is None:
            seat.first_output_s = now
        for index, route in enumerate(seat.routes):
            values = {
                target: delta.outputs[port] for port, target in route.ports.items() if port in delta.outputs
            }
            if not values and not last:
                continue
            number = seat.numbers.get(index, 0)
            seat.numbers[index] = number + 1
            piece = wire.Piece(delta.session, self.model, route.stage, number, values, last)
            self._peers.send(route.address, piece)
        if last:
            self._seats.pop(delta.session)
            timings = {"total_s": now - seat.opened_s}
            if seat.first_output_s is not None:
                timings["first_output_s"] = seat.first_output_s - seat.opened_s
            finished = wire.Finished(
                delta.session, self.model, delta.finish_reason or "stop", dict(delta.usage), timings
            )
            self._peers.send(seat.inbox, finished)

    def _drop_expired(self) -> None:
        cutoff = time.monotonic() - self._lease_s
        for session, seat in list(self._seats.items()):
            if seat.touched_s < cutoff:
                error = TritoneError(
                    f"stage {self.model} heard nothing of the session for {self._lease_s:g} s"
                )
                self._deliver([Delta(session, error=error)])


class BatchLoop:
    """The thread of one Triton-batched stage. Only `post` is called from other threads."""

    def __init__(self, model: str, engine: BatchEngine, lease_s: float) -> None:
        self.model = model
        self._engine = engine
        self._lease_s = lease_s
        self._mailbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._touched_s: dict[str, float] = {}
        self._beat_s = time.monotonic()
        self._stats: dict[str, Any] = {"active": 0}
        self._batches = self._chunks = 0

    def post(self, task: Callable[[], None]) -> None:
        self._mailbox.put(task)

    def stats(self) -> dict[str, Any]:
        return {**self._stats, "batches": self._batches, "chunks": self._chunks, "beat_age_s": self._age_s()}

    def run(self) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                self._mailbox.get(timeout=IDLE_WAIT_S)()
            self._beat_s = time.monotonic()
            for session, touched_s in list(self._touched_s.items()):
                if self._beat_s - touched_s > self._lease_s:
                    self.cancel(session)
            self._stats = dict(self._engine.stats())

    def batch(self, message: wire.Run, answer: Callable[[wire.AnyMessage], None]) -> None:
        chunks = [Chunk(c.session, c.inputs, c.start, c.end, c.settings) for c in message.chunks]
        now = time.monotonic()
        for chunk in chunks:
            self._touched_s[chunk.session] = now
        self._batches += 1
        self._chunks += len(chunks)
        try:
            results = self._engine.run(chunks)
        except Exception as error:
            log.exception("stage %s: batch failed", self.model)
            for chunk in chunks:
                self.cancel(chunk.session)
            answer(
                wire.Refused(
                    message.call, "INTERNAL", f"stage {self.model} failed: {error}", "see the server log"
                )
            )
            return
        for chunk, result in zip(chunks, results, strict=True):
            if chunk.end or isinstance(result, TritoneError):
                self.cancel(chunk.session)
        self._stats = dict(self._engine.stats())
        answer(wire.Ran(message.call, [_stream_result(result) for result in results]))

    def cancel(self, session: str) -> None:
        if self._touched_s.pop(session, None) is not None:
            self._engine.abort(session)

    def cancel_inbox(self, address: str) -> None:
        """Nothing is sent from here; streams end by their END chunk, a cancel or the lease."""

    def _age_s(self) -> float:
        return time.monotonic() - self._beat_s


def _stream_result(result: Any) -> wire.StreamResult:
    if isinstance(result, TritoneError):
        return wire.StreamResult({}, result.code, result.what, result.cure)
    return wire.StreamResult(dict(result))


class Host:
    """The socket side of an engine process."""

    def __init__(self, address: str, server: socket.socket) -> None:
        self._address = address
        self._server = server
        self._loops: dict[str, StageLoop | BatchLoop] = {}
        self._channels: set[wire.Channel] = set()
        self._state: wire.AnyMessage = wire.Loading(0.0)  # what a door is told when it connects
        self._lock = threading.Lock()
        self.peers = Peers(address, self._peer_lost)

    def serve(self) -> None:
        threading.Thread(target=self._accept, daemon=True, name="accept").start()

    def become(self, state: wire.AnyMessage, loops: Mapping[str, StageLoop | BatchLoop]) -> None:
        """Tell every door, now and later, that the process is Ready with its loops, or failed to load."""
        with self._lock:
            self._loops = dict(loops)
            for loop in loops.values():
                threading.Thread(target=_run_or_die, args=(loop,), daemon=True, name=loop.model).start()
            self._state = state
            for channel in list(self._channels):
                try:
                    channel.send(state)
                except wire.Disconnected:
                    self._channels.discard(channel)

    def _accept(self) -> None:
        while True:
            channel = wire.accept(self._server)
            with self._lock:
                self._channels.add(channel)
                try:
                    channel.send(self._state)
                except wire.Disconnected:
                    self._channels.discard(channel)
                    continue
            threading.Thread(target=self._read, args=(channel,), daemon=True, name="reader").start()

    def _read(self, channel: wire.Channel) -> None:
        def answer(message: wire.AnyMessage) -> None:
            with contextlib.suppress(wire.Disconnected):  # if the asker is gone, its reader ends below
                channel.send(message)

        try:
            while True:
                self._dispatch(channel.receive(), answer)
        except wire.Disconnected:
            with self._lock:
                self._channels.discard(channel)
            channel.close()

    def _dispatch(self, message: Any, answer: Callable[[wire.AnyMessage], None]) -> None:
        match message:
            case wire.Piece():
                loop = self._loops.get(message.stage)
                if isinstance(loop, StageLoop):
                    loop.post(partial(loop.piece, message))
            case wire.Open():
                loop = self._loops.get(message.stage)
                if isinstance(loop, StageLoop):
                    loop.post(partial(loop.open, message, answer))
                else:
                    answer(self._unknown_stage(message))
            case wire.Run():
                loop = self._loops.get(message.stage)
                if isinstance(loop, BatchLoop):
                    loop.post(partial(loop.batch, message, answer))
                else:
                    answer(self._unknown_stage(message))
            case wire.Cancel(session):
                for loop in self._loops.values():
                    loop.post(partial(loop.cancel, session))
            case wire.Ping(call):
                answer(wire.Pong(call, {model: loop.stats() for model, loop in self._loops.items()}))
            case wire.Hello():
                pass
            case _:
                log.warning("unexpected %s", type(message).__name__)

    def _unknown_stage(self, message: wire.Open | wire.Run) -> wire.Refused:
        what = f"this engine process does not serve stage '{message.stage}'"
        return wire.Refused(message.call, "UNAVAILABLE", what, "try again")

    def _peer_lost(self, address: str) -> None:
        for loop in list(self._loops.values()):
            loop.post(partial(loop.cancel_inbox, address))


def _run_or_die(loop: StageLoop | BatchLoop) -> None:
    """A stage thread that ends would leave a process that looks alive: end it, the door starts a new one."""
    try:
        loop.run()
    except BaseException:
        log.exception("stage %s: the loop ended", loop.model)
        os._exit(70)


def build_loops(deploy: Deploy, stages: tuple[str, ...], device: str, peers: Peers) -> dict[str, Any]:
    """Load the engines of `stages`; Triton model name to its loop."""
    loops: dict[str, StageLoop | BatchLoop] = {}
    for name in stages:
        settings = deploy.stage(name)
        folder = deploy.checkpoint / name
        if deploy.pipeline.needs_checkpoint:
            require_checkpoint(deploy.checkpoint, name)
        engine = deploy.engine_class(name)(Placement(folder, device, settings.threads), settings.options)
        if isinstance(engine, BatchEngine):
            loops[settings.model] = BatchLoop(settings.model, engine, settings.lease_s)
        else:
            loops[settings.model] = StageLoop(settings.model, engine, peers, settings.lease_s)
    return loops


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tritone.engines.host")
    parser.add_argument("--deploy", type=Path, required=True)
    parser.add_argument("--stages", required=True, help="comma-separated stages of the pipeline")
    parser.add_argument("--address", required=True, help="abstract socket to listen on")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--life-line", type=int, required=True, help="descriptor that ends with the door")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(name)s %(process)d: %(message)s", stream=sys.stderr)
    # A Ctrl-C in the server's terminal reaches the whole group; the life line ends this process in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_watch_life_line, args=(arguments.life_line,), daemon=True, name="life").start()
    try:
        server = wire.listen(arguments.address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return ADDRESS_TAKEN_STATUS
        raise
    host = Host(arguments.address, server)
    host.serve()
    stages = tuple(arguments.stages.split(","))
    began_s = time.monotonic()
    try:
        deploy = deploys.load(arguments.deploy)
        loops = build_loops(deploy, stages, arguments.device, host.peers)
    except (ConfigError, InvalidRequest) as error:
        host.become(wire.LoadFailed(error.what, error.cure), {})
        time.sleep(1.0)  # let doors that are just connecting hear it
        return 1
    except Exception as error:
        log.exception("stages %s: load failed", arguments.stages)
        host.become(wire.LoadFailed(f"{type(error).__name__}: {error}", "the server log has the details"), {})
        time.sleep(1.0)
        return 1
    load_s = time.monotonic() - began_s
    host.become(wire.Ready(load_s), loops)
    log.info("stages %s ready after %.1f s", arguments.stages, load_s)
    threading.Event().wait()
    return 0


def _watch_life_line(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
