"""The asynchronous client against a real gRPC server."""

import asyncio
import base64
import time
from contextlib import aclosing

import numpy as np
import pytest
from fake_triton import INFO, RATE_HZ, Audio, Done, Fail, Hang, Raw, Text, Wait, counting_samples

from tritone_client import (
    AsyncTritoneClient,
    AudioChunk,
    BrokenStream,
    Cancelled,
    DeadlineExceeded,
    EncodedAudio,
    InvalidRequest,
    Media,
    NotFound,
    Progress,
    ServerFault,
    TextDelta,
    gather,
)
from tritone_client import Done as DoneEvent
from tritone_client.request import Request
from waiting import PATIENCE_S, until

pytestmark = pytest.mark.asyncio


async def events_of(triton, prompt: str | None = "hi", **options):
    async with AsyncTritoneClient(triton.url) as client, aclosing(client.stream(prompt, **options)) as events:
        return [event async for event in events]


async def test_events_are_typed_and_in_order(triton):
    events = await events_of(triton)
    assert [type(event) for event in events] == [TextDelta, AudioChunk, TextDelta, AudioChunk, DoneEvent]
    assert [event.index for event in events] == [0, 1, 2, 3, 4]
    assert [events[0].text, events[2].text] == ["Hel", "lo"]
    first, second = events[1], events[3]
    assert (first.sample_offset, second.sample_offset) == (0, 400)
    assert first.sample_rate_hz == RATE_HZ and first.samples.dtype == np.int16
    assert first.duration_s == pytest.approx(400 / RATE_HZ)
    np.testing.assert_array_equal(np.concatenate([first.samples, second.samples]), counting_samples(0, 1000))


async def test_done_tells_reasons_usage_and_timings(triton):
    triton.script = [Wait(0.05), Text("a"), Wait(0.05), Audio(2400), Wait(0.05), Done({"text": "length"})]
    done = (await events_of(triton))[-1]
    assert done.finish_reasons == {"text": "length"}
    assert done.usage == INFO["usage"]
    assert done.stage_timings == INFO["timings"]["stages"]
    assert done.seed == 7 and done.info == INFO
    measured = done.measured
    assert 0.05 <= measured.ttft_s <= measured.ttfp_s - 0.04 <= measured.e2el_s - 0.08
    assert measured.audio_s == pytest.approx(0.1)
    assert measured.rtf == pytest.approx(measured.e2el_s / 0.1)


async def test_without_text_or_audio_there_is_nothing_to_time(triton):
    triton.script = [Done(info={})]
    measured = (await events_of(triton))[-1].measured
    assert (measured.ttft_s, measured.ttfp_s, measured.audio_s, measured.rtf) == (None, None, 0.0, None)
    assert measured.e2el_s > 0


async def test_the_request_reaches_the_server_as_it_was_asked(triton):
    async with AsyncTritoneClient(triton.url, "smoltalk", headers={"authorization": "Bearer x"}) as client:
        await client.ask(
            "hi", speaker="Ethan", deadline_s=30, parameters={"priority": 2, "traceparent": "00"}
        )
    [request] = triton.requests
    assert request.model == "smoltalk"
    assert set(request.inputs) == {"text_input", "speaker", "stream"}
    assert request.parameters == {"deadline_ms": 30_000, "priority": 2, "traceparent": "00"}
    assert request.metadata["authorization"] == "Bearer x"


async def test_float_samples(triton):
    triton.script = [Audio(400, float32=True), Audio(600, float32=True), Done()]
    async with AsyncTritoneClient(triton.url) as client:
        answer = await client.ask("hi", audio_format="f32")
    assert answer.samples.dtype == np.float32
    np.testing.assert_array_equal(answer.samples * 32768, counting_samples(0, 1000))


async def test_base64_samples_are_decoded(triton):
    encoded = base64.b64encode(counting_samples(0, 400).tobytes())
    triton.script = [Audio(400, encoded=encoded), Done()]
    async with AsyncTritoneClient(triton.url) as client:
        answer = await client.ask("hi", audio_format="s16_base64")
    np.testing.assert_array_equal(answer.samples, counting_samples(0, 400))
    assert answer.encoded_audio == b""


async def test_encoded_audio_is_joined_to_one_file(triton):
    triton.script = [Audio(400, encoded=b"fLaC"), Audio(400, encoded=b"more"), Done()]
    events = await events_of(triton, audio_format="flac")
    assert events[0] == EncodedAudio(b"fLaC", "flac", 0)
    measured = events[-1].measured
    assert measured.ttfp_s is not None
    assert measured.audio_s == 0.5 and measured.rtf == measured.e2el_s / 0.5  # as the server says
    async with AsyncTritoneClient(triton.url) as client:
        answer = await client.ask("hi", audio_format="flac")
    assert answer.encoded_audio == b"fLaCmore"
    assert answer.samples.size == 0 and answer.sample_rate_hz is None


