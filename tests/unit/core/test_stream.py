"""Codec frames are cut so that nothing is lost, repeated or mixed between segments."""

import numpy as np
import pytest

from tritone.deploy import Chunks
from tritone.stream import FrameBuffer, FrameGate


def cut(pushes, initial=4, later=25, growth=0.0):
    """All chunks of a stream; `pushes` are (number of frames, segment_end)."""
    buffer = FrameBuffer(Chunks(initial, later, growth))
    chunks, at = [], 0
    for count, segment_end in pushes:
        chunks += buffer.push(np.arange(at, at + count, dtype=np.float32)[:, None], segment_end)
        at += count
    return [*chunks, buffer.finish()], at


def test_116_frames_at_4_then_25_lose_nothing():
    chunks, total = cut([(1, False)] * 116)
    assert [len(c.frames) for c in chunks] == [4, 25, 25, 25, 25, 12]
    joined = np.concatenate([c.frames for c in chunks])
    assert np.array_equal(joined[:, 0], np.arange(total))
    assert [c.last for c in chunks] == [False] * 5 + [True]


@pytest.mark.parametrize(
    ("sizes", "growth", "expected"),
    [
        ((4, 25), 0, [4, 25, 25, 25]),
        ((4, 25), 2, [4, 8, 16, 25, 25]),
        ((4, 25), 1.5, [4, 6, 9, 14, 21, 25, 25]),
        ((4, 25), 100, [4, 25, 25]),
        ((4, 25), 1, [4, 4, 4, 4]),
        ((10, 25), 1.1, [10, 11, 13, 15]),  # 10 * 1.1 in floats is above 11
        ((30, 25), 2, [30, 25, 25]),
        ((1, 3), 1.0001, [1, 2, 3, 3]),
    ],
)
@pytest.mark.parametrize("arrival", ["one by one", "at once"])
def test_chunks_grow_to_their_full_size(sizes, growth, expected, arrival):
    total = sum(expected)
    chunks, _ = cut([(total, False)] if arrival == "at once" else [(1, False)] * total, *sizes, growth)
    assert [len(c.frames) for c in chunks] == [*expected, 0]
    assert np.array_equal(np.concatenate([c.frames.reshape(-1) for c in chunks]), np.arange(total))


def test_the_short_end_of_a_segment_does_not_shrink_what_follows():
    chunks, _ = cut([(5, True), (60, False)], growth=2)
    assert [len(c.frames) for c in chunks] == [4, 1, 16, 25, 19]


@pytest.mark.parametrize("seed", range(30))
def test_any_arrival_gives_all_frames_in_order_and_ends_every_segment(seed):
    random = np.random.default_rng(seed)
    pushes = [(int(random.integers(0, 40)), bool(random.random() < 0.3)) for _ in range(20)]
    growth = [0, 1, 1.3, 2][seed % 4]
    chunks, total = cut(pushes, int(random.integers(1, 9)), int(random.integers(1, 30)), growth)
    frames = [c.frames.reshape(-1) for c in chunks]
    assert np.array_equal(np.concatenate(frames), np.arange(total))
    borders = np.cumsum([len(f) for f in frames])
    ends_seen = {int(border) for border, c in zip(borders, chunks, strict=True) if c.segment_end}
    ends_asked = {
        int(at) for at, (_, end) in zip(np.cumsum([n for n, _ in pushes]), pushes, strict=True) if end
    }
    assert ends_asked - {0} <= ends_seen
    assert all(c.segment_end for c in chunks if c.last)


def test_a_segment_is_cut_as_soon_as_it_ends():
    buffer = FrameBuffer(Chunks(4, 25))
    chunks = buffer.push(np.zeros((10, 2), np.float32), segment_end=True)
    assert [(len(c.frames), c.segment_end) for c in chunks] == [(4, False), (6, True)]
    assert len(buffer.finish().frames) == 0


def test_a_segment_whose_frames_all_left_still_ends():
    buffer = FrameBuffer(Chunks(4, 4))
    assert [c.segment_end for c in buffer.push(np.zeros((4, 1), np.float32))] == [False]
    late = buffer.push(np.zeros((0, 1), np.float32), segment_end=True)
    assert [(len(c.frames), c.segment_end) for c in late] == [(0, True)]


def frames(*numbers):
    return np.array(numbers)[:, None]


def test_frames_wait_until_they_fill_a_chunk():
    gate = FrameGate((2, 3))
    pushed = [gate.push(frames(number), number == 8, now_s=0.001 * number) for number in range(9)]
    assert [None if out is None else out.flatten().tolist() for out in pushed] == [
        *(None, [0, 1], None, None, [2, 3, 4], None, None, [5, 6, 7], [8])
    ]
    gate = FrameGate((2, 3))
    assert gate.push(frames(0, 1, 2, 3), False, 0.0).flatten().tolist() == [0, 1, 2, 3]
    assert gate.push(frames(4), False, 0.0).flatten().tolist() == [4], "one was missing to 2 + 3"
    assert gate.push(None, False, 9.0) is None and gate.push(None, True, 9.0) is None


def test_slow_frames_wait_for_no_chunk():
    gate = FrameGate((4, 25), longest_s=0.5)
    assert gate.push(frames(0), False, 1.0) is None and gate.push(frames(1), False, 1.4) is None
    assert gate.push(None, False, 1.5).flatten().tolist() == [0, 1]
    assert gate.push(frames(2), False, 9.0) is None, "it waits from then on"
    assert gate.push(None, True, 9.1).flatten().tolist() == [2]
