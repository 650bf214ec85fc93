"""Numbers of the host for each row of a captured step, in one array that is copied at once.

int32 [B, COLUMNS] on the host ─► the same on the device ─► views by name; floats bit by bit
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor, float32

from tritone.engines.graph_memory import PACKED_BYTES
from tritone.ports import Array

COLUMNS = PACKED_BYTES // 4


class PackedRows:
    """The names of the columns."""

    def __init__(self, integers: Sequence[str], floats: Sequence[str]) -> None:
        names = (*integers, *floats)
        assert len(names) <= COLUMNS
        self._floats = frozenset(floats)
        self._num_integers, self._num_floats = len(integers), len(floats)
        self._place = {name: place for place, name in enumerate(names)}

    def column(self, packed: Tensor, name: str) -> Tensor:
        """int32 or float32 [B], a view of packed int32 [B, COLUMNS]."""
        return (packed.view(float32) if name in self._floats else packed)[:, self._place[name]]

    def fill(self, packed: Array, **values: float) -> None:
        """Give all rows of an array the same values."""
        for name, value in values.items():
            (packed.view(np.float32) if name in self._floats else packed)[:, self._place[name]] = value

    def put(
        self, into: Array, integers: Sequence[tuple[int, ...]], floats: Sequence[tuple[float, ...]]
    ) -> None:
        """Write the first rows of int32 [B, COLUMNS], one or more, each in the order of the names."""
        count, first = len(integers), self._num_integers
        into[:count, :first] = integers
        into.view(np.float32)[:count, first : first + self._num_floats] = floats


def seed_words(seed: int | None) -> tuple[int, int]:
    """The low and the high 32 bits of a seed, each as an int32."""
    seed = seed or 0
    return _signed(seed & 0xFFFFFFFF), _signed(seed >> 32)


def seeds_of(low: Tensor, high: Tensor) -> Tensor:
    """Seeds int64 [B] of their words int32 [B]."""
    return (low.long() & 0xFFFFFFFF) | (high.long() << 32)


def _signed(word: int) -> int:
    """The same 32 bits as an int32."""
    return word - (1 << 32) if word >= 1 << 31 else word
