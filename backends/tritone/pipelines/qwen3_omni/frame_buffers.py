"""What a captured frame reads and writes, at addresses that never change.

host ─► packed int32 [B, COLUMNS], one copy a frame ─► views by name
        text [B, H], the rows to speak
kept by slot, a spare one behind the last for rows that only fill a bucket:
        spoken [slots + 1, H], seen [slots + 1, V]
◄─ frames int32 [B, codebooks]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tritone.engines.packed_rows import COLUMNS, PackedRows, seed_words, seeds_of
from tritone.pipelines.qwen3_omni.frame import Codec
from tritone.pipelines.qwen3_omni.frame_row import FrameRow
from tritone.ports import Array

INTEGERS = ("slot", "place", "draws", "begins", "bars_end", "seed_low", "seed_high", "top_k")
FLOATS = ("position", "temperature", "top_p", "log_min_p", "penalty", "residual_temperature")
ROWS = PackedRows(INTEGERS, FLOATS)


@dataclass(frozen=True)
class FrameBuffers:
    """On the device; B is the largest bucket."""

    packed: Tensor  # int32 [B, COLUMNS]; floats bit by bit
    text: Tensor  # [B, H]
    frames: Tensor  # int32 [B, codebooks]
    spoken: Tensor  # [slots + 1, H]: embeddings of a slot's last frame, added up
    seen: Tensor  # bool [slots + 1, V]: code 0 of its earlier frames

    @classmethod
    def of(
        cls,
        rows: int,
        slots: int,
        hidden_size: int,
        vocab_size: int,
        codebooks: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> FrameBuffers:
        def zeros(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=of, device=device)

        return cls(
            packed=torch.from_numpy(pack_spare(rows, slots)).to(device),
            text=zeros(rows, hidden_size),
            frames=zeros(rows, codebooks, of=torch.int32),
            spoken=zeros(slots + 1, hidden_size),
            seen=zeros(slots + 1, vocab_size, of=torch.bool),
        )

    def column(self, name: str, rows: int) -> Tensor:
        """int32 or float32 [rows], a view."""
        return ROWS.column(self.packed[:rows], name)

    def seeds(self, rows: int) -> Tensor:
        """int64 [rows]"""
        return seeds_of(self.column("seed_low", rows), self.column("seed_high", rows))


def pack_spare(rows: int, slots: int) -> Array:
    """Packed rows, int32 [rows, COLUMNS], that fill a bucket: greedy ones in the spare slot."""
    packed = np.zeros((rows, COLUMNS), np.int32)
    ROWS.fill(packed, slot=slots, begins=1, top_k=1, penalty=1.0, top_p=1.0, log_min_p=-math.inf)
    return packed


def pack(rows: Sequence[FrameRow], codec: Codec, vocab_size: int, into: Array) -> None:
    """Rows as the device reads them, into the first of int32 [B, COLUMNS]; all of a frame in two copies."""
    ROWS.put(
        into,
        [
            (
                row.slot,
                row.place,
                row.draws,
                row.begins,
                row.bars_end,
                *seed_words(row.sampling.seed),
                row.sampling.top_k or vocab_size,
            )
            for row in rows
        ],
        [
            (
                row.place if row.position is None else row.position,
                row.sampling.temperature,
                row.sampling.top_p,
                math.log(row.sampling.min_p) if row.sampling.min_p else -math.inf,
                row.sampling.repetition_penalty,
                codec.residual_temperature(row.sampling),
            )
            for row in rows
        ],
    )
