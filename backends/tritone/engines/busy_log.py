"""When the engine of a loop computed, noted once for all sessions that it has.

    step ─note─► [ old: the shortest gaps filled | recent: as they were ] ─since─► a session that ends

It takes the same room however many sessions there are, and however long one lasts.
"""

from __future__ import annotations

import numpy as np

from tritone.busy import thinned
from tritone.ports import Array

NUM_SPANS = 2048  # what a message tells without leaving its socket


class BusyLog:
    """Of one thread."""

    def __init__(self, most: int = NUM_SPANS) -> None:
        """most: spans that are kept; at least 4."""
        self._spans: Array = np.zeros((most, 2))  # float64, the first `_count` rows: begin and end, ascending
        self._count = 0

    def note(self, began_s: float, ended_s: float) -> None:
        """A step, later than all before. Times by time.monotonic()."""
        if self._count == len(self._spans):
            self._thin()
        self._spans[self._count] = began_s, ended_s
        self._count += 1

    def since(self, moment_s: float) -> Array:
        """The spans after a moment, ascending: float64 [n, 2]; the last half of `most` as they were noted."""
        spans = self._spans[: self._count]
        after: Array = spans[np.searchsorted(spans[:, 1], moment_s, side="right") :]
        return np.maximum(after, moment_s)

    def _thin(self) -> None:
        """The older half takes half of its room from now on."""
        half = len(self._spans) // 2
        kept = np.concatenate([thinned(self._spans[:half], half // 2), self._spans[half:]])
        self._count = len(kept)
        self._spans[: self._count] = kept
