"""Requests are exactly the tensors of the contract, and only what was given."""

import json

import numpy as np
import pytest

from tritone_client import InvalidRequest
from tritone_client.request import build_request


def text(request, name: str) -> str:
    assert request.inputs[name].shape == (1,)
    return request.inputs[name][0].decode()


def test_prompt_alone_sends_the_prompt_and_asks_for_streaming():
    request = build_request("Grüße")
    assert set(request.inputs) == {"text_input", "stream"}
    assert text(request, "text_input") == "Grüße"
    assert request.inputs["stream"].dtype == np.bool_ and request.inputs["stream"].tolist() == [True]
    assert request.parameters == {}
    assert request.client_timeout_s is None


def test_every_option_goes_to_its_input():
    request = build_request(
        messages=[{"role": "user", "content": "hi"}],
        modalities=["text", "audio"],
        speaker="Ethan",
        language="de",
        instructions="whisper",
        audio_format="f32",
        return_timings=True,
        deadline_s=1.5,
        parameters={"traceparent": "00-1", "codec_chunk_frames": 25},
    )
    assert json.loads(text(request, "messages")) == [{"role": "user", "content": "hi"}]
    assert text(request, "modalities") == "text,audio"
    assert text(request, "speaker") == "Ethan"
    assert text(request, "language") == "de"
    assert text(request, "instructions") == "whisper"
    assert text(request, "audio_format") == "f32"
    assert request.inputs["return_timings"].tolist() == [True]
    assert request.parameters == {"traceparent": "00-1", "codec_chunk_frames": 25, "deadline_ms": 1500}
    assert request.client_timeout_s == 2.0


def test_sampling_shorthands_join_sampling_and_win():
    request = build_request(
        "hi",
        sampling={"top_p": 0.9, "seed": 1, "talker": {"top_k": 5}},
        max_tokens=8,
        temperature=0.0,
        seed=2,
    )
    assert json.loads(text(request, "sampling_parameters")) == {
        "top_p": 0.9,
        "talker": {"top_k": 5},
        "max_tokens": 8,
        "temperature": 0.0,
        "seed": 2,
    }


def test_files_are_sent_as_they_are(tmp_path):
    content = b"RIFF\x00\x01\x00\x00"  # trailing zeros must survive
    path = tmp_path / "question.wav"
    path.write_bytes(content)
    assert build_request(audio=path).inputs["audio"].tolist() == [content]
    assert build_request(audio=str(path)).inputs["audio"].tolist() == [content]
    assert build_request(audio=content).inputs["audio"].tolist() == [content]
    both = build_request(audio=[path, b"second"], image=b"png", video=b"mp4").inputs
    assert both["audio"].tolist() == [content, b"second"]
    assert both["image"].tolist() == [b"png"] and both["video"].tolist() == [b"mp4"]


def test_several_files_or_a_system_text_make_a_conversation():
    part = {"type": "text", "text": "hi"}
    request = build_request("hi", videos=[b"v"], audios=(b"a", b"b"), images=[b"i"])
    kinds = ["image", "audio", "audio", "video"]
    assert json.loads(text(request, "messages")) == [
        {"role": "user", "content": [*({"type": kind} for kind in kinds), part]}
    ]
    assert request.inputs["audio"].tolist() == [b"a", b"b"] and "text_input" not in request.inputs
    system = {"role": "system", "content": "be brief"}
    asked = {"role": "user", "content": "hi"}
    assert json.loads(text(build_request("hi", system="be brief"), "messages")) == [system, asked]
    silent = build_request(audio=(np.zeros(3, np.float32), 16_000), system="be brief")
    assert json.loads(text(silent, "messages")) == [system, {"role": "user", "content": [{"type": "audio"}]}]


def test_one_file_goes_along_with_the_prompt():
    one = build_request("hi", images=[b"i"])
    assert text(one, "text_input") == "hi" and "messages" not in one.inputs
    assert one.inputs["image"].tolist() == [b"i"]
    assert "image" not in build_request("hi", images=[], audios=[]).inputs


