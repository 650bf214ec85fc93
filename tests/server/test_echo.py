"""The framework on a real tritonserver, with the weight-free echo pipeline: every sample is accounted for."""

import asyncio
import os
import signal
import time

import numpy as np
import pytest

from echo import expected_pcm
from tritone_client import (
    AudioChunk,
    DeadlineExceeded,
    Done,
    InvalidRequest,
    TextDelta,
    TritoneError,
    Unavailable,
)
from waiting import PATIENCE_S

pytestmark = pytest.mark.server

PACED = ["stage.writer.engine.step_s=0.01"]
WORDS = "word " * 3000  # half a minute of them: whatever is to happen to it happens before its end
ALL_OF_THEM = {"max_tokens": 4000}


@pytest.fixture(scope="module")
def server(serve, echo_folder):
    return serve(echo_folder, overrides=PACED)


async def ask(client, text, heard=None, **options):
    """The whole answer of a stream: text, float32 samples, done. heard: set with the first sound."""
    text_out, samples, done = "", [], None
    async for event in client.stream(text, audio_format="f32", **options):
        match event:
            case TextDelta():
                text_out += event.text
            case AudioChunk():
                assert event.sample_offset == sum(map(len, samples))
                samples.append(event.samples)
                if heard is not None:
                    heard.set()
            case Done():
                done = event
    return text_out, np.concatenate([np.zeros(0, np.float32), *samples]), done


def is_exact(answer):
    text, samples, _ = answer
    return np.array_equal(samples, expected_pcm(text))


async def test_text_and_audio_interleave_and_end_once(server):
    async with server.client("echo") as client:
        kinds = [type(event) async for event in client.stream(" ".join(map(str, range(300))))]
    assert kinds.count(Done) == 1 and kinds[-1] is Done
    first_audio, last_text = kinds.index(AudioChunk), len(kinds) - 1 - kinds[::-1].index(TextDelta)
    assert first_audio < last_text, "speech must start while the text is being written"


async def test_sixteen_different_requests_at_once_never_mix(server):
    async with server.client("echo") as client:
        texts = [f"request {i} says {'la ' * i}" for i in range(16)]
        answers = await asyncio.gather(*(ask(client, text) for text in texts))
    for text, answer in zip(texts, answers, strict=True):
        assert answer[0].split() == text.split() and is_exact(answer)


@pytest.mark.parametrize(("initial", "later"), [(1, 1), (4, 25), (3, 7), (4000, 4000)])
async def test_the_chunk_policy_of_a_request_does_not_change_its_sound(server, initial, later):
    parameters = {"initial_codec_chunk_frames": initial, "codec_chunk_frames": later}
    async with server.client("echo") as client:
        assert is_exact(await ask(client, "words of quite different lengths indeed", parameters=parameters))


async def test_utf8_never_breaks_in_a_delta(server):
    async with server.client("echo") as client:
        text, _, _ = await ask(client, "聪明 🙂 第五项修炼", modalities="text")
    assert text.split() == ["聪明", "🙂", "第五项修炼"]


async def test_text_only_starts_no_speech_stage(server):
    async with server.client("echo") as client:
        before = (await client.ping(PATIENCE_S))["wave"]["engines"][0]["chunks"]
        _, samples, done = await ask(client, "quiet please", modalities="text")
        after = (await client.ping(PATIENCE_S))["wave"]["engines"][0]["chunks"]
    assert len(samples) == 0 and before == after and set(done.finish_reasons) == {"text"}


async def test_leaving_frees_every_stage(server):
    async with server.client("echo") as client:
        for _ in range(5):
            async for event in client.stream(WORDS, **ALL_OF_THEM):
                if isinstance(event, AudioChunk):
                    break
        await all_free(client)
        assert is_exact(await ask(client, "still exact after five aborts"))


