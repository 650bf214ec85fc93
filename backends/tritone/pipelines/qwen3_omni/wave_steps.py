"""Frames of streams as passes in fixed shapes, whoever computes them.

    shares ─► parts of at most the largest bucket ─► rows of one bucket: slots, codes, valid, starts
      samples ◄─ cut: no lead, no padding ◄─ wave [rows, frames · samples_per_frame] ◄─┘ step, over a pool

The states of all streams lie in a pool, a slot each; a spare one behind the last is of rows that only fill a
bucket.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tritone.networks.waveform_config import MAX_BATCH_FRAMES, MAX_PASS_FRAMES, WaveformConfig
from tritone.pipelines.qwen3_omni.waves import Share, Waves
from tritone.ports import Array

LEAST_GROWTH = 1.5  # from one bucket of frames to the next: a closer one saves little padding


@dataclass(frozen=True)
class Batch:
    """Some parts that share a pass."""

    members: list[int]  # their numbers
    rows: int
    frames: int


@dataclass(frozen=True)
class Buckets:
    """The shapes that passes have; sizes ascend, and the first number of rows is 1."""

    rows: tuple[int, ...]
    frames: tuple[int, ...]

    @classmethod
    def of(cls, max_rows: int, chunk_frames: Sequence[int]) -> Buckets:
        """Powers of two up to one that holds `max_rows`; sizes of chunks that are worth a bucket."""
        rows = [1]
        while rows[-1] < max_rows:
            rows.append(2 * rows[-1])
        *smaller, largest = sorted({min(frames, MAX_PASS_FRAMES) for frames in chunk_frames})
        kept: list[int] = []
        for frames in smaller:
            if frames * LEAST_GROWTH <= largest and (not kept or frames >= kept[-1] * LEAST_GROWTH):
                kept.append(frames)
        return cls(tuple(rows), (*kept, largest))

    @classmethod
    def exact(cls, max_rows: int) -> Buckets:
        """Every shape: nothing is padded."""
        return cls(tuple(range(1, max_rows + 1)), tuple(range(1, MAX_PASS_FRAMES + 1)))

    def up_to(self, rows: int) -> Buckets:
        """Those of at most so many rows."""
        return Buckets(tuple(size for size in self.rows if size <= rows), self.frames)

    @property
    def max_frames(self) -> int:
        return self.frames[-1]

    def shapes(self) -> Iterator[tuple[int, int]]:
        """(rows, frames), the largest first."""
        for frames in reversed(self.frames):
            for rows in reversed(self._rows_of(frames)):
                yield rows, frames

    def fitted(self, lengths: Sequence[int]) -> list[Batch]:
        """Passes for parts of so many frames, at most `max_frames`; empty parts are in none."""
        groups: dict[int, list[int]] = {}
        for number, length in enumerate(lengths):
            if length:
                groups.setdefault(_fitting(self.frames, length), []).append(number)
        batches = []
        for frames, group in groups.items():
            sizes = self._rows_of(frames)
            for first in range(0, len(group), sizes[-1]):
                members = group[first : first + sizes[-1]]
                batches.append(Batch(members, _fitting(sizes, len(members)), frames))
        return batches

    def _rows_of(self, frames: int) -> tuple[int, ...]:
        return tuple(rows for rows in self.rows if rows == 1 or rows * frames <= MAX_BATCH_FRAMES)


class StepWaves(Waves):
    """Makes passes; what computes them is a subclass's."""

    def __init__(self, config: WaveformConfig, buckets: Buckets, slots: int) -> None:
        """slots: of streams; the pool has one more."""
        self.config = config
        self._buckets, self._spare = buckets, slots
        self._ages = [0] * slots  # frames of each slot's stream so far

    def begin(self, slot: int) -> None:
        self._ages[slot] = 0  # its first pass is a start, which heeds nothing that is in the slot

    def end(self, slot: int) -> None:
        """What is in the pool stays, for nobody."""

    def decode(self, shares: Sequence[Share]) -> list[Array]:
        parts: list[list[Array]] = [[] for _ in shares]
        size = self._buckets.max_frames
        for begin in range(0, max((len(share.frames) for share in shares), default=0), size):
            given = [share.frames[begin : begin + size] for share in shares]
            for batch in self._buckets.fitted([len(frames) for frames in given]):
                slots = [shares[number].slot for number in batch.members]
                made = self._pass(batch, slots, [given[number] for number in batch.members])
                for number, samples in zip(batch.members, made, strict=True):
                    parts[number].append(samples)
        return [np.concatenate(mine) if mine else np.zeros(0, np.float32) for mine in parts]

    def _pass(self, batch: Batch, slots: Sequence[int], given: Sequence[Array]) -> list[Array]:
        """New samples of each slot, whose frames fit the batch."""
        spares = batch.rows - len(slots)
        codes = np.zeros((batch.rows, batch.frames, self.config.num_quantizers), np.int32)
        for row, frames in zip(codes, given, strict=False):
            row[: len(frames)] = frames
        ages = [self._ages[slot] for slot in slots]
        lengths = [len(frames) for frames in given]
        wave = self._step(
            np.array([*slots, *[self._spare] * spares], np.int32),
            np.array([*(age == 0 for age in ages), *[False] * spares], np.bool_),
            codes,
            np.array([*lengths, *[0] * spares], np.int32),
        )
        for slot, length in zip(slots, lengths, strict=True):
            self._ages[slot] += length
        lead, rate = self.config.missing_samples, self.config.samples_per_frame
        return [
            row[max(0, lead - age * rate) : length * rate]
            for row, age, length in zip(wave, ages, lengths, strict=False)
        ]

    @abstractmethod
    def _step(self, slots: Array, starts: Array, codes: Array, valid: Array) -> Array:
        """One pass over the pool: samples float32 [at least the rows in use, frames · samples_per_frame].

        slots: int32 [rows]; starts: bool [rows]; codes: int32 [rows, frames, codebooks]; valid: int32 [rows],
        frames of each row, 0 where the slot is the spare one. The samples are the caller's.
        """


def _fitting(sizes: Sequence[int], size: int) -> int:
    """The smallest of the ascending sizes that holds `size`."""
    return next(bucket for bucket in sizes if bucket >= size)
