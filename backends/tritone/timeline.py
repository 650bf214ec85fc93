"""When what happened to one request, as `done` tells it: moments since it was received.

    received ──queued──► its turn ── opened ── first output … last output ── ended    of each stage
                                       └─ or, of a stage that Triton batches: call, call, call

Stages note their moments by time.monotonic(), a clock that all processes of a machine share; here they become
seconds since the request was received. A stage that was cut off before it could say when it did what is known
as the orchestrator saw it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tritone import wire
from tritone.busy import BusyTimes

MAX_SPANS = 256  # in which a stage computed, of one request
MAX_CALLS = 256  # of one request to one stage that are told one by one

COUNTS = {"completion_tokens": "tokens", "codec_frames": "frames"}
"""What of a stage's usage its timings repeat, and under which name."""


@dataclass(frozen=True)
class Call:
    """One chunk's way through a stage that Triton batches; times by time.monotonic()."""

    began_s: float
    ended_s: float
    frames: int
    batch: int  # chunks that the engine computed together
    busy: tuple[float, float]  # when it did

    @property
    def queued_s(self) -> float:
        """Until the engine computed: its way there, and the wait for a batch."""
        return max(0.0, self.busy[0] - self.began_s)


@dataclass
class StageTimeline:
    """One stage, in times by time.monotonic()."""

    opened_s: float | None = None
    first_output_s: float | None = None
    last_output_s: float | None = None
    ended_s: float | None = None
    queued_s: float | None = None  # of it in a queue
    steps: int = 0  # of the engine that gave an output
    batch: float | None = None  # mean size
    counts: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    calls_s: float = 0.0
    call_list: list[Call] = field(default_factory=list)  # the first MAX_CALLS

    def note_output(self, at_s: float) -> None:
        if self.first_output_s is None:
            self.first_output_s = at_s
        self.last_output_s = at_s


class Timeline:
    """The times of one request; each `note` is one thing that happened."""

    def __init__(self, received_s: float | None = None) -> None:
        """received_s: time.monotonic(); None: now."""
        self.received_s = time.monotonic() if received_s is None else received_s
        self.busy = BusyTimes()
        self.stages: dict[str, StageTimeline] = {}
        self.queued_s: float | None = None  # how long it waited for its turn; None: it never had one
        self._queued_from_s = self.received_s

    def note_queued(self) -> None:
        """It has been read, and waits for its turn from now on."""
        self._queued_from_s = time.monotonic()

    def note_turn(self) -> None:
        """Its turn has come."""
        self.queued_s = time.monotonic() - self._queued_from_s

    def note_opened(self, stage: str) -> None:
        self._stage(stage).opened_s = time.monotonic()

    def note_output(self, stage: str) -> None:
        """Something of the stage has arrived here."""
        self._stage(stage).note_output(time.monotonic())

    def note_end(self, stage: str, end: wire.Finished) -> None:
        """What a stage says of itself when it has ended the session takes the place of what was seen here."""
        times, kept = end.times, self._stage(stage)
        kept.opened_s, kept.ended_s, kept.queued_s = times.opened_s, times.ended_s, times.queued_s
        kept.first_output_s, kept.last_output_s = times.first_output_s, times.last_output_s
        kept.steps, kept.batch = times.steps, times.batch
        kept.counts = {name: end.usage[key] for key, name in COUNTS.items() if key in end.usage}
        self.busy.note(stage, end.busy)

    def note_call(self, stage: str, call: Call, gave_output: bool, last: bool) -> None:
        kept = self._stage(stage)
        if kept.opened_s is None:
            kept.opened_s = call.began_s
        if gave_output:
            kept.note_output(call.ended_s)
        if last:
            kept.ended_s = call.ended_s
        kept.queued_s = (kept.queued_s or 0.0) + call.queued_s
        kept.batch = ((kept.batch or 0.0) * kept.calls + call.batch) / (kept.calls + 1)
        kept.calls += 1
        kept.calls_s += call.ended_s - call.began_s
        kept.counts["frames"] = kept.counts.get("frames", 0) + call.frames
        if len(kept.call_list) < MAX_CALLS:
            kept.call_list.append(call)
        self.busy.note(stage, call.busy)

    def forget_stages(self) -> None:
        """They begin again."""
        self.stages.clear()

    def as_dict(self, firsts: Mapping[str, float], now_s: float) -> dict[str, Any]:
        """The `timings` of `done`; client/CONTRACT.md has what they mean.

        firsts: by name, seconds since the request was received. now_s: its end, time.monotonic().
        """
        busy_s = self.busy.by_stage()
        return {
            "received_unix_s": round(time.time() - (time.monotonic() - self.received_s), 6),
            **({} if self.queued_s is None else {"queued_s": round(self.queued_s, 6)}),
            **{name: round(value, 6) for name, value in firsts.items()},
            "total_s": round(now_s - self.received_s, 6),
            "idle_s": round(self.busy.idle_s(self.received_s, now_s), 6),
            "stages": {
                name: self._told(name, self._stage(name), busy_s.get(name))
                for name in dict.fromkeys((*self.stages, *busy_s))
            },
        }

    def _told(self, name: str, stage: StageTimeline, busy_s: float | None) -> dict[str, Any]:
        moments = {
            "opened_at_s": stage.opened_s,
            "first_output_at_s": stage.first_output_s,
            "last_output_at_s": stage.last_output_s,
            "ended_at_s": stage.ended_s,
        }
        told: dict[str, Any] = {key: self._since(at_s) for key, at_s in moments.items() if at_s is not None}
        durations = {"queued_s": stage.queued_s, "busy_s": busy_s, "batch": stage.batch}
        if stage.calls:
            told["calls"] = stage.calls
            durations["calls_s"] = stage.calls_s
        elif stage.opened_s is not None:
            if stage.ended_s is not None:
                durations["total_s"] = stage.ended_s - stage.opened_s
            if stage.first_output_s is not None:
                durations["first_output_s"] = stage.first_output_s - stage.opened_s
        told |= {key: round(value, 6) for key, value in durations.items() if value is not None}
        if stage.steps:
            told["steps"] = stage.steps
        told |= stage.counts
        spans = self.busy.of(name, MAX_SPANS)
        if len(spans):
            told["busy"] = [[self._since(begin), self._since(end)] for begin, end in spans.tolist()]
        if stage.call_list:
            told["call_spans"] = [
                [self._since(call.began_s), self._since(call.ended_s), call.frames, call.batch]
                for call in stage.call_list
            ]
        return told

    def _stage(self, name: str) -> StageTimeline:
        stage = self.stages.get(name)
        if stage is None:
            stage = self.stages[name] = StageTimeline()
        return stage

    def _since(self, at_s: float) -> float:
        return round(at_s - self.received_s, 6)
