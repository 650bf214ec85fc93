"""What a client receives: every response complete, numbered and placed; one end."""

import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import pytest

from tritone import deploy_reader
from tritone.answer import Answer
from tritone.request import read_request
from tritone.timeline import Timeline

DEPLOY = deploy_reader.load(Path(__file__).parents[3] / "model_repository" / "smoltalk" / "deploy.yaml")
RATE_HZ = 24000
USAGE = {
    "thinker": {"prompt_tokens": 7, "completion_tokens": 3, "cached_tokens": 2},
    "talker": {"prompt_tokens": 90, "completion_tokens": 11, "codec_frames": 10},
}
REQUEST = read_request({"text_input": "Hi"}, {}, DEPLOY, drawn_seed=5)


def answer(**changes):
    responses = []
    made = Answer(
        dataclasses.replace(REQUEST, **changes),
        RATE_HZ,
        lambda tensors, final: responses.append((tensors, final)),
    )
    return made, responses


def tone(samples, offset=0):
    return (0.5 * np.sin(2 * np.pi * 440 * (np.arange(samples) + offset) / RATE_HZ)).astype(np.float32)


async def fill(made):
    made.text("Hello ", 2)
    await made.audio(tone(300))
    made.text("you.", 1)
    await made.audio(tone(500, 300))
    await made.audio(np.zeros(0, np.float32))
    made.finish_reasons.update(text="stop", audio="stop")
    await made.done(USAGE, "thinker")


async def test_a_stream_is_numbered_placed_and_ends_once():
    made, responses = answer(stream=True)
    await fill(made)
    assert [str(t["event"][0], "utf8") for t, _ in responses] == ["text", "audio", "text", "audio", "done"]
    assert [int(t["index"][0]) for t, _ in responses] == [0, 1, 2, 3, 4]
    assert [final for _, final in responses] == [False] * 4 + [True]
    assert b"".join(t["text_output"][0] for t, _ in responses) == b"Hello you."
    assert [int(t["sample_offset"][0]) for t, _ in responses if "sample_offset" in t] == [0, 300]
    assert all(int(t["sample_rate"][0]) == RATE_HZ for t, _ in responses if "audio_output" in t)


async def test_a_whole_answer_is_one_response_with_the_same_content():
    streamed, parts = answer(stream=True, audio_format="f32")
    whole, (one,) = answer(stream=False, audio_format="f32"), (None,)
    await fill(streamed)
    made, responses = whole
    await fill(made)
    ((one, final),) = responses
    assert final and one["event"][0] == b"done" and one["text_output"][0] == b"Hello you."
    joined = np.concatenate([t["audio_f32"] for t, _ in parts if "audio_f32" in t])
    assert np.array_equal(one["audio_f32"], joined) and len(joined) == 800


async def test_done_tells_reasons_usage_seed_and_timings_if_asked():
    made, responses = answer(stream=True, return_timings=True, return_num_input_tokens=True)
    await fill(made)
    last = responses[-1][0]
    info = json.loads(last["info"][0])
    assert json.loads(last["finish_reason"][0]) == {"text": "stop", "audio": "stop"}
    assert info["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "codec_frames": 10,
        "audio_s": round(800 / RATE_HZ, 6),
        "stages": USAGE,
    }
    assert info["seed"] == 5
    assert info["timings"]["stages"] == {} and "trace_id" not in info
    assert 0 <= info["timings"]["ttft_s"] <= info["timings"]["ttfp_s"] <= info["timings"]["total_s"]
    assert int(last["num_input_tokens"][0]) == 7
    made, responses = answer(stream=True)
    await fill(made)
    assert "timings" not in json.loads(responses[-1][0]["info"][0])


@pytest.mark.parametrize(("stream", "counts"), [(True, [2, 1]), (False, [3])])
async def test_output_tokens_are_counted_where_they_are_sent(stream, counts):
    made, responses = answer(stream=stream, return_num_output_tokens=True)
    await fill(made)
    assert [int(t["num_output_tokens"][0]) for t, _ in responses if "num_output_tokens" in t] == counts


async def test_times_count_from_when_the_request_was_received():
    responses = []
    request = dataclasses.replace(REQUEST, stream=True, return_timings=True)
    timeline = Timeline(time.monotonic() - 5)
    made = Answer(request, RATE_HZ, lambda tensors, final: responses.append(tensors), timeline=timeline)
    made.text("Hello")
    await made.done({}, trace_id="ab" * 16)
    info = json.loads(responses[-1]["info"][0])
    assert info["trace_id"] == "ab" * 16
    assert 5 <= info["timings"]["ttft_s"] <= info["timings"]["total_s"] < 15
    assert "ttfp_s" not in info["timings"], "nothing was heard"


async def test_without_a_writer_no_stage_speaks_for_the_text():
    made, responses = answer(stream=True, return_num_input_tokens=True)
    await made.done({"talker": {"prompt_tokens": 90, "completion_tokens": 11}})
    last = responses[-1][0]
    usage = json.loads(last["info"][0])["usage"]
    assert set(usage) == {"audio_s", "stages"} and usage["stages"]["talker"]["prompt_tokens"] == 90
    assert int(last["num_input_tokens"][0]) == 0


async def test_text_that_came_together_goes_out_together_and_before_all_else():
    made, responses = answer(stream=True, return_num_output_tokens=True)
    for word in ("one ", "two "):
        made.text(word, 1)
    assert not responses
    made.flush()
    made.flush()
    for word in ("three ", "four"):
        made.text(word, 1)
    await made.audio(tone(300))
    await made.done(USAGE, "thinker")
    texts = [(str(t["event"][0], "utf8"), t["text_output"][0]) for t, _ in responses]
    assert texts == [("text", b"one two "), ("text", b"three four"), ("audio", b""), ("done", b"")]
    assert [int(t["num_output_tokens"][0]) for t, _ in responses if "num_output_tokens" in t] == [2, 2]


async def test_text_that_was_not_sent_is_made_again():
    made, responses = answer(stream=True)
    made.text("one ", 1)
    made.flush()
    made.text("two ", 1)
    made.rewind()
    for word in ("one ", "two ", "three"):
        made.text(word, 1)
    await made.done(USAGE, "thinker")
    assert b"".join(t["text_output"][0] for t, _ in responses) == b"one two three"
    assert made.num_text_tokens == 3
