"""When stages computed, and when none did."""

import pytest

from tritone.busy import BusyTimes


def busy(**spans):
    times = BusyTimes()
    for stage, of_stage in spans.items():
        for span in of_stage:
            times.note(stage, [span])
    return times


def test_a_stage_is_busy_for_the_sum_of_its_spans():
    times = busy(a=[(0, 1), (2, 2.5)], b=[(1, 4)])
    times.note("a", [[10, 11], [12, 14]])
    assert times.by_stage() == {"a": pytest.approx(4.5), "b": pytest.approx(3)}


@pytest.mark.parametrize(
    ("spans", "idle_s"),
    [
        ({}, 10),
        ({"a": [(0, 10)]}, 0),
        ({"a": [(-5, 20)]}, 0),  # what lies outside counts for nothing
        ({"a": [(2, 3)], "b": [(5, 6)]}, 8),
        ({"a": [(2, 5)], "b": [(3, 4), (4, 6)]}, 6),  # at the same time: once
        ({"a": [(8, 9), (1, 2)], "b": [(20, 30)]}, 8),  # in any order
        ({"a": [(1, 9)], "b": [(2, 3)]}, 2),
    ],
    ids=str,
)
def test_idle_is_what_no_stage_fills(spans, idle_s):
    assert busy(**spans).idle_s(0, 10) == pytest.approx(idle_s)
