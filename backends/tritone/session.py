"""Everything that is known about one request while it runs, with one owner and one end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tritone.answer import Answer
from tritone.pipeline import Plan
from tritone.ports import Array
from tritone.request import Request
from tritone.request_trace import RequestTrace
from tritone.routing import Routing
from tritone.timeline import Timeline


class ChunkCall(NamedTuple):
    """A call of a Triton-batched stage, under way or returned."""

    task: asyncio.Task[tuple[dict[str, Any], Array | None]]
    ends: bool  # the sequence, if it comes to the stage


@dataclass
class Session:
    """One request in flight.

    Created by the orchestrator when it admits a request; `Orchestrator._release` ends it, whatever happened.
    """

    id: str  # names the session in every engine: pipeline model, orchestrator and count
    sequence: int  # the same for Triton's sequence batcher, uint64
    request: Request
    plan: Plan
    routing: Routing
    answer: Answer
    timeline: Timeline
    trace: RequestTrace
    mail: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)  # wire messages from engines
    endpoints: dict[str, str] = field(default_factory=dict)  # by open stage: address of its engine
    # By Triton-batched stage whose sequence has begun and not ended: the last call to it.
    chunk_calls: dict[str, ChunkCall] = field(default_factory=dict)
    finished: dict[str, str] = field(default_factory=dict)  # by stage: reason
    undelivered: set[str] = field(default_factory=set)  # finished stages whose output is not taken yet
    pieces_seen: dict[str, int] = field(default_factory=dict)  # by stage
    usage: dict[str, dict[str, Any]] = field(default_factory=dict)  # by stage: its counts
    writer: str | None = None  # the stage that writes the text, whether or not that was asked for
    started: bool = False  # it got its turn
    num_frames: int = 0  # codec frames that have arrived
    resumed: int = 0  # times that it began again

    def holds(self, stage: str) -> bool:
        """Whether the engine of an open stage still has something of it."""
        return stage not in self.finished or stage in self.undelivered

    def needs(self, stage: str) -> bool:
        """Whether the answer needs it: what a stage has not delivered matters while its consumers go on."""
        if stage not in self.finished:
            return True
        going = [other for other in self.endpoints if other not in self.finished]
        return stage in self.undelivered and any(self.routing.feeds(stage, other) for other in going)

    def begin_again(self, id_: str, sequence: int) -> None:
        """Forget what the stages were asked and said; what the client has received stays received."""
        self.id, self.sequence = id_, sequence
        self.mail = asyncio.Queue()
        for record in (self.endpoints, self.chunk_calls, self.finished, self.undelivered, self.pieces_seen):
            record.clear()
        self.usage.clear()
        self.num_frames = 0
        self.resumed += 1
        self.timeline.forget_stages()
        self.trace.begin_again()
        self.answer.rewind()
