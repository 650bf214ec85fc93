"""How codec frames are cut into chunks for code2wav. Pure: no torch, no Triton."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tritone.deploy import Chunks
from tritone.ports import Array

LARGE = 1000  # frames of a chunk that no stage takes in one piece
ROUNDING = 1e-9  # of a product of floats: 10 * 1.1 is a little more than 11 and means 11


@dataclass(frozen=True)
class FrameChunk:
    """One call's worth of frames."""

    frames: Array  # [F, ...], F >= 0; 0 only to end a stream
    segment_end: bool  # the last frame of a segment (a clause that is synthesised on its own)
    last: bool  # nothing follows in this stream


class FrameBuffer:
    """Frames in, chunks out: a small first chunk for an early first packet, larger ones after it.

        4 | 25 | 25 | 25        growth 0: full size from the second chunk on
        4 | 8 | 16 | 25         growth 2: each at most twice the one before, rounded up

    A chunk never spans two segments. Sizes count frames of the codec.
    """

    def __init__(self, chunks: Chunks) -> None:
        self._sizes = chunks
        self._held: Array | None = None  # frames not yet in a chunk, [F, ...]
        self._wanted_frames = chunks.initial_codec_chunk_frames
        self._in_segment = False  # frames of an unfinished segment have left

    def push(self, frames: Array, segment_end: bool = False) -> list[FrameChunk]:
        """The chunks that `frames` [F, ...] completes."""
        held = frames if self._held is None else np.concatenate([self._held, frames])
        chunks = []
        while len(held) > self._wanted_frames or (len(held) == self._wanted_frames and not segment_end):
            size = self._wanted_frames
            chunks.append(self._chunk(held[:size], segment_end=False))
            held = held[size:]
        if segment_end and (len(held) or self._in_segment):
            chunks.append(self._chunk(held, segment_end=True))
            held = held[len(held) :]
        self._held = held
        return chunks

    def finish(self) -> FrameChunk:
        """What is left, possibly no frames, as the last chunk of the stream."""
        left = np.zeros((0,), np.float32) if self._held is None else self._held
        return FrameChunk(left, segment_end=True, last=True)

    def _chunk(self, frames: Array, segment_end: bool) -> FrameChunk:
        # From the size wanted, not the size cut: the short end of a segment must not shrink what follows.
        self._wanted_frames = size_after(self._wanted_frames, self._sizes)
        self._in_segment = not segment_end
        return FrameChunk(frames, segment_end, last=False)


class FrameGate:
    """Frames of one session that wait where they are made until they fill a chunk.

    Before that nobody could use them, and one by one they would cost an orchestrator of many streams most of
    its time. Where frames are slow they go out all the same, so that it hears that their stage is at work.
    """

    def __init__(self, sizes: Sequence[int], longest_s: float = 0.5) -> None:
        """sizes: of the first chunks, in order; the last one is that of all others. longest_s: of a wait."""
        self._sizes = itertools.chain(sizes, itertools.repeat(sizes[-1]))
        self._longest_s = longest_s
        self._held: list[Array] = []
        self._since_s = 0.0  # when the first of them came
        self._missing = next(self._sizes)  # frames until the chunk is full

    def push(self, frames: Array | None, last: bool, now_s: float) -> Array | None:
        """The frames [F, ...] that go out now; None: these wait, too. last: none follow."""
        if frames is not None:
            self._since_s = self._since_s if self._held else now_s
            self._held.append(frames)
            self._missing -= len(frames)
        if not self._held or not (last or self._missing <= 0 or now_s - self._since_s >= self._longest_s):
            return None
        while self._missing <= 0:
            self._missing += next(self._sizes)
        held, self._held = self._held, []
        return held[0] if len(held) == 1 else np.concatenate(held)


def size_after(size: int, chunks: Chunks) -> int:
    """The size wanted after a chunk of `size` frames."""
    full, growth = chunks.codec_chunk_frames, chunks.codec_chunk_growth
    if not growth:
        return full
    return min(full, math.ceil(size * growth - ROUNDING))


def sizes_of(chunks: Chunks) -> tuple[int, ...]:
    """The sizes that chunks of a long stream have, in their order; no more once they are LARGE."""
    sizes = [chunks.initial_codec_chunk_frames]
    while (size := size_after(sizes[-1], chunks)) != sizes[-1] and min(sizes[-1], size) < LARGE:
        sizes.append(size)
    return tuple(sizes)
