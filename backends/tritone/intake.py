"""What the stages of one request push, taken until each of them has ended.

session.mail ─┬─ text ───────────────────────────────────────────► answer
              ├─ frames ─► ChunkFeed, a chunk a call ─► code2wav ─► answer
              └─ ends, failures ─► session
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from tritone import wire
from tritone.chunk_feed import ChunkFeed
from tritone.deploy import Deploy
from tritone.errors import TritoneError, Unavailable, from_code
from tritone.routing import FRAMES, NUM_TOKENS, SEGMENT_END
from tritone.session import Session
from tritone.stage_calls import StageCalls


class Intake:
    """Of a session whose stages are open."""

    def __init__(self, deploy: Deploy, calls: StageCalls, session: Session) -> None:
        self._deploy = deploy
        self._pipeline = deploy.pipeline
        self._calls = calls
        self._session = session
        self._feeds = {
            stage.name: ChunkFeed(
                session.request.chunks,
                partial(calls.call_chunk, session, stage),
                session.answer,
                whole=deploy.mode == "sync",
            )
            for stage in session.routing.chunked()
        }

    async def run(self) -> None:
        """Until all stages have ended and all frames are sound. Raises what the first one failed with."""
        session = self._session
        try:
            async with asyncio.TaskGroup() as group:
                for feed in self._feeds.values():
                    group.create_task(feed.run())
                async for message in self._mail():
                    match message:
                        case wire.Piece():
                            self._take(message)
                        case wire.Finished():
                            self._note_end(message)
                        case wire.Delivered(source=source):
                            session.undelivered.discard(self._calls.stage_of(source))
                    if session.mail.empty():
                        session.answer.flush()  # as long as messages wait, text gathers
        except BaseExceptionGroup as group_error:
            raise _first(group_error) from None
        finally:
            with contextlib.suppress(TritoneError):  # what ended the stages is told
                session.answer.flush()

    async def _mail(self) -> AsyncIterator[Any]:
        """What the stages send, until each has finished. Raises what a stage failed with."""
        session, loop = self._session, asyncio.get_running_loop()
        waiting = set(session.endpoints)
        heard_s = loop.time()
        while waiting:
            try:
                message = await self._next()
            except TimeoutError:
                await self._check_stages(waiting)
                if loop.time() - heard_s > self._deploy.stall_limit_s:
                    raise self._stalled(waiting) from None
                continue
            heard_s = loop.time()
            if not isinstance(message, wire.Failed):
                yield message
            elif session.needs(name := self._calls.stage_of(message.source)):  # still, since it was sent
                session.trace.fail_stage(name, message.code)
                raise from_code(message.code, message.what, message.cure)
            waiting = {name for name in waiting if session.needs(name)}

    async def _next(self) -> Any:
        """Raises TimeoutError when nothing comes for long."""
        mail = self._session.mail
        if not mail.empty():
            return mail.get_nowait()
        # Not wait_for: in Python 3.11 that may swallow the cancellation that a deadline is.
        async with asyncio.timeout(self._deploy.stall_s):
            return await mail.get()

    async def _check_stages(self, names: set[str]) -> None:
        """Nothing came for long: that is a queue, or a stage that is not well. Raises for the latter."""
        states = await self._calls.ping()
        for name in sorted(names):
            if "error" in states[name]:
                raise Unavailable(f"stage {name} gives nothing: {states[name]['error']}", "try again")

    def _stalled(self, names: set[str]) -> Unavailable:
        limit_s = self._deploy.stall_limit_s
        return Unavailable(f"stage {', '.join(sorted(names))} gave nothing for {limit_s:g} s", "try again")

    def _take(self, piece: wire.Piece) -> None:
        session, name = self._session, self._calls.stage_of(piece.source)
        expected = session.pieces_seen.get(name, 0)
        if piece.number != expected:
            raise TritoneError(
                f"piece {piece.number} of stage {name} came when {expected} was due", "try again"
            )
        session.pieces_seen[name] = expected + 1
        if piece.values:
            session.timeline.note_output(name)
        for port, value in piece.values.items():
            if self._pipeline.modality_of(name, port) == "text":
                session.answer.text(value, int(piece.values.get(NUM_TOKENS, 0)))
        for consumer, feed in self._feeds.items():
            inputs = session.routing.chunk_inputs(name, piece.values, consumer)
            if FRAMES in inputs:
                session.num_frames += len(inputs[FRAMES])
                feed.push(inputs[FRAMES], bool(inputs.get(SEGMENT_END, False)))
            if piece.last and session.routing.feeds(name, consumer):
                feed.end()

    def _note_end(self, end: wire.Finished) -> None:
        session, name = self._session, self._calls.stage_of(end.source)
        session.finished[name] = end.reason
        if not end.is_delivered:
            session.undelivered.add(name)
        session.usage[name] = dict(end.usage)
        session.timeline.note_end(name, end)
        session.trace.end_stage(name, session.timeline.stages[name])


def _first(error: BaseException) -> BaseException:
    """The first leaf of a group of exceptions: in one request, the others only follow from it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
