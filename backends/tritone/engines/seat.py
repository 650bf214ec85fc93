"""One session on one stage, as its loop keeps it: where its outputs go, and when what happened to it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from tritone import wire
from tritone.connectors.base import Delivery
from tritone.engines.base import QUEUED
from tritone.stream import FrameGate
from tritone.tracing import NO_SPAN, Attribute, Span

NO_USAGE: Mapping[str, int | float] = {}


@dataclass
class Seat:
    """Moments are by time.monotonic()."""

    inbox: str
    routes: list[wire.Route]
    sources_left: int  # upstream stages that have not ended
    opened_s: float
    fed_s: float  # when something last came for it
    first_output_s: float | None = None
    last_output_s: float | None = None
    phases: list[tuple[str, float]] = field(default_factory=list)  # named by the engine, and their begins
    steps: int = 0  # that gave it something
    companions: int = 0  # sessions that those steps gave something, all added up
    numbers: dict[int, int] = field(default_factory=dict)  # pieces sent, by index of the route
    gates: dict[int, FrameGate] = field(default_factory=dict)  # by index of a route whose frames may wait
    whole: bool = False  # the engine gets nothing before all sources have ended
    held: list[Delivery] = field(default_factory=list)  # what came until then, in order
    span: Span = NO_SPAN

    def times(self, ended_s: float) -> wire.StageTimes:
        """What is told of a session that has ended."""
        waits = [end_s - began_s for phase, began_s, end_s in self._phase_spans(ended_s) if phase == QUEUED]
        return wire.StageTimes(
            opened_s=self.opened_s,
            ended_s=ended_s,
            first_output_s=self.first_output_s,
            last_output_s=self.last_output_s,
            queued_s=sum(waits) if waits else None,
            steps=self.steps,
            batch=self.companions / self.steps if self.steps else None,
        )

    def end_spans(self, error: str, usage: Mapping[str, int | float]) -> None:
        """That of the session, and of each phase below it. error: TritoneError.code, "" if it is done."""
        if self.span is NO_SPAN:
            return
        now = time.monotonic()
        for phase, began_s, ended_s in self._phase_spans(now):
            self.span.child(phase, began_s=began_s).end(ended_s)
        attributes: dict[str, Attribute] = {f"tritone.usage.{name}": value for name, value in usage.items()}
        if self.first_output_s is not None:
            attributes["tritone.first_output_s"] = round(self.first_output_s - self.opened_s, 6)
        self.span.end(now, error, attributes)

    def _phase_spans(self, now: float) -> list[tuple[str, float, float]]:
        """Each phase, when it began and when it ended; the last ends now."""
        ends_s = [began_s for _, began_s in self.phases[1:]] + [now]
        return [(*phase, end_s) for phase, end_s in zip(self.phases, ends_s, strict=False)]
