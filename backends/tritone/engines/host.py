"""The engine process: hosts the engines of one or more stages, one thread each, behind one socket.

    reader threads (one a connection) ──mailbox──► stage thread: drain it, step the engine, send what came
                          └─Piece─► connector ─mailbox──┘

Started by a door with `python -m tritone.engines.host`; ends when the door closes its end of the life line,
so that no engine outlives its server, also after kill -9.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tritone import allocator, deploy_reader, wire
from tritone.connectors.base import Budget
from tritone.connectors.local import LocalConnector
from tritone.deploy import Deploy
from tritone.engines.base import BatchEngine, Placement
from tritone.engines.batch_loop import BatchLoop
from tritone.engines.loop import Answer, Loop
from tritone.engines.peers import Peers
from tritone.engines.stage_loop import StageLoop
from tritone.engines.stage_stream import StageStream
from tritone.engines.torch_trace import TorchTrace
from tritone.errors import ConfigError, InvalidRequest
from tritone.fault_log import FaultFormatter
from tritone.stream import sizes_of
from tritone.tracing import Tracer, open_tracer

log = logging.getLogger("tritone.engine")

ADDRESS_TAKEN_STATUS = 17  # exit status: another process already serves this address
ACCEPT_PAUSE_S = 0.5
# How long a thread may hold the interpreter's lock while another waits for it. With Python's own 5 ms a loop
# whose frame is ready would wait longer for another's Python than for the GPU.
SHARED_SWITCH_S = 0.0005


class Host:
    """The socket side of an engine process."""

    def __init__(self, address: str, server: socket.socket) -> None:
        self._address = address
        self._server = server
        self._loops: dict[str, Loop] = {}
        self._channels: set[wire.Channel] = set()
        self._state: wire.AnyMessage = wire.Loading()  # what a door is told when it connects
        self._lock = threading.Lock()
        self._torch_trace = TorchTrace(allowed=False)
        self.peers = Peers(address, self._peer_lost, self._peer_late)

    def serve(self) -> None:
        threading.Thread(target=self._accept, daemon=True, name="accept").start()

    def allow_profiling(self, allowed: bool) -> None:
        self._torch_trace = TorchTrace(allowed)

    def become(self, state: wire.AnyMessage, loops: Mapping[str, Loop]) -> None:
        """Tell every door, now and later, that the process is Ready with its loops, or failed to load."""
        with self._lock:
            self._loops = dict(loops)
            for loop in loops.values():
                threading.Thread(target=loop.run, daemon=True, name=loop.model).start()
            self._state = state
            for channel in list(self._channels):
                try:
                    channel.send(state)
                except wire.Disconnected:
                    self._channels.discard(channel)

    def _accept(self) -> None:
        while True:
            try:
                channel = wire.accept(self._server)
            except OSError as error:  # out of descriptors: those that wait may have their turn later
                log.error("cannot accept a connection: %s", error)
                time.sleep(ACCEPT_PAUSE_S)
                continue
            with self._lock:
                self._channels.add(channel)
                try:
                    channel.send(self._state)
                except wire.Disconnected:
                    self._channels.discard(channel)
                    continue
            threading.Thread(target=self._read, args=(channel,), daemon=True, name="reader").start()

    def _read(self, channel: wire.Channel) -> None:
        outbox = wire.Outbox(channel)
        try:
            while True:
                self._take(channel.receive(), channel, outbox.send)  # and hold nothing of it while waiting
        except wire.Disconnected:
            pass
        except Exception:  # the peer hears that the channel is gone, and waits for no answer
            log.exception("a connection is given up")
        finally:
            with self._lock:
                self._channels.discard(channel)
            channel.close()
            for connector in self._connectors(*self._loops):
                connector.producer_lost(channel)

    def _take(self, message: Any, channel: wire.Channel, answer: Answer) -> None:
        if isinstance(message, wire.Piece):
            for connector in self._connectors(message.stage):
                connector.receive(message, channel)
        else:
            self._dispatch(message, answer)

    def _connectors(self, *models: str) -> list[LocalConnector]:
        """The connectors of those of the stages that are here and batch by themselves."""
        loops = [self._loops.get(model) for model in models]
        connectors = [loop.connector for loop in loops if isinstance(loop, StageLoop)]
        return [connector for connector in connectors if isinstance(connector, LocalConnector)]

    def _dispatch(self, message: Any, answer: Answer) -> None:
        match message:
            case wire.Open():
                self.open(message, answer)
            case wire.Run():
                loop = self._loops.get(message.stage)
                if isinstance(loop, BatchLoop):
                    loop.post(partial(loop.batch, message, answer))
                else:
                    answer(self._unknown_stage(message))
            case wire.Cancel(session=session):
                for loop in self._loops.values():
                    loop.post(partial(loop.cancel, session))
            case wire.Ping(call=call):
                answer(wire.Pong(call, {model: loop.stats() for model, loop in self._loops.items()}))
            case wire.TraceTorch():
                answer(self._torch_trace.answer(message))  # its connection waits for nothing else
            case wire.Hello():
                pass
            case _:
                log.warning("unexpected %s", type(message).__name__)

    def open(self, message: wire.Open, answer: Answer) -> None:
        """Start a session; `answer` is called once, by any thread."""
        loop = self._loops.get(message.stage)
        if not isinstance(loop, StageLoop):
            answer(self._unknown_stage(message))
            return
        try:
            self.peers.ensure(message.inbox)  # here, for the loop does not wait
        except wire.Disconnected as error:
            what = f"the orchestrator is gone ({error})"
            answer(wire.Refused(message.call, "UNAVAILABLE", what, "try again"))
        else:
            loop.post(partial(loop.open, message, answer))

    def _unknown_stage(self, message: wire.Open | wire.Run) -> wire.Refused:
        what = f"this engine process does not serve stage '{message.stage}'"
        return wire.Refused(message.call, "UNAVAILABLE", what, "try again")

    def _peer_lost(self, address: str) -> None:
        for loop in list(self._loops.values()):
            loop.post(partial(loop.peer_lost, address))

    def _peer_late(self, address: str) -> None:
        for loop in list(self._loops.values()):
            if isinstance(loop, StageLoop):
                loop.post(partial(loop.peer_late, address))


def build_loops(
    deploy: Deploy,
    stages: tuple[str, ...],
    device: str,
    peers: Peers,
    tracer: Tracer | None = None,
    num_gpus: int = 1,
) -> dict[str, Loop]:
    """Load the engines of `stages`; Triton model name to its loop."""
    loops: dict[str, Loop] = {}
    budget = Budget(deploy.connector.queued_bytes)
    for name in stages:
        settings = deploy.stage(name)
        folder = deploy.require_checkpoint(name)
        chunk_frames = sizes_of(deploy.chunks)
        stream = StageStream(_urgency(deploy, name, stages) if num_gpus == 1 else None)
        placement = Placement(
            folder, device, settings.threads, settings.max_batch_size, chunk_frames, num_gpus, stream
        )
        engine = deploy.engine_class(name)(placement, settings.options)
        stream.leave()
        if isinstance(engine, BatchEngine):
            loops[settings.model] = BatchLoop(settings.model, engine, settings.lease_s, tracer, stream)
        else:
            connector = LocalConnector(peers.own_address, settings.model, deploy.connector, budget)
            loops[settings.model] = StageLoop(
                settings.model, engine, peers, connector, settings.lease_s, tracer, stream
            )
    return loops


def _urgency(deploy: Deploy, stage: str, stages: tuple[str, ...]) -> int | None:
    """For `StageStream`: one that has its GPU's process for itself needs no stream of its own."""
    settings = deploy.stage(stage)
    if deploy.engine_class(stage).leaves_default_stream:
        return settings.urgency
    return settings.urgency if len(stages) > 1 and settings.own_stream else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tritone.engines.host")
    parser.add_argument("--deploy", type=Path, required=True)
    parser.add_argument("--stages", required=True, help="comma-separated stages of the pipeline")
    parser.add_argument("--address", required=True, help="abstract socket to listen on")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num-gpus", type=int, default=1, help="from --device on")
    parser.add_argument("--life-line", type=int, required=True, help="descriptor that ends with the door")
    arguments = parser.parse_args(argv)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FaultFormatter("%(name)s %(process)d: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # A Ctrl-C in the server's terminal reaches the whole group; the life line ends this process in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tracers: list[Tracer] = []  # of this process, once it has one
    life = (arguments.life_line, tracers)
    threading.Thread(target=_watch_life_line, args=life, daemon=True, name="life").start()
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
        deploy = deploy_reader.load(arguments.deploy)
        tracers.append(_open_tracer(deploy, stages, arguments.device))
        host.allow_profiling(deploy.profiling)
        loops = build_loops(deploy, stages, arguments.device, host.peers, tracers[0], arguments.num_gpus)
    except (ConfigError, InvalidRequest) as error:
        host.become(wire.LoadFailed(error.what, error.cure), {})
        time.sleep(1.0)  # let doors that are just connecting hear it
        return 1
    except Exception as error:
        log.exception("stages %s: load failed", arguments.stages)
        host.become(wire.LoadFailed(f"{type(error).__name__}: {error}", "the server log has the details"), {})
        time.sleep(1.0)
        return 1
    if len(stages) > 1:
        sys.setswitchinterval(SHARED_SWITCH_S)
    load_s = time.monotonic() - began_s
    allocator.give_back_often(deploy.max_in_flight * allocator.IN_ENGINE_BYTES)
    host.become(wire.Ready(load_s), loops)
    log.info("stages %s ready after %.1f s", arguments.stages, load_s)
    threading.Event().wait()
    return 0


def _open_tracer(deploy: Deploy, stages: tuple[str, ...], device: str) -> Tracer:
    service = "+".join(deploy.stage(stage).model for stage in stages) + ".engine"
    facts = {
        "tritone.pipeline": deploy.pipeline.name,
        "tritone.stage": ",".join(stages),
        # Among the GPUs that it sees it is the first; people know it by its number in the machine.
        "tritone.device": device
        if device == "cpu"
        else f"cuda:{os.environ.get('CUDA_VISIBLE_DEVICES', '0')}",
    }
    return open_tracer(deploy.tracing, service, facts)


def _watch_life_line(descriptor: int, tracers: list[Tracer]) -> None:
    while os.read(descriptor, 1):
        pass
    for tracer in tracers:
        tracer.close()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
