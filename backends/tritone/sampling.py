"""Sampling settings of an autoregressive stage: read, checked and merged here; applied in `engines/`.

Names and meanings follow vLLM's SamplingParams where they mean the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tritone.errors import InvalidRequest, suggestion

MAX_STOP_STRINGS = 16


@dataclass(frozen=True)
class Sampling:
    """One stage's settings. Temperature 0 is greedy; the other filters then have no effect."""

    temperature: float = 0.0  # 0: always the likeliest token
    top_p: float = 1.0  # the likeliest tokens that have this probability together
    top_k: int = 0  # so many of the likeliest tokens; 0: no limit
    min_p: float = 0.0  # tokens at least so likely, as a part of the likeliest one's probability
    repetition_penalty: float = 1.0  # above 1: tokens that were there already become less likely
    max_tokens: int = 256  # then finish reason `length`
    min_tokens: int = 0  # before which nothing ends the answer
    seed: int | None = None  # left out: drawn by the orchestrator for each request, and told in `done`
    stop: tuple[str, ...] = ()  # stop strings; never part of the output
    ignore_eos: bool = False  # the token that ends an answer does not end it

    def merged(self, changes: Mapping[str, Any], where: str = "sampling_parameters") -> Sampling:
        """These settings with a caller's `changes` on top.

        changes: JSON values; a number may come as a numeric string (as Triton's vLLM backend accepts).
        Raises InvalidRequest naming `where`, the key, the value and the allowed range.
        """
        known = {f.name: f for f in dataclasses.fields(self)}
        new: dict[str, Any] = {}
        for key, value in changes.items():
            if key not in known:
                raise InvalidRequest(f"unknown key '{key}' in {where}", suggestion(key, known))
            new[key] = _READERS[key](f"{where}.{key}", value)
        return dataclasses.replace(self, **new)

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "stop": list(self.stop)}


def _number(low: float, high: float, low_open: bool = False) -> Any:
    def read(name: str, value: Any) -> float:
        try:
            number = float("x" if isinstance(value, bool) else value)
        except (TypeError, ValueError, OverflowError):
            raise InvalidRequest(
                f"{name} is {value!r:.40}, not a number of a sensible size", f"give a number up to {high:g}"
            ) from None
        if not low <= number <= high or (low_open and number == low):
            raise InvalidRequest(
                f"{name} is {number:g}",
                f"give a number {'above' if low_open else 'from'} {low:g} up to {high:g}",
            )
        return number

    return read


def _integer(low: int, high: int) -> Any:
    def read(name: str, value: Any) -> int:
        try:
            number = int(value) if isinstance(value, str) else value
        except ValueError:
            number = None
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        if isinstance(number, bool) or not isinstance(number, int):
            raise InvalidRequest(f"{name} is {value!r}, not a whole number", f"give one from {low} to {high}")
        if not low <= number <= high:
            raise InvalidRequest(f"{name} is {number}", f"give a whole number from {low} to {high}")
        return number

    return read


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} is {value!r}", "give true or false")
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) and s for s in strings):
        raise InvalidRequest(f"{name} is {value!r}", "give a non-empty string or a list of them")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"{name} has {len(strings)} strings", f"give at most {MAX_STOP_STRINGS}")
    return tuple(strings)


_READERS = {
    "temperature": _number(0.0, 10.0),
    "top_p": _number(0.0, 1.0, low_open=True),
    "top_k": _integer(0, 1 << 20),
    "min_p": _number(0.0, 1.0),
    "repetition_penalty": _number(0.0, 10.0, low_open=True),
    "max_tokens": _integer(1, 1 << 20),
    "min_tokens": _integer(0, 1 << 20),
    "seed": _integer(0, (1 << 63) - 1),
    "stop": _strings,
    "ignore_eos": _boolean,
}
