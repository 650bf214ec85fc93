"""What the two stage doors do: find their deploy file, keep an engine process, pass calls on to it."""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from tritone import allocator, deploy_reader, wire
from tritone.control import OpenSession
from tritone.deploy import Deploy
from tritone.device import Device, visible
from tritone.engine_link import EngineLink
from tritone.engine_process import EngineSpec
from tritone.errors import ConfigError, TritoneError
from tritone.metrics import Publisher
from tritone.pipeline import Batching, Stage
from tritone.private_memory import keep_private
from tritone.server_key import server_key
from tritone.tally import StageTally
from tritone.tracing import open_tracer
from tritone.triton import log_error, make_metric_family, model_parameters

SERVER_WAIT_S = 1.0  # on top of load_timeout_s


def server_name() -> str:
    """Names the running tritonserver: doors are its children, so they agree without talking."""
    parent = os.getppid()
    started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{parent}-{started}"


def load_deploy(args: Mapping[str, str]) -> tuple[Deploy, dict[str, str], Path]:
    """The deploy file beside the model folder that Triton loads, the pbtxt parameters, and the file's path.

    Raises ConfigError when the pbtxt was not rendered from this deploy file.
    """
    parameters = model_parameters(args["model_config"])
    path = Path(args["model_repository"]).parent / "deploy.yaml"
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist",
            "point --model-repository at the folder that holds deploy.yaml and the models",
        )
    deploy = deploy_reader.load(path)
    if parameters.get("deploy_digest") != deploy.digest:
        raise ConfigError(
            f"config.pbtxt of {args['model_name']} was not rendered from {path}",
            f"run `tritone render {path.parent}`",
        )
    return deploy, parameters, path


@dataclass(frozen=True)
class Instance:
    """One instance of a stage model, and how its engine process is addressed."""

    stage: Stage
    index: int
    gpus: tuple[int, ...]  # that its engine runs on; none: the CPU

    @classmethod
    def of(cls, args: Mapping[str, str], stage: Stage, device: Device) -> Instance:
        """device: of the stage. Triton says which of its GPUs, and knows of no engine over several."""
        match = re.search(r"_(\d+)$", args["model_instance_name"])
        on_gpu = args["model_instance_kind"] == "GPU"
        gpus = (int(args["model_instance_device_id"]),) if on_gpu else device.gpus
        return cls(stage, int(match.group(1)) if match else 0, gpus)

    @property
    def device(self) -> str:
        """Names it in sockets and metrics."""
        return "cuda:" + "+".join(map(str, self.gpus)) if self.gpus else "cpu"


def engine_address(deploy: Deploy, stage: str, device: str, index: int) -> str:
    """The abstract socket of the engine process that hosts instance `index` of a stage on a device."""
    return f"tritone/{server_name()}/{deploy.engine_group(stage)}/{device}/{index}"


