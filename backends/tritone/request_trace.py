"""The spans of one request as its orchestrator sees it.

    request ─┬─ queue         until its turn
             ├─ stage talker ───┬─ (door) open                below a stage: spans of other processes
             │                  └─ (engine) session ─ queued, prefill, decode
             └─ stage code2wav ─── (door) run, a chunk each ── (engine) compute

Attributes are numbers and names, never what a client sent: neither prompts nor the words of errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cache
from typing import Any

from tritone.errors import Cancelled, TritoneError
from tritone.timeline import StageTimeline
from tritone.tracing import HEADERS, NO_CARRIER, NO_SPAN, NOTHING, Attribute, Carrier, Span, Tracer


class RequestTrace:
    """Begins with the request; `end` ends it and all that is still open below it."""

    def __init__(
        self, tracer: Tracer, pipeline: str, parameters: Mapping[str, Any], received_s: float
    ) -> None:
        """parameters: of the request, unchecked. received_s: time.monotonic()."""
        headers = {name: parameters[name] for name in HEADERS if isinstance(parameters.get(name), str)}
        self._request = tracer.begin(f"chat {pipeline}", headers, received_s, _facts(pipeline))
        self._queue: Span = NO_SPAN
        self._stages: dict[str, Span] = {}

    @property
    def is_recorded(self) -> bool:
        """Whether there are spans; all else costs nothing where there are none."""
        return self._request is not NO_SPAN

    @property
    def trace_id(self) -> str:
        """ "" if nothing is recorded."""
        return self._request.trace_id

    def note_queued(self) -> None:
        """It waits for its turn from now on."""
        self._queue = self._request.child("queue")

    def note_turn(self) -> None:
        self._queue.end()

    def stage(self, name: str) -> Carrier:
        """For what a stage does; its span begins when this is first asked for."""
        if not self.is_recorded:
            return NO_CARRIER
        if name not in self._stages:
            attributes = {"tritone.stage": name}
            self._stages[name] = self._request.child(f"stage {name}", "client", attributes=attributes)
        return self._stages[name].carrier

    def end_stage(self, name: str, times: StageTimeline) -> None:
        """It has done its part."""
        if name in self._stages:
            self._stages[name].end(attributes=_counts(times))

    def fail_stage(self, name: str, code: str) -> None:
        """It is the one that failed. code: TritoneError.code"""
        if name in self._stages:
            self._stages[name].end(error=code)

    def begin_again(self) -> None:
        """The stages are opened anew, under spans of their own."""
        for span in self._stages.values():
            span.end(error=Cancelled.code)
        self._stages.clear()

    def end(self, error: BaseException | None = None, attributes: Mapping[str, Attribute] = NOTHING) -> None:
        """error: what the client is told, or the cancellation that it hears of."""
        code = _code(error) if error is not None else ""
        self._queue.end(error=code)
        self.begin_again()
        self._request.end(error=code, attributes=attributes)


def answer_attributes(
    finish_reasons: Mapping[str, str],
    usage: Mapping[str, Any],
    firsts: Mapping[str, float],
    seed: int,
    audio_s: float,
) -> dict[str, Attribute]:
    """Of a request that was answered. usage: of the stage that writes the text. firsts: seconds by name."""
    names = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens"}
    attributes: dict[str, Attribute] = {
        "gen_ai.output.type": "speech" if "audio" in finish_reasons else "text",
        "gen_ai.response.finish_reasons": list(finish_reasons.values()),
        "gen_ai.request.seed": seed,
        **{f"gen_ai.usage.{name}": int(usage[key]) for key, name in names.items() if key in usage},
        **{f"tritone.{name}": round(value, 6) for name, value in firsts.items()},
    }
    if "audio" in finish_reasons:
        attributes["tritone.audio_s"] = round(audio_s, 6)
    return attributes


@cache
def _facts(pipeline: str) -> Mapping[str, Attribute]:
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tritone",
        "gen_ai.request.model": pipeline,
    }


def _counts(times: StageTimeline) -> dict[str, Attribute]:
    counts = {
        "calls": times.calls or None,
        "steps": times.steps or None,
        "batch": times.batch,
        "queued_s": times.queued_s,
        **times.counts,
    }
    return {f"tritone.{name}": round(value, 6) for name, value in counts.items() if value is not None}


def _code(error: BaseException) -> str:
    if isinstance(error, TritoneError):
        return error.public_code or error.code
    return Cancelled.code if isinstance(error, asyncio.CancelledError) else TritoneError.code
