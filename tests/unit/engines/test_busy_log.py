"""The log of an engine's steps: exact for what is recent, of one size for ever."""

import tracemalloc

import numpy as np
import pytest

from tritone.engines.busy_log import BusyLog


def steps(count, begin_s=0.0):
    """One that begins each second and takes 0.5 s to 0.9 s."""
    begins = begin_s + np.arange(count)
    return np.stack([begins, begins + 0.5 + 0.1 * (np.arange(count) % 5)], axis=1)


def noted(spans, most):
    log = BusyLog(most)
    for began_s, ended_s in spans:
        log.note(began_s, ended_s)
    return log


def test_a_session_is_told_the_steps_since_it_was_opened():
    log = noted(steps(10), 16)
    np.testing.assert_array_equal(log.since(7.0), steps(10)[7:])
    np.testing.assert_array_equal(log.since(0.0), steps(10))
    assert log.since(100.0).shape == (0, 2)


def test_nothing_before_the_moment_is_told():
    log = noted(steps(3), 16)
    assert log.since(1.25)[0].tolist() == [1.25, 1.6]


def test_what_is_told_does_not_change_with_later_steps():
    log = noted(steps(4), 4)
    told = log.since(0.0)
    for began_s, ended_s in steps(4, begin_s=4.0):
        log.note(began_s, ended_s)
    np.testing.assert_array_equal(told, steps(4))


@pytest.mark.parametrize("count", [63, 64, 65, 100, 1000, 5003])
def test_of_many_steps_the_last_are_exact_and_of_the_others_the_long_gaps_stay(count):
    spans = steps(count)
    told = noted(spans, 64).since(0.0)
    assert len(told) <= 64
    exact = min(count, 32)
    np.testing.assert_array_equal(told[-exact:], spans[-exact:])
    assert told[0, 0] == 0.0 and (told[1:, 0] > told[:-1, 1]).all()
    gaps = (told[1:, 0] - told[:-1, 1]).tolist()
    assert set(np.round(gaps, 6)) <= {0.1, 0.2, 0.3, 0.4, 0.5}
    if 64 < count <= 100:  # thinned once: half of the gaps of the older half are gone, the short ones
        assert min(gaps[:15]) >= 0.3


def test_it_takes_no_more_room_with_thousands_of_steps_more():
    log = noted(steps(5000), 1024)
    tracemalloc.start()
    try:
        for began_s in range(5000, 15_000):
            log.note(began_s, began_s + 0.5)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 10_000
    assert len(log.since(0.0)) <= 1024
