"""smoltalk on a real tritonserver: streamed equals whole, bad input, kills, every layout."""

import asyncio
import io
import json
import os
import re
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
from tritone.checkpoint import checkpoint_dir
from tritone.engines.base import Placement
from tritone.engines.whisper import WhisperEngine
from tritone_client import AudioChunk, Done, TextDelta, TritoneClient, Unavailable
from waiting import PATIENCE_S

pytestmark = [pytest.mark.server, pytest.mark.weights]

QUESTION = "What is the ocean like?"
SHORT = {"max_tokens": 10, "seed": 7}
ENDLESS = {"ignore_eos": True}
MANY = 1500  # tokens: half a minute of work and more


@pytest.fixture(scope="module")
def echo_and_smoltalk(serve, echo_folder):
    """Two pipelines in one server; one of them may be profiled."""
    return serve("smoltalk", echo_folder, overrides=("smoltalk:profiling=true",))


@pytest.fixture
def server(echo_and_smoltalk):
    return echo_and_smoltalk


@pytest.fixture(scope="module")
def short_answer(echo_and_smoltalk):
    """Text and float32 samples of the streamed answer to QUESTION."""
    with TritoneClient(echo_and_smoltalk.grpc_url, "smoltalk") as client:
        answer = client.ask(QUESTION, audio_format="f32", **SHORT)
    return answer.text, answer.samples


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
        kinds = []
        async for event in client.stream(QUESTION, sampling=ENDLESS, max_tokens=MANY):
            kinds.append(type(event))
            if AudioChunk in kinds and kinds[-1] is TextDelta:
                break  # there is no need to hear the rest
        assert kinds[0] is kinds[-1] is TextDelta


async def test_an_answer_is_told_whole(server):
    async with server.client("smoltalk") as client:
        events = [event async for event in client.stream(QUESTION, **SHORT)]
    kinds = [type(event) for event in events]
    assert kinds[0] is TextDelta and kinds[-1] is Done and kinds.count(Done) == 1
    done = events[-1]
    assert done.usage["prompt_tokens"] > 5 and done.usage["completion_tokens"] <= SHORT["max_tokens"]
    assert done.seed == 7 and set(done.finish_reasons) == {"text", "audio"}
    samples = np.concatenate([event.samples for event in events if isinstance(event, AudioChunk)])
    assert len(samples) / 24000 == pytest.approx(done.usage["audio_s"], abs=1e-5) and len(samples) > 24000
    assert np.abs(samples).max() > 1000


async def test_streamed_equals_whole_and_every_chunking(server, short_answer):
    text, streamed = short_answer
    async with server.client("smoltalk") as client:
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
        alone = [await whole(client, question) for question in questions[:2]]
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


async def test_a_stage_that_is_profiled_speaks_on_and_the_same(server, short_answer, tmp_path):
    text, samples = short_answer
    out = tmp_path / "trace.json"
    profile = [sys.executable, "-m", "tritone", "profile", f"--pid={server.process.pid}", f"--out={out}"]
    async with server.client("smoltalk") as client:
        for seconds in (3, 20, 60):  # the longer for a machine that speaks no chunk meanwhile
            seconds_word = f"--seconds={seconds}"
            taken = await asyncio.create_subprocess_exec(*profile, "smoltalk", "code2wav", seconds_word)
            num_answers = 0
            while taken.returncode is None:
                again, samples_again, _ = await whole(client)
                assert again == text and np.abs(samples_again - samples).max() <= 1e-4
                num_answers += 1
            assert taken.returncode == 0 and num_answers >= 1
            events = json.loads(out.read_text())["traceEvents"]
            if any(event.get("name", "").startswith("aten::addmm") for event in events):
                return
    pytest.fail("the profile shows no work")


async def test_a_pipeline_that_does_not_allow_it_is_not_profiled(server, tmp_path):
    words = ["profile", "echo", "writer", f"--pid={server.process.pid}", f"--out={tmp_path / 'trace.json'}"]
    refused = subprocess.run(
        [sys.executable, "-m", "tritone", *words], capture_output=True, text=True, timeout=6 * PATIENCE_S
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
async def test_encoded_chunks_concatenate_to_one_file(server, short_answer, audio_format):
    _, samples = short_answer
    async with server.client("smoltalk") as client:
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


# -- how well it speaks ------------------------------------------------------------------------------------

# Harvard sentences, list 1 (IEEE Recommended Practice for Speech Quality Measurements, 1969).
SENTENCES = [
    "The birch canoe slid on the smooth planks.",
    "Glue the sheet to the dark blue background.",
    "It's easy to tell the depth of a well.",
    "These days a chicken leg is a rare dish.",
    "Rice is often served in round bowls.",
    "The juice of lemons makes fine punch.",
    "The box was thrown beside the parked truck.",
    "The hogs were fed chopped corn and garbage.",
    "Four hours of steady work faced us.",
    "A large size in stockings is hard to sell.",
]
MAX_WORD_ERROR_RATE = 0.08


def words(text):
    return re.sub(r"[^a-z0-9' ]", " ", text.lower().replace("4 ", "four ")).split()


def word_errors(reference, heard):
    """Levenshtein distance in words."""
    row = np.arange(len(heard) + 1)
    for i, word in enumerate(reference, 1):
        previous, row = row, np.empty_like(row)
        row[0] = i
        for j, other in enumerate(heard, 1):
            row[j] = min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (word != other))
    return int(row[-1])