async def all_free(client):
    """Wait until no stage holds a session. An engine that is being started again tells nothing of it yet."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            stages = await client.ping(PATIENCE_S)
            if all(engine.get("active") == 0 for stage in stages.values() for engine in stage["engines"]):
                return
            await asyncio.sleep(0.02)


async def test_a_deadline_in_mid_stream_keeps_what_was_made_and_says_so(server):
    async with server.client("echo") as client:
        for deadline_ms in (1500, 15_000):  # the second for a machine on which nothing comes by the first
            try:
                text, samples, done = await ask(
                    client, WORDS, **ALL_OF_THEM, parameters={"deadline_ms": deadline_ms}
                )
            except DeadlineExceeded:
                continue
            if len(samples):
                break
        assert 0 < len(text) < len(WORDS) and len(samples) > 0
        assert np.array_equal(samples, expected_pcm(WORDS)[: len(samples)])
        assert done.finish_reasons == {"text": "deadline", "audio": "deadline"}
        await all_free(client)


@pytest.mark.parametrize("stage", ["writer", "singer", "wave"])
async def test_kill_9_of_an_engine_fails_its_request_and_no_later_one(server, stage):
    async with server.client("echo") as client:
        stream = client.stream(WORDS, **ALL_OF_THEM)
        async for event in stream:
            if isinstance(event, AudioChunk):
                break
        os.kill(server.engine_pid(stage), signal.SIGKILL)
        with pytest.raises(Unavailable, match="engine"):
            async with asyncio.timeout(PATIENCE_S):
                async for _ in stream:
                    pass
        answer = await until_it_works(client)
        assert is_exact(answer)


async def until_it_works(client):
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await ask(client, "hello again")
        except Unavailable as error:
            assert time.monotonic() < end, error
            await asyncio.sleep(0.1)


async def test_ping_tells_a_dead_stage(server):
    async with server.client("echo") as client:
        with pytest.raises(Unavailable, match="singer"):
            for _ in range(9):  # it may be back before the ping; each time it takes a longer pause
                os.kill(server.engine_pid("singer"), signal.SIGKILL)
                await client.ping(PATIENCE_S)
        await until_it_works(client)
        assert set(await client.ping(PATIENCE_S)) == {"writer", "singer", "wave"}


async def test_a_refusal_of_a_stage_reaches_the_client_as_it_is(server):
    async with server.client("echo") as client:
        with pytest.raises(InvalidRequest, match="start with another word"):
            await ask(client, "refuse this")
        await all_free(client)


async def test_stages_cannot_be_called_from_outside(server):
    async with server.client("echo_writer") as client:
        with pytest.raises(TritoneError):
            await client.ping(PATIENCE_S)


async def test_in_sync_mode_sound_comes_whole_after_all_the_text(serve_once, echo_folder):
    server = serve_once(
        echo_folder,
        overrides=[*PACED, "mode=sync", "stage.singer.colocate=speech", "stage.wave.colocate=speech"],
    )
    text, small = "all of it is written first", {"codec_chunk_frames": 1}
    async with server.client("echo") as client:
        assert is_exact(await ask(client, text, parameters=small))
        events = [event async for event in client.stream(text, parameters=small, return_timings=True)]
    kinds = [type(event) for event in events]
    first_s = {name: told["first_output_at_s"] for name, told in events[-1].info["timings"]["stages"].items()}
    assert first_s["singer"] - first_s["writer"] >= (len(text.split()) - 1) * 0.01, "it waits for all words"
    assert kinds.count(AudioChunk) == len(text.split()), "of each segment one"
    assert kinds.index(AudioChunk) > len(kinds) - 1 - kinds[::-1].index(TextDelta)


async def test_instances_share_the_work_and_colocated_stages_share_a_process(serve_once, echo_folder):
    server = serve_once(
        echo_folder,
        overrides=[
            *PACED,
            "stage.writer.instances=2",
            "stage.singer.colocate=speech",
            "stage.wave.colocate=speech",
        ],
    )
    assert server.engine_pid("singer,wave")
    async with server.client("echo") as client:
        tasks = [asyncio.create_task(ask(client, WORDS, **ALL_OF_THEM)) for _ in range(8)]
        loads = [0, 0]
        while min(loads) < 2:
            assert not any(task.done() for task in tasks), "one instance never had two of them"
            loads = [engine["sessions"] for engine in (await client.ping(PATIENCE_S))["writer"]["engines"]]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        answers = await asyncio.gather(*(ask(client, f"{i} " * 20) for i in range(8)))
        assert all(map(is_exact, answers))
        os.kill(server.engine_pid("writer"), signal.SIGKILL)
        await asyncio.sleep(0.1)
        assert is_exact(await ask(client, "the other instance answers")), "one of two may die unnoticed"
        shared = server.engine_pid("singer,wave")
        running = asyncio.create_task(ask(client, WORDS, **ALL_OF_THEM))
        while not (await client.ping(PATIENCE_S))["wave"]["engines"][0]["active"]:
            await asyncio.sleep(0.01)
        os.kill(shared, signal.SIGKILL)
        with pytest.raises(Unavailable, match="engine"):
            await running
        assert is_exact(await until_it_works(client))
        assert set(await client.ping(PATIENCE_S)) == {"writer", "singer", "wave"}
        async with asyncio.timeout(PATIENCE_S):
            while len(server.engine_pids("singer,wave")) > 1:  # both doors start one, and one ends
                await asyncio.sleep(0.05)
        assert server.engine_pid("singer,wave") != shared
        await all_free(client)


async def test_streams_outlive_kill_9_of_any_engine_if_deploy_says_so(serve_once, echo_folder):
    """They go on, sample by sample, where they were; a new request waits for the engine."""
    server = serve_once(echo_folder, overrides=["stage.writer.engine.step_s=0.02", "resumes=2"])
    async with server.client("echo") as client:
        for stage in ("writer", "singer", "wave"):
            text = f"{stage} " * 60
            heard = [asyncio.Event() for _ in range(4)]
            tasks = [
                asyncio.create_task(ask(client, f"{i} {text}", heard=event)) for i, event in enumerate(heard)
            ]
            await asyncio.gather(*(event.wait() for event in heard))
            os.kill(server.engine_pid(stage), signal.SIGKILL)
            late = asyncio.create_task(ask(client, "too late to be refused"))
            for i, task in enumerate(tasks):
                answer = await task
                assert answer[0].split() == f"{i} {text}".split() and is_exact(answer)
            assert is_exact(await late)
        await all_free(client)


async def test_plain_tritonserver_refuses_above_the_cap_and_is_never_stuck(plain_server, echo_folder):
    """Nothing of ours around it: default thread pool, default flags."""
    server = plain_server(echo_folder)
    async with server.client("echo") as client:
        for _ in range(2):
            tasks = [ask(client, f"request {i} of many " * 3) for i in range(48)]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            refused = [r for r in results if isinstance(r, Unavailable)]
            served = [r for r in results if not isinstance(r, BaseException)]
            assert len(served) >= 32 and len(served) + len(refused) == 48
            assert all("max_in_flight" in str(r) for r in refused) and all(map(is_exact, served))
        await all_free(client)
