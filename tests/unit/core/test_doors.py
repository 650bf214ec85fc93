"""The three doors, with the engines of the echo pipeline behind them: what they let through, and what not.

Triton is `fake_triton_backend`: its BLS calls go through the stage doors, as in a server. The engines run as
threads of this process and serve the addresses where the doors look for them, so no process is started.
"""

import itertools
import json
import os
import random
import threading
import time
import uuid
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml

import echo
from tritone import contract, control, deploy_reader, inbox, readiness, wire
from tritone.engines.base import Placement
from tritone.engines.batch_loop import BatchLoop
from tritone.engines.host import Host, build_loops
from tritone.errors import ConfigError, EngineLost, Unavailable
from tritone.server_key import server_key
from waiting import PATIENCE_S, wait_until

from . import fake_triton_backend as fake

OUTPUTS = [port.name for port in echo.PIPELINE.outputs]
PORTS = {port.name: port for port in (*echo.PIPELINE.inputs, contract.CONTROL)}


class FaultyWave(echo.Wave):
    """Its sound of the letter X is of a shape that its port does not have, that of Y of another port."""

    def run(self, chunks):
        return [
            self._faulty(chunk, result) for chunk, result in zip(chunks, super().run(chunks), strict=True)
        ]

    def _faulty(self, chunk, result):
        codes = set(chunk.inputs.get("frames", np.zeros((0, 1)))[:, 0])
        if ord("X") in codes:
            return {"pcm": np.zeros((2, 2), np.float32)}
        return {"smell": np.zeros(2, np.float32)} if ord("Y") in codes else result


class Server:
    """Stage doors and their engines, once for all tests; pipeline doors as they are asked for."""

    def __init__(self, folder):
        from tritone import stage_door

        self.name = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        stage_door.server_name = lambda: self.name
        path = folder / "deploy.yaml"
        stages = {"writer": {"engine": {"step_s": 0.002}}}
        path.write_text(yaml.safe_dump({"pipeline": str(Path(echo.__file__)), "stages": stages}))
        self.deploy = deploy_reader.load(path)
        self._folder = folder
        self.loops = {}
        for stage in ("writer", "singer", "wave"):
            self._start_engine(stage)
        self.engine_doors = {
            stage: self.door("tritone_engine", f"echo_{stage}", stage=stage) for stage in ("writer", "singer")
        }
        self.batch_door = self.door("tritone_batch", "echo_wave", stage="wave")
        turn = threading.Lock()  # an instance is called by one thread at a time

        def batch(request):
            with turn:
                return self.batch_door.execute([request])[0]

        self.wave = fake.SequenceBatcher(batch)
        fake.MODELS.update(echo_wave=self.wave)
        for stage, door in self.engine_doors.items():
            fake.MODELS[f"echo_{stage}"] = lambda request, door=door: self.through(door, request)

    def _start_engine(self, stage):
        from tritone.stage_door import engine_address

        address = engine_address(self.deploy, stage, "cpu", 0)
        host = Host(address, wire.listen(address))
        if stage == "wave":
            loops = {"echo_wave": BatchLoop("echo_wave", FaultyWave(Placement(self._folder), None), 60.0)}
        else:
            loops = build_loops(self.deploy, (stage,), "cpu", host.peers)
        self.loops.update(loops)
        host.serve()
        host.become(wire.Ready(0.0), loops)

    def door(self, kind, model, decoupled=False, **parameters):
        parameters = {"deploy_digest": self.deploy.digest, **parameters}
        config = {
            "parameters": {key: {"string_value": value} for key, value in parameters.items()},
            "model_transaction_policy": {"decoupled": decoupled},
        }
        door = fake.load_door(kind)()
        door.initialize(
            {
                "model_name": model,
                "model_repository": str(self._folder / model),
                "model_config": json.dumps(config),
                "model_instance_name": f"{model}_0_0",
                "model_instance_kind": "CPU",
                "model_instance_device_id": "0",
            }
        )
        return door

    def through(self, door, request):
        """The response of an engine door to a BLS call."""
        asked = fake.ClientRequest(request.tensors, request.outputs, decoupled=False)
        door.execute([asked])
        asked.sender.outcome()
        (answer,) = asked.sender.responses
        if isinstance(answer, dict):
            return fake.InferenceResponse([fake.Tensor(name, array) for name, array in answer.items()])
        return fake.InferenceResponse([], answer)

    @property
    def live_sessions(self):
        """By stage model, what its engine holds."""
        return {model: loop.stats()["active"] for model, loop in self.loops.items()}

    def close(self):
        for door in (*self.engine_doors.values(), self.batch_door):
            door.finalize()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with fake.installed():
        server = Server(tmp_path_factory.mktemp("repository"))
        yield server
        server.close()


