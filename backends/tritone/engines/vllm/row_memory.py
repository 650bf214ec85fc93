"""Hidden states that were tapped, for prompts that begin alike: what a cache spares is not tapped again.

keys of a prompt up to its last media row ─► rows [M, H] of all its media ─► the next turn of the conversation
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from tritone.ports import Array


class RowMemory:
    """The rows of prompts, the least recently used forgotten first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rows: OrderedDict[str, Array] = OrderedDict()
        self.size_bytes = 0

    def recall(self, keys: Sequence[int], places: Array, ends: Sequence[int]) -> Array | None:
        """The rows at the longest known beginning of `places`, or None.

        keys: of the prompt's rows. places: int64 [M], where rows are wanted. ends: how many of them a
        beginning may have, rising.
        """
        for end in reversed(ends):
            name = _name(keys, places, end)
            if name in self._rows:
                self._rows.move_to_end(name)
                return self._rows[name]
        return None

    def keep(self, keys: Sequence[int], places: Array, rows: Array) -> None:
        """rows: float32 [M, H], of all `places`."""
        if rows.nbytes > self._max_bytes:
            return
        name = _name(keys, places, len(places))
        self.size_bytes += rows.nbytes - (self._rows.pop(name).nbytes if name in self._rows else 0)
        self._rows[name] = rows
        while self.size_bytes > self._max_bytes:
            self.size_bytes -= self._rows.popitem(last=False)[1].nbytes


def _name(keys: Sequence[int], places: Array, end: int) -> str:
    return hashlib.sha256(np.asarray(keys[: int(places[end - 1]) + 1], np.int64).tobytes()).hexdigest()
