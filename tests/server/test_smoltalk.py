"""smoltalk on a real tritonserver: streamed equals whole, bad input, kills, every layout."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import soundfile
import tritonclient.grpc.aio as grpc_aio
from tritonclient.utils import InferenceServerException

from tritone.audio import AudioLimits, decode_audio
from tritone_client import AudioChunk, Done, TextDelta, Unavailable

pytestmark = [pytest.mark.server, pytest.mark.weights]

QUESTION = "What is the ocean like?"
SHORT = {"max_tokens": 24, "seed": 7}
ENDLESS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def echo_and_smoltalk(serve, echo_folder):
    """Two pipelines in one server; one of them may be profiled."""
    return serve("smoltalk", echo_folder, overrides=("smoltalk:profiling=true",))


@pytest.fixture
def server(echo_and_smoltalk):
    return echo_and_smoltalk


async def whole(client, prompt=QUESTION, **options):
    """Text, float32 samples and done of a streamed answer."""
    answer = await client.ask(prompt, audio_format="f32", **{**SHORT, **options})
    return answer.text, answer.samples, answer.done


def raw_inputs(**values):
    """Triton inputs from numpy arrays, lists of bytes or text, without any of our client's checks."""
    inputs = []
    for name, value in values.items():
        array = value if isinstance(value, np.ndarray) else np.array(value, object)
        kinds = {"O": "BYTES", "b": "BOOL"}
        kind = (
            kinds.get(array.dtype.kind)
            or {"float32": "FP32", "int32": "INT32", "int64": "INT64"}[array.dtype.name]
        )
        tensor = grpc_aio.InferInput(name, array.shape, kind)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


async def raw(server, model="smoltalk", parameters=None, outputs=None, **values):
    """All responses of one request made with tritonclient alone."""

    async def requests():
        yield {
            "model_name": model,
            "inputs": raw_inputs(**values),
            "parameters": parameters,
            "outputs": outputs,
        }

    async with grpc_aio.InferenceServerClient(server.grpc_url) as client:
        answers = [answer async for answer in client.stream_infer(requests())]  # to the stream's own end
    for _, error in answers:
        if error is not None:
            raise error
    return [result for result, _ in answers]


def error_of(exception):
    """(gRPC status, message) of either kind of error that tritonclient raises."""
    if isinstance(exception, InferenceServerException):
        return str(exception.status()), exception.message()
    return str(exception.code()), exception.details()


# -- what it says ------------------------------------------------------------------------------------------


async def test_speech_starts_while_the_text_is_being_written(server):
    async with server.client("smoltalk") as client:
        events = [event async for event in client.stream(QUESTION, max_tokens=40, seed=7)]
    kinds = [type(event) for event in events]
    assert kinds[0] is TextDelta and kinds[-1] is Done and kinds.count(Done) == 1
    assert kinds.index(AudioChunk) < len(kinds) - 1 - kinds[::-1].index(TextDelta)
    done = events[-1]
    assert done.usage["prompt_tokens"] > 5 and done.usage["completion_tokens"] <= 40
    assert done.seed == 7 and set(done.finish_reasons) == {"text", "audio"}
    samples = np.concatenate([event.samples for event in events if isinstance(event, AudioChunk)])
    assert len(samples) / 24000 == pytest.approx(done.usage["audio_s"], abs=1e-5) and len(samples) > 24000
    assert np.abs(samples).max() > 1000


async def test_streamed_equals_whole_and_every_chunking(server):
    async with server.client("smoltalk") as client:
        text, streamed, _ = await whole(client)
        policies = [(1, 2), (7, 31), (4096, 4096)]
        for initial, later in policies:
            sizes = {"initial_codec_chunk_frames": initial, "codec_chunk_frames": later}
            again = await whole(client, parameters=sizes)
            assert again[0] == text and len(again[1]) == len(streamed)
            assert np.abs(again[1] - streamed).max() <= 1e-4
    (response,) = await raw(
        server,
        text_input=[QUESTION.encode()],
        audio_format=[b"f32"],
        sampling_parameters=[json.dumps(SHORT).encode()],
    )
    assert response.as_numpy("text_output")[0].decode() == text
    assert len(response.as_numpy("audio_f32")) == len(streamed)
    assert np.abs(response.as_numpy("audio_f32") - streamed).max() <= 1e-4


