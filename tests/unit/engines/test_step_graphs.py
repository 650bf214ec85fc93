"""Captured steps on a CPU, where a graph is a call."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tritone.engines.step_graphs import StepGraphs  # noqa: E402

SPARE = 90


class Doubled(StepGraphs):
    """A step that draws the double of what a row says."""

    def __init__(self, *sizes: int) -> None:
        self.packed, self.drawn = torch.zeros((2, sizes[-1], 1), dtype=torch.int32)
        self.steps: list[list[int]] = []
        spare = np.full((sizes[-1], 1), SPARE, np.int32)
        super().__init__(self._double, self.packed, self.drawn, spare, sizes)

    def launch(self, *rows: int):
        self._next_rows()[: len(rows), 0] = rows
        staging = self._replay(len(rows))
        staging.fetch(self.drawn[: len(rows)])
        return staging

    def _double(self, rows: int) -> None:
        self.steps.append(self.packed[:rows, 0].tolist())
        self.drawn[:rows] = 2 * self.packed[:rows]


def test_the_largest_size_is_captured_first():
    assert [len(rows) for rows in Doubled(1, 2, 4).steps] == [4, 2, 1]


def test_a_step_has_the_smallest_size_and_spare_rows_fill_it():
    graphs = Doubled(1, 2, 4)
    graphs.steps.clear()
    for rows in ((1,), (1, 2), (1, 2, 3), (5, 6, 7, 8), (9,)):
        assert graphs.launch(*rows).fetched(len(rows))[:, 0].tolist() == [2 * row for row in rows]
    assert graphs.steps == [[1], [1, 2], [1, 2, 3, SPARE], [5, 6, 7, 8], [9]]


def test_a_step_leaves_alone_what_the_one_before_has_drawn():
    graphs = Doubled(2)
    first, second = graphs.launch(1, 2), graphs.launch(3)
    assert first.fetched(2)[:, 0].tolist() == [2, 4] and second.fetched(1)[:, 0].tolist() == [6]