@pytest.fixture
def pipeline_door(server):
    door = server.door("tritone_pipeline", "echo", decoupled=True)
    yield door
    door.finalize()


@pytest.fixture
def whole_answer_door(server):
    door = server.door("tritone_pipeline", "echo_sync")
    yield door
    door.finalize()


def client_request(decoupled=True, outputs=OUTPUTS, parameters=None, **values):
    tensors = {name: PORTS[name].pack(value) for name, value in values.items()}
    return fake.ClientRequest(tensors, outputs, parameters, decoupled)


def ask(door, decoupled=True, outputs=OUTPUTS, parameters=None, **values):
    request = client_request(decoupled, outputs, parameters, **{"stream": decoupled, **values})
    door.execute([request])
    return request.sender


def sound_of(sender):
    return np.concatenate([answer["audio_f32"] for answer in sender.responses if "audio_f32" in answer])


def shown(name, **labels):
    """The sum of what a scrape gives for a family and labels."""
    series = fake.MetricFamily.shown.items()
    return sum(value for (its, pairs), value in series if its == name and set(labels.items()) <= set(pairs))


# -- all doors together ------------------------------------------------------------------------------------


def test_a_stream_through_all_doors_says_what_was_asked(pipeline_door, server):
    sender = ask(pipeline_door, text_input="hello my dear world", audio_format="f32")
    assert sender.outcome() == "done" and sender.flags.count(1) == 1
    assert "".join(sender.texts("text_output")) == "hello my dear world "
    np.testing.assert_array_equal(sound_of(sender), echo.expected_pcm("hello my dear world "))
    wait_until(lambda: server.live_sessions == {"echo_writer": 0, "echo_singer": 0, "echo_wave": 0})
    assert server.wave.live == set()


def test_a_whole_answer_is_one_response_with_the_same_content(whole_answer_door):
    sender = ask(whole_answer_door, decoupled=False, text_input="hello my dear", audio_format="f32")
    assert sender.outcome() == "done" and sender.flags == [1]
    assert sender.texts("text_output") == ["hello my dear "]
    np.testing.assert_array_equal(sound_of(sender), echo.expected_pcm("hello my dear "))


def test_the_whole_answer_door_refuses_to_stream(whole_answer_door):
    sender = ask(whole_answer_door, decoupled=False, text_input="hi", stream=True)
    assert sender.outcome() == "INVALID_ARG" and "echo_sync gives one response" in sender.message


def test_a_refusal_of_an_engine_reaches_the_client(pipeline_door):
    sender = ask(pipeline_door, text_input="refuse this")
    assert sender.outcome() == "INVALID_ARG" and "start with another word" in sender.message


