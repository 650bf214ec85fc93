"""The stage of the `fake` pipeline that Triton batches: frames in, their sound out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from tritone.engines.base import BatchEngine, Chunk, Placement, Values
from tritone.errors import InvalidRequest, TritoneError
from tritone.pipelines.fake.faults import check_fault, read_fault, strike
from tritone.pipelines.fake.orders import Fault
from tritone.pipelines.fake.signal import encode

_NO_FRAMES = np.zeros((0, 2), np.int32)


@dataclass(frozen=True)
class WaveOptions:
    pace_ms: Annotated[float, Meta(ge=0)] = 0  # of a batch, where no prompt in it gives more
    fault: str = ""  # of every request that orders none, e.g. "fail@12"

    def __post_init__(self) -> None:
        check_fault(self.fault)


@dataclass
class _Stream:
    pace_s: float
    fault: Fault | None
    seen: int = 0  # frames


class Wave(BatchEngine):
    """input: `frames`, int [F, 2]: voice, number. output: `pcm`. settings of the first chunk: pace, fault."""

    Options = WaveOptions

    def __init__(self, placement: Placement, options: WaveOptions) -> None:
        self._options = options
        self._streams: dict[str, _Stream] = {}
        self._frames = 0

    def run(self, chunks: Sequence[Chunk]) -> list[Values | TritoneError]:
        for chunk in chunks:
            if chunk.start:
                self._streams[chunk.session] = self._begin(chunk.settings)
        live = [self._streams[chunk.session] for chunk in chunks if chunk.session in self._streams]
        time.sleep(max((stream.pace_s for stream in live), default=0.0))
        return [self._sound(chunk) for chunk in chunks]

    def abort(self, session: str) -> None:
        self._streams.pop(session, None)

    def stats(self) -> dict[str, int | float]:
        return {"active": len(self._streams), "frames": self._frames}

    def _begin(self, settings: Mapping[str, Any]) -> _Stream:
        pace_ms = settings.get("pace_ms", self._options.pace_ms)
        return _Stream(pace_ms / 1000, read_fault(settings.get("fault"), self._options.fault))

    def _sound(self, chunk: Chunk) -> Values | TritoneError:
        stream = self._streams.get(chunk.session)
        if stream is None:
            return InvalidRequest(f"stream {chunk.session} has no state", "begin it with its first chunk")
        frames = np.asarray(chunk.inputs.get("frames", _NO_FRAMES))
        stream.seen += len(frames)
        if stream.fault is not None and stream.seen > stream.fault.at:
            return strike(stream.fault)
        self._frames += len(frames)
        if chunk.end:
            del self._streams[chunk.session]
        return {"pcm": encode(frames)}
