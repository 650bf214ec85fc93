"""Qwen3-Omni on a real tritonserver, with the tiny checkpoint: equal to the reference, and tidy."""

import asyncio
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

for package in ("torch", "transformers", "torchvision", "av", "PIL"):
    pytest.importorskip(package)

import qwen3_omni_oracle as oracle  # noqa: E402
from qwen3_omni_oracle import CASES  # noqa: E402

from tritone_client import AudioChunk, Done, InvalidRequest, TextDelta  # noqa: E402
from waiting import PATIENCE_S, until  # noqa: E402

pytestmark = [pytest.mark.server, pytest.mark.weights]

PIPELINE = "qwen3_omni"
STAGES = {"thinker", "talker", "code2wav"}
ENDLESS = {  # greedy, and never at its end by itself
    "thinker": {"temperature": 0, "ignore_eos": True, "max_tokens": 2000},
    "talker": {"temperature": 0, "min_tokens": 3000, "repetition_penalty": 1.0},
}
ALL_OF_IT = 2000 + 3000


@pytest.fixture(scope="module")
def server(serve):
    oracle.checkpoint()
    return serve(PIPELINE)


def options_of(case):
    """What a client sends for a case of the oracle."""
    return {
        "messages": case.messages,
        "images": case.image_files,
        "audios": case.audio_files,
        "videos": case.video_files,
        "use_audio_in_video": case.use_audio_in_video or None,
        "speaker": case.speaker.upper(),
        "sampling": {
            "thinker": {"temperature": 0, "max_tokens": case.thinker_max_tokens},
            "talker": {
                "temperature": 0,
                "max_tokens": case.talker_max_tokens,
                "repetition_penalty": case.talker_repetition_penalty,
            },
        },
        "audio_format": "f32",
        "seed": 5,
    }


async def ask(client, case, **more):
    return await client.ask(None, **{**options_of(case), **more})


def assert_equal(answer, name, tolerance=1e-4):
    expected, done = oracle.answer(name), answer.done
    assert answer.text == expected.text
    assert answer.samples.shape == expected.waveform.shape
    assert np.abs(answer.samples - expected.waveform).max() <= tolerance
    assert done.finish_reasons["text"] == expected.thinker_finish
    cut = "length" in (expected.thinker_finish, expected.talker_finish)
    assert done.finish_reasons["audio"] == ("length" if cut else "stop")
    assert done.usage["prompt_tokens"] == len(expected.prompt_ids)
    assert done.usage["completion_tokens"] == len(expected.text_ids)
    assert done.usage["codec_frames"] == expected.codes.shape[1]
    assert done.usage["audio_s"] == pytest.approx(len(expected.waveform) / 24000, abs=1e-5)
    assert done.seed == 5


async def engines(client):
    stages = await client.ping(PATIENCE_S)
    return {name: stage["engines"][0] for name, stage in stages.items()}


async def sessions_left(client, within_s=PATIENCE_S):
    """What stages and connectors still hold of sessions; of an ended request nothing after a while."""
    kinds = ("active", "sessions", "connector_streams", "connector_queued_bytes", "connector_in_flight_bytes")
    end = time.monotonic() + within_s
    while True:
        stages = await engines(client)
        left = sum(engine.get(kind, 0) for engine in stages.values() for kind in kinds)
        if not left or time.monotonic() >= end:
            return left
        await asyncio.sleep(0.02)


# -- equal to the reference --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
async def test_a_streamed_answer_is_the_references(server, name):
    async with server.client(PIPELINE) as client:
        assert_equal(await ask(client, CASES[name]), name)


async def test_all_answers_at_once_are_the_references(server):
    async with server.client(PIPELINE) as client:
        answers = await asyncio.gather(*(ask(client, case) for case in CASES.values()))
        for name, answer in zip(CASES, answers, strict=True):
            assert_equal(answer, name)
        assert await sessions_left(client) == 0


@pytest.mark.parametrize(
    "chunks",
    [
        {"initial_codec_chunk_frames": 1, "codec_chunk_frames": 1},
        {"initial_codec_chunk_frames": 3, "codec_chunk_frames": 25, "codec_chunk_growth": 1.5},
        {"initial_codec_chunk_frames": 4000, "codec_chunk_frames": 4000},
    ],
    ids=str,
)
async def test_the_chunk_policy_changes_nothing_that_is_heard(server, chunks):
    async with server.client(PIPELINE) as client:
        assert_equal(await ask(client, CASES["stops"], **chunks), "stops")


async def test_the_whole_answer_twin_and_http_say_the_same(server):
    expected = oracle.answer("stops")
    case = CASES["stops"]
    sampling = json.dumps(options_of(case)["sampling"])
    import tritonclient.http

    def text(name, value):
        tensor = tritonclient.http.InferInput(name, [1], "BYTES")
        return tensor.set_data_from_numpy(np.array([value.encode()], object))

    inputs = [
        text("messages", json.dumps(case.messages)),
        text("sampling_parameters", sampling),
        text("audio_format", "f32"),
    ]
    with tritonclient.http.InferenceServerClient(server.http_url.removeprefix("http://")) as client:
        result = client.infer(f"{PIPELINE}_sync", inputs)
    assert result.as_numpy("text_output")[0].decode() == expected.text
    assert np.abs(result.as_numpy("audio_f32") - expected.waveform).max() <= 1e-4


