"""A fixed set of requests: the same ones, in the same order and with the same seeds, at every level and run.

    asks      0  1  2  0  1  2  0 …      in turn, as long as a level lasts
    seed      s s+1 s+2 s+3 …            of a request that names none

So two levels, or two servers, differ in what is measured and not in what was asked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tritone_client.errors import InvalidRequest
from tritone_client.request import RequestOptions, build_request

DELIVERY_OPTIONS = frozenset(
    {
        "deadline_s",
        "return_timings",
        "traceparent",
        "initial_codec_chunk_frames",
        "codec_chunk_frames",
        "codec_chunk_growth",
    }
)
"""How an answer is delivered, not what is asked: two runs that differ in these alone compare."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request before it is sent."""

    prompt: str | None
    options: RequestOptions

    def named(self) -> dict[str, Any]:
        """All that decides the answer, as JSON values; a file by the SHA-256 of its bytes."""
        decisive = {name: value for name, value in self.options.items() if name not in DELIVERY_OPTIONS}
        given = {name: _json(value) for name, value in decisive.items() if value is not None}
        return given if self.prompt is None else {"prompt": self.prompt, **given}


@dataclass(frozen=True, slots=True)
class RequestSet:
    """What one level asks."""

    source: str  # where the asks come from, for people
    asks: tuple[Ask, ...]
    num_requests: int | None  # at every level; None: as many as its duration allows
    first_seed: int = 0

    def __post_init__(self) -> None:
        if not self.asks:
            raise InvalidRequest(f"{self.source} holds no requests; give at least one")
        if self.num_requests is not None and self.num_requests < 1:
            raise InvalidRequest(f"the number of requests is {self.num_requests}; give at least 1")
        for ask in self.asks:
            build_request(ask.prompt, **ask.options)  # a request that makes no sense is told before the load

    def __iter__(self) -> Iterator[Ask]:
        """The requests of one level, each with its seed."""
        number = 0
        while self.num_requests is None or number < self.num_requests:
            yield self[number]
            number += 1

    def __getitem__(self, number: int) -> Ask:
        ask = self.asks[number % len(self.asks)]
        return Ask(ask.prompt, {"seed": self.first_seed + number, **_given(ask.options)})

    @property
    def digest(self) -> str:
        """16 hex digits that are equal exactly for sets that ask the same."""
        asked = {
            "asks": [ask.named() for ask in self.asks],
            "first_seed": self.first_seed,
            "num_requests": self.num_requests,
        }
        text = json.dumps(asked, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _given(options: Mapping[str, Any]) -> RequestOptions:
    """Without those that are None, which would hide a default."""
    given: RequestOptions = {name: value for name, value in options.items() if value is not None}  # type: ignore[assignment]
    return given


def _json(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"sha256": hashlib.sha256(value).hexdigest()}
    if isinstance(value, Mapping):
        return {str(name): _json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json(inner) for inner in value]
    return value