def test_messages_of_the_caller_stay_as_they_are():
    messages = [{"role": "user", "content": [{"type": "audio"}, {"type": "image"}]}]
    request = build_request(messages=messages, images=[b"i"], audio=b"a")
    assert json.loads(text(request, "messages")) == messages


def test_parameters_with_a_name_of_their_own():
    request = build_request(
        "hi",
        video=b"v",
        use_audio_in_video=True,
        initial_codec_chunk_frames=2,
        codec_chunk_frames=10,
        codec_chunk_growth=1.5,
        parameters={"codec_chunk_frames": 3, "traceparent": "00-1"},
    )
    assert request.parameters == {
        "traceparent": "00-1",
        "use_audio_in_video": True,
        "initial_codec_chunk_frames": 2,
        "codec_chunk_frames": 10,
        "codec_chunk_growth": "1.5",
    }
    assert build_request("hi", codec_chunk_growth=2.0).parameters == {"codec_chunk_growth": 2}
    assert build_request("hi", video=b"v", use_audio_in_video=False).parameters == {
        "use_audio_in_video": False
    }


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (np.array([0.5, -1.0], dtype=np.float64), [0.5, -1.0]),
        (np.array([16384, -32768], dtype=np.int16), [0.5, -1.0]),
        ([0.5, -1.0], [0.5, -1.0]),
    ],
    ids=["float64", "int16", "list"],
)
def test_raw_audio_becomes_float32_with_its_rate(samples, expected):
    inputs = build_request(audio=(samples, 16_000)).inputs
    assert inputs["audio_input"].dtype == np.float32 and inputs["audio_input"].tolist() == expected
    assert inputs["audio_input_rate"].dtype == np.int32 and inputs["audio_input_rate"].tolist() == [16_000]
    assert "audio" not in inputs


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "nothing is asked"),
        ({"prompt": "a", "messages": []}, "both prompt and messages"),
        ({"prompt": "a", "audio": "/no/such/file.wav"}, "cannot read the audio file '/no/such/file.wav'"),
        ({"prompt": "a", "images": ["/no/such/file.png"]}, "cannot read the image file '/no/such/file.png'"),
        ({"prompt": "a", "image": b"x", "images": [b"y"]}, "both image and images are given"),
        ({"prompt": "a", "videos": "film.mp4"}, "videos is one file; give a list of files, or video"),
        ({"messages": [], "system": "a"}, "both system and messages"),
        ({"system": "a"}, "nothing is asked"),
        ({"prompt": "a", "use_audio_in_video": True}, "there is no video"),
        ({"audio": (np.zeros((2, 3)), 16_000)}, "shape [2, 3]"),
        ({"audio": (np.zeros(0), 16_000)}, "shape [0]"),
        ({"audio": (np.zeros(3, dtype=np.int32), 16_000)}, "int32"),
        ({"audio": (np.zeros(3), 0)}, "0 Hz"),
        ({"prompt": "a", "audio_format": "mp3"}, "use one of s16, f32"),
        ({"prompt": "a", "deadline_s": 0}, "deadline_s is 0"),
        ({"prompt": "a", "deadline_s": float("inf")}, "deadline_s is inf"),
        ({"prompt": "a", "parameters": {"x": 1.5}}, "'x' is a float"),
        ({"prompt": "a", "parameters": {"timeout": 1}}, "belongs to Triton"),
        ({"prompt": "a", "sampling": {"top_p": float("nan")}}, "sampling cannot be JSON"),
    ],
)
def test_senseless_requests_are_refused_before_sending(arguments, sentence):
    with pytest.raises(InvalidRequest) as error:
        build_request(**arguments)
    assert sentence in str(error.value)


def test_half_characters_are_refused():
    with pytest.raises(InvalidRequest, match="text_input holds surrogates"):
        build_request("caf\udce9")
