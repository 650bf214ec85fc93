"""When the stages of one request computed: what remains of its time is the chain's own.

thinker   ▓▓▓▓▓▓ ▓▓ ▓▓              busy_s of a stage: the sum of its spans
code2wav         ▓    ▓▓▓           idle_s: the time in no span of any stage
          ─────────────────► time   clock: time.monotonic(), which all processes of a machine share
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tritone.ports import Array


class BusyTimes:
    """Spans in which stages computed, other requests of the same batches included."""

    def __init__(self) -> None:
        self._spans: dict[str, list[Array]] = {}  # by stage: float64 [n, 2], begin and end

    def note(self, stage: str, spans: npt.ArrayLike) -> None:
        """spans: float64 [n, 2] or anything that can be seen as such."""
        self._spans.setdefault(stage, []).append(np.asarray(spans, np.float64).reshape(-1, 2))

    def by_stage(self) -> Mapping[str, float]:
        """Seconds that each stage computed."""
        return {
            stage: sum(float(np.ptp(s, axis=1).sum()) for s in spans) for stage, spans in self._spans.items()
        }

    def of(self, stage: str, most: int) -> Array:
        """The spans of a stage, ascending and disjoint: float64 [n, 2] with n at most `most`.

        Where there are more, the shortest gaps between them are filled.
        """
        spans: Array = np.concatenate([np.zeros((0, 2)), *self._spans.get(stage, ())])
        return thinned(spans[np.argsort(spans[:, 0], kind="stable")], most)

    def idle_s(self, begin_s: float, end_s: float) -> float:
        """Seconds from `begin_s` to `end_s` in which no stage computed."""
        spans = np.concatenate([np.zeros((0, 2)), *(s for spans in self._spans.values() for s in spans)])
        spans = spans[np.argsort(spans[:, 0])].clip(begin_s, end_s)
        idle_s, reached_s = 0.0, begin_s
        for begin, end in spans.tolist():
            idle_s += max(0.0, begin - reached_s)
            reached_s = max(reached_s, end)
        return idle_s + max(0.0, end_s - reached_s)


def thinned(spans: Array, most: int) -> Array:
    """Spans with ascending begins, made disjoint: float64 [n, 2] with n at most `most`.

    Where there are more, the shortest gaps between them are filled.
    """
    if not len(spans):
        return spans
    reached = np.maximum.accumulate(spans[:, 1])
    gaps = spans[1:, 0] - reached[:-1]
    starts = np.flatnonzero(gaps > 0)
    if len(starts) >= most:
        starts = np.sort(starts[np.argsort(-gaps[starts], kind="stable")[: most - 1]])
    begins = spans[np.concatenate([[0], starts + 1]), 0]
    ends = reached[np.concatenate([starts, [len(spans) - 1]])]
    disjoint: Array = np.stack([begins, ends], axis=1)
    return disjoint
