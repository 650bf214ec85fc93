"""The two stages of the `fake` pipeline that batch by themselves: writer and singer.

    waiting words ─► those whose time has come ─► fault? ─► a delta each
                         ▲
                         └─ alarm: wakes the loop when the next one is due

Between two words an engine sleeps, so that pace costs no processor time, however many sessions wait.
"""

from __future__ import annotations

import math
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from tritone.engines.base import Delta, Engine, Placement, Values
from tritone.errors import InvalidRequest, TritoneError, Unavailable
from tritone.pipelines.fake.faults import check_fault, read_fault, strike
from tritone.pipelines.fake.orders import Fault, Orders
from tritone.ports import Array

TICK_S = 0.004  # words that are due within it share a step


@dataclass(frozen=True)
class PacedOptions:
    pace_ms: Annotated[float, Meta(ge=0)] = 0  # of a word, where the prompt gives none
    max_sessions: Annotated[int, Meta(ge=1)] = 128  # more are refused UNAVAILABLE
    fault: str = ""  # of every request that orders none, e.g. "fail@12"
    allow_faults: bool = True  # writer: whether a prompt may order faults, in any stage

    def __post_init__(self) -> None:
        check_fault(self.fault)


@dataclass
class _Line:
    """One session: what waits to be given, and when."""

    settings: Mapping[str, Any]
    pace_s: float
    fault: Fault | None
    due_s: float  # time.monotonic()
    waiting: deque[Any] = field(default_factory=deque)
    ended: bool = False  # nothing more comes to wait
    given: int = 0
    orders: Orders = field(default_factory=Orders)  # of the writer: what it says

    @property
    def next_s(self) -> float:
        """When it has something to give."""
        return self.due_s if self.waiting or self.ended else math.inf