def test_requests_of_all_fates_leave_no_state_in_any_engine(pipeline_door, server):
    rng, overlaps_before = random.Random(7), len(server.wave.overlaps)
    senders = []
    for _ in range(40):
        senders.append(
            ask(
                pipeline_door,
                text_input=" ".join(rng.choices(["one", "two", "X", "Y", "refuse"], [8, 8, 1, 1, 1], k=12)),
                modalities=rng.choice(["text", "audio", "text,audio"]),
                parameters={"deadline_ms": rng.choice([3, 20, 60_000])},
            )
        )
        if rng.random() < 0.4:
            rng.choice(senders).cancelled = True
        time.sleep(rng.choice([0, 0.005]))
    ends = Counter(sender.outcome() for sender in senders)
    assert len(ends) >= 4 and "UNMARKED" not in ends, ends
    assert all(sender.flags.count(1) == 1 and not sender.faults for sender in senders)
    wait_until(lambda: server.live_sessions == {"echo_writer": 0, "echo_singer": 0, "echo_wave": 0})
    wait_until(lambda: server.wave.live == set())
    assert server.wave.overlaps[overlaps_before:] == []
    assert ask(pipeline_door, text_input="still fine").outcome() == "done"


def test_an_engine_works_until_it_is_told_of_the_cancel_and_no_longer(pipeline_door, server):
    sender = ask(pipeline_door, text_input="w " * 8000, modalities="text")  # long after the cancel
    wait_until(lambda: len(sender.responses) > 3)
    sender.cancelled = True
    assert sender.outcome() == "CANCELLED"
    wait_until(lambda: server.live_sessions["echo_writer"] == 0, timeout_s=8.0)


# -- the pipeline door -------------------------------------------------------------------------------------


def test_a_request_that_cannot_be_read_is_refused_and_the_one_beside_it_served(server):
    door = server.door("tritone_pipeline", "echo", decoupled=True)
    bad = [
        fake.ClientRequest({"text_input": np.array([b"\xff"], object)}, OUTPUTS),
        fake.ClientRequest({"text_input": np.array([b"a", b"b"], object)}, OUTPUTS),
        client_request(text_input="hi", parameters={"temperature": 1}),
    ]
    good = client_request(text_input="hi", stream=True)
    before = shown("tritone_requests_total", model="echo", outcome="refused", code="INVALID_ARG")
    door.execute([*bad, good])
    assert [request.sender.outcome() for request in bad] == ["INVALID_ARG"] * 3
    assert good.sender.outcome() == "done"
    door.finalize()  # publishes what is left
    after = shown("tritone_requests_total", model="echo", outcome="refused", code="INVALID_ARG")
    assert after == before + 3


class UnreadableRequest(fake.ClientRequest):
    """Triton cannot give the tensors: say, no shared memory is left to map them."""

    def inputs(self):
        raise RuntimeError("no shared memory")


def test_a_fault_of_triton_while_a_request_is_read_ends_that_request_only(pipeline_door):
    unreadable, good = UnreadableRequest({}, OUTPUTS), client_request(text_input="hi", stream=True)
    pipeline_door.execute([unreadable, good])
    assert unreadable.sender.outcome() == "INTERNAL"
    assert good.sender.outcome() == "done"


def test_a_server_that_asks_the_doors_hears_of_an_engine_that_is_gone(pipeline_door, server, monkeypatch):
    monkeypatch.setattr(readiness, "LOOK_EVERY_S", 0.02)
    doors = [pipeline_door, server.engine_doors["singer"]]
    assert all(door.is_ready() is True for door in doors)
    link = server.engine_doors["singer"]._door.own
    link._ready.clear()
    wait_until(lambda: not any(door.is_ready() for door in doors))
    link._ready.set()
    wait_until(lambda: all(door.is_ready() for door in doors))


def test_drain_all_ends_the_requests_of_every_pipeline_model_of_the_server(pipeline_door, whole_answer_door):
    senders = [
        ask(pipeline_door, text_input="w " * 8000, modalities="text"),
        ask(whole_answer_door, decoupled=False, text_input="w " * 8000, modalities="text"),
    ]
    wait_until(lambda: len(senders[0].responses) > 1)
    inbox.drain_all(os.getpid(), timeout_s=PATIENCE_S)
    for sender in senders:
        assert sender.outcome(0.1) == "UNAVAILABLE" and "shutting down" in sender.message
    assert ask(pipeline_door, text_input="hi").outcome() == "UNAVAILABLE"