async def test_the_same_answers_alone_and_among_eight(server):
    questions = [
        f"Tell me about {topic}."
        for topic in ("cats", "rain", "bread", "the moon", "ships", "tea", "snow", "music")
    ]
    async with server.client("smoltalk") as client:
        alone = [await whole(client, question) for question in questions[:3]]
        together = await asyncio.gather(*(whole(client, question) for question in questions))
    for (text, samples, _), (text_8, samples_8, _) in zip(alone, together, strict=False):
        assert text == text_8 and len(samples) == len(samples_8)
        assert np.abs(samples - samples_8).max() <= 1e-4
    assert len({text for text, _, _ in together}) == len(questions)


async def test_a_seed_gives_the_same_sampled_answer_again(server):
    async with server.client("smoltalk") as client:
        first, second = [await whole(client, temperature=0.9, modalities="text") for _ in range(2)]
        other = await whole(client, temperature=0.9, modalities="text", seed=8)
    assert first[0] == second[0] != other[0]


async def test_a_stage_that_is_profiled_speaks_on_and_the_same(server, tmp_path):
    out = tmp_path / "trace.json"
    profile = [sys.executable, "-m", "tritone", "profile", f"--pid={server.process.pid}", f"--out={out}"]
    async with server.client("smoltalk") as client:
        text, samples, _ = await whole(client)
        taken = await asyncio.create_subprocess_exec(*profile, "smoltalk", "code2wav", "--seconds=3")
        num_answers = 0
        while taken.returncode is None:
            again, samples_again, _ = await whole(client)
            assert again == text and np.abs(samples_again - samples).max() <= 1e-4
            num_answers += 1
    events = json.loads(out.read_text())["traceEvents"]
    assert taken.returncode == 0 and num_answers >= 1
    assert sum(event.get("name", "").startswith("aten::addmm") for event in events) > 0


async def test_a_pipeline_that_does_not_allow_it_is_not_profiled(server, tmp_path):
    words = ["profile", "echo", "writer", f"--pid={server.process.pid}", f"--out={tmp_path / 'trace.json'}"]
    refused = subprocess.run(
        [sys.executable, "-m", "tritone", *words], capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 1 and "profiling is off for this pipeline; set" in refused.stderr
    assert list(tmp_path.iterdir()) == []


async def test_a_spoken_question_is_heard(server):
    async with server.client("smoltalk") as client:
        spoken = await client.ask(
            messages=[{"role": "assistant", "content": "What is the capital of France?"}]
        )
        file = io.BytesIO()
        soundfile.write(file, spoken.samples, 24000, format="WAV")
        answer = await client.ask(audio=file.getvalue(), modalities="text", **SHORT)
        raw_samples = spoken.samples.astype(np.float32) / 32768
        again = await client.ask(audio=(raw_samples, 24000), modalities="text", **SHORT)
    assert "France" in answer.text and again.text == answer.text


@pytest.mark.parametrize("audio_format", ["wav", "flac", "opus"])
async def test_encoded_chunks_concatenate_to_one_file(server, audio_format):
    async with server.client("smoltalk") as client:
        _, samples, _ = await whole(client)
        parts = []
        async for event in client.stream(QUESTION, audio_format=audio_format, **SHORT):
            if hasattr(event, "data"):
                parts.append(event.data)
    data, rate_hz = decode_audio(b"".join(parts), AudioLimits())
    assert rate_hz in (24000, 48000) and len(data) / rate_hz == pytest.approx(len(samples) / 24000, abs=0.02)
    if audio_format != "opus":
        assert np.abs(data - samples).max() < 2e-4


async def test_what_cannot_be_spoken_is_skipped_and_ends(server):
    async with server.client("smoltalk") as client:
        messages = [{"role": "assistant", "content": "聪明 🙂 … !"}]
        silent = await client.ask(messages=messages, modalities="audio")
        spoken = await client.ask(
            messages=[{"role": "assistant", "content": "Hello 聪明 🙂 friend."}], modalities="audio"
        )
        plain = await client.ask(
            messages=[{"role": "assistant", "content": "Hello friend."}], modalities="audio"
        )
    assert len(silent.samples) == 0 and silent.done.finish_reasons["audio"] == "stop"
    assert 0.5 < len(spoken.samples) / len(plain.samples) < 2


async def test_a_client_that_requests_only_text_outputs_starts_no_speech(server):
    async with server.client("smoltalk") as client:
        before = (await client.ping(5))["code2wav"]["engines"][0]["chunks"]
        outputs = [grpc_aio.InferRequestedOutput(name) for name in ("text_output", "info")]
        (response,) = await raw(server, text_input=[b"Hello!"], outputs=outputs)
        assert response.as_numpy("text_output")[0] and response.as_numpy("audio_output") is None
        assert (await client.ping(5))["code2wav"]["engines"][0]["chunks"] == before


# -- what it refuses ---------------------------------------------------------------------------------------


def wav(samples, rate_hz=16000):
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format="WAV")
    return file.getvalue()


