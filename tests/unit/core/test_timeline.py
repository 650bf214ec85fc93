"""When what happened to a request, in seconds since it was received."""

import time

import numpy as np
import pytest

from tritone import wire
from tritone.timeline import MAX_CALLS, MAX_SPANS, Call, Timeline

RECEIVED_S = 1000.0


def finished(times, usage=None, busy=()):
    return wire.Finished("s", "m", "stop", usage or {}, times, busy)


def told(timeline, now_s=1010.0, **firsts):
    return timeline.as_dict(firsts, now_s)


@pytest.fixture
def timeline():
    return Timeline(RECEIVED_S)


def test_a_stage_that_batches_by_itself_tells_all_its_moments(timeline):
    times = wire.StageTimes(1001.0, 1005.5, 1002.0, 1005.0, queued_s=0.25, steps=3, batch=2.5)
    usage = {"completion_tokens": 7, "codec_frames": 4, "prompt_tokens": 100}
    timeline.note_end("talker", finished(times, usage, [[1001.5, 1002.0], [1003.0, 1005.0]]))
    answer = told(timeline, ttft_s=1.25)
    assert (answer["ttft_s"], answer["total_s"], answer["idle_s"]) == (1.25, 10.0, 7.5)
    assert answer["stages"]["talker"] == {
        "opened_at_s": 1.0,
        "first_output_at_s": 2.0,
        "last_output_at_s": 5.0,
        "ended_at_s": 5.5,
        "first_output_s": 1.0,
        "total_s": 4.5,
        "queued_s": 0.25,
        "busy_s": 2.5,
        "tokens": 7,
        "frames": 4,
        "steps": 3,
        "batch": 2.5,
        "busy": [[1.5, 2.0], [3.0, 5.0]],
    }


def test_a_stage_that_triton_batches_tells_its_calls(timeline):
    timeline.note_call("wave", Call(1001.0, 1002.0, 4, 1, (1001.5, 1001.75)), True, False)
    timeline.note_call("wave", Call(1003.0, 1004.0, 25, 4, (1003.25, 1004.0)), True, False)
    timeline.note_call("wave", Call(1004.0, 1004.5, 0, 1, (1004.0, 1004.25)), False, True)
    assert told(timeline)["stages"]["wave"] == {
        "opened_at_s": 1.0,
        "first_output_at_s": 2.0,
        "last_output_at_s": 4.0,
        "ended_at_s": 4.5,
        "calls": 3,
        "calls_s": 2.5,
        "queued_s": 0.75,
        "busy_s": 1.25,
        "frames": 29,
        "batch": 2.0,
        "busy": [[1.5, 1.75], [3.25, 4.25]],
        "call_spans": [[1.0, 2.0, 4, 1], [3.0, 4.0, 25, 4], [4.0, 4.5, 0, 1]],
    }


def test_only_the_first_calls_are_told_one_by_one_and_all_are_counted(timeline):
    for number in range(MAX_CALLS + 10):
        at_s = RECEIVED_S + number
        timeline.note_call("wave", Call(at_s, at_s + 0.5, 2, 1, (at_s, at_s + 0.25)), True, False)
    wave = told(timeline)["stages"]["wave"]
    assert len(wave["call_spans"]) == MAX_CALLS and wave["call_spans"][-1][0] == MAX_CALLS - 1
    assert wave["calls"] == MAX_CALLS + 10 and wave["frames"] == 2 * (MAX_CALLS + 10)
    assert wave["busy_s"] == pytest.approx(0.25 * (MAX_CALLS + 10))


def test_the_wait_for_a_turn_is_told_once_it_is_over():
    timeline = Timeline(time.monotonic() - 100)
    timeline.note_queued()
    assert "queued_s" not in told(timeline)
    time.sleep(0.02)
    timeline.note_turn()
    assert 0.02 <= told(timeline)["queued_s"] < 50, "reading the request is no wait"


def test_a_stage_that_was_cut_off_is_told_as_it_was_seen(timeline):
    timeline.received_s = 0.0
    timeline.note_opened("writer")
    timeline.note_output("writer")
    timeline.note_output("writer")
    writer = told(timeline)["stages"]["writer"]
    assert set(writer) == {"opened_at_s", "first_output_at_s", "last_output_at_s", "first_output_s"}
    assert writer["opened_at_s"] <= writer["first_output_at_s"] <= writer["last_output_at_s"]


def test_what_began_again_is_told_from_there(timeline):
    timeline.note_opened("writer")
    timeline.note_output("writer")
    timeline.forget_stages()
    timeline.note_end("writer", finished(wire.StageTimes(1008.0, 1009.0)))
    assert told(timeline)["stages"]["writer"] == {
        "opened_at_s": 8.0,
        "ended_at_s": 9.0,
        "total_s": 1.0,
        "busy_s": 0.0,
    }


def test_the_wall_clock_of_the_zero_lays_it_beside_other_clocks():
    before_s = time.time()
    timeline = Timeline()
    after_s = time.time()
    assert before_s - 0.01 <= told(timeline, timeline.received_s)["received_unix_s"] <= after_s + 0.01


@pytest.mark.parametrize("most", [1, 2, 5, 100])
def test_spans_are_at_most_so_many_and_the_longest_gaps_stay(timeline, most):
    rng = np.random.default_rng(most)
    begins = np.cumsum(rng.uniform(0.1, 2.0, 40))
    spans = np.stack([begins, begins + rng.uniform(0.01, 0.3, 40)], axis=1)
    timeline.busy.note("a", rng.permutation(spans))
    kept = timeline.busy.of("a", most)
    assert len(kept) <= most and (kept[:, 0] < kept[:, 1]).all() and (kept[1:, 0] > kept[:-1, 1]).all()
    assert kept[0, 0] == spans[0, 0] and kept[-1, 1] == spans[:, 1].max()
    merged = timeline.busy.of("a", 1000)
    gaps = np.sort(merged[1:, 0] - merged[:-1, 1])[::-1]
    np.testing.assert_allclose(np.sort(kept[1:, 0] - kept[:-1, 1])[::-1], gaps[: most - 1])
    assert timeline.busy.of("nobody", most).shape == (0, 2)


def test_thousands_of_steps_are_told_as_a_picture(timeline):
    begins = 1000 + np.arange(5000) * 0.01
    spans = np.stack([begins, begins + 0.005], axis=1)
    times = wire.StageTimes(1000.0, 1050.0, steps=5000, batch=1.0)
    timeline.note_end("writer", finished(times, busy=spans))
    writer = told(timeline, 1050.0)["stages"]["writer"]
    assert len(writer["busy"]) == MAX_SPANS and writer["busy_s"] == pytest.approx(25.0)
    assert writer["busy"][0][0] == 0.0 and writer["busy"][-1][1] == pytest.approx(49.995)