class StageDoor:
    """The library half of a stage door: links to the engine of this instance and of its siblings."""

    def __init__(self, args: Mapping[str, str]) -> None:
        keep_private()
        self.deploy, parameters, path = load_deploy(args)
        self.stage = self.deploy.pipeline.stage(parameters["stage"])
        self.settings = self.deploy.stage(self.stage.name)
        self.model = args["model_name"]
        self.key = server_key(server_name())  # which calls to this door carry
        facts = {"tritone.pipeline": self.deploy.pipeline.name, "tritone.stage": self.stage.name}
        self._tracer = open_tracer(self.deploy.tracing, f"{self.model}.door", facts)
        instance = Instance.of(args, self.stage, self.settings.placed)
        visible(instance.gpus, os.environ)  # ConfigError now, not each time that the engine starts
        mates = self.deploy.hosted_with(self.stage.name)
        own_address = engine_address(self.deploy, self.stage.name, instance.device, instance.index)
        spec = EngineSpec(
            deploy_file=path,
            stages=mates,
            address=own_address,
            gpus=instance.gpus,
            threads=max(self.deploy.stage(mate).threads for mate in mates),
            python=self.settings.python,
            load_timeout_s=max(self.deploy.stage(mate).load_timeout_s for mate in mates),
            mps_priority=self.deploy.mps_priority(self.stage.name),
            env=self.settings.env,
        )
        self.own = EngineLink(
            self.stage.name,
            own_address,
            spec,
            self.settings.call_timeout_s,
            turn_limit_s=max(self.deploy.stage(mate).call_timeout_s for mate in mates),
        )
        addresses = [
            engine_address(self.deploy, self.stage.name, instance.device, i)
            for i in range(self.settings.instances)
        ]
        self._links = [
            self.own
            if address == own_address
            else EngineLink(self.stage.name, address, None, self.settings.call_timeout_s)
            for address in addresses
        ]
        make_family = make_metric_family if self.deploy.metrics else None
        labels = {
            "pipeline": self.deploy.pipeline.name,
            "stage": self.stage.name,
            "instance": f"{instance.device}/{instance.index}",
        }
        self._publisher = Publisher(labels, make_family, log_error)
        try:
            self.own.wait_ready(spec.load_timeout_s + SERVER_WAIT_S)
        except ConfigError:
            self.close()
            raise
        self._publisher.start(StageTally(self._publisher, self.own, self.model).look)
        allocator.give_back_often(self.deploy.max_in_flight * allocator.IN_DOOR_BYTES)

    @property
    def is_ready(self) -> bool:
        """Whether an engine of this stage can be called."""
        return any(link.is_ready for link in self._links)

    def open(self, control: OpenSession, inputs: Mapping[str, Any]) -> Future[dict[str, Any]]:
        """Open a session on the least loaded engine: {"endpoint": its address}, or the TritoneError."""
        opened: Future[dict[str, Any]] = Future()
        if control.trace:
            span = self._tracer.child(f"open {self.model}", control.trace, "server")
            opened.add_done_callback(lambda done: span.end(error=_code(done.exception())))
        if sum(link.is_ready for link in self._links) < 2:
            live = next((link for link in self._links if link.is_ready), self.own)
            self._open_on(live, control, inputs, opened)
        else:
            self._stats().add_done_callback(
                lambda stats: self._open_on(self._least_loaded(stats.result()), control, inputs, opened)
            )
        return opened

    def ping(self) -> Future[dict[str, Any]]:
        """The figures of every engine of this stage; "error" is set when the stage cannot serve."""
        state: Future[dict[str, Any]] = Future()
        self._stats().add_done_callback(lambda stats: state.set_result(self._state(stats.result())))
        return state

    def run(self, chunks: list[wire.StreamChunk]) -> list[wire.StreamResult]:
        """One batch on this instance's engine; blocks. Raises TritoneError when all of it fails."""
        name = f"run {self.model}"
        spans = {
            number: self._tracer.child(name, chunk.trace, "server")
            for number, chunk in enumerate(chunks)
            if chunk.trace
        }
        sent = list(chunks)
        for number, span in spans.items():
            sent[number] = structs.replace(chunks[number], trace=span.carrier)
        codes = [TritoneError.code] * len(chunks)
        try:
            future = self.own.call(lambda call: wire.Run(call, self.model, sent))
            results: list[wire.StreamResult] = future.result().results
            codes = [result.code for result in results]
            return results
        except TritoneError as error:
            codes = [error.code] * len(chunks)
            raise
        finally:
            for number, span in spans.items():
                span.end(error=codes[number], attributes={"tritone.batch": len(chunks)})

    def cancel(self, session: str) -> None:
        self.own.tell(wire.Cancel(session))

    def close(self) -> None:
        self._publisher.close()
        for link in {self.own, *self._links}:
            link.close()
        self._tracer.close()

    def _open_on(
        self,
        link: EngineLink,
        control: OpenSession,
        inputs: Mapping[str, Any],
        opened: Future[dict[str, Any]],
    ) -> None:
        def message(call: int) -> wire.Open:
            return wire.Open(
                call=call,
                stage=self.model,
                session=control.session,
                inbox=control.inbox,
                inputs=dict(inputs),
                sources=control.sources,
                settings=control.settings,
                routes=control.routes,
                whole=control.whole,
                trace=control.trace,
            )

        def done(answer: Future[Any]) -> None:
            error = answer.exception()
            if error is not None:
                link.tell(wire.Cancel(control.session))  # it may have been too late, and is opened after all
                opened.set_exception(error)
            else:
                opened.set_result({"endpoint": link.address})

        link.call(message).add_done_callback(done)

    def _stats(self) -> Future[dict[EngineLink, dict[str, Any]]]:
        """What each engine of the stage says of itself; {"error": why} for one that does not answer."""
        gathered: Future[dict[EngineLink, dict[str, Any]]] = Future()
        found: dict[EngineLink, dict[str, Any]] = {}
        lock = threading.Lock()

        def note(link: EngineLink, answer: Future[Any]) -> None:
            error = answer.exception()
            with lock:
                found[link] = (
                    {"error": str(error)} if error is not None else answer.result().stats[self.model]
                )
                complete = len(found) == len(self._links)
            if complete:
                gathered.set_result(found)

        for link in self._links:
            link.call(wire.Ping).add_done_callback(functools.partial(note, link))
        return gathered

    def _least_loaded(self, stats: Mapping[EngineLink, Mapping[str, Any]]) -> EngineLink:
        live = [link for link in self._links if "error" not in stats[link]]
        return min(live, key=lambda link: stats[link]["sessions"] + link.in_flight, default=self.own)

    def _state(self, stats: Mapping[EngineLink, Mapping[str, Any]]) -> dict[str, Any]:
        engines = [dict(stats[link]) for link in self._links]
        for engine in engines:
            if engine.get("beat_age_s", 0.0) > self.settings.call_timeout_s:
                engine["error"] = f"its loop has not turned for {engine['beat_age_s']:.0f} s"
        errors = [engine["error"] for engine in engines if "error" in engine]
        # Triton sends a stream's chunks to one instance, so a batched stage needs all of its engines.
        serves = not errors if self.stage.batching is Batching.TRITON else len(errors) < len(engines)
        return {"engines": engines} if serves else {"engines": engines, "error": errors[0]}


def _code(error: BaseException | None) -> str:
    """TritoneError.code; "" for None."""
    return "" if error is None else as_error(error).code


def as_error(error: BaseException) -> TritoneError:
    """What to tell the caller of any exception."""
    return error if isinstance(error, TritoneError) else TritoneError(f"the stage failed: {error}")