def test_a_drain_with_a_grace_lets_requests_finish_and_refuses_others(pipeline_door):
    sender = ask(pipeline_door, text_input="word " * 200, modalities="text")
    wait_until(lambda: len(sender.responses) > 1)
    order = wire.Drain(grace_s=20.0, why="pipeline echo is being reloaded")
    drained = []
    drain = threading.Thread(
        target=lambda: drained.append(inbox.drain_all(os.getpid(), PATIENCE_S, order, {"echo"}))
    )
    drain.start()
    wait_until(lambda: ask(pipeline_door, text_input="hi").outcome() == "UNAVAILABLE")
    refused = ask(pipeline_door, text_input="hi")
    assert refused.outcome() == "UNAVAILABLE" and "is being reloaded" in refused.message
    assert sender.outcome() == "done"
    drain.join(PATIENCE_S)
    assert drained == [True]


def test_a_drain_of_other_models_is_none_of_ours(pipeline_door):
    assert inbox.drain_all(os.getpid(), PATIENCE_S, wire.Drain(grace_s=5.0), {"other"})
    assert ask(pipeline_door, text_input="hi").outcome() == "done"


def test_finalize_ends_what_runs(server):
    door = server.door("tritone_pipeline", "echo", decoupled=True)
    sender = ask(door, text_input="w " * 8000, modalities="text")
    wait_until(lambda: len(sender.responses) > 1)
    door.finalize()
    assert sender.outcome(0.1) == "UNAVAILABLE"
    wait_until(lambda: server.live_sessions["echo_writer"] == 0)


def test_a_config_that_was_not_rendered_from_the_deploy_file_is_refused(server):
    with pytest.raises(ConfigError, match="was not rendered from"):
        server.door("tritone_pipeline", "echo", decoupled=True, deploy_digest="stale")


# -- the stage doors ---------------------------------------------------------------------------------------

MALFORMED = {
    "nothing": b"",
    "not JSON": b"open the door",
    "half of it": b'{"op":"chunk","session":"s"',
    "not UTF-8": b'{"op":"\xff"}',
    "a list": b'["chunk","s",true,true]',
    "a number": b"7",
    "no op": b'{"session":"s","start":true,"end":true}',
    "an unknown op": b'{"op":"dance"}',
    "a field is missing": b'{"op":"chunk","session":"s","start":true}',
    "a field has the wrong type": b'{"op":"chunk","session":"s","start":"yes","end":true}',
    "session is no text": b'{"op":"drop","session":5}',
    "open without routes": b'{"op":"open","session":"s","inbox":"i","sources":0,"settings":{}}',
    "open with a bad route": b'{"op":"open","session":"","inbox":"","sources":0,"settings":{},"routes":[7]}',
}


def key():
    """Of the server that the doors believe to be children of."""
    from tritone import stage_door

    return server_key(stage_door.server_name())


def with_key(data):
    """Bytes in place of a control, from a caller who knows the key."""
    return b'{"key":"%s","call":%s}' % (key().encode(), data)


def batched(call, frames=None, segment_end=True):
    """A BLS call of the batch door. call: a control, or its bytes."""
    data = call if isinstance(call, bytes) else control.encode(call, key())
    tensors = {"control": np.frombuffer(data, np.uint8)[None], "segment_end": np.array([[segment_end]])}
    if frames is not None:
        tensors["frames"] = np.array([[[ord(letter)] for letter in frames]], np.float32)
    inputs = [fake.Tensor(name, array) for name, array in tensors.items()]
    return fake.InferenceRequest("echo_wave", ["pcm", "reply"], inputs)


names = (f"stream-{number}" for number in itertools.count())


def chunk(frames="ab", start=True, end=True):
    return batched(control.RunChunk(next(names), start, end), frames)


def end_of(response):
    return "done" if not response.has_error() else fake.outcome_of(response.error())