# -- streaming ---------------------------------------------------------------------------------------------


async def test_speech_leaves_before_the_text_is_complete(server):
    sampling = {
        "thinker": {"temperature": 0, "ignore_eos": True, "max_tokens": 700},  # for a talker that is slow
        "talker": {"temperature": 0, "min_tokens": 40, "max_tokens": 40},
    }
    options = {**options_of(CASES["stops"]), "sampling": sampling, "return_timings": True}
    async with server.client(PIPELINE) as client:
        events = [event async for event in client.stream(None, **options)]
    kinds = [type(event) for event in events]
    assert kinds.index(AudioChunk) < len(kinds) - 1 - kinds[::-1].index(TextDelta)
    assert kinds.count(Done) == 1 and kinds[-1] is Done
    chunks = [event for event in events if isinstance(event, AudioChunk)]
    assert [chunk.sample_offset for chunk in chunks] == np.cumsum(
        [0, *(len(chunk.samples) for chunk in chunks)]
    ).tolist()[:-1]
    assert len(chunks[0].samples) == 4 * 1920 - 555, "the first chunk holds four frames"
    timings = events[-1].stage_timings
    assert set(timings) == STAGES
    assert timings["talker"]["first_output_s"] < timings["thinker"]["total_s"]


async def test_text_alone_starts_no_speech(server):
    async with server.client(PIPELINE) as client:
        before = await engines(client)
        answer = await ask(client, CASES["stops"], modalities="text", audio_format=None, speaker=None)
        after = await engines(client)
    assert answer.text == oracle.answer("stops").text
    assert after["talker"]["generated_tokens"] == before["talker"]["generated_tokens"]
    assert after["code2wav"]["chunks"] == before["code2wav"]["chunks"]
    assert set(answer.done.finish_reasons) == {"text"} and set(answer.done.usage["stages"]) == {"thinker"}


async def test_audio_alone_is_the_same_sound(server):
    async with server.client(PIPELINE) as client:
        answer = await ask(client, CASES["cut"], modalities="audio")
    expected = oracle.answer("cut")
    assert answer.text == "" and np.abs(answer.samples - expected.waveform).max() <= 1e-4
    assert answer.done.finish_reasons == {"audio": "length"}, "its text was cut, though nobody sees that"


async def test_a_seed_repeats_an_answer_whatever_else_runs(server):
    options = {**options_of(CASES["stops"]), "sampling": {"thinker": {"max_tokens": 24, "temperature": 1.0}}}
    options["sampling"]["talker"] = {"max_tokens": 30}
    async with server.client(PIPELINE) as client:
        alone = await client.ask(None, **options)
        crowd = [ask(client, CASES[name]) for name in ("text", "image", "audio", "turns", "cut")]
        again, other, *_ = await asyncio.gather(
            client.ask(None, **options), client.ask(None, **{**options, "seed": 6}), *crowd
        )
    assert again.text == alone.text != other.text
    assert again.samples.shape == alone.samples.shape
    assert np.abs(again.samples - alone.samples).max() <= 1e-4


# -- ends --------------------------------------------------------------------------------------------------


async def test_a_speech_shorter_than_the_first_chunk(server):
    sampling = {
        "thinker": {"temperature": 0, "max_tokens": 12},
        "talker": {"temperature": 0, "max_tokens": 3},
    }
    async with server.client(PIPELINE) as client:
        answer = await ask(client, CASES["text"], sampling=sampling)
    assert len(answer.samples) == 2 * 1920 - 555
    assert np.abs(answer.samples - oracle.answer("text").waveform[: len(answer.samples)]).max() <= 1e-4


async def test_a_speech_without_a_single_frame(server):
    sampling = {"thinker": {"temperature": 0, "max_tokens": 12}, "talker": {"max_tokens": 1}}
    async with server.client(PIPELINE) as client:
        answer = await ask(client, CASES["text"], sampling=sampling)
        assert answer.text and len(answer.samples) == 0
        assert answer.done.finish_reasons == {"text": "length", "audio": "length"}
        assert await sessions_left(client) == 0


async def test_a_prompt_that_fills_the_context_but_for_one_token(server):
    """4,095 tokens of prompt leave one for the answer; one more is refused."""
    spoken = {"thinker": {"temperature": 0, "max_tokens": 100}, "talker": {"temperature": 0}}
    async with server.client(PIPELINE) as client:

        async def asked(length):
            messages = [{"role": "user", "content": "0" * length}]
            return await ask(client, CASES["text"], messages=messages, sampling=spoken, modalities="text")

        frame_tokens = (await asked(1)).done.usage["prompt_tokens"] - 1
        answer = await asked(4095 - frame_tokens)
        assert answer.done.usage["prompt_tokens"] == 4095 and answer.done.usage["completion_tokens"] == 1
        assert answer.done.finish_reasons == {"text": "length"}
        with pytest.raises(InvalidRequest, match="messages has 4096 tokens"):
            await asked(4096 - frame_tokens)


