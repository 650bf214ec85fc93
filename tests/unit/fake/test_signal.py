"""Sound that names its request and its place: every way to spoil it is told apart."""

import numpy as np
import pytest

from tritone.audio import to_s16
from tritone.pipelines.fake.signal import FRAME_SAMPLES, MAX_NUMBER, decode, encode, voice_of

VOICE, OTHER = voice_of(7), voice_of(8)


def frames(numbers, voice=VOICE):
    return np.array([[voice, number] for number in numbers], np.int32).reshape(-1, 2)


def sound(numbers, voice=VOICE):
    return encode(frames(numbers, voice))


@pytest.mark.parametrize("as_sent", [lambda x: x, to_s16], ids=["f32", "s16"])
def test_every_voice_and_number_comes_back(as_sent):
    rng = np.random.default_rng(3)
    said = rng.integers(0, MAX_NUMBER + 1, (500, 2))
    said[:2] = [[0, 0], [MAX_NUMBER, MAX_NUMBER]]
    samples = encode(said)
    assert samples.dtype == np.float32 and len(samples) == 500 * FRAME_SAMPLES and abs(samples).max() < 1
    heard = decode(as_sent(samples))
    assert np.array_equal(np.stack([heard.voices, heard.numbers], 1), said) and heard.cut_samples == 0


def test_the_order_of_encoding_in_pieces_does_not_matter():
    assert np.array_equal(np.concatenate([sound(range(3)), sound(range(3, 9))]), sound(range(9)))


def test_a_right_answer_has_no_faults():
    assert decode(sound(range(30))).faults(VOICE, 30) == {}
    assert decode(sound(range(30))).faults(VOICE) == {}
    assert decode(np.zeros(0, np.float32)).faults(VOICE, 0) == {}


SPOILT = {
    "lost": ([*range(5), *range(6, 10)], "frames 5"),
    "truncated": (range(7), "frames 7, 8, 9"),
    "doubled": ([*range(5), 4, *range(5, 10)], "frames 4"),
    "reordered": ([0, 1, 3, 2, *range(4, 10)], "frames 2"),
    "beyond": (range(11), "frames 10"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_what_the_way_did_to_the_frames_is_told(kind):
    numbers, which = SPOILT[kind]
    assert decode(sound(numbers)).faults(VOICE, 10) == {kind: which}


def test_a_frame_of_another_request_is_told():
    samples = np.concatenate([sound(range(4)), sound([4], OTHER), sound(range(4, 10))])
    assert decode(samples).faults(VOICE, 10) == {"foreign": "frames 4"}
    assert set(decode(sound(range(10), OTHER)).faults(VOICE, 10)) == {"foreign", "truncated"}


def test_lost_and_changed_samples_are_told():
    samples = sound(range(10))
    spoilt = samples.copy()
    spoilt[3 * FRAME_SAMPLES + 17] += 0.001
    assert decode(spoilt).faults(VOICE, 10) == {"damaged": "frames 3", "lost": "frames 3"}
    without_one = decode(np.delete(samples, 5 * FRAME_SAMPLES + 9)).faults(VOICE, 10)
    assert "damaged" in without_one and without_one["cut"] == f"{FRAME_SAMPLES - 1} samples at the end"
    silent = decode(np.zeros(2 * FRAME_SAMPLES, np.int16)).faults(VOICE, 2)
    assert set(silent) == {"damaged", "truncated"}


def test_two_seeds_of_a_run_never_share_a_voice():
    assert len({voice_of(seed) for seed in range(100_000)}) == 100_000
    assert all(0 <= voice_of(seed) <= MAX_NUMBER for seed in (0, (1 << 63) - 1))