async def test_pictures_video_and_progress(triton):
    frames = np.arange(12, dtype=np.uint8).reshape(1, 2, 2, 3)
    triton.script = [
        Raw({"event": "progress", "index": np.uint32([0]), "text_output": "", "info": '{"step": 3}'}),
        Raw({"event": "image", "index": np.uint32([1]), "text_output": "", "image_output": frames}),
        Raw({"event": "video", "index": np.uint32([2]), "text_output": "", "video_encoded": b"mp4"}),
        Raw({"event": "done", "index": np.uint32([3]), "text_output": ""}, is_final=True),
    ]
    progress, image, video, done = await events_of(triton)
    assert progress == Progress({"step": 3}, 0)
    assert isinstance(image, Media) and image.modality == "image"
    np.testing.assert_array_equal(image.frames, frames)
    assert video.modality == "video" and video.files == (b"mp4",) and video.frames is None
    assert done.finish_reasons == {} and done.seed is None


async def test_one_response_may_carry_the_whole_answer(triton):
    triton.script = [
        Raw(
            {
                "event": "done",
                "index": np.uint32([0]),
                "text_output": "Hi",
                "audio_output": counting_samples(0, 5),
                "sample_rate": np.int32([8000]),
                "sample_offset": np.int64([0]),
            },
            is_final=True,
        )
    ]
    assert [type(event) for event in await events_of(triton)] == [TextDelta, AudioChunk, DoneEvent]


async def test_ask_gathers_everything(triton):
    async with AsyncTritoneClient(triton.url) as client:
        answer = await client.ask("hi")
    assert answer.text == "Hello"
    assert answer.sample_rate_hz == RATE_HZ
    np.testing.assert_array_equal(answer.samples, counting_samples(0, 1000))
    assert answer.done.seed == 7


async def test_say_sends_a_conversation_that_ends_with_the_assistant(triton):
    async with AsyncTritoneClient(triton.url) as client:
        answer = await gather(client.say("Good night", speaker="Ethan"))
        with pytest.raises(InvalidRequest, match="not messages"):
            client.say("Good night", messages=[])
        with pytest.raises(InvalidRequest, match="leave system out"):
            client.say("Good night", system="be brief")
    assert answer.samples.size == 1000
    [request] = triton.requests
    assert request.text("messages") == '[{"role": "assistant", "content": "Good night"}]'
    assert request.text("modalities") == "audio"
    assert set(request.inputs) == {"messages", "modalities", "speaker", "stream"}


async def test_many_requests_at_once_keep_their_answers_apart(triton):
    triton.script = lambda request: [Text(request.text("text_input")), Wait(0.05), Done()]
    async with AsyncTritoneClient(triton.url) as client:
        answers = await asyncio.gather(*(client.ask(f"question {number}") for number in range(16)))
    assert [answer.text for answer in answers] == [f"question {number}" for number in range(16)]
    assert triton.max_running > 1


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ([Audio(400), Audio(400, offset=500), Done()], "starts at sample 500 where 400 was due"),
        ([Audio(400, offset=1), Done()], "starts at sample 1 where 0 was due"),
        ([Audio(400), Audio(400, offset=0), Done()], "starts at sample 0 where 400 was due"),
        ([Audio(400), Audio(400, rate_hz=16_000), Done()], "24000 to 16000 Hz"),
        ([Audio(400), Audio(400, float32=True), Done()], "int16 to float32"),
        ([Text("a")], "ended without `done`"),
        ([Text("a"), Raw({}, is_final=True)], "no `event`"),
        ([Text("a"), Raw({"event": "text", "index": np.uint32([5]), "text_output": "b"})], "response 5 came"),
        ([Raw({"event": "text", "text_output": "b"})], "`index` is missing"),
        ([Raw({"event": "done", "index": np.uint32([0]), "info": "[1]"})], "`info` is not a JSON object"),
        ([Raw({"event": "text", "index": np.uint32([0]), "text_output": b"\xc3"})], "not UTF-8"),
        ([Done(), Text("a")], "follows the last one"),
    ],
)
async def test_answers_that_do_not_add_up_are_refused(triton, script, sentence):
    triton.script = script
    with pytest.raises(BrokenStream) as error:
        await events_of(triton)
    assert sentence in str(error.value)


async def test_text_before_an_error_is_delivered(triton):
    import grpc

    triton.script = [Text("Hel"), Fail(grpc.StatusCode.INTERNAL, "TRITONE_INTERNAL: talker died; try again")]
    texts = []
    async with AsyncTritoneClient(triton.url) as client:
        with pytest.raises(ServerFault, match="talker died"):
            async for event in client.stream("hi"):
                texts.append(event.text)
    assert texts == ["Hel"]


async def server_saw_cancel(triton) -> bool:
    return await asyncio.to_thread(triton.cancelled.wait, PATIENCE_S)


async def asked(triton) -> None:
    """Wait until the server has a request."""
    await until(lambda: triton.requests)


