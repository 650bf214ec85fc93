"""The heart of a pipeline model: one coroutine a request.

    admit ── open stages, consumers first ── take what they push ──► answer
                                               └─ frames, cut into chunks ─► code2wav (BLS) ─► answer

Stages that batch by themselves are opened by one short BLS call each and then push to the inbox socket; a
Triton-batched stage is called by BLS, a call a chunk. Nothing here holds a server thread for long.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tritone import contract as c
from tritone import wire
from tritone.admission import Admission
from tritone.answer import Answer
from tritone.bls import Stages
from tritone.control import DropStream
from tritone.deploy import Deploy
from tritone.errors import (
    DeadlineExceeded,
    EngineLost,
    InvalidRequest,
    NotReached,
    TritoneError,
    Unavailable,
    suggestion,
)
from tritone.fault_log import described
from tritone.fetch import Fetcher
from tritone.inbox import Inbox
from tritone.intake import Intake
from tritone.metrics import Publisher
from tritone.pipeline import Facts
from tritone.reception import Arrival, Reception
from tritone.request import MAX_DRAWN_SEED, check_supported, read_request
from tritone.request_trace import RequestTrace, answer_attributes
from tritone.routing import Routing
from tritone.session import ChunkCall, Session
from tritone.stage_calls import Opening, StageCalls
from tritone.tally import RequestTally
from tritone.timeline import Timeline
from tritone.tracing import Attribute, Tracer
from tritone.triton import Reply, log_error, log_info, make_metric_family

READY_POLL_S = 0.1
CLEANUP_TIMEOUT_S = 5.0


class Orchestrator:
    """Runs the requests of one pipeline model on an event loop of its own."""

    def __init__(
        self,
        deploy: Deploy,
        facts: Facts,
        name: str,
        address: str,
        may_stream: bool,
        key: str = "",
        tracer: Tracer | None = None,
    ) -> None:
        """name: unique in this server; begins every session id. address: of the inbox, see inbox.address.

        may_stream: the model is decoupled; its twin gives one response. key: see server_key.
        """
        self._deploy = deploy
        self._pipeline = deploy.pipeline
        self._facts = facts
        self._name = name
        self._address = address
        self._may_stream = may_stream
        self._tracer = tracer or Tracer()
        self._sessions: dict[str, Session] = {}
        self._admission = Admission(deploy.max_in_flight, deploy.max_queued)
        self._lost_s: dict[str, float] = {}  # by engine address: loop time at which it was lost
        self._background: set[asyncio.Task[None]] = set()
        self._stages = Stages(deploy.bls_threads, key)
        self._calls = StageCalls(deploy, name, self._stages, self._abandon)
        self._models = self._calls.models
        self._fetcher = Fetcher(deploy)
        self._encoders = ThreadPoolExecutor(1, "encode")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="orchestrator")
        self._thread.start()
        self._inbox = asyncio.run_coroutine_threadsafe(self._make_inbox(), self._loop).result()
        self._publisher = Publisher(
            {"pipeline": self._pipeline.name, "model": name.partition("/")[0]},
            make_metric_family if deploy.metrics else None,
            log_error,
        )
        tally = RequestTally(self._publisher, may_stream, deploy.max_in_flight, self._admission)
        self._reception = Reception(name, self._loop, self._answer, tally.ended)
        self._publisher.start(tally.look)

    # -- for the door (any thread) ---------------------------------------------------------------------------

    def submit(self, values: Mapping[str, Any], parameters: Mapping[str, Any], reply: Reply) -> None:
        """Answer a request through `reply`, later; never raises."""
        self._reception.submit(values, parameters, reply)

    def refuse(self, reply: Reply, error: TritoneError) -> None:
        """End a request whose inputs cannot be read."""
        self._reception.refuse(reply, error)

    def states(self, timeout_s: float) -> dict[str, dict[str, Any]]:
        """As `ping`. Raises TimeoutError."""
        return asyncio.run_coroutine_threadsafe(self.ping(), self._loop).result(timeout_s)

    def close(self) -> None:
        """Cancel what runs, then stop."""
        self._reception.close()
        asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result(timeout=2 * CLEANUP_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=CLEANUP_TIMEOUT_S)
        self._publisher.close()
        self._stages.close()
        self._encoders.shutdown(wait=False)
        self._fetcher.close()
        self._tracer.close()

    # -- one request -----------------------------------------------------------------------------------------

    async def _answer(self, arrival: Arrival) -> None:
        if arrival.values.get("op"):
            await self._operate(arrival.values["op"], arrival.reply)
        else:
            arrival.session = self._admit(arrival.values, arrival.parameters, arrival.reply)
            await self._serve(arrival.session)

    def _admit(self, values: Mapping[str, Any], parameters: Mapping[str, Any], reply: Reply) -> Session:
        trace = RequestTrace(self._tracer, self._pipeline.name, parameters, reply.received_s)
        try:
            return self._make_session(values, parameters, reply, trace)
        except Exception as error:
            trace.end(error)
            raise

    def _make_session(
        self, values: Mapping[str, Any], parameters: Mapping[str, Any], reply: Reply, trace: RequestTrace
    ) -> Session:
        self._reception.check_open()
        drawn_seed = secrets.randbelow(MAX_DRAWN_SEED)
        request = read_request(values, parameters, self._deploy, drawn_seed, reply.wants, self._may_stream)
        check_supported(request, self._pipeline)
        plan = self._pipeline.plan(request)
        id_, sequence = self._calls.next_id()
        timeline = Timeline(reply.received_s)
        session = Session(
            id=id_,
            sequence=sequence,
            request=request,
            plan=plan,
            routing=Routing(self._pipeline, plan, request.modalities),
            answer=Answer(request, self._facts.sample_rate_hz, reply.send, self._encoders, timeline),
            timeline=timeline,
            trace=trace,
        )
        session.writer = self._writer(session)
        self._sessions[session.id] = session
        return session

    async def _serve(self, session: Session) -> None:
        """Answer, and end the request's spans with what came of it."""
        try:
            await self._take_turn(session)
        except BaseException as error:
            session.trace.end(error)
            raise
        if session.trace.is_recorded:
            session.trace.end(attributes=self._attributes(session))

    async def _take_turn(self, session: Session) -> None:
        deadline_s, complete = session.request.deadline_s, False
        session.timeline.note_queued()
        session.trace.note_queued()
        try:
            async with asyncio.timeout(deadline_s), self._admission.turn(session.request.priority):
                session.timeline.note_turn()
                session.trace.note_turn()
                session.request, session.plan = await self._fetcher.filled(session.request, session.plan)
                await self._work(session)
                complete = True
        except TimeoutError:
            if session.answer.is_empty:
                raise DeadlineExceeded(
                    f"the deadline of {deadline_s:g} s passed before any output",
                    "raise deadline_ms or try again later",
                ) from None
        finally:
            self._release(session)
        await self._finish(session, complete)

    async def _work(self, session: Session) -> None:
        """Open the stages and take what they make; again from the start if one dies and deploy says so."""
        session.started = True
        resumes_left, opened = self._deploy.resumes, False
        while True:
            try:
                await self._open(session)
                opened = True
                await Intake(self._deploy, self._calls, session).run()
                return
            except EngineLost as lost:
                if not self._deploy.resumes or (opened and not resumes_left):
                    raise
                resumes_left, opened = resumes_left - opened, False
                log_info(f"{self._name}: {session.id} begins again: {lost.what}")
                await self._begin_again(session)

    async def _begin_again(self, session: Session) -> None:
        """Give a session a new name in every stage, once all that it needs serve; its deadline bounds it."""
        self._release(session)
        session.begin_again(*self._calls.next_id())
        self._sessions[session.id] = session
        states = None
        while states is None or any("error" in states[name] for name in session.plan):
            await asyncio.sleep(READY_POLL_S)  # also the first time: a door may be the last to notice
            states = await self.ping()

    async def _open(self, session: Session) -> None:
        """Open the stages that batch by themselves, consumers first, so that nothing arrives unannounced."""
        for stage in session.routing.open_order():
            began_s = self._loop.time()
            endpoint = await self._calls.open(session, stage, self._inbox.address)
            session.endpoints[stage.name] = endpoint
            if self._lost_s.get(endpoint, -1.0) >= began_s:
                died = self._engine_died(stage.name)
                session.trace.fail_stage(stage.name, died.code)
                raise died

    def _abandon(self, opening: Opening, session: str) -> None:
        self._in_background(self._undo_open(opening, session))

    async def _undo_open(self, opening: Opening, session: str) -> None:
        """The request ended while the stage was being opened: it opens all the same."""
        self._inbox.tell((await opening)["endpoint"], wire.Cancel(session))

    async def _finish(self, session: Session, complete: bool) -> None:
        """Send `done`. A modality that the deadline cut off says so; text may end long before speech."""
        for modality in session.request.modalities:
            maker = session.routing.maker(modality)
            if maker is None:
                continue
            ended = complete or modality == "text"
            reason = session.finished.get(maker, "deadline") if ended else "deadline"
            if modality == "audio" and reason == "stop" and self._speaks_cut_text(session, maker):
                # Who asked for audio alone sees no other reason, and what is heard breaks off.
                reason = "length"
            session.answer.finish_reasons[modality] = reason
        await session.answer.done(session.usage, self._writer(session), session.trace.trace_id)

    def _attributes(self, session: Session) -> dict[str, Attribute]:
        """What the span of an answered request says of it."""
        usage = session.usage.get(self._writer(session) or "", {})
        answer = session.answer
        return answer_attributes(
            answer.finish_reasons, usage, answer.firsts, session.request.seed, answer.audio_s
        )

    def _writer(self, session: Session) -> str | None:
        """The stage that writes the text, whether or not the text was asked for."""
        return session.routing.maker("text") if "text" in self._pipeline.finals else None

    def _speaks_cut_text(self, session: Session, speaker: str) -> bool:
        """The stage spoke all of its text, but a limit had ended that."""
        writer = self._writer(session)
        return writer in self._pipeline.upstream(speaker) and session.finished.get(writer) == "length"

    def _release(self, session: Session) -> None:
        """Free everything the session holds, in every stage; the only way a session ends."""
        del self._sessions[session.id]
        for name, address in session.endpoints.items():
            if session.holds(name):
                self._inbox.tell(address, wire.Cancel(session.id))
        for name, call in session.chunk_calls.items():
            self._in_background(self._end_sequence(session.id, session.sequence, name, call))

    async def _end_sequence(self, id_: str, sequence: int, stage: str, last: ChunkCall) -> None:
        """Triton keeps a place for a sequence until its END, which must not overtake the call under way."""
        await asyncio.wait({last.task})
        fault = None if last.task.cancelled() else last.task.exception()
        if fault is not None:
            log_info(f"{self._name}: the last chunk of {id_} failed: {described(fault)}")
        if not last.ends or isinstance(fault, NotReached):
            await self._stages.sequence(self._models[stage], sequence, DropStream(id_), {})

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        async def quietly() -> None:
            try:
                await work
            except Exception as error:
                log_info(f"{self._name}: while cleaning up: {described(error)}")

        task = self._loop.create_task(quietly())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # -- all requests ----------------------------------------------------------------------------------------

    async def ping(self) -> dict[str, dict[str, Any]]:
        """The state of every stage: its engines' figures, and "error" if it cannot serve."""
        return await self._calls.ping()

    async def _operate(self, op: str, reply: Reply) -> None:
        if op != "ping":
            raise InvalidRequest(f"op is '{op}'", suggestion(op, ["ping"]))
        states = await self.ping()
        down = [
            f"stage {name} is not ready: {state['error']}"
            for name, state in states.items()
            if "error" in state
        ]
        if down:
            raise Unavailable(", ".join(down), "wait for the restart or read the server log")
        info = {
            "stages": states,
            "sessions": len(self._sessions),
            "max_in_flight": self._deploy.max_in_flight,
        }
        tensors = {
            "event": c.EVENT.pack("done"),
            "index": c.INDEX.pack(0),
            "text_output": c.TEXT_OUTPUT.pack(""),
        }
        reply.send({**tensors, "info": c.INFO.pack(json.dumps(info))}, True)

    async def _make_inbox(self) -> Inbox:
        return Inbox(self._address, self._deliver, self._engine_lost, self._drain)

    def _deliver(self, message: Any) -> None:
        session = self._sessions.get(message.session)
        if session is not None:  # else it ended while the message was under way
            session.mail.put_nowait(message)

    def _engine_lost(self, address: str) -> None:
        self._lost_s[address] = self._loop.time()
        for session in self._sessions.values():
            for name, endpoint in session.endpoints.items():
                if endpoint == address and session.needs(name):
                    error = self._engine_died(name)
                    lost = wire.Failed(session.id, self._models[name], error.code, error.what, error.cure)
                    session.mail.put_nowait(lost)

    def _engine_died(self, stage: str) -> EngineLost:
        return EngineLost(f"the engine of stage {stage} died under the request", "try again")

    async def _drain(self, grace_s: float = 0.0, why: str = wire.Drain().why) -> None:
        """End every request, when the grace is over at the latest, with all that this leaves to do."""
        await self._reception.drain(grace_s, why, CLEANUP_TIMEOUT_S / 2)
        if self._background:
            await asyncio.wait(set(self._background), timeout=CLEANUP_TIMEOUT_S / 2)

    async def _shut_down(self) -> None:
        await self._drain()
        left = asyncio.all_tasks() - {asyncio.current_task()}  # e.g. a look at the stages: who waits is told
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=CLEANUP_TIMEOUT_S / 2)
        self._inbox.close()
