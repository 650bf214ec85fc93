"""The frames of one session on their way through a Triton-batched stage: in order, one call at a time."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Awaitable, Callable

from tritone.answer import Answer
from tritone.deploy import Chunks
from tritone.ports import Array
from tritone.stream import FrameBuffer, FrameChunk

CallChunk = Callable[[FrameChunk, bool], Awaitable[Array]]
"""Takes a chunk and whether it is the stream's first; gives its samples, mono float32 [n]."""


class ChunkFeed:
    """Frames are pushed in; chunks go out to the stage, and its samples to the answer."""

    def __init__(self, chunks: Chunks, call: CallChunk, answer: Answer, whole: bool = False) -> None:
        """whole: nothing goes out before all frames are there; then each segment is one chunk."""
        if whole:
            chunks = dataclasses.replace(
                chunks, initial_codec_chunk_frames=sys.maxsize, codec_chunk_frames=sys.maxsize
            )
        self._max_ahead_s = chunks.max_ahead_s
        self._buffer = FrameBuffer(chunks)
        self._call = call
        self._answer = answer
        self._chunks: asyncio.Queue[FrameChunk] = asyncio.Queue()
        self._held: list[FrameChunk] | None = [] if whole else None

    def push(self, frames: Array, segment_end: bool) -> None:
        """frames: [F, ...] of the stage's `frames` port; segment_end: they end a segment."""
        for chunk in self._buffer.push(frames, segment_end):
            if self._held is None:
                self._chunks.put_nowait(chunk)
            else:
                self._held.append(chunk)

    def end(self) -> None:
        """No frames follow."""
        for chunk in self._held or ():
            self._chunks.put_nowait(chunk)
        self._chunks.put_nowait(self._buffer.finish())

    async def run(self) -> None:
        """Until the last chunk is sound. Raises what the stage fails with."""
        first = True
        while True:
            chunk = await self._chunks.get()
            if first and chunk.last and not len(chunk.frames):
                return  # there was nothing to speak
            await self._answer.audio(await self._call(chunk, first))
            if chunk.last:
                return
            first = False
            if self._max_ahead_s and (too_early_s := self._answer.ahead_s - self._max_ahead_s) > 0:
                await asyncio.sleep(too_early_s)  # frames are small; their sound would wait in the server
