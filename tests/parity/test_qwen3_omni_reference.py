"""The reference's answers are what the parity tests take them for: clear, repeatable, ended as they say."""

from __future__ import annotations

import io

import numpy as np
import pytest

for package in ("transformers", "torchvision", "av", "PIL"):
    pytest.importorskip(package)

import qwen3_omni_oracle as oracle  # noqa: E402
import qwen3_omni_reference as reference  # noqa: E402
from qwen3_omni_oracle import CASES  # noqa: E402

SAMPLES_PER_FRAME, MISSING_SAMPLES = 1920, 555


@pytest.mark.parametrize("name", CASES)
def test_every_choice_is_clear(name):
    """By a hundred times the rounding noise of the logits, which is below 6e-6."""
    assert oracle.answer(name).margins.least >= reference.CLEAR


@pytest.mark.parametrize("name", CASES)
def test_an_answer_has_the_shape_of_its_limits(name):
    case, answer = CASES[name], oracle.answer(name)
    assert answer.codes.shape[0] == 16 and 0 <= answer.codes.min() <= answer.codes.max() < 64
    assert len(answer.waveform) == SAMPLES_PER_FRAME * answer.codes.shape[1] - MISSING_SAMPLES
    assert 0.01 < np.abs(answer.waveform).max() < 1
    assert len(answer.text_ids) <= case.thinker_max_tokens
    assert answer.codes.shape[1] <= case.talker_max_tokens - 1
    assert (answer.thinker_finish == "length") <= (len(answer.text_ids) == case.thinker_max_tokens)
    assert (answer.talker_finish == "length") <= (answer.codes.shape[1] == case.talker_max_tokens - 1)


def test_the_named_ends_are_reached():
    stops, cut = oracle.answer("stops"), oracle.answer("cut")
    assert (stops.thinker_finish, stops.talker_finish) == ("stop", "stop")
    assert len(stops.text_ids) < 40 and 10 <= stops.codes.shape[1] <= 60
    assert cut.thinker_finish == "length" and len(cut.text_ids) == 24
    assert oracle.answer("long").codes.shape[1] == 47  # more than two chunks of 4 and 25


def test_the_repetition_penalty_changes_the_codes():
    plain, penalised = oracle.answer("text"), oracle.answer("penalty")
    assert np.array_equal(plain.text_ids, penalised.text_ids)
    assert not np.array_equal(plain.codes, penalised.codes)


def test_answers_differ():
    """Media reach the answer: no two cases of different input say the same."""
    codes = {name: oracle.answer(name).codes.tobytes() for name in CASES}
    assert len(set(codes.values())) == len(CASES)


def test_a_second_run_gives_the_same():
    kept, fresh = oracle.answer("image_audio"), oracle._reference().answer(CASES["image_audio"])
    assert np.array_equal(kept.text_ids, fresh.text_ids) and np.array_equal(kept.codes, fresh.codes)
    assert np.abs(kept.waveform - fresh.waveform).max() <= 1e-6


def test_files_decode_to_what_the_reference_saw_and_heard():
    import av
    import soundfile
    from PIL import Image

    case = CASES["image_audio"]
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(case.image_files[0]))), case.images[0])
    samples, rate_hz = soundfile.read(io.BytesIO(case.audio_files[0]), dtype="int16")
    assert rate_hz == 16000 and np.array_equal(samples, case.audios[0])
    [video], [file] = CASES["video_audio"].videos, CASES["video_audio"].video_files
    with av.open(io.BytesIO(file)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert float(container.streams.video[0].average_rate) == video.fps
    assert np.array_equal(np.stack(frames), video.frames)
    with av.open(io.BytesIO(file)) as container:
        heard = [frame.to_ndarray()[0] for frame in container.decode(audio=0)]
        assert container.streams.audio[0].rate == 16000
    assert np.array_equal(np.concatenate(heard), video.sound)


def test_frames_are_taken_evenly():
    def places(total, fps):
        frames = np.arange(total, dtype=np.uint8)[:, None, None, None]
        taken, rate_hz = reference.sampled(reference.Video(frames, fps))
        return taken.ravel().tolist(), rate_hz

    assert places(12, 8) == ([0, 4, 7, 11], pytest.approx(4 / 1.5))  # 1.5 s: not fewer than four
    assert places(10, 5) == ([0, 3, 6, 9], 2.0)
    assert places(75, 25) == ([0, 15, 30, 44, 59, 74], 2.0)
    assert places(3, 1) == ([0, 2], pytest.approx(2 / 3))  # no more than there are, and an even number