async def test_break_cancels_on_the_server(triton):
    triton.script = [Text("a"), Hang()]
    async with AsyncTritoneClient(triton.url) as client:
        async for _ in client.stream("hi"):
            break
        assert await server_saw_cancel(triton)


async def test_aclose_cancels_on_the_server(triton):
    triton.script = [Text("a"), Hang()]
    async with AsyncTritoneClient(triton.url) as client:
        events = client.stream("hi")
        await anext(events)
        assert not triton.cancelled.is_set()
        await events.aclose()
        assert await server_saw_cancel(triton)


async def test_cancelling_the_task_cancels_on_the_server(triton):
    triton.script = [Hang()]
    async with AsyncTritoneClient(triton.url) as client:
        task = asyncio.create_task(client.ask("hi"))
        await asked(triton)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await server_saw_cancel(triton)


async def test_a_callers_timeout_stays_a_timeout(triton):
    triton.script = [Hang()]
    async with AsyncTritoneClient(triton.url) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as limit:
                answer = asyncio.create_task(client.ask("hi"))
                await asked(triton)
                limit.reschedule(0)
                await answer
        assert await server_saw_cancel(triton)


async def test_a_complete_answer_is_not_cancelled(triton):
    await events_of(triton)
    await asyncio.sleep(0.05)
    assert not triton.cancelled.is_set()


async def test_closing_the_client_ends_its_streams(triton):
    triton.script = [Text("a"), Hang()]
    client = AsyncTritoneClient(triton.url)
    task = asyncio.create_task(client.ask("hi"))
    await asked(triton)
    await client.close()
    with pytest.raises(Cancelled, match="client was closed"):
        await task
    with pytest.raises(RuntimeError, match="closed"):
        await client.ask("hi")


async def test_deadline_is_sent_and_kept(triton):
    triton.script = [Text("a"), Hang()]
    start_s = time.perf_counter()
    with pytest.raises(DeadlineExceeded, match=r"within 1 s"):
        await events_of(triton, deadline_s=1.0)  # long enough for the request to get there
    assert 1.0 <= time.perf_counter() - start_s < PATIENCE_S
    assert triton.requests[0].parameters["deadline_ms"] == 1000
    assert await server_saw_cancel(triton)


async def test_a_server_that_ends_at_the_deadline_may_say_so(triton, monkeypatch):
    monkeypatch.setattr(Request, "client_timeout_s", property(lambda request: PATIENCE_S))
    triton.script = [Text("a"), Wait(0.3), Done({"text": "deadline"})]
    done = (await events_of(triton, deadline_s=0.2))[-1]
    assert done.finish_reasons == {"text": "deadline"}


async def test_ping_gives_the_stages(triton):
    triton.script = [Done({}, {"stages": {"thinker": {"engines": []}, "talker": {}}})]
    async with AsyncTritoneClient(triton.url) as client:
        assert await client.ping(deadline_s=3) == {"thinker": {"engines": []}, "talker": {}}
    [request] = triton.requests
    assert set(request.inputs) == {"op"} and request.text("op") == "ping"
    assert request.parameters == {"deadline_ms": 3000}


async def test_ping_has_no_grace(triton):
    triton.script = [Wait(PATIENCE_S), Done({}, {"stages": {}})]
    async with AsyncTritoneClient(triton.url) as client:
        with pytest.raises(DeadlineExceeded):
            await client.ping(deadline_s=0.2)


async def test_ping_of_something_else(triton):
    async with AsyncTritoneClient(triton.url) as client:
        with pytest.raises(BrokenStream, match="without its stages"):
            await client.ping()


async def test_describe_reads_the_model_configuration(triton):
    triton.config_parameters = {
        "contract_version": "1",
        "sample_rate_hz": "24000",
        "modalities": "text,audio",
        "speakers": "Ethan, Chelsie",
        "max_in_flight": "8",
        "max_audio_s": "37.5",
        "other": "x",
    }
    async with AsyncTritoneClient(triton.url) as client:
        description = await client.describe()
        assert await client.limits() == {"max_in_flight": 8, "max_audio_s": 37.5}
    assert description.name == "smoltalk"
    assert (description.contract_version, description.sample_rate_hz) == (1, 24_000)
    assert description.speakers == ("Ethan", "Chelsie") and description.modalities == ("text", "audio")
    assert description.parameters["other"] == "x"


async def test_describe_of_a_bare_or_broken_or_missing_model(triton):
    async with AsyncTritoneClient(triton.url) as client:
        description = await client.describe()
        assert (description.contract_version, description.speakers, description.limits) == (None, (), {})
        triton.config_parameters = {"max_audio_s": "long"}
        with pytest.raises(ServerFault, match="max_audio_s is not a number"):
            await client.describe()
    async with AsyncTritoneClient(triton.url, "nothing") as client:
        with pytest.raises(NotFound, match="unknown model"):
            await client.describe()
