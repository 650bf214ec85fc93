"""What a captured step of tokens reads and writes, at addresses that never change.

host ─► packed int32 [B, COLUMNS], one copy a step ─► views by name
step ─► logits float32 [B, V], ids int32 [B] ─► host
kept by slot, a spare one behind the last for rows that only fill a bucket:
        last [slots + 1], the token that was drawn last; seen [slots + 1, V], for penalties
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tritone.engines.packed_rows import COLUMNS, PackedRows, seed_words, seeds_of
from tritone.ports import Array
from tritone.sampling import Sampling

INTEGERS = ("slot", "place", "token", "draw", "bars_end", "seed_low", "seed_high", "top_k")
FLOATS = ("position", "temperature", "top_p", "log_min_p", "penalty")
ROWS = PackedRows(INTEGERS, FLOATS)
DRAWN_LAST = -1  # in place of a token: the one that was drawn last in this slot
NOT_A_NUMBER = -1  # in place of a drawn token: what it was to be drawn from was not a number
OUT_OF_REACH = -2  # the same: it may lie beyond the candidates that were looked at


@dataclass(frozen=True)
class TokenRow:
    """What a slot brings to its next token."""

    slot: int
    place: int  # of the row in its slot
    position: float | None  # that turns it, if that is not its place
    token: int | None  # that is the row; None: the one drawn last, which the host need not know yet
    sampling: Sampling
    draw: int  # place in the sequence of the token to draw
    bars_end: bool  # what ends an answer must not come


@dataclass(frozen=True)
class TokenBuffers:
    """On the device; B is the largest bucket."""

    packed: Tensor  # int32 [B, COLUMNS]
    logits: Tensor  # float32 [B, V]
    ids: Tensor  # int32 [B], drawn
    last: Tensor  # int64 [slots + 1]
    seen: Tensor  # bool [slots + 1, V]: of a slot with a penalty the tokens of its sequence

    @classmethod
    def of(cls, rows: int, slots: int, vocab_size: int, device: torch.device) -> TokenBuffers:
        def zeros(*shape: int, of: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=of, device=device)

        return cls(
            packed=torch.from_numpy(pack_spare(rows, slots)).to(device),
            logits=zeros(rows, vocab_size, of=torch.float32),
            ids=zeros(rows, of=torch.int32),
            last=zeros(slots + 1, of=torch.int64),
            seen=zeros(slots + 1, vocab_size, of=torch.bool),
        )

    def column(self, name: str, rows: slice) -> Tensor:
        """int32 or float32 [rows], a view."""
        return ROWS.column(self.packed[rows], name)

    def slots(self, rows: slice) -> Tensor:
        """int64 [rows]"""
        return self.column("slot", rows).long()

    def seeds(self, rows: slice) -> Tensor:
        """int64 [rows]"""
        return seeds_of(self.column("seed_low", rows), self.column("seed_high", rows))

    def inputs(self, rows: slice) -> Tensor:
        """Tokens of the rows, int64 [rows]."""
        given = self.column("token", rows).long()
        return torch.where(given == DRAWN_LAST, self.last[self.slots(rows)], given)

    def settle_likeliest(self, rows: slice) -> None:
        """Draw for each row the token with the highest logit."""
        highest, tokens = self.logits[rows].max(-1)  # of numbers and what is none, the latter
        self.ids[rows] = tokens.int().masked_fill(highest.isnan(), NOT_A_NUMBER)
        self.last[self.slots(rows)] = tokens


def pack_spare(rows: int, slots: int) -> Array:
    """Packed rows, int32 [rows, COLUMNS], that fill a bucket: greedy ones in the spare slot."""
    packed = np.zeros((rows, COLUMNS), np.int32)
    ROWS.fill(packed, slot=slots, top_k=1, penalty=1.0, top_p=1.0, log_min_p=-math.inf)
    return packed


def pack(rows: Sequence[TokenRow], vocab_size: int, into: Array) -> None:
    """Rows as the device reads them, into the first of int32 [B, COLUMNS]; all of a step in two copies."""
    ROWS.put(
        into,
        [
            (
                row.slot,
                row.place,
                DRAWN_LAST if row.token is None else row.token,
                row.draw,
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
            )
            for row in rows
        ],
    )
