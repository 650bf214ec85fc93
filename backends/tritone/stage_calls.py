"""What an orchestrator asks of its stages, one BLS call each; what comes of it is noted in the session.

open        a stage that batches by itself takes a session       ─► endpoint of its engine
call_chunk  a stage that Triton batches computes a chunk         ─► its sound
ping        every stage                                          ─► its figures, or what is wrong with it
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tritone.control import OpenSession, PingStage, RunChunk
from tritone.deploy import Deploy
from tritone.errors import TritoneError
from tritone.pipeline import Batching, Stage
from tritone.ports import Array, by_name
from tritone.routing import FRAMES, SEGMENT_END
from tritone.session import ChunkCall, Session
from tritone.stream import FrameChunk, sizes_of
from tritone.timeline import Call

if TYPE_CHECKING:
    from tritone.bls import Stages

PING_TIMEOUT_S = 2.5  # below what those who ping allow, so that they hear which stage it is

Opening = asyncio.Task[dict[str, Any]]
Abandon = Callable[[Opening, str], None]
"""Told of a stage that is still being opened when its session, by id, has ended: it opens all the same."""


class StageCalls:
    """For one event loop."""

    def __init__(self, deploy: Deploy, name: str, stages: Stages, abandon: Abandon) -> None:
        """name: unique in this server; begins every session id."""
        self._deploy = deploy
        self._pipeline = deploy.pipeline
        self._name = name
        self._stages = stages
        self._abandon = abandon
        self._counter = itertools.count(1)
        self._sequence_base = secrets.randbits(62)  # nobody else can name a live sequence
        self.models = {stage.name: deploy.stage(stage.name).model for stage in self._pipeline.stages}
        self._stage_names = {model: name for name, model in self.models.items()}

    def stage_of(self, model: str) -> str:
        """The stage that a Triton model serves."""
        return self._stage_names[model]

    def next_id(self) -> tuple[str, int]:
        """A session id and a sequence number that were never used."""
        number = next(self._counter)
        return f"{self._name}-{number}", self._sequence_base + number

    async def open(self, session: Session, stage: Stage, inbox: str) -> str:
        """The address of the engine that has the session now. inbox: where its outputs go."""
        call, ports = session.plan[stage.name], by_name(stage.inputs)
        is_whole = self._deploy.mode == "sync"
        sizes = () if is_whole else sizes_of(session.request.chunks)
        control = OpenSession(
            session=session.id,
            inbox=inbox,
            sources=session.routing.num_sources(stage.name),
            settings=dict(call.settings),
            routes=session.routing.routes(stage, self.models, session.endpoints, inbox, sizes),
            whole=is_whole,
            trace=session.trace.stage(stage.name),
        )
        inputs = {ports[name]: value for name, value in call.inputs.items()}
        opening = asyncio.create_task(self._stages.control(self.models[stage.name], control, inputs))
        try:
            reply = await asyncio.shield(opening)
        except asyncio.CancelledError:
            self._abandon(opening, session.id)
            raise
        except TritoneError as error:
            session.trace.fail_stage(stage.name, error.code)
            raise
        session.timeline.note_opened(stage.name)
        endpoint: str = reply["endpoint"]
        return endpoint

    async def call_chunk(self, session: Session, stage: Stage, chunk: FrameChunk, first: bool) -> Array:
        """One chunk through a Triton-batched stage: mono float32 [n]."""
        ports = by_name(stage.inputs)
        settings = dict(session.plan[stage.name].settings) if first else {}
        control = RunChunk(session.id, first, chunk.last, settings, session.trace.stage(stage.name))
        inputs: dict[Any, Any] = {ports[FRAMES]: chunk.frames} if len(chunk.frames) else {}
        if SEGMENT_END in ports:
            inputs[ports[SEGMENT_END]] = chunk.segment_end
        model, output = self.models[stage.name], stage.outputs[0]
        call = asyncio.create_task(self._stages.sequence(model, session.sequence, control, inputs, output))
        session.chunk_calls[stage.name] = ChunkCall(call, chunk.last)
        began_s = time.monotonic()
        try:
            reply, samples = await asyncio.shield(call)
        except TritoneError as error:
            session.trace.fail_stage(stage.name, error.code)
            raise
        assert samples is not None
        computed_from_s, computed_to_s = reply["busy"]
        times = Call(
            began_s, time.monotonic(), len(chunk.frames), reply["batch"], (computed_from_s, computed_to_s)
        )
        session.timeline.note_call(stage.name, times, len(samples) > 0, chunk.last)
        if chunk.last:
            session.trace.end_stage(stage.name, session.timeline.stages[stage.name])
            del session.chunk_calls[stage.name]
        return samples

    async def ping(self) -> dict[str, dict[str, Any]]:
        """The state of every stage: its engines' figures, and "error" if it cannot serve."""
        stages = self._pipeline.stages
        states = await asyncio.gather(*(self._ping(stage) for stage in stages))
        return {stage.name: state for stage, state in zip(stages, states, strict=True)}

    async def _ping(self, stage: Stage) -> dict[str, Any]:
        model = self.models[stage.name]
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                if stage.batching is Batching.ENGINE:
                    return await self._stages.control(model, PingStage(), {})
                _, number = self.next_id()
                state, _ = await self._stages.sequence(model, number, PingStage(), {})
                return state
        except TimeoutError:
            return {"error": f"its door did not answer within {PING_TIMEOUT_S:g} s"}
        except TritoneError as error:
            return {"error": error.what}