def text(value):
    return [value if isinstance(value, bytes) else value.encode()]


SECOND = np.zeros(16000, np.float32)
BAD = {
    "no prompt": ({}, {}, ["INVALID_ARG", "text_input"]),
    "empty prompt": ({"text_input": text("")}, {}, ["INVALID_ARG", "text_input", "empty"]),
    "longer than the context": ({"text_input": text("word " * 3000)}, {}, ["INVALID_ARG", "tokens", "2048"]),
    "longer than the limit": ({"text_input": text("x" * 100_000)}, {}, ["INVALID_ARG", "100000", "16384"]),
    "unknown modality": (
        {"text_input": text("Hi"), "modalities": text("text,smell")},
        {},
        ["INVALID_ARG", "modalities", "smell", "audio"],
    ),
    "unknown voice": (
        {"text_input": text("Hi"), "speaker": text("darth")},
        {},
        ["INVALID_ARG", "speaker", "darth", "heart"],
    ),
    "empty audio file": ({"audio": text(b"")}, {}, ["INVALID_ARG", "audio"]),
    "empty recording": ({"audio": text(wav(np.zeros(0)))}, {}, ["INVALID_ARG", "audio"]),
    "not an audio file": ({"audio": text(b"GIF89a not sound at all")}, {}, ["INVALID_ARG", "audio"]),
    "audio at 1 Hz": (
        {"audio_input": SECOND, "audio_input_rate": np.array([1], np.int32)},
        {},
        ["INVALID_ARG", "audio_input_rate", "1 Hz"],
    ),
    "NaN": (
        {"audio_input": np.full(16000, np.nan, np.float32), "audio_input_rate": np.array([16000], np.int32)},
        {},
        ["INVALID_ARG", "audio_input"],
    ),
    "no samples": (
        {"audio_input": SECOND[:0], "audio_input_rate": np.array([16000], np.int32)},
        {},
        ["INVALID_ARG", "audio_input"],
    ),
    "20 minutes": (
        {"audio_input": np.zeros(20 * 60 * 8000, np.float32), "audio_input_rate": np.array([8000], np.int32)},
        {},
        ["INVALID_ARG", "audio_input", "1200", "300"],
    ),
    "rate missing": ({"audio_input": SECOND}, {}, ["INVALID_ARG", "audio_input_rate"]),
    "unknown tensor": ({"txt_input": text("Hi")}, {}, ["INVALID_ARG", "txt_input"]),
    "wrong dtype": ({"text_input": np.zeros(1, np.float32)}, {}, ["INVALID_ARG", "text_input"]),
    "wrong shape": ({"text_input": [b"a", b"b"]}, {}, ["INVALID_ARG", "text_input"]),
    "invalid UTF-8": ({"text_input": text(b"caf\xe9")}, {}, ["INVALID_ARG", "text_input", "UTF-8"]),
    "max_tokens 0": (
        {"text_input": text("Hi"), "sampling_parameters": text('{"max_tokens": 0}')},
        {},
        ["INVALID_ARG", "max_tokens", "0"],
    ),
    "max_tokens negative": (
        {"text_input": text("Hi"), "sampling_parameters": text('{"max_tokens": -5}')},
        {},
        ["INVALID_ARG", "max_tokens", "-5"],
    ),
    "temperature hot": (
        {"text_input": text("Hi"), "sampling_parameters": text('{"temperature": "hot"}')},
        {},
        ["INVALID_ARG", "temperature", "hot"],
    ),
    "unknown parameter": (
        {"text_input": text("Hi")},
        {"deadlin_ms": 100},
        ["INVALID_ARG", "deadlin_ms", "deadline_ms"],
    ),
    "misplaced parameter": (
        {"text_input": text("Hi")},
        {"max_tokens": 4},
        ["INVALID_ARG", "sampling_parameters"],
    ),
    "deadline 0": ({"text_input": text("Hi")}, {"deadline_ms": 0}, ["INVALID_ARG", "deadline_ms"]),
    "unknown op": ({"op": text("pong")}, {}, ["INVALID_ARG", "op", "ping"]),
}


