"""What a prompt of the `fake` pipeline orders: `key=value` words; every other word is said as it is.

words=40              say so many counted words, "<voice>.0 <voice>.1 …"; without it, and without other
                      words, 20
frames_per_word=3     codec frames of a word, 20 ms of sound each
pace_ms=5             the writer takes so long for a word
singer_ms=5           the singer, for a word
wave_ms=5             the wave stage, for a chunk
payload_bytes=8192    that the writer hands to the singer with every word
fail=singer@12        a fault in one of the stages writer, singer, wave, when it comes to a word (wave: to
                      a frame), counted from 0; without @ to the first

fail    the stage ends this request with an error         kill    the engine is killed, as by the kernel
raise   its engine raises; all its requests fail                  when memory runs out
oom     likewise a MemoryError                            hang    its engine never returns
                                                          stall   this request gets nothing more
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tritone.errors import InvalidRequest, suggestion
from tritone.pipelines.fake.signal import MAX_NUMBER

STAGES = ("writer", "singer", "wave")
FAULTS = ("fail", "raise", "oom", "kill", "hang", "stall")
PACES = {"writer": "pace_ms", "singer": "singer_ms", "wave": "wave_ms"}
RANGES: Mapping[str, tuple[int, int]] = {
    "words": (1, 100_000),
    "frames_per_word": (0, 1000),
    "payload_bytes": (0, 1 << 24),
    **dict.fromkeys(PACES.values(), (0, 600_000)),
}
DEFAULT_WORDS = 20

_ORDER = re.compile(r"([A-Za-z_]+)=(.*)", re.DOTALL)
_PLACE = re.compile(r"([a-z]*)(?:@([0-9]{1,8}))?")


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong on purpose."""

    kind: str  # one of FAULTS
    at: int = 0  # the word, or the frame of the wave stage, from 0


@dataclass(frozen=True)
class Orders:
    """A prompt, read and checked."""

    said: tuple[str, ...] = ()  # words of the prompt itself; () counts
    words: int = DEFAULT_WORDS
    frames_per_word: int = 3
    payload_bytes: int = 0
    paces_ms: Mapping[str, int] = field(default_factory=dict)  # by stage; absent: as deploy says
    faults: Mapping[str, Fault] = field(default_factory=dict)  # by stage

    @classmethod
    def read(cls, text: str) -> Orders:
        """Raises InvalidRequest naming the key, its value and what to do."""
        said: list[str] = []
        numbers: dict[str, int] = {}
        faults: dict[str, Fault] = {}
        for word in text.split():
            order = _ORDER.fullmatch(word)
            if order is None:
                said.append(word)
                continue
            key, value = order.groups()
            if key in FAULTS:
                stage, fault = _fault(key, value)
                if stage in faults:
                    raise InvalidRequest(f"stage {stage} gets two faults", "order one fault a stage")
                faults[stage] = fault
            elif key in RANGES:
                numbers[key] = _number(key, value)
            else:
                known = [*RANGES, *FAULTS]
                raise InvalidRequest(f"the prompt orders unknown '{key}'", suggestion(key, known))
        if said and "words" in numbers:
            raise InvalidRequest(
                f"the prompt has words={numbers['words']} and says '{said[0]}'", "leave one of them out"
            )
        paces = {stage: numbers.pop(key) for stage, key in PACES.items() if key in numbers}
        words = numbers.pop("words", len(said) or DEFAULT_WORDS)
        orders = cls(tuple(said), words, paces_ms=paces, faults=faults, **numbers)
        if orders.num_frames > MAX_NUMBER:
            raise InvalidRequest(
                f"the prompt orders {orders.num_frames} frames", f"order at most {MAX_NUMBER}"
            )
        return orders

    @property
    def num_frames(self) -> int:
        """Of the whole answer."""
        return self.words * self.frames_per_word

    def text(self, voice: int) -> str:
        """Of the whole answer."""
        return " ".join(self.word(voice, number) for number in range(self.words))

    def word(self, voice: int, number: int) -> str:
        return self.said[number] if self.said else f"{voice:06x}.{number}"

    def settings(self, stage: str) -> dict[str, Any]:
        """What concerns one stage, as JSON values."""
        settings: dict[str, Any] = {}
        if stage in self.paces_ms:
            settings["pace_ms"] = self.paces_ms[stage]
        if stage in self.faults:
            settings["fault"] = [self.faults[stage].kind, self.faults[stage].at]
        return settings


def _fault(kind: str, value: str) -> tuple[str, Fault]:
    place = _PLACE.fullmatch(value)
    if place is None:
        raise InvalidRequest(f"the prompt has {kind}={value}", f"write e.g. {kind}=singer@12")
    stage, at = place.groups()
    if stage not in STAGES:
        raise InvalidRequest(f"{kind} names the unknown stage '{stage}'", suggestion(stage, STAGES))
    if kind == "stall" and stage == "wave":
        raise InvalidRequest("stall=wave is not a fault of its own", "order hang=wave")
    return stage, Fault(kind, int(at or 0))


def _number(key: str, value: str) -> int:
    low, high = RANGES[key]
    number = int(value) if re.fullmatch(r"[0-9]{1,9}", value) else -1
    if not low <= number <= high:
        raise InvalidRequest(f"the prompt has {key}={value}", f"give a whole number from {low} to {high}")
    return number