def samples_of(response):
    tensor, reply = response.output_tensors()
    assert tensor.name() == "pcm" and tensor.as_numpy().shape[0] == 1, "the batch dimension"
    began_s, ended_s = json.loads(reply.as_numpy()[0, 0])["busy"]
    assert 0 < began_s <= ended_s <= time.monotonic()
    return tensor.as_numpy()[0]


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_control_to_the_batch_door_is_refused_and_the_chunk_beside_it_served(server, data):
    before, bad, after = server.batch_door.execute([chunk("ab"), batched(with_key(data)), chunk("cd")])
    assert end_of(bad) == "INVALID_ARG"
    np.testing.assert_array_equal(samples_of(before), echo.expected_pcm("ab"))
    np.testing.assert_array_equal(samples_of(after), echo.expected_pcm("cd"))


def test_a_request_without_a_control_is_refused(server):
    (bad,) = server.batch_door.execute([fake.InferenceRequest("echo_wave", ["pcm"], [])])
    assert end_of(bad) == "INVALID_ARG"


def test_a_chunk_of_a_wrong_shape_is_refused_and_the_one_beside_it_served(server):
    bad = chunk()
    bad.tensors["frames"] = np.zeros((1, 3, 2), np.float32)
    refused, served = server.batch_door.execute([bad, chunk("ab")])
    assert end_of(refused) == "INVALID_ARG" and end_of(served) == "done"


@pytest.mark.parametrize("letter", ["X", "Y"])
def test_an_output_that_does_not_fit_its_port_fails_that_chunk_only(server, letter):
    served, failed, also = server.batch_door.execute([chunk("ab"), chunk(letter), chunk("cd")])
    assert end_of(failed) == "INTERNAL"
    np.testing.assert_array_equal(samples_of(served), echo.expected_pcm("ab"))
    np.testing.assert_array_equal(samples_of(also), echo.expected_pcm("cd"))


def test_a_chunk_of_a_stream_that_never_began_fails_alone(server):
    failed, served = server.batch_door.execute([chunk("ab", start=False), chunk("cd")])
    assert end_of(failed) == "ENGINE_LOST" and end_of(served) == "done"


def test_chunks_of_one_execute_are_one_batch_of_the_engine(server):
    loop = server.loops["echo_wave"]
    before = loop.stats()["batches"]
    assert [end_of(r) for r in server.batch_door.execute([chunk() for _ in range(5)])] == ["done"] * 5
    assert loop.stats()["batches"] == before + 1


def test_each_stage_shows_what_its_engine_did(server, pipeline_door):
    stages = ("writer", "singer", "wave")
    before = {stage: shown("tritone_stage_batched_total", stage=stage) for stage in stages}
    assert ask(pipeline_door, text_input="hello my dear world").outcome() == "done"
    for stage in stages:
        labels = {"pipeline": "echo", "stage": stage, "instance": "cpu/0"}
        wait_until(lambda: shown("tritone_stage_batched_total", **labels) > before[labels["stage"]])  # noqa: B023
        assert shown("tritone_engine_up", **labels) == 1
        assert shown("tritone_engine_restarts_total", **labels) == 0
    taken = {"stage": "singer", "instance": "cpu/0"}
    wait_until(lambda: shown("tritone_connector_chunks_total", **taken) >= 4)
    assert shown("tritone_connector_bytes_total", **taken) > 0
    latency_s = shown("tritone_connector_latency_seconds_total", **taken)
    assert 0 < latency_s < PATIENCE_S * shown("tritone_connector_chunks_total", **taken)
    assert fake.MetricFamily.faults == []


def test_a_drop_frees_the_stream(server):
    session = next(names)
    server.batch_door.execute([batched(control.RunChunk(session, True, False), "ab")])
    wait_until(lambda: server.live_sessions["echo_wave"] == 1)
    (dropped,) = server.batch_door.execute([batched(control.DropStream(session))])
    assert end_of(dropped) == "done"
    wait_until(lambda: server.live_sessions["echo_wave"] == 0)