@pytest.mark.parametrize("case", BAD)
async def test_bad_input_is_one_clear_error(server, case):
    values, parameters, words = BAD[case]
    for model in ("smoltalk", "smoltalk_sync"):
        with pytest.raises(Exception) as refusal:
            if model == "smoltalk":
                await raw(server, parameters=parameters, **values)
            else:
                async with grpc_aio.InferenceServerClient(server.grpc_url) as client:
                    await client.infer(model, raw_inputs(**values), parameters=parameters)
        status, message = error_of(refusal.value)
        if status != "None":  # the server's own checks give no status on a stream
            assert status == "StatusCode.INVALID_ARGUMENT", (status, message)
        for word in words[1:]:
            assert word in message, message
        if "TRITONE_" in message:
            assert words[0] in message and "; " in message
        assert "Traceback" not in message and len(message) < 400


async def test_the_server_is_unharmed_after_all_that(server):
    async with server.client("smoltalk") as client:
        stages = await client.ping(5)
        active = [engine["active"] for stage in stages.values() for engine in stage["engines"]]
        assert set(stages) == {"ears", "thinker", "talker", "code2wav"} and sum(active) == 0
        assert (await client.ask("Hello!", **SHORT)).text
    async with server.client("echo") as client:
        assert (await client.ask("both pipelines live")).text.split() == ["both", "pipelines", "live"]


# -- what happens when things break ------------------------------------------------------------------------


async def test_leaving_stops_the_thinker(server):
    async with server.client("smoltalk") as client:
        async for event in client.stream("Tell me about ships.", max_tokens=150, sampling=ENDLESS):
            if isinstance(event, AudioChunk):
                break
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            stages = await client.ping(5)
            active = sum(engine["active"] for stage in stages.values() for engine in stage["engines"])
            if active == 0:
                return
        pytest.fail(f"{active} sessions live 2 s after the client left")


@pytest.mark.parametrize("stage", ["thinker", "talker", "code2wav"])
async def test_kill_9_in_mid_stream_fails_one_request_and_not_the_next(server, stage):
    async with server.client("smoltalk") as client:
        stream = client.stream("Tell me about ships.", max_tokens=150, sampling=ENDLESS)
        async for event in stream:
            if isinstance(event, AudioChunk):
                break
        os.kill(server.engine_pid(stage), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(Unavailable):
            async for _ in stream:
                pass
        assert time.monotonic() - began < 2
        while True:
            try:
                answer = await client.ask("Hello!", **SHORT)
                break
            except Unavailable as error:
                assert time.monotonic() - began < 60, error
                await asyncio.sleep(0.2)
        assert answer.text and len(answer.samples) > 0


async def test_kill_9_of_the_ears_is_noticed_too(server):
    async with server.client("smoltalk") as client:
        pid = server.engine_pid("ears")
        os.kill(pid, signal.SIGSTOP)  # so that it certainly has not finished
        noise = (np.random.default_rng(0).normal(size=16000 * 20) * 0.1).astype(np.float32)
        asking = asyncio.create_task(client.ask(audio=(noise, 16000), modalities="text", **SHORT))
        await asyncio.sleep(0.4)
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(Unavailable, match="ears"):
            await asking
        assert time.monotonic() - began < 2


async def test_every_layout_gives_the_same_answer(server, serve):
    other = serve(
        "smoltalk",
        overrides=[
            "stage.talker.colocate=speech",
            "stage.code2wav.colocate=speech",
            "stage.thinker.instances=2",
        ],
    )
    assert other.engine_pid("talker,code2wav") and len(other.engine_pids("thinker")) == 2
    async with server.client("smoltalk") as one, other.client("smoltalk") as two:
        text_1, samples_1, _ = await whole(one)
        answers = await asyncio.gather(*(whole(two) for _ in range(3)))
    for text_2, samples_2, _ in answers:
        assert text_1 == text_2 and np.abs(samples_1 - samples_2).max() <= 1e-4
