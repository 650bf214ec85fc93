import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritone_bench.playback import Arrival, Playback, Silence, heard_at, play


@pytest.mark.parametrize(
    ("arrivals", "underruns", "begin_s", "end_s"),
    [
        ([], [], None, None),
        ([(5.0, 1.0)], [], 5.0, 6.0),
        ([(5.0, 1.0), (5.1, 1.0), (6.9, 1.0)], [], 5.0, 8.0),
        ([(5.0, 1.0), (6.0, 1.0)], [], 5.0, 7.0),
        ([(5.0, 1.0), (6.25, 1.0)], [(6.0, 6.25)], 5.0, 7.25),
        # the clock stands still while there is nothing to play: a chunk late once is one underrun
        ([(5.0, 1.0), (6.25, 1.0), (7.25, 1.0)], [(6.0, 6.25)], 5.0, 8.25),
        ([(5.0, 1.0), (6.25, 1.0), (8.5, 1.0)], [(6.0, 6.25), (7.25, 8.5)], 5.0, 9.5),
        # what came early is a cushion for what comes late
        ([(0.0, 1.0), (0.1, 3.0), (3.9, 1.0)], [], 0.0, 5.0),
        ([(0.0, 1.0), (0.1, 3.0), (4.5, 1.0)], [(4.0, 4.5)], 0.0, 5.5),
        # several at the same moment
        ([(1.0, 0.5), (1.0, 0.5), (2.0, 0.5)], [], 1.0, 2.5),
        # what has no sound neither starts the clock nor ends a silence
        ([(0.0, 0.0), (2.0, 1.0), (3.5, 0.0), (4.0, 1.0)], [(3.0, 4.0)], 2.0, 5.0),
        ([(0.0, 0.0)], [], None, None),
        # rounding is no underrun
        ([(0.0, 0.1), (0.1, 0.1), (0.2, 0.1), (0.30000000000000004, 0.1)], [], 0.0, 0.4),
    ],
)  # fmt: skip
def test_what_a_listener_hears(arrivals, underruns, begin_s, end_s):
    playback = play([Arrival(*arrival) for arrival in arrivals])
    assert playback.underruns == tuple(Silence(*underrun) for underrun in underruns)
    assert (playback.begin_s, playback.end_s) == (begin_s, pytest.approx(end_s))
    assert playback.silence_s == playback.underrun_s == sum(end - begin for begin, end in underruns)


def test_the_wait_for_the_first_sound_counts_only_when_it_is_asked_for():
    arrivals = [Arrival(3.0, 1.0), Arrival(5.0, 1.0)]
    assert play(arrivals).silence_s == 1.0
    waited = play(arrivals, asked_s=2.25)
    assert (waited.leading_s, waited.underrun_s, waited.silence_s) == (0.75, 1.0, 1.75)


def test_one_chunk_cannot_run_out():
    assert not play([]).can_underrun
    assert not play([Arrival(0.0, 1.0), Arrival(0.5, 0.0)]).can_underrun
    assert play([Arrival(0.0, 1.0), Arrival(0.5, 0.1)]).can_underrun


@pytest.mark.parametrize(
    ("arrivals", "asked_s"),
    [([(2.0, 1.0), (1.0, 1.0)], None), ([(2.0, 1.0)], 3.0), ([(2.0, -1.0)], None)],
)
def test_impossible_arrivals_are_refused(arrivals, asked_s):
    with pytest.raises(ValueError, match="chunk"):
        play([Arrival(*arrival) for arrival in arrivals], asked_s)


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 3000)), max_size=30))
def test_time_is_either_sound_or_silence(steps_ms):
    arrivals, at_ms = [], 0
    for wait_ms, length_ms in steps_ms:
        at_ms += wait_ms
        arrivals.append(Arrival(at_ms / 1000, length_ms / 1000))
    playback = play(arrivals)
    sound_s = sum(arrival.duration_s for arrival in arrivals)
    if playback.begin_s is None:
        assert sound_s == 0 and playback == Playback(None, None, (), 0)
        return
    assert playback.end_s - playback.begin_s == pytest.approx(sound_s + playback.underrun_s)
    assert playback.end_s >= arrivals[-1].at_s or arrivals[-1].duration_s == 0
    corners = heard_at(arrivals)
    assert corners[0] == (playback.begin_s, 0.0)
    assert corners[-1] == (pytest.approx(playback.end_s), pytest.approx(sound_s))
    for at_s, heard_s in corners:  # nobody hears what has not come
        come_s = sum(arrival.duration_s for arrival in arrivals if arrival.at_s <= at_s + 1e-9)
        assert heard_s <= come_s + 1e-6


def test_the_curve_of_what_is_heard():
    arrivals = [Arrival(1.0, 1.0), Arrival(2.5, 0.5), Arrival(2.6, 1.0)]
    assert heard_at(arrivals) == [(1.0, 0.0), (2.0, 1.0), (2.5, 1.0), (4.0, 2.5)]
    assert heard_at([]) == []
