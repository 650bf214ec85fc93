"""The loop of a stage that Triton batches: one task a batch, answered to the door that sent it.

Run ─► chunks of streams that are here ─► engine ─► results, those of lost streams among them ─► Ran
"""

from __future__ import annotations

import logging
import time
from typing import Any

from tritone import wire
from tritone.engines.base import BatchEngine, Chunk, Values
from tritone.engines.loop import Answer, Loop
from tritone.engines.stage_stream import StageStream
from tritone.errors import EngineLost, TritoneError
from tritone.tracing import Tracer

log = logging.getLogger("tritone.engine")


class BatchLoop(Loop):
    """The loop of a stage that Triton batches."""

    def __init__(
        self,
        model: str,
        engine: BatchEngine,
        lease_s: float,
        tracer: Tracer | None = None,
        stream: StageStream | None = None,
    ) -> None:
        super().__init__(model, lease_s, tracer, stream)
        self._engine = engine
        self._touched_s: dict[str, float] = {}  # by stream: time.monotonic() of its last chunk

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "chunks": self._num_batched}

    def _turn(self) -> None:
        self._drain(block=True)
        self._beat_s = time.monotonic()
        for session, touched_s in list(self._touched_s.items()):
            if self._beat_s - touched_s > self._lease_s:
                self.cancel(session)
        self._stats = dict(self._engine.stats())

    def batch(self, message: wire.Run, answer: Answer) -> None:
        # A process that came in the place of another has none of its streams.
        lost = {c.session for c in message.chunks if not c.start and c.session not in self._touched_s}
        given = [chunk for chunk in message.chunks if chunk.session not in lost]
        chunks = [Chunk(c.session, c.inputs, c.start, c.end, c.settings) for c in given]
        self._beat_s = time.monotonic()
        self._touched_s.update((chunk.session, self._beat_s) for chunk in chunks)
        self._num_batches += 1
        self._num_batched += len(chunks)
        began_s = time.monotonic()
        try:
            results = self._engine.run(chunks) if chunks else []
        except Exception as error:
            log.exception("stage %s: batch failed", self.model)
            busy = (began_s, time.monotonic())
            for chunk in chunks:
                self.cancel(chunk.session)
            answer(
                wire.Refused(
                    message.call, "INTERNAL", f"stage {self.model} failed: {error}", "see the server log"
                )
            )
            self._record(given, busy, [TritoneError.code] * len(chunks))
            return
        for chunk, result in zip(chunks, results, strict=True):
            if chunk.end or isinstance(result, TritoneError):
                self.cancel(chunk.session)
        self._stats = dict(self._engine.stats())
        busy = (began_s, time.monotonic())
        codes = [result.code if isinstance(result, TritoneError) else "" for result in results]
        told = dict(zip((chunk.session for chunk in chunks), results, strict=True))
        gone = EngineLost(f"the engine of stage {self.model} died under the request", "try again")
        results = [told.get(chunk.session, gone) for chunk in message.chunks]
        answer(wire.Ran(message.call, [_stream_result(result, busy, len(chunks)) for result in results]))
        self._record(given, busy, codes)

    def _record(self, chunks: list[wire.StreamChunk], busy: tuple[float, float], codes: list[str]) -> None:
        """A span for each chunk of a batch that has been computed."""
        began_s, ended_s = busy
        for chunk, code in zip(chunks, codes, strict=True):
            if chunk.trace:
                span = self._tracer.child(f"compute {self.model}", chunk.trace, began_s=began_s)
                span.end(ended_s, code, {"tritone.batch": len(chunks)})

    def cancel(self, session: str) -> None:
        if self._touched_s.pop(session, None) is not None:
            self._engine.abort(session)

    def peer_lost(self, address: str) -> None:
        """Nothing is sent from here; streams end by their END chunk, a cancel or the lease."""


def _stream_result(result: Values | TritoneError, busy: tuple[float, float], batch: int) -> wire.StreamResult:
    if isinstance(result, TritoneError):
        return wire.StreamResult({}, result.code, result.what, result.cure)
    return wire.StreamResult(dict(result), busy=busy, batch=batch)
