import numpy as np
import pytest
from made import failed, record

from tritone_bench.playback import Arrival
from tritone_bench.record import LeadingSilence


def test_the_measures_of_a_request():
    one = record(
        end_s=4.5,
        text=(0.5, 0.6, 1.5),
        audio=(Arrival(1.0, 1.0), Arrival(1.5, 1.0), Arrival(4.0, 1.0)),
        usage={"completion_tokens": 11},
        leading_silence_s=0.2,
    ).figures()
    assert (one.ttft_s, one.tpot_s, one.text_e2el_s) == (0.5, pytest.approx(0.1), 1.5)
    assert one.longest_itl_s == pytest.approx(0.9)
    assert (one.ttfp_s, one.longest_gap_s, one.audio_e2el_s, one.e2el_s) == (1.0, 2.5, 4.0, 4.5)
    assert (one.audio_s, one.rtf, one.num_chunks, one.leading_silence_s) == (3.0, 1.5, 3, 0.2)
    assert (one.underrun_s, one.num_underruns) == (1.0, 1)
    assert one.modalities == ("audio", "text") and one.failure is None


def test_what_a_request_does_not_have_is_none():
    text = record(audio=(), finish_reasons={"text": "stop"}).figures()
    assert (text.ttfp_s, text.rtf, text.underrun_s, text.longest_gap_s, text.num_chunks) == (None,) * 4 + (0,)
    assert text.modalities == ("text",)
    sound = record(text=(), audio=(Arrival(1.0, 1.0),), usage={}).figures()
    assert (sound.ttft_s, sound.tpot_s, sound.text_e2el_s, sound.underrun_s) == (None,) * 4
    assert sound.num_chunks == 1 and sound.longest_gap_s is None


@pytest.mark.parametrize(
    ("text", "tokens"),
    [((0.5,), 20), ((0.5, 0.9), 1), ((0.5, 0.9), None), ((), 5)],
    ids=["in one piece", "one token", "not counted", "no text"],
)
def test_tpot_is_not_guessed(text, tokens):
    usage = {} if tokens is None else {"completion_tokens": tokens}
    assert record(text=text, usage=usage).figures().tpot_s is None


def test_a_failed_request_has_only_its_time():
    one = failed(3, "INTERNAL").figures()
    assert (one.number, one.failure, one.e2el_s, one.ttft_s, one.audio_s) == (3, "INTERNAL", 0.1, None, 0.0)


@pytest.mark.parametrize("dtype", [np.int16, np.float32])
def test_leading_silence_is_that_of_the_sound_itself(dtype):
    scale = 32768 if dtype == np.int16 else 1
    quiet, loud = (np.full(n, level * scale, dtype) for n, level in ((1000, 0.002), (500, -0.5)))
    silence = LeadingSilence()
    silence.add(quiet, 10_000)
    assert silence.seconds is None
    silence.add(np.concatenate([quiet, loud]), 10_000)
    silence.add(quiet, 10_000)  # a pause later is none of it
    assert silence.seconds == pytest.approx(0.2)
