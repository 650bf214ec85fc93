"""From what happened to what is counted: the requests of a pipeline model, and the engine of a stage.

request ended ──► RequestTally ─┐
engine's figures ──► StageTally ┴─► metrics.Publisher
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tritone import metrics as m
from tritone import wire
from tritone.allocator import num_blocks
from tritone.errors import EngineLost, TritoneError
from tritone.metrics import Family, Publisher

if TYPE_CHECKING:  # the doors of stages know nothing of requests, the orchestrator nothing of engines
    from tritone.admission import Admission
    from tritone.engine_link import EngineLink
    from tritone.reception import Arrival
    from tritone.session import Session

DONE_CODE = "OK"  # where the client got an answer
WRONG = {"INVALID_ARG", "NOT_FOUND", "UNSUPPORTED"}  # codes of requests that no server would take
KNOWN_ENDS = (
    ("ok", DONE_CODE),
    ("deadline", DONE_CODE),
    ("deadline", "DEADLINE_EXCEEDED"),
    ("cancelled", "CANCELLED"),
    ("refused", "INVALID_ARG"),
    ("refused", "UNAVAILABLE"),
    ("failed", "INTERNAL"),
    ("failed", "UNAVAILABLE"),
)
ANSWER_TIMEOUT_S = 1.0


def end_of(session: Session | None, error: TritoneError | None) -> tuple[str, str]:
    """Outcome and code of a request.

    refused: the request is wrong, or had to wait and could not; nothing was made. failed: the server's fault.
    deadline: it passed, before any output or after some of it was sent.
    """
    if error is None:
        assert session is not None
        was_cut = "deadline" in session.answer.finish_reasons.values()
        return "deadline" if was_cut else "ok", DONE_CODE
    code = error.public_code or error.code
    if code == "DEADLINE_EXCEEDED":
        return "deadline", code
    if code == "CANCELLED":
        return "cancelled", code
    started = session is not None and session.started
    is_refusal = code in WRONG or (code == "UNAVAILABLE" and not started)
    return "refused" if is_refusal else "failed", code


class RequestTally:
    """Counts each request of one pipeline model once, when it ends."""

    def __init__(self, publisher: Publisher, may_stream: bool, limit: int, admission: Admission) -> None:
        """limit: requests that may run at a time. admission: knows how many run and wait."""
        self._publisher = publisher
        self._may_stream = may_stream
        self._limit = limit
        self._admission = admission
        for streamed in {False, may_stream}:
            for outcome, code in KNOWN_ENDS:
                publisher.count(m.REQUESTS, 0, streamed=_word(streamed), outcome=outcome, code=code)

    def look(self) -> None:
        """Set the gauges; called by the publisher."""
        self._publisher.set(m.IN_FLIGHT, self._admission.running)
        self._publisher.set(m.QUEUED, self._admission.queued)
        self._publisher.set(m.IN_FLIGHT_LIMIT, self._limit)
        self._publisher.set(m.BLOCKS, num_blocks())

    def ended(self, arrival: Arrival, error: TritoneError | None) -> None:
        """A request has ended, with an answer or this error. One that operates the server does not count."""
        if arrival.values.get("op"):
            return
        streams = self._may_stream and bool(arrival.values.get("stream"))
        outcome, code = end_of(arrival.session, error)
        self._publisher.count(m.REQUESTS, streamed=_word(streams), outcome=outcome, code=code)
        session = arrival.session
        if session is not None and session.started:
            self._count_work(session)
            if streams or error is None:  # else the client heard nothing of it
                self._observe_outputs(session, _word(streams))
            if outcome == "ok":
                self._observe_ends(session, _word(streams))

    def _count_work(self, session: Session) -> None:
        count, usage = self._publisher.count, session.usage.values()
        written = session.usage.get(session.writer or "", {})
        count(m.TEXT_TOKENS, written.get("prompt_tokens", 0), direction="in")
        num_written = written.get("completion_tokens", session.answer.num_text_tokens)
        count(m.TEXT_TOKENS, num_written, direction="out")
        frames = [stage["codec_frames"] for stage in usage if "codec_frames" in stage]
        count(m.CODEC_FRAMES, frames[-1] if frames else session.num_frames)
        count(m.IMAGES, session.request.parts("image"), direction="in")
        count(m.RESUMES, session.resumed)

    def _observe_outputs(self, session: Session, streamed: str) -> None:
        observe, pace = self._publisher.observe, session.answer.pace
        if "text" in pace.first_s:
            observe(m.TTFT, pace.first_s["text"], modality="text", streamed=streamed)
        if "audio" in pace.first_s:
            observe(m.TTFP, pace.first_s["audio"], modality="audio", streamed=streamed)
            self._publisher.count(m.AUDIO_SECONDS, session.answer.audio_s)
        if session.request.stream:
            for gap_s in pace.gaps_s:
                observe(m.GAP, gap_s, modality="audio", streamed=streamed)

    def _observe_ends(self, session: Session, streamed: str) -> None:
        observe, answer, pace = self._publisher.observe, session.answer, session.answer.pace
        for modality in session.request.modalities:
            is_heard = session.request.stream and modality in pace.last_s
            end_s = pace.last_s[modality] if is_heard else pace.now_s
            observe(m.E2EL, end_s, modality=modality, streamed=streamed)
            if modality == "audio" and answer.audio_s:
                observe(m.RTF, end_s / answer.audio_s, modality=modality, streamed=streamed)
        if answer.num_text_tokens > 1:
            tpot_s = (pace.last_s["text"] - pace.first_s["text"]) / (answer.num_text_tokens - 1)
            observe(m.TPOT, tpot_s, modality="text", streamed=streamed)


GAUGES: Mapping[str, Family] = {  # by the key of an engine's figures
    "active": m.SESSIONS,
    "waiting": m.QUEUE,
    "slots": m.SLOTS,
    "running": m.SLOTS_USED,
    "kv_tokens": m.KV_TOKENS,
    "kv_capacity_tokens": m.KV_CAPACITY,
    "state_bytes": m.STATE_BYTES,
    "blocks": m.ENGINE_BLOCKS,
    "connector_queued_bytes": m.CONNECTOR_QUEUED,
    "connector_in_flight_bytes": m.CONNECTOR_IN_FLIGHT,
}
COUNTERS: Mapping[str, Family] = {  # figures that only grow while the engine lives
    "batches": m.BATCHES,
    "batched": m.BATCHED,
    "connector_bytes_taken": m.CONNECTOR_BYTES,
    "connector_chunks_taken": m.CONNECTOR_CHUNKS,
    "connector_latency_s": m.CONNECTOR_LATENCY,
}


class StageTally:
    """What the engine of one instance of a stage says of itself. Once asked, it is published a turn later."""

    def __init__(self, publisher: Publisher, link: EngineLink, model: str) -> None:
        self._publisher = publisher
        self._link = link
        self._model = model
        self._asked: Future[Any] | None = None
        self._asked_load = 0  # which engine was asked, by the number of its load
        self._counted: dict[str, float] = {}  # of the engine that answered last
        self._counted_load = 0
        self._loads = 0  # as far as they are counted
        self._levels: set[Family] = set()  # gauges that were ever set

    def look(self) -> None:
        """Take the answer to the last question, and ask again; called by the publisher."""
        self._publisher.set(m.ENGINE_UP, float(self._link.is_ready))
        self._publisher.set(m.DOOR_BLOCKS, num_blocks())
        loads = self._link.loads
        if loads != self._loads:
            self._publisher.count(m.ENGINE_RESTARTS, loads - max(self._loads, 1))
            self._loads = loads
        if self._asked is not None and self._asked.done():
            error = self._asked.exception()
            if error is None:
                self._take(self._asked.result().stats.get(self._model, {}))
            elif isinstance(error, EngineLost):
                for family in self._levels:
                    self._publisher.set(family, 0)
        if self._asked is None or self._asked.done():
            self._asked_load = loads
            self._asked = self._link.call(wire.Ping, ANSWER_TIMEOUT_S)

    def _take(self, figures: Mapping[str, Any]) -> None:
        if self._asked_load != self._counted_load:  # a new engine counts from 0
            self._counted_load = self._asked_load
            self._counted.clear()
        for key, family in GAUGES.items():
            if key in figures:
                self._set(family, figures[key])
        grown = {key: figures[key] - self._counted.get(key, 0) for key in COUNTERS if key in figures}
        for key, amount in grown.items():
            self._publisher.count(COUNTERS[key], max(amount, 0))
            self._counted[key] = figures[key]
        if "batches" in grown:
            self._set(m.BATCH_SIZE, grown["batched"] / grown["batches"] if grown["batches"] > 0 else 0)

    def _set(self, family: Family, value: float) -> None:
        self._levels.add(family)
        self._publisher.set(family, value)


def _word(flag: bool) -> str:
    return "true" if flag else "false"