async def test_a_stop_string_ends_text_and_speech(server):
    text = oracle.answer("cut").text
    stop = text[len(text) // 2 :][:3]
    sampling = {"thinker": {"temperature": 0, "max_tokens": 24, "stop": [stop]}, "talker": {"temperature": 0}}
    sampling["talker"]["max_tokens"] = 40
    async with server.client(PIPELINE) as client:
        answer = await ask(client, CASES["cut"], sampling=sampling)
    assert answer.text == text[: text.index(stop)] and answer.done.finish_reasons["text"] == "stop"
    assert len(answer.samples)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speaker": "nobody"}, ["speaker", "nobody", "aiden, chelsie, ethan"]),
        ({"images": [b"no picture"], "messages": None}, ["image", "not a picture", "PNG"]),
        ({"videos": [b"RIFF" * 100], "messages": None}, ["video", "cannot be read"]),
        ({"audios": [b"noise" * 100], "messages": None}, ["audio"]),
        ({"messages": [{"role": "user", "content": "0123456789" * 600}]}, ["messages", "tokens", "4096"]),
        ({"messages": [{"role": "assistant", "content": "I"}]}, ["assistant", "user message"]),
        ({"sampling": {"code2wav": {"temperature": 1}}}, ["code2wav", "does not sample"]),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_bad_input_is_refused_in_one_sentence_and_leaves_nothing(server, changes, words):
    async with server.client(PIPELINE) as client:
        with pytest.raises(InvalidRequest) as caught:
            await ask(client, CASES["text"], **changes)
        message = str(caught.value)
        assert all(word in message for word in words) and "Traceback" not in message, message
        assert await sessions_left(client) == 0


# -- leaving -----------------------------------------------------------------------------------------------


def held_resources(server):
    """Descriptors and memory files of every engine process, and what lies in shared memory."""
    counts = {}
    for stage in STAGES:
        folder = Path(f"/proc/{server.engine_pid(stage)}/fd")
        links = [os.readlink(link) for link in folder.iterdir() if link.is_symlink()]
        counts[stage] = (len(links), sum("memfd:tritone" in link for link in links))
    counts["shm"] = len(server.regions())
    return counts


@pytest.mark.parametrize("phase", ["media", "prompt", "text", "speech"])
async def test_leaving_in_any_phase_stops_and_frees_every_stage(server, phase):
    """Within half a second, as tests/soak measures; here, before the stages have made all that was asked."""
    case = CASES["video"] if phase == "media" else CASES["stops"]
    options = {**options_of(case), "sampling": ENDLESS}
    async with server.client(PIPELINE) as client:
        await ask(client, CASES["text"])
        await _leave(client, options, phase)
        assert await sessions_left(client) == 0
        before = held_resources(server)  # every connection that stays is open now, that for a cancel too
        for _ in range(3):
            so_far = await generated(client)
            await _leave(client, options, phase)
            assert await sessions_left(client) == 0
            assert await generated(client) - so_far < ALL_OF_IT, "nobody told the stages"
        await until(lambda: held_resources(server) == before, what="descriptors or memory are left")
        assert_equal(await ask(client, CASES["text"]), "text")


async def generated(client):
    """Tokens and frames that thinker and talker have made since they began."""
    stages = await engines(client)
    return stages["thinker"]["generated_tokens"] + stages["talker"]["generated_tokens"]


async def _leave(client, options, phase):
    """Ask, and hang up when the answer is in this phase."""
    stream = client.stream(None, **options)
    task = asyncio.create_task(_read_until(stream, {"text": TextDelta, "speech": AudioChunk}.get(phase)))
    if phase in ("media", "prompt"):
        await asyncio.sleep(0.05)
        task.cancel()
    await asyncio.wait({task})
    await stream.aclose()


async def _read_until(stream, kind):
    async for event in stream:
        if kind is not None and isinstance(event, kind):
            return


# -- other layouts -----------------------------------------------------------------------------------------

TOGETHER = [f"stage.{stage}.colocate=all" for stage in ("thinker", "talker", "code2wav")]


async def test_stages_in_one_process_and_code2wav_in_onnxruntime_give_the_same_sound(serve_once):
    pytest.importorskip("onnxscript")
    import plans

    plans.write_onnx(oracle.checkpoint())
    server = serve_once(PIPELINE, overrides=[*TOGETHER, "stage.code2wav.engine=onnx"])
    assert server.engine_pid("thinker,talker,code2wav")
    async with server.client(PIPELINE) as client:
        whole = {"initial_codec_chunk_frames": 4000, "codec_chunk_frames": 4000}
        cuts = ({}, whole, {"initial_codec_chunk_frames": 3, "codec_chunk_frames": 7})
        answers = await asyncio.gather(*(ask(client, CASES["image_audio"], **cut) for cut in cuts))
        for answer in answers:
            assert_equal(answer, "image_audio")
        assert await sessions_left(client) == 0