def test_when_a_whole_batch_fails_each_request_gets_a_response_of_its_own(server, monkeypatch):
    """The stub saves every response to shared memory, and an object that it saves twice frees the first."""

    def lost(chunks):
        raise EngineLost("the engine of stage wave died under the request", "try again")

    monkeypatch.setattr(server.batch_door._door, "run", lost)
    responses = server.batch_door.execute([chunk(), chunk(), batched(control.PingStage())])
    assert [end_of(response) for response in responses] == ["ENGINE_LOST", "ENGINE_LOST", "done"]
    assert len({id(response) for response in responses}) == 3


def engine_request(call, **values):
    """A BLS call of an engine door."""
    data = call if isinstance(call, bytes) else control.encode(call, key())
    return fake.ClientRequest(
        {"control": np.frombuffer(data, np.uint8), **values}, ["reply"], decoupled=False
    )


def reply_of(request):
    assert request.sender.outcome() == "done", request.sender.message
    return json.loads(request.sender.texts("reply")[0])


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_control_to_an_engine_door_is_refused_and_the_call_beside_it_served(server, data):
    bad, good = engine_request(with_key(data)), engine_request(control.PingStage())
    server.engine_doors["writer"].execute([bad, good])
    assert bad.sender.outcome() == "INVALID_ARG" and bad.sender.flags == [1]
    assert len(reply_of(good)["engines"]) == 1


def test_each_stage_door_refuses_the_calls_of_the_other(server):
    open_call = control.OpenSession("s", "nowhere", 0, {}, [])
    (refused,) = server.batch_door.execute([batched(open_call)])
    assert end_of(refused) == "INVALID_ARG"
    for call in (control.RunChunk("s", True, True), control.DropStream("s")):
        request = engine_request(call)
        server.engine_doors["writer"].execute([request])
        assert request.sender.outcome() == "INVALID_ARG"


STRANGERS = {
    "no key": b'{"op":"ping"}',
    "an empty key": control.encode(control.PingStage()),
    "another key": control.encode(control.PingStage(), "0" * 64),
    "a key of another alphabet": control.encode(control.PingStage(), "聪明"),
    "nothing": b"",
    "not UTF-8": b"\xff",
}


@pytest.mark.parametrize("data", STRANGERS.values(), ids=STRANGERS)
def test_a_stage_heeds_nobody_who_does_not_know_the_key(server, data):
    request = engine_request(data)
    server.engine_doors["writer"].execute([request])
    assert request.sender.outcome() == "INVALID_ARG"
    refused, served = server.batch_door.execute([batched(data), chunk("ab")])
    assert end_of(refused) == "INVALID_ARG" and end_of(served) == "done"
    for message in (request.sender.message, refused.error().message()):
        assert key() not in message and ("call the pipeline model instead" in message or b"\xff" in data)


@pytest.mark.parametrize("data", STRANGERS.values(), ids=STRANGERS)
def test_the_sequence_of_a_stranger_is_ended_and_that_of_a_stream_goes_on(server, data):
    stranger = batched(data, "ab")
    stranger.sequence, stranger.bits = 666, fake.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
    session = next(names)
    stream = batched(control.RunChunk(session, True, False), "ab")
    stream.sequence, stream.bits = 7, fake.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
    assert end_of(server.wave(stream)) == "done"
    assert end_of(server.wave(stranger)) == "INVALID_ARG"
    wait_until(lambda: server.wave.live == {7})
    end = batched(control.RunChunk(session, False, True), "cd")
    end.sequence, end.bits = 7, fake.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
    assert end_of(server.wave(end)) == "done"


