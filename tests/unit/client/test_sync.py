"""The sync face: the same behaviour from ordinary code and threads."""

import json
import signal
import threading
import time

import numpy as np
import pytest
from fake_triton import Done, Hang, Text, counting_samples

from tritone_client import (
    AudioChunk,
    Cancelled,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidRequest,
    TextDelta,
    TritoneClient,
)
from tritone_client import Done as DoneEvent
from waiting import PATIENCE_S


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tritone-client"]


def test_stream_say_and_ask(triton):
    with TritoneClient(triton.url) as client:
        kinds = [type(event) for event in client.stream("hi")]
        assert kinds == [TextDelta, AudioChunk, TextDelta, AudioChunk, DoneEvent]
        assert [type(event) for event in client.say("hi")] == kinds
        answer = client.ask("hi")
    assert answer.text == "Hello"
    np.testing.assert_array_equal(answer.samples, counting_samples(0, 1000))
    assert client_threads() == []


def test_files_and_a_system_text_make_a_conversation(triton):
    with TritoneClient(triton.url) as client:
        answer = client.ask("What?", images=[b"png"], audios=[b"wav"], system="be brief")
    assert answer.text == "Hello" and answer.done.usage["stages"]["thinker"]["prompt_tokens"] == 5
    [request] = triton.requests
    assert request.inputs["image"].tolist() == [b"png"] and request.inputs["audio"].tolist() == [b"wav"]
    system, user = json.loads(request.text("messages"))
    assert system == {"role": "system", "content": "be brief"}
    assert [part["type"] for part in user["content"]] == ["image", "audio", "text"]


def test_ping_and_describe(triton):
    triton.script = [Done({}, {"stages": {"thinker": {"engines": []}}})]
    triton.config_parameters = {"max_in_flight": "8", "sample_rate_hz": "24000"}
    with TritoneClient(triton.url) as client:
        assert client.ping() == {"thinker": {"engines": []}}
        assert client.limits() == {"max_in_flight": 8}
        assert client.describe().sample_rate_hz == 24_000


def test_events_arrive_while_the_answer_is_made(triton):
    triton.script = [Text("a"), Hang()]
    with TritoneClient(triton.url) as client:
        assert next(iter(client.stream("hi"))).text == "a"


def test_leaving_the_loop_cancels_on_the_server(triton):
    triton.script = [Text("a"), Hang()]
    with TritoneClient(triton.url) as client:
        for _ in client.stream("hi"):
            break
        assert triton.cancelled.wait(PATIENCE_S)


def test_errors_are_those_of_the_async_client(triton):
    triton.script = [Text("a"), Hang()]
    with TritoneClient(triton.url) as client:
        with pytest.raises(InvalidRequest, match="nothing is asked"):
            client.stream()
        with pytest.raises(DeadlineExceeded):
            list(client.stream("hi", deadline_s=0.1))
        with pytest.raises(DeadlineExceeded):
            client.ask("hi", deadline_s=0.1)
    with TritoneClient("127.0.0.1:1") as client, pytest.raises(ConnectionFailed):
        client.ask("hi")
    with pytest.raises(InvalidRequest, match="scheme"):
        TritoneClient("grpc://127.0.0.1:1")
    assert client_threads() == []


@pytest.mark.parametrize("call", [lambda client: list(client.stream("hi")), lambda client: client.ask("hi")])
def test_ctrl_c_cancels_on_the_server(triton, call):
    def interrupt_once_asked() -> None:
        while not triton.requests:
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    triton.script = [Hang()]
    with TritoneClient(triton.url) as client:
        threading.Thread(target=interrupt_once_asked).start()
        with pytest.raises(KeyboardInterrupt):
            call(client)
        assert triton.cancelled.wait(PATIENCE_S)


def test_closing_ends_the_streams_of_other_threads(triton):
    triton.script = [Text("a"), Hang()]
    client = TritoneClient(triton.url)
    errors: list[BaseException] = []

    def call(ask) -> None:
        try:
            ask("hi")
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=call, args=(client.ask,)),
        threading.Thread(target=call, args=(lambda prompt: list(client.stream(prompt)),)),
    ]
    for thread in threads:
        thread.start()
    while len(triton.requests) < 2:
        time.sleep(0.01)
    client.close()
    client.close()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [type(error) for error in errors] == [Cancelled, Cancelled]
    with pytest.raises(RuntimeError, match="closed"):
        client.ask("hi")