def test_word_errors_counts_words():
    assert word_errors(words("a b c"), words("a x c d")) == 2
    assert word_errors(words("a b c"), words("A, b c!")) == 0


async def test_speech_is_intelligible(server):
    """Ten sentences as a listener writes them down."""
    ears = WhisperEngine(Placement(checkpoint_dir("smoltalk") / "ears"), WhisperEngine.Options(beam_size=5))
    async with server.client("smoltalk") as client:
        answers = await asyncio.gather(
            *(
                client.ask(messages=[{"role": "assistant", "content": sentence}], modalities="audio", seed=1)
                for sentence in SENTENCES
            )
        )
    errors = 0
    for number, (sentence, said) in enumerate(zip(SENTENCES, answers, strict=True)):
        samples = said.samples.astype(np.float32) / 32768
        ears.add_request(str(number), {"audio_input": samples, "audio_input_rate": said.sample_rate_hz}, {})
        ears.push(str(number), {}, last=True)
        heard = ""
        while ears.has_work:
            heard += "".join(str(delta.outputs.get("transcript", "")) for delta in ears.step())
        errors += word_errors(words(sentence), words(heard))
    total = sum(len(words(sentence)) for sentence in SENTENCES)
    assert errors / total <= MAX_WORD_ERROR_RATE, f"{errors} of {total} words"


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
        assert set(await client.ping(PATIENCE_S)) == {"ears", "thinker", "talker", "code2wav"}
        await until_nothing_is_active(client)
        assert (await client.ask("Hello!", **SHORT)).text
    async with server.client("echo") as client:
        assert (await client.ask("both pipelines live")).text.split() == ["both", "pipelines", "live"]


# -- what happens when things break ------------------------------------------------------------------------


async def test_leaving_stops_the_thinker(server):
    async with server.client("smoltalk") as client:
        async for event in client.stream("Tell me about ships.", max_tokens=MANY, sampling=ENDLESS):
            if isinstance(event, AudioChunk):
                break
        await until_nothing_is_active(client)


async def until_nothing_is_active(client):
    """What a request held is let go of just after its client is told the end."""
    async with asyncio.timeout(PATIENCE_S):
        while await num_active(client):
            await asyncio.sleep(0.05)


async def num_active(client):
    stages = await client.ping(PATIENCE_S)
    return sum(engine["active"] for stage in stages.values() for engine in stage["engines"])


@pytest.mark.parametrize("stage", ["thinker", "talker", "code2wav"])
async def test_kill_9_in_mid_stream_fails_one_request_and_not_the_next(server, stage):
    async with server.client("smoltalk") as client:
        stream = client.stream("Tell me about ships.", max_tokens=MANY, sampling=ENDLESS)
        async for event in stream:
            if isinstance(event, AudioChunk):
                break
        os.kill(server.engine_pid(stage), signal.SIGKILL)
        with pytest.raises(Unavailable):
            async with asyncio.timeout(PATIENCE_S):
                async for _ in stream:
                    pass
        began = time.monotonic()
        while True:
            try:
                answer = await client.ask("Hello!", max_tokens=8, seed=7)
                break
            except Unavailable as error:
                assert time.monotonic() - began < 9 * PATIENCE_S, error
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
        with pytest.raises(Unavailable, match="ears"):
            async with asyncio.timeout(PATIENCE_S):
                await asking


async def test_every_layout_gives_the_same_answer(short_answer, serve_once):
    other = serve_once(
        "smoltalk",
        overrides=[
            "stage.talker.colocate=speech",
            "stage.code2wav.colocate=speech",
            "stage.thinker.instances=2",
        ],
    )
    assert other.engine_pid("talker,code2wav") and len(other.engine_pids("thinker")) == 2
    text_1, samples_1 = short_answer
    async with other.client("smoltalk") as two:
        answers = await asyncio.gather(*(whole(two) for _ in range(2)))
    for text_2, samples_2, _ in answers:
        assert text_1 == text_2 and np.abs(samples_1 - samples_2).max() <= 1e-4