@pytest.mark.parametrize("whole", [False, True])
def test_an_open_passes_on_whether_the_stage_waits_for_its_whole_input(server, whole):
    address = f"tritone-test/{uuid.uuid4().hex}"
    orchestrator, loop = wire.listen(address), server.loops["echo_singer"]
    try:
        request = engine_request(control.OpenSession("waits", address, 1, {}, [], whole))
        server.engine_doors["singer"].execute([request])
        assert reply_of(request)["endpoint"] and loop._seats["waits"].whole is whole
    finally:
        loop.post(lambda: loop.cancel("waits"))
        orchestrator.close()
    wait_until(lambda: "waits" not in loop._seats)


def test_an_open_for_an_orchestrator_that_is_gone_is_unavailable(server):
    request = engine_request(control.OpenSession("s", f"gone-{uuid.uuid4().hex}", 0, {}, []))
    server.engine_doors["writer"].execute([request])
    assert request.sender.outcome() == "UNAVAILABLE" and "orchestrator is gone" in request.sender.message
    assert server.live_sessions["echo_writer"] == 0


# -- Reply: the doors' hands -------------------------------------------------------------------------------


def make_reply(outputs=("a", "b"), decoupled=True):
    from tritone.triton import Reply

    request = fake.ClientRequest({}, outputs, decoupled=decoupled)
    return Reply(request), request.sender


def test_reply_sends_the_requested_outputs_only(server):
    reply, sender = make_reply(["a", "missing"])
    reply.send({"a": np.zeros(1), "b": np.zeros(1)}, final=True)
    assert [set(answer) for answer in sender.responses] == [{"a"}]


def test_nothing_is_sent_and_nobody_asked_after_the_end(server):
    for end in (
        lambda reply: reply.send({}, final=True),
        lambda reply: reply.fail(Unavailable("no", "wait")),
    ):
        reply, sender = make_reply()
        end(reply)
        reply.send({"a": np.zeros(1)})
        reply.send({"a": np.zeros(1)}, final=True)
        reply.fail(Unavailable("again", "wait"))
        sender.cancelled = True
        assert not reply.is_cancelled()
        assert sender.flags == [1] and sender.faults == []


def test_the_end_waits_for_a_question_about_cancellation_that_is_under_way(server):
    """The server frees the request with FINAL; a question that overlaps it reads freed memory."""
    reply, sender = make_reply()
    asking, answer = threading.Event(), threading.Event()

    def slow():
        asking.set()
        answer.wait(PATIENCE_S)
        return False

    sender.is_cancelled = slow
    asker = threading.Thread(target=reply.is_cancelled, daemon=True)
    asker.start()
    assert asking.wait(PATIENCE_S)
    ender = threading.Thread(target=reply.send, args=({}, True), daemon=True)
    ender.start()
    time.sleep(0.05)
    assert not sender.ended.is_set()
    answer.set()
    assert sender.ended.wait(PATIENCE_S)
    asker.join(PATIENCE_S)
    ender.join(PATIENCE_S)


def test_two_ends_at_once_are_one(server):
    for _ in range(50):
        reply, sender = make_reply()
        together = threading.Barrier(4)

        def end(reply=reply, together=together):
            together.wait(PATIENCE_S)
            reply.fail(Unavailable("no", "wait"))

        threads = [threading.Thread(target=end, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert sender.flags == [1] and sender.faults == []


@pytest.mark.parametrize(
    "big",
    [
        pytest.param(np.zeros(2 << 20, np.uint8), id="numbers"),
        pytest.param(
            np.array([b"\0" * (2 << 20)], object),
            id="STRING",
        ),
    ],
)
def test_a_response_larger_than_the_free_shared_memory_is_refused_before_it_is_sent(server, monkeypatch, big):
    from tritone import triton

    usage = triton.shutil.disk_usage("/")
    monkeypatch.setattr(triton.shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    reply, sender = make_reply()
    with pytest.raises(Unavailable, match="does not fit"):
        reply.send({"a": big}, final=True)
    assert sender.responses == []
    reply.fail(Unavailable("no", "wait"))
    assert sender.outcome() == "UNAVAILABLE"
