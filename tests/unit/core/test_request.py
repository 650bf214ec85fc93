"""Requests: defaults are filled in, bad input is one sentence with field, value and cure."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from tritone import contract, deploy_reader, pbtxt
from tritone.deploy import Limits
from tritone.errors import InvalidRequest, TritoneError, Unsupported
from tritone.request import check_supported, read_request

DEPLOY = deploy_reader.load(Path(__file__).parents[3] / "model_repository" / "smoltalk" / "deploy.yaml")
SEES = dataclasses.replace(
    DEPLOY,
    pipeline=dataclasses.replace(
        DEPLOY.pipeline, accepts=(*DEPLOY.pipeline.accepts, contract.IMAGE, contract.VIDEO)
    ),
    limits=Limits(audio_bytes=3, image_bytes=4, video_bytes=5),
)


def read(parameters=None, deploy=DEPLOY, **values):
    request = read_request(values, parameters or {}, deploy, drawn_seed=41)
    check_supported(request, deploy.pipeline)
    return request


def test_defaults():
    request = read(text_input="Hi")
    assert request.messages == ({"role": "user", "content": [{"type": "text", "text": "Hi"}]},)
    assert request.modalities == ("text", "audio") and not request.stream
    assert request.seed == request.sampling["thinker"].seed == 41
    assert request.deadline_s == DEPLOY.deadline_s and request.chunks == DEPLOY.chunks


def test_sampling_without_a_stage_goes_to_the_writer_and_a_stage_may_be_named():
    shared = read(text_input="Hi", sampling_parameters='{"temperature": "0.7", "max_tokens": 5, "stop": "."}')
    named = read(
        text_input="Hi",
        sampling_parameters='{"thinker": {"temperature": 0.7, "max_tokens": 5, "stop": ["."]}}',
    )
    assert shared.sampling == named.sampling
    assert shared.sampling["thinker"].temperature == 0.7


@pytest.mark.parametrize("where", ["parameter", "json"])
def test_the_seed_may_come_either_way(where):
    request = (
        read({"seed": 9}, text_input="Hi")
        if where == "parameter"
        else read(text_input="Hi", sampling_parameters='{"seed": 9}')
    )
    assert request.seed == request.sampling["thinker"].seed == 9


def test_audio_becomes_a_part_of_the_turn():
    request = read(text_input="What is this?", audio=[b"RIFF"])
    assert [part["type"] for part in request.messages[0]["content"]] == ["audio", "text"]
    raw = read(audio_input=np.zeros(10, np.float32), audio_input_rate=16000)
    assert raw.parts("audio") == 1


def test_parameters_reach_the_request():
    request = read({"deadline_ms": 1500, "codec_chunk_frames": 9}, text_input="Hi")
    assert request.deadline_s == 1.5 and request.chunks.codec_chunk_frames == 9
    assert request.chunks.codec_chunk_growth == DEPLOY.chunks.codec_chunk_growth


@pytest.mark.parametrize(
    ("sent", "growth"), [(2, 2.0), ("1.5", 1.5), (1.5, 1.5), (0, 0.0), ("0", 0.0), ("1", 1.0)]
)
def test_growth_may_be_a_whole_number_or_text(sent, growth):
    assert read({"codec_chunk_growth": sent}, text_input="Hi").chunks.codec_chunk_growth == growth


def test_pictures_and_films_come_before_the_text_in_the_order_of_the_kinds():
    request = read(deploy=SEES, text_input="What?", video=[b"v"], audio=[b"a"], image=[b"i", b"j"])
    kinds = [part["type"] for part in request.messages[0]["content"]]
    assert kinds == ["image", "image", "audio", "video", "text"]
    assert request.media == {"image": [b"i", b"j"], "audio": [b"a"], "video": [b"v"]}


@pytest.mark.parametrize(("kind", "most"), [("audio", 3), ("image", 4), ("video", 5)])
def test_a_file_may_be_as_large_as_its_limit_and_no_larger(kind, most):
    read(deploy=SEES, **{kind: [b"x" * most, b"x"]})
    # Said before anything else is looked at.
    bad = {"messages": "[", "text_input": "also", kind: [b"x", b"x" * (most + 1)]}
    with pytest.raises(InvalidRequest) as refusal:
        read(deploy=SEES, **bad)
    assert refusal.value.what == f"{kind}[1] has {most + 1} bytes"
    assert refusal.value.cure == f"send at most {most} bytes a file"
    with pytest.raises(InvalidRequest, match=f"^{kind} has {most + 1} bytes"):
        read(deploy=SEES, **{kind: [b"x" * (most + 1)]})


def test_the_sound_of_a_video_is_heard_only_if_asked_for():
    assert not read(deploy=SEES, video=[b"v"]).use_audio_in_video
    for value in (True, False):
        request = read({"use_audio_in_video": value}, deploy=SEES, video=[b"v"])
        assert request.use_audio_in_video is value
    with pytest.raises(Unsupported, match="use_audio_in_video") as refusal:
        read({"use_audio_in_video": True}, text_input="Hi")
    assert "takes no video" in refusal.value.what and refusal.value.cure


def test_limits_of_media_are_published_where_media_is_taken():
    def published(deploy):
        parameters = pbtxt.render(deploy)[deploy.pipeline.name].parameters
        names = {kind: [name for name in parameters if kind in name] for kind in ("audio", "image", "video")}
        return names, {name: value.string_value for name, value in parameters.items()}

    names, values = published(SEES)
    assert sorted(names["image"]) == ["max_image_bytes", "max_image_pixels"]
    assert sorted(names["video"]) == ["max_video_bytes", "max_video_s"]
    assert (values["max_image_bytes"], values["max_image_pixels"]) == ("4", "64000000")
    assert (values["max_video_bytes"], values["max_video_s"]) == ("5", "300")
    names, values = published(DEPLOY)
    assert names["image"] == names["video"] == [] and values["max_media_parts"] == "16"


USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("values", "parameters", "words"),
    [
        ({}, {}, ["no prompt", "text_input"]),
        ({"text_input": ""}, {}, ["text_input", "empty"]),
        ({"text_input": " \n"}, {}, ["text_input", "empty"]),
        ({"text_input": "x" * 70000}, {}, ["text_input", "70000", "16384"]),
        ({"text_input": "a", "messages": "[]"}, {}, ["text_input", "messages", "both"]),
        ({"messages": "nope"}, {}, ["messages", "JSON"]),
        ({"messages": "[]"}, {}, ["messages"]),
        ({"messages": json.dumps([{"role": "robot", "content": "x"}])}, {}, ["robot", "assistant"]),
        ({"messages": json.dumps([{"role": "user", "content": ""}])}, {}, ["messages[0]", "empty"]),
        ({"messages": json.dumps([{"role": "user", "content": [{"type": "smell"}]}])}, {}, ["smell"]),
        (
            {"messages": json.dumps([{"role": "user", "content": [{"type": "audio"}]}])},
            {},
            ["1 audio", "0 are"],
        ),
        ({"messages": json.dumps([USER]), "audio": [b"x"]}, {}, ["0 audio", "1 are"]),
        ({"text_input": "a", "modalities": "text,smell"}, {}, ["modalities", "smell"]),
        ({"text_input": "a", "audio_format": "mp3"}, {}, ["audio_format", "mp3"]),
        ({"text_input": "a", "audio": [b"x"] * 40}, {}, ["40 media", "16"]),
        ({"audio_input": np.zeros(3, np.float32)}, {}, ["audio_input_rate is missing"]),
        ({"text_input": "a", "sampling_parameters": "{"}, {}, ["sampling_parameters", "JSON"]),
        ({"text_input": "a", "sampling_parameters": '{"temperature": "hot"}'}, {}, ["temperature", "'hot'"]),
        ({"text_input": "a", "sampling_parameters": '{"max_tokens": 0}'}, {}, ["max_tokens", "0", "from 1"]),
        ({"text_input": "a", "sampling_parameters": '{"max_tokens": -3}'}, {}, ["max_tokens", "-3"]),
        ({"text_input": "a", "sampling_parameters": '{"max_token": 3}'}, {}, ["max_token", "max_tokens"]),
        ({"text_input": "a", "sampling_parameters": '{"top_p": 0}'}, {}, ["top_p", "above 0"]),
        (
            {"text_input": "a", "sampling_parameters": '{"talker": {"seed": 3}}'},
            {},
            ["talker", "does not sample"],
        ),
        ({"text_input": "a"}, {"deadline_ms": 0}, ["deadline_ms", "0"]),
        ({"text_input": "a"}, {"deadline_ms": 10**9}, ["deadline_ms", "600000"]),
        ({"text_input": "a", "session": "x"}, {}, ["session", "reserved"]),
        ({"messages": '[{"role": "user", "content": "\\ud83d"}]'}, {}, ["messages", "surrogate"]),
        ({"messages": "[" * 15000}, {}, ["messages", "JSON"]),
        ({"text_input": "a", "sampling_parameters": "[" * 15000}, {}, ["sampling_parameters", "JSON"]),
        (
            {"messages": json.dumps([{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}])},
            {},
            ["content[0]", "'x'"],
        ),
        ({"text_input": "a", "speaker": "heartx" * 100}, {}, ["speaker", "600", "256"]),
        (
            {"text_input": "a", "sampling_parameters": '{"temperature": 1' + "0" * 400 + "}"},
            {},
            ["temperature", "sensible size"],
        ),
        ({"text_input": "a"}, {"deadline_ms": "soon"}, ["deadline_ms", "soon"]),
        ({"text_input": "a"}, {"deadlin_ms": 5}, ["deadlin_ms", "did you mean 'deadline_ms'"]),
        ({"text_input": "a"}, {"max_tokens": 5}, ["max_tokens", "sampling_parameters"]),
        ({"text_input": "a"}, {"codec_chunk_frames": 0}, ["codec_chunk_frames", "0"]),
        ({"text_input": "a"}, {"codec_chunk_frames": True}, ["codec_chunk_frames", "True", "int"]),
        ({"text_input": "a"}, {"codec_chunk_growth": "0.5"}, ["codec_chunk_growth", "'0.5'", "0 or 1"]),
        ({"text_input": "a"}, {"codec_chunk_growth": -1}, ["codec_chunk_growth", "-1"]),
        ({"text_input": "a"}, {"codec_chunk_growth": "nan"}, ["codec_chunk_growth", "'nan'"]),
        ({"text_input": "a"}, {"codec_chunk_growth": "fast"}, ["codec_chunk_growth", "'fast'"]),
        ({"text_input": "a"}, {"codec_chunk_growth": 10**400}, ["codec_chunk_growth", "0 or 1 to 4096"]),
        ({"text_input": "a"}, {"codec_chunk_growth": True}, ["codec_chunk_growth", "numeric string"]),
        ({"text_input": "a"}, {"use_audio_in_video": 1}, ["use_audio_in_video", "1", "bool"]),
        ({"text_input": "a"}, {"use_audio_in_video": "true"}, ["use_audio_in_video", "'true'", "bool"]),
        ({"text_input": "a"}, {"seed": -1}, ["seed", "-1"]),
    ],
)
def test_bad_input_names_field_value_and_cure(values, parameters, words):
    with pytest.raises(InvalidRequest) as refusal:
        read(parameters, **values)
    assert all(word in refusal.value.message for word in words), refusal.value.message
    assert refusal.value.cure


def test_media_without_a_stage_is_unsupported():
    with pytest.raises(Unsupported, match="image"):
        read(messages=json.dumps([{"role": "user", "content": [{"type": "image"}]}]), image=[b"x"])


def plan(**values):
    return DEPLOY.pipeline.plan(read(**values))


def test_text_only_starts_the_thinker_alone():
    assert set(plan(text_input="Hi", modalities="text")) == {"thinker"}


def test_speech_in_starts_the_ears():
    assert set(plan(audio=[b"RIFF"])) == {"ears", "thinker", "talker", "code2wav"}


def test_words_of_the_assistant_are_spoken_without_thinking():
    messages = json.dumps([{"role": "assistant", "content": "Say this."}])
    calls = plan(messages=messages)
    assert set(calls) == {"talker", "code2wav"} and calls["talker"].inputs["text"] == "Say this."
    with pytest.raises(InvalidRequest, match="ask for audio"):
        plan(messages=messages, modalities="text")


def test_an_unknown_voice_lists_the_known():
    with pytest.raises(TritoneError, match="'Darth'") as refusal:
        plan(text_input="Hi", speaker="Darth")
    assert "heart" in refusal.value.cure
    assert plan(text_input="Hi", speaker="HEART")["talker"].settings["speaker"] == "heart"


def test_audio_outputs_that_nobody_requests_start_no_speech():
    def read_for(wanted, **values):
        return read_request(values, {}, DEPLOY, 1, wanted).modalities

    assert read_for({"text_output", "info"}, text_input="Hi") == ("text",)
    assert read_for({"text_output", "audio_f32"}, text_input="Hi") == ("text", "audio")
    with pytest.raises(InvalidRequest, match="no audio output is requested"):
        read_for({"text_output"}, text_input="Hi", modalities="audio")