class Alarm:
    """A thread that calls `ring` at a time that may be set anew."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._at_s = math.inf
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True, name="alarm").start()

    def set(self, at_s: float) -> None:
        """at_s: time.monotonic(), or inf."""
        with self._changed:
            self._at_s = at_s
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while True:
                left_s = self._at_s - time.monotonic()
                if left_s > 0:
                    self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
                    continue
                self._at_s = math.inf
                self._ring()


class PacedEngine(Engine):
    """Gives what waits in its sessions one by one, each at its own pace."""

    Options = PacedOptions

    def __init__(self, placement: Placement, options: PacedOptions) -> None:
        self._options = options
        self._lines: dict[str, _Line] = {}
        self._given = 0
        self._alarm = Alarm(lambda: self.wake())

    def add_request(self, session: str, inputs: Values, settings: Mapping[str, Any]) -> None:
        if len(self._lines) >= self._options.max_sessions:
            raise Unavailable(
                f"max_sessions of the engine is {self._options.max_sessions} and as many are live",
                "try again later",
            )
        pace_ms = settings.get("pace_ms", self._options.pace_ms)
        fault = read_fault(settings.get("fault"), self._options.fault)
        line = _Line(settings, pace_ms / 1000, fault, time.monotonic())
        self._begin(line, inputs)
        self._lines[session] = line

    def push(self, session: str, inputs: Values, last: bool) -> None:
        line = self._lines.get(session)
        if line is not None:
            self._take(line, inputs, last)
            self._set_alarm()

    def step(self) -> list[Delta]:
        now = time.monotonic()
        deltas = []
        for session, line in list(self._lines.items()):
            if line.next_s <= now + TICK_S:
                deltas += self._turn(session, line)
                line.due_s = max(line.due_s, now - line.pace_s) + line.pace_s
        self._set_alarm()
        return deltas

    @property
    def has_work(self) -> bool:
        now = time.monotonic()
        return any(line.next_s <= now for line in self._lines.values())

    def abort(self, session: str) -> None:
        self._lines.pop(session, None)

    def stats(self) -> dict[str, int | float]:
        return {"active": len(self._lines), "words": self._given}

    @abstractmethod
    def _begin(self, line: _Line, inputs: Values) -> None:
        """Fill a new session. Raises InvalidRequest."""

    @abstractmethod
    def _take(self, line: _Line, inputs: Values, last: bool) -> None:
        """Let what was pushed wait."""

    @abstractmethod
    def _outputs(self, line: _Line, item: Any) -> Values:
        """What a waiting item gives. Raises TritoneError."""

    @abstractmethod
    def _end(self, line: _Line) -> tuple[str, dict[str, int | float]]:
        """Finish reason and usage of a session that gave everything."""

    def _turn(self, session: str, line: _Line) -> list[Delta]:
        fault = line.fault
        if fault is not None and line.given >= fault.at and line.waiting:
            if fault.kind == "stall":
                line.due_s = math.inf
                return []
            return [Delta(session, error=strike(fault))]
        outputs: Values = {}
        if line.waiting:
            try:
                outputs = self._outputs(line, line.waiting.popleft())
            except TritoneError as error:
                return [Delta(session, error=error)]
            line.given += 1
            self._given += 1
        if line.waiting or not line.ended:
            return [Delta(session, outputs)]
        del self._lines[session]
        reason, usage = self._end(line)
        return [Delta(session, outputs, reason, usage)]

    def _set_alarm(self) -> None:
        self._alarm.set(min((line.next_s for line in self._lines.values()), default=math.inf))


class Writer(PacedEngine):
    """input: `said`. settings: voice, words, payload_bytes, has_faults, sampling. outputs: all declared."""

    def _begin(self, line: _Line, inputs: Values) -> None:
        settings = line.settings
        if settings["has_faults"] and not self._options.allow_faults:
            raise InvalidRequest("the prompt orders a fault", "leave it out; allow_faults is off here")
        line.orders = Orders(tuple(str(inputs.get("said") or "").split()), settings["words"])
        line.waiting.append(0)
        line.ended = True

    def _take(self, line: _Line, inputs: Values, last: bool) -> None:
        pass

    def _outputs(self, line: _Line, item: int) -> Values:
        number, words, voice = item, line.settings["words"], line.settings["voice"]
        if number + 1 < min(words, line.settings["sampling"]["max_tokens"]):
            line.waiting.append(number + 1)
        text = line.orders.word(voice, number) + (" " if number + 1 < words else "")
        word = np.array([voice, number], np.int32)
        outputs: dict[str, Any] = {"text": text, "num_tokens": 1, "word": word}
        if line.settings["payload_bytes"]:
            outputs["payload"] = np.full(line.settings["payload_bytes"], number & 0xFF, np.uint8)
        return outputs

    def _end(self, line: _Line) -> tuple[str, dict[str, int | float]]:
        reason = "stop" if line.given == line.settings["words"] else "length"
        return reason, {"completion_tokens": line.given}


class Singer(PacedEngine):
    """pushed: `word`, `payload`. settings: frames_per_word, payload_bytes. output: `frames`, int32 [F, 2]."""

    def _begin(self, line: _Line, inputs: Values) -> None:
        pass

    def _take(self, line: _Line, inputs: Values, last: bool) -> None:
        if "word" in inputs:
            line.waiting.append((inputs["word"], inputs.get("payload")))
        line.ended = line.ended or last

    def _outputs(self, line: _Line, item: tuple[Array, Array | None]) -> Values:
        (voice, word), payload = item[0].tolist(), item[1]
        size, expected = 0 if payload is None else len(payload), line.settings["payload_bytes"]
        if size != expected or (payload is not None and (payload != word & 0xFF).any()):
            raise TritoneError(f"the payload of word {word} is not the {expected} bytes that were sent")
        count = line.settings["frames_per_word"]
        frames = np.empty((count, 2), np.int32)
        frames[:, 0] = voice
        frames[:, 1] = np.arange(count) + word * count
        return {"frames": frames}

    def _end(self, line: _Line) -> tuple[str, dict[str, int | float]]:
        return "stop", {"codec_frames": line.given * line.settings["frames_per_word"]}
