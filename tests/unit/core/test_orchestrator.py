"""One request, whatever happens to it: one end for the client, and nothing left in any stage.

The orchestrator, its BLS calls and its inbox are real; Triton is `fake_triton_backend`, and the stages are
scripts: `Bench.script` says what the engines of a session do while its writer is being opened.
"""

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import json
import logging
import queue
import random
import socket
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import echo
from tritone import contract, control, deploy_reader, wire
from tritone.chunk_feed import ChunkFeed
from tritone.deploy import Chunks
from tritone.engines.host import Host, build_loops
from tritone.errors import EngineLost, InvalidRequest
from tritone.otlp import OtlpTracer, Readable
from waiting import PATIENCE_S, wait_until

from . import fake_triton_backend as fake

ECHO = Path(__file__).parents[2] / "pipelines" / "echo.py"
TEXT_OUTPUTS = [port.name for port in contract.COMMON_OUTPUTS]
OUTPUTS = [*TEXT_OUTPUTS, *(port.name for port in contract.AUDIO_OUTPUTS)]
SAMPLES_PER_FRAME = 80
CANCEL_POLL_S = 0.005
START, END, RETURNED = 1, 2, "returned"
HELD_S = 10 * PATIENCE_S  # how long a stage stands still that a test holds
DEADLINE_S = 15.0  # of a request whose deadline the test lets come when it has seen what must come before
DEADLINE = {"deadline_ms": int(1000 * DEADLINE_S)}


@pytest.fixture(scope="module", autouse=True)
def triton():
    with fake.installed():
        yield


class StageEngine:
    """The engine process of a stage as an orchestrator sees it: what it is told, and what it pushes."""

    def __init__(self, model):
        self.address = f"tritone-test/{uuid.uuid4().hex}"
        self._model = model
        self._server = wire.listen(self.address)
        self._server.setblocking(False)
        self._heard = []
        self._listening = []
        self._inbox = None
        self._lock = threading.Lock()

    def connect(self, inbox):
        """As the loops do before they say Opened."""
        with self._lock:
            if self._inbox is None:
                self._inbox = wire.connect(inbox)
                self._inbox.send(wire.Hello(self.address))

    def push(self, message):
        inbox = self._inbox
        if inbox is None:
            raise wire.Disconnected("it is dead")
        inbox.send(message)

    def piece(self, session, number, values, last=False):
        self.push(wire.Piece(session, self._model, "", number, values, last))

    def finish(self, session, reason="stop"):
        self.push(wire.Finished(session, self._model, reason, {"completion_tokens": 2}, times(0.1)))

    def finish_undelivered(self, session):
        """The stage has ended, and the next one has not taken everything yet."""
        usage = {"completion_tokens": 2}
        self.push(wire.Finished(session, self._model, "stop", usage, times(0.1), is_delivered=False))

    def deliver(self, session):
        self.push(wire.Delivered(session, self._model))

    def fail(self, session, code, what):
        self.push(wire.Failed(session, self._model, code, what, "do it again"))

    def die(self):
        with self._lock:
            inbox, self._inbox = self._inbox, None
        if inbox is not None:
            inbox.close()

    @property
    def cancelled(self):
        """The sessions that it was told to forget, so far."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._listening.append(wire.accept(self._server))
        for channel in self._listening:
            with contextlib.suppress(BlockingIOError, wire.Disconnected):
                while True:
                    self._heard.append(channel.receive(socket.MSG_DONTWAIT))
        return [message.session for message in self._heard if isinstance(message, wire.Cancel)]

    def close(self):
        self.die()
        self._server.close()
        for channel in self._listening:
            channel.close()


def answer(bench, session, text):
    """The script of a healthy pipeline: the text comes back word by word, and a frame a character."""
    words = [f"{word} " for word in text.split()]
    if bench.is_heard("writer", session):
        for number, word in enumerate(words):
            bench.writer.piece(session, number, {"text": word}, last=number == len(words) - 1)
    bench.writer.finish(session)
    if bench.is_heard("singer", session):
        for number, word in enumerate(words):
            bench.sing(session, number, word)
        bench.singer.piece(session, len(words), {}, last=True)
        bench.singer.finish(session)


def silent(bench, session, text):
    """A script that leaves the session waiting."""


def refuse(bench, session, text):
    """A script of a stage that takes nothing."""
    raise InvalidRequest("that is too long", "shorten it")


def speaks_a_word(bench, session, text):
    """A script that gives one chunk of sound, and then nothing."""
    if bench.is_heard("singer", session):
        bench.sing(session, 0, "abcd")


class Bench:
    """An orchestrator of the echo pipeline over scripted stages. `check` is the promise of all tests here."""

    def __init__(self, may_stream=True, plan=None, accepts=(), tracer=None, **settings):
        from tritone.orchestrator import Orchestrator

        deploy = deploy_reader.from_mapping({"pipeline": str(ECHO), **settings}, "test")
        pipeline = deploy.pipeline
        pipeline = dataclasses.replace(
            pipeline, plan=plan or pipeline.plan, accepts=(*pipeline.accepts, *accepts)
        )
        deploy = dataclasses.replace(deploy, pipeline=pipeline)
        self.writer, self.singer = StageEngine("echo_writer"), StageEngine("echo_singer")
        self.wave = fake.SequenceBatcher(self._wave)
        self.script = answer
        self.on_chunk = lambda call: None  # called with each RunChunk; may wait or raise
        self.on_drop = lambda call: None
        self.chunk_calls = []  # the RunChunk calls, in order
        self.opened = {"writer": {}, "singer": {}}  # by stage: the calls that opened sessions, by session
        self.pings = Counter()
        self.ill = {}  # by stage: the "error" of its ping
        self._held = []
        self._clients = []
        self.requests = []  # those of the clients that do not only ask after the stages
        fake.MODELS.clear()
        fake.MODELS["echo_writer"] = lambda request: self._engine_stage("writer", request)
        fake.MODELS["echo_singer"] = lambda request: self._engine_stage("singer", request)
        fake.MODELS["echo_wave"] = self.wave
        self.address = f"tritone-test/{uuid.uuid4().hex}"
        facts = deploy.pipeline.facts(deploy.checkpoint)
        self.orchestrator = Orchestrator(deploy, facts, "echo/1", self.address, may_stream, tracer=tracer)
        self._passed_s = 0.0
        self.orchestrator._loop.time = lambda: time.monotonic() + self._passed_s

    # -- the client's side

    def ask(self, text="one two", parameters=None, outputs=OUTPUTS, decoupled=True, **values):
        """Submit a request; the sender that its responses go to."""
        from tritone.triton import Reply

        request = fake.ClientRequest({}, outputs, decoupled=decoupled)
        values = {"text_input": text, "stream": decoupled, "modalities": "text", **values}
        self.orchestrator.submit(values, parameters or {}, Reply(request))
        self._clients.append(request.sender)
        if not values.get("op"):
            self.requests.append(request.sender)
        return request.sender

    def speak(self, text="abcd", **more):
        return self.ask(text, modalities="audio", **more)

    def pass_time(self, seconds=DEADLINE_S):
        """Let so many seconds pass at once for the orchestrator: what is due by then is due now."""
        self._passed_s += seconds
        self.orchestrator._loop.call_soon_threadsafe(lambda: None)  # it may sleep until then

    # -- the stages' side

    def sing(self, session, number, text, last=False):
        frames = np.array([[ord(character)] for character in text], np.float32)
        self.singer.piece(session, number, {"frames": frames, "segment_end": True}, last)

    def hold(self):
        """An event to wait for inside a stage; the end of the test sets it."""
        event = threading.Event()
        self._held.append(event)
        return event

    def sessions(self, stage="writer", count=1):
        """The first `count` sessions that the stage opened, waited for."""
        wait_until(lambda: len(self.opened[stage]) >= count)
        return list(self.opened[stage])[:count]

    def is_heard(self, stage, session):
        """Whether the orchestrator asked the stage for pieces of the session."""
        call = self.opened[stage].get(session)
        return call is not None and any(route.address == self.address for route in call.routes)

    def _engine_stage(self, stage, request):
        call = control.decode(request.tensors["control"])
        if isinstance(call, control.PingStage):
            self.pings[stage] += 1
            return self._reply({"error": self.ill[stage]} if stage in self.ill else {"engines": []})
        engine = self.writer if stage == "writer" else self.singer
        try:
            engine.connect(call.inbox)
            self.opened[stage][call.session] = call
            if stage == "writer":
                messages = json.loads(request.tensors["messages"][0])
                self.script(self, call.session, messages[-1]["content"][0]["text"])
        except (InvalidRequest, EngineLost) as error:  # as a door answers
            raise fake.TritonError(error.internal_message) from None
        except wire.Disconnected as error:
            raise fake.TritonError(f"the engine died: {error}") from None
        return self._reply({"endpoint": engine.address})

    def _wave(self, request):
        call = control.decode(request.tensors["control"])
        if isinstance(call, control.PingStage):
            return self._reply({"error": self.ill["wave"]} if "wave" in self.ill else {"engines": []}, True)
        if isinstance(call, control.DropStream):
            self.on_drop(call)
            return self._reply({}, True)
        if isinstance(call, control.KeepStream):
            return self._reply({}, True)
        self.chunk_calls.append(call)
        self.on_chunk(call)
        num_frames = request.tensors["frames"].shape[1] if "frames" in request.tensors else 0
        samples = np.full((1, num_frames * SAMPLES_PER_FRAME), 0.5, np.float32)
        return self._sound(samples)

    def _reply(self, values, batched=False):
        array = contract.REPLY.pack(json.dumps(values))
        return fake.InferenceResponse([fake.Tensor("reply", array[None] if batched else array)])

    def _sound(self, samples):
        """samples: [1, n]"""
        reply = contract.REPLY.pack(json.dumps({"busy": [0.0, 0.0], "batch": 3}))[None]
        return fake.InferenceResponse([fake.Tensor("pcm", samples), fake.Tensor("reply", reply)])

    # -- the end

    @property
    def is_idle(self):
        o = self.orchestrator
        return not (o._sessions or o._reception._tasks or o._background)

    def check(self):
        """Every client has exactly one end, and nothing of its request is left anywhere."""
        for event in self._held:
            event.set()
        wait_until(lambda: self.is_idle)
        time.sleep(3 * CANCEL_POLL_S)  # is anybody still asked about?
        for client in self._clients:
            assert client.ended.is_set() and client.flags.count(1) == 1 and client.flags[-1] == 1
            assert client.faults == []
        assert self.wave.live == set() and self.wave.overlaps == [] and self.wave.refused == []
        assert not [line for _, line in fake.Logger.lines if "cannot tell a client" in line]

    def close(self):
        for event in self._held:
            event.set()
        if self.orchestrator._thread.is_alive():
            self.orchestrator.close()
        self.writer.close()
        self.singer.close()


def counted():
    """By outcome and code, the requests that metrics tell of; those of closed orchestrators are complete."""
    counts = Counter()
    for (name, labels), value in fake.MetricFamily.shown.items():
        if name == "tritone_requests_total":
            counts[dict(labels)["outcome"], dict(labels)["code"]] += value
    return +counts


def check_counts(requests):
    """Each request is counted exactly once, by the code that its client got."""
    assert fake.MetricFamily.faults == []
    told = Counter(fake.outcome_of(request.responses[-1]) for request in requests)
    codes = Counter()
    for (outcome, code), count in counted().items():
        assert (code == "OK") == (outcome == "ok" or (outcome == "deadline" and code == "OK")), outcome
        codes["done" if code == "OK" else code] += count
    assert codes == told


class Complaints(logging.Handler):
    """What asyncio logs: exceptions of callbacks, and of tasks that nobody asked."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(self.format(record))


@pytest.fixture
def make_bench(monkeypatch):
    from tritone import reception

    monkeypatch.setattr(reception, "CANCEL_POLL_S", CANCEL_POLL_S)
    gc.collect()  # of what other tests have left, so that nothing is said of it here
    complaints = Complaints()
    fake.MetricFamily.shown.clear()
    logging.getLogger("asyncio").addHandler(complaints)
    benches = []

    def make(**settings):
        benches.append(Bench(**settings))
        return benches[-1]

    yield make
    try:
        for bench in benches:
            bench.check()
    finally:
        for bench in benches:
            bench.close()
        check_counts([request for bench in benches for request in bench.requests])
        benches.clear()
        gc.collect()  # a task whose exception nobody took says so when it goes
        logging.getLogger("asyncio").removeHandler(complaints)
    assert complaints.lines == []


@pytest.fixture
def bench(make_bench):
    return make_bench()


# -- one end ---------------------------------------------------------------------------------------------


def end_normally(bench):
    return bench.ask()


def end_normally_with_sound(bench):
    return bench.ask(modalities="text,audio")


def end_as_one_response(bench):
    return bench.ask(decoupled=False)


def refuse_the_request(bench):
    return bench.ask(modalities="smell")


def refuse_in_the_stage(bench):
    bench.script = refuse
    return bench.ask()


def fail_in_a_stage(bench):
    bench.script = lambda bench, session, text: bench.writer.fail(session, "INTERNAL", "a fault")
    return bench.ask()


def fail_in_a_chunk(bench):
    def fault(call):
        raise fake.TritonError("TRITONE_INTERNAL: stage wave failed; see the log")

    bench.on_chunk = fault
    return bench.speak()


def cancel(bench):
    bench.script = silent
    client = bench.ask()
    bench.sessions()
    client.cancelled = True
    return client


def deadline_without_output(bench):
    bench.script, so_far = silent, len(bench.opened["writer"])
    client = bench.ask(parameters=DEADLINE)
    bench.sessions(count=so_far + 1)
    bench.pass_time()
    return client


def deadline_with_output(bench):
    bench.script = lambda bench, session, text: bench.writer.piece(session, 0, {"text": "one "})
    client = bench.ask(parameters=DEADLINE)
    wait_until(lambda: "one " in client.texts("text_output"))
    bench.pass_time()
    return client


def engine_death(bench):
    bench.script = silent
    client = bench.ask()
    wait_until(lambda: any(s.endpoints for s in list(bench.orchestrator._sessions.values())))
    bench.writer.die()
    return client


def stage_model_that_does_not_exist(bench):
    def unknown(request):
        raise fake.TritonError("Request for unknown model: 'echo_writer' is not found")

    fake.MODELS["echo_writer"] = unknown
    return bench.ask()


ENDS = [
    (end_normally, "done"),
    (end_normally_with_sound, "done"),
    (end_as_one_response, "done"),
    (refuse_the_request, "INVALID_ARG"),
    (refuse_in_the_stage, "INVALID_ARG"),
    (fail_in_a_stage, "INTERNAL"),
    (fail_in_a_chunk, "INTERNAL"),
    (cancel, "CANCELLED"),
    (deadline_without_output, "DEADLINE_EXCEEDED"),
    (deadline_with_output, "done"),
    (engine_death, "UNAVAILABLE"),
    (stage_model_that_does_not_exist, "UNAVAILABLE"),
]


@pytest.mark.parametrize(("what", "end"), ENDS, ids=[what.__name__ for what, _ in ENDS])
def test_every_request_has_exactly_one_end(bench, what, end):
    client = what(bench)
    assert client.outcome() == end
    bench.check()


def test_a_fault_of_the_plan_is_one_internal_error(make_bench):
    def plan(request):
        raise KeyError("speaker")

    client = make_bench(plan=plan).ask()
    assert client.outcome() == "INTERNAL" and "speaker" in client.message


def test_a_request_that_is_submitted_as_the_drain_begins_has_an_end(bench):
    """Both reach the event loop in the same turn."""
    from tritone.reception import Arrival
    from tritone.triton import Reply

    request = fake.ClientRequest({}, OUTPUTS)
    loop, orchestrator = bench.orchestrator._loop, bench.orchestrator

    def in_one_turn():
        bench.drain = loop.create_task(orchestrator._drain())
        orchestrator._reception._accept(Arrival({"text_input": "hi"}, {}, Reply(request)))

    loop.call_soon_threadsafe(in_one_turn)
    bench.requests.append(request.sender)
    assert request.sender.outcome() == "UNAVAILABLE"


def test_each_end_is_counted_once_as_what_it_was(make_bench):
    from tritone.triton import Reply

    bench = make_bench(max_in_flight=3)
    assert bench.ask("one two").outcome() == "done"
    assert bench.ask("hi", parameters={"nonsense": 1}).outcome() == "INVALID_ARG"
    bench.script = refuse
    assert bench.ask("too long for its stage").outcome() == "INVALID_ARG"
    bench.script = lambda bench, session, text: bench.writer.fail(session, "INTERNAL", "it broke")
    assert bench.ask("hi").outcome() == "INTERNAL"
    assert deadline_without_output(bench).outcome() == "DEADLINE_EXCEEDED"
    assert deadline_with_output(bench).outcome() == "done"
    bench.script = silent
    leaver, *running = [bench.ask("hi") for _ in range(3)]
    wait_until(lambda: len(bench.opened["writer"]) == 8)
    assert bench.ask("no room").outcome() == "UNAVAILABLE"
    leaver.cancelled = True
    assert leaver.outcome() == "CANCELLED"
    assert bench.ask(op="ping").outcome() == "done"
    unread = fake.ClientRequest({}, OUTPUTS)
    bench.orchestrator.refuse(Reply(unread), InvalidRequest("text_input is no text", "mend it"))
    bench.requests.append(unread.sender)
    drain = bench.orchestrator._drain()
    asyncio.run_coroutine_threadsafe(drain, bench.orchestrator._loop).result(PATIENCE_S)
    assert [client.outcome() for client in running] == ["UNAVAILABLE"] * 2
    assert bench.ask("too late").outcome() == "UNAVAILABLE"
    bench.check()
    bench.close()
    assert counted() == {
        ("ok", "OK"): 1,
        ("deadline", "OK"): 1,
        ("deadline", "DEADLINE_EXCEEDED"): 1,
        ("cancelled", "CANCELLED"): 1,
        ("refused", "INVALID_ARG"): 3,
        ("refused", "UNAVAILABLE"): 2,
        ("failed", "INTERNAL"): 1,
        ("failed", "UNAVAILABLE"): 2,
    }


def test_without_metrics_nothing_is_shown(make_bench):
    bench = make_bench(metrics=False)
    assert bench.ask("one two").outcome() == "done"
    bench.close()
    assert fake.MetricFamily.shown == {}
    bench.requests.clear()


def test_a_streamed_answer_is_whole_and_says_how_it_ended(bench):
    client = bench.ask("one two", modalities="text,audio")
    assert client.outcome() == "done"
    assert "".join(client.texts("text_output")) == "one two "
    assert json.loads(client.texts("finish_reason")[0]) == {"text": "stop", "audio": "stop"}
    sound = [answer["audio_output"] for answer in client.responses if "audio_output" in answer]
    assert sum(map(len, sound)) == len("one two ") * SAMPLES_PER_FRAME
    assert [int(answer["index"][0]) for answer in client.responses] == list(range(len(client.responses)))


def times(total_s, first_output_s=None):
    """Of a stage that opens a session now and ends it after `total_s`, and gives something once or never."""
    now = time.monotonic()
    first_s = None if first_output_s is None else now + first_output_s
    return wire.StageTimes(now, now + total_s, first_s, first_s)


def ending_with(writer="stop", singer="stop"):
    """A script of a healthy pipeline whose stages end for these reasons, each with counts of its own."""

    def script(bench, session, text):
        usage = {"prompt_tokens": 5, "completion_tokens": 2}
        bench.writer.piece(session, 0, {"text": "abcd"}, last=True)
        bench.writer.push(wire.Finished(session, "echo_writer", writer, usage, times(0.5)))
        if bench.is_heard("singer", session):
            bench.sing(session, 0, "abcd", last=True)
            usage = {"prompt_tokens": 90, "completion_tokens": 11, "codec_frames": 4}
            bench.singer.push(wire.Finished(session, "echo_singer", singer, usage, times(0.75, 0.25)))

    return script


@pytest.mark.parametrize(
    ("writer", "singer", "audio"),
    [
        ("stop", "stop", "stop"),
        ("length", "stop", "length"),
        ("length", "repetition", "repetition"),
        ("stop", "length", "length"),
        ("repetition", "stop", "stop"),
    ],
)
@pytest.mark.parametrize("modalities", ["audio", "text,audio"])
def test_audio_of_a_text_that_was_cut_says_so(bench, writer, singer, audio, modalities):
    bench.script = ending_with(writer, singer)
    client = bench.ask(modalities=modalities)
    assert client.outcome() == "done"
    reasons = json.loads(client.texts("finish_reason")[0])
    assert reasons == ({"audio": audio} if modalities == "audio" else {"text": writer, "audio": audio})


def test_done_keeps_what_each_stage_counts_and_how_long_it_took(bench):
    bench.script = ending_with()
    client = bench.ask(modalities="text,audio", return_timings=True, return_num_input_tokens=True)
    assert client.outcome() == "done"
    info = json.loads(client.texts("info")[0])
    assert info["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "codec_frames": 4,
        "audio_s": 4 * SAMPLES_PER_FRAME / 8000,
        "stages": {
            "writer": {"prompt_tokens": 5, "completion_tokens": 2},
            "singer": {"prompt_tokens": 90, "completion_tokens": 11, "codec_frames": 4},
        },
    }
    assert int(client.responses[-1]["num_input_tokens"][0]) == 5
    stages = info["timings"]["stages"]
    writer, singer, wave = (stages[name] for name in ("writer", "singer", "wave"))
    assert (writer["total_s"], writer["busy_s"], writer["tokens"]) == (0.5, 0.0, 2)
    assert (singer["total_s"], singer["first_output_s"], singer["frames"]) == (0.75, 0.25, 4)
    assert singer["first_output_at_s"] - singer["opened_at_s"] == pytest.approx(0.25, abs=1e-5)
    assert "first_output_at_s" not in writer, "it says that it gave nothing"
    assert info["timings"]["idle_s"] == info["timings"]["total_s"], "no stage of this bench computes"
    assert wave["calls"] == 2 and wave["calls_s"] > 0 and wave["frames"] == 4  # four frames, then the end
    assert [(frames, batch) for _, _, frames, batch in wave["call_spans"]] == [(4, 3), (0, 3)]
    assert wave["opened_at_s"] == wave["call_spans"][0][0] and wave["ended_at_s"] == wave["call_spans"][1][1]
    assert 0 <= info["timings"]["queued_s"] < singer["opened_at_s"] < wave["opened_at_s"]
    assert info["timings"]["ttfp_s"] >= wave["first_output_at_s"] == wave["last_output_at_s"]


def test_what_a_deadline_cuts_off_is_sent_and_says_so(bench):
    def script(bench, session, text):
        bench.writer.piece(session, 0, {"text": "one "})
        bench.sing(session, 0, "abcd")

    bench.script = script
    client = bench.ask(modalities="text,audio", parameters=DEADLINE)
    wait_until(lambda: {"text", "audio"} <= set(client.texts("event")))
    bench.pass_time()
    assert client.outcome() == "done"
    assert json.loads(client.texts("finish_reason")[0]) == {"text": "deadline", "audio": "deadline"}
    assert client.texts("event")[-1] == "done" and "audio" in client.texts("event")


# -- spans -----------------------------------------------------------------------------------------------

CALLER = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}


class Traced:
    """A bench, and the spans that its orchestrator records."""

    def __init__(self, make_bench, **settings):
        self._exporter = InMemorySpanExporter()
        self.tracer = OtlpTracer(SimpleSpanProcessor(Readable(self._exporter, Resource({}))), Resource({}))
        self.bench = make_bench(tracer=self.tracer, **settings)

    @property
    def spans(self):
        return self._exporter.get_finished_spans()

    def named(self, name):
        """The one span of that name, waited for: the client may hear of the end before it."""
        wait_until(lambda: any(span.name == name for span in self.spans))
        (found,) = [span for span in self.spans if span.name == name]
        return found

    def errors(self):
        self.named("chat echo")
        return {span.name: span.attributes.get("error.type", "") for span in self.spans}


@pytest.fixture
def traced(make_bench):
    return Traced(make_bench)


def below(span, parent):
    inside = parent.start_time <= span.start_time <= span.end_time <= parent.end_time
    return inside and span.parent.span_id == parent.context.span_id


def test_the_spans_of_a_request_form_one_tree_below_its_caller(traced):
    bench = traced.bench
    client = bench.ask(modalities="text,audio", parameters=CALLER)
    assert client.outcome() == "done"
    assert json.loads(client.texts("info")[0])["trace_id"] == "ab" * 16
    request = traced.named("chat echo")
    assert f"{request.parent.span_id:016x}" == "cd" * 8
    children = ["queue", "stage writer", "stage singer", "stage wave"]
    assert all(below(traced.named(name), request) for name in children) and len(traced.spans) == 5
    assert {f"{span.context.trace_id:032x}" for span in traced.spans} == {"ab" * 16}
    (session,) = bench.sessions()
    carriers = {
        "stage writer": [bench.opened["writer"][session].trace],
        "stage singer": [bench.opened["singer"][session].trace],
        "stage wave": [call.trace for call in bench.chunk_calls],
    }
    for name, traces in carriers.items():
        span_id = f"{traced.named(name).context.span_id:016x}"
        assert traces and all(trace == {"traceparent": f"00-{'ab' * 16}-{span_id}-01"} for trace in traces)


def test_spans_say_what_was_made_and_nothing_that_was_said(traced):
    client = traced.bench.ask("a secret word", seed=None, modalities="text,audio", parameters={"seed": 5})
    assert client.outcome() == "done"
    request = dict(traced.named("chat echo").attributes)
    assert request.pop("tritone.ttft_s") > 0 and request.pop("tritone.ttfp_s") > 0
    assert request == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tritone",
        "gen_ai.request.model": "echo",
        "gen_ai.request.seed": 5,
        "gen_ai.output.type": "speech",
        "gen_ai.response.finish_reasons": ["stop", "stop"],
        "gen_ai.usage.output_tokens": 2,
        "tritone.audio_s": len("a secret word ") * SAMPLES_PER_FRAME / 8000,
    }
    wave = traced.named("stage wave").attributes
    assert wave["tritone.calls"] == len(traced.bench.chunk_calls) and wave["tritone.batch"] == 3
    assert "secret" not in " ".join(span.to_json() for span in traced.spans)


@pytest.mark.parametrize("flag", ["00", None])
def test_a_caller_who_wants_no_spans_gets_none_anywhere(traced, flag):
    bench = traced.bench
    parameters = {"traceparent": CALLER["traceparent"][:-2] + (flag or "")}
    client = bench.ask(modalities="text,audio", parameters=parameters)
    assert client.outcome() == "done"
    if flag is None:
        assert traced.named("chat echo").parent is None, "one that is not valid begins a trace of its own"
        return
    (session,) = bench.sessions()
    assert bench.opened["writer"][session].trace == {} and bench.chunk_calls[0].trace == {}
    bench.check()
    assert not traced.spans and "trace_id" not in json.loads(client.texts("info")[0])


@pytest.mark.parametrize(
    ("end", "errors"),
    [
        (end_normally, {"chat echo": "", "queue": "", "stage writer": ""}),
        (refuse_the_request, {"chat echo": "INVALID_ARG"}),
        (refuse_in_the_stage, {"chat echo": "INVALID_ARG", "queue": "", "stage writer": "INVALID_ARG"}),
        (fail_in_a_stage, {"chat echo": "INTERNAL", "queue": "", "stage writer": "INTERNAL"}),
        (cancel, {"chat echo": "CANCELLED", "queue": "", "stage writer": "CANCELLED"}),
        (
            deadline_without_output,
            {"chat echo": "DEADLINE_EXCEEDED", "queue": "", "stage writer": "CANCELLED"},
        ),
        (deadline_with_output, {"chat echo": "", "queue": "", "stage writer": "CANCELLED"}),
        (engine_death, {"chat echo": "UNAVAILABLE", "queue": "", "stage writer": "ENGINE_LOST"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_end_is_told_by_the_spans_that_it_concerns(traced, end, errors):
    end(traced.bench).outcome()
    assert traced.errors() == errors
    for span in traced.spans:
        is_error = span.status.status_code is StatusCode.ERROR
        assert is_error == bool(errors[span.name]) and (span.status.description or "") == errors[span.name]


def test_a_chunk_that_fails_is_the_fault_of_its_stage(traced):
    assert fail_in_a_chunk(traced.bench).outcome() == "INTERNAL"
    assert traced.errors() == {
        "chat echo": "INTERNAL",
        "queue": "",
        "stage writer": "",
        "stage singer": "",
        "stage wave": "INTERNAL",
    }


def test_a_request_that_never_has_its_turn_is_told_by_its_queue(make_bench):
    traced = Traced(make_bench, max_in_flight=1, max_queued=1)
    traced.bench.script = silent
    holder = traced.bench.ask()
    traced.bench.sessions()
    client = traced.bench.ask(parameters=DEADLINE)
    wait_until(lambda: traced.bench.orchestrator._admission.queued == 1)
    traced.bench.pass_time()
    assert client.outcome() == "DEADLINE_EXCEEDED"
    refused = [span for span in traced.spans if span.name == "queue" and span.attributes]
    assert [span.attributes["error.type"] for span in refused] == ["DEADLINE_EXCEEDED"]
    holder.cancelled = True


def test_stages_that_begin_again_have_spans_anew(make_bench):
    traced = Traced(make_bench, resumes=1)
    bench = traced.bench

    def script(bench, session, text):
        if len(bench.opened["writer"]) == 1:
            bench.writer.fail(session, "ENGINE_LOST", "it died")
        else:
            answer(bench, session, text)

    bench.script = script
    assert bench.ask().outcome() == "done"
    request = traced.named("chat echo")
    tries = [span for span in traced.spans if span.name == "stage writer"]
    assert [span.attributes.get("error.type") for span in tries] == ["ENGINE_LOST", None]
    assert all(below(span, request) for span in tries) and "error.type" not in request.attributes


def test_a_ping_is_no_request(traced):
    assert traced.bench.ask(op="ping").outcome() == "done"
    assert traced.spans == ()


# -- what a request leaves in the stages -----------------------------------------------------------------


@pytest.mark.parametrize("end", ["CANCELLED", "DEADLINE_EXCEEDED"])
def test_a_stage_that_opens_after_the_end_is_cancelled(bench, end):
    opens = bench.hold()
    bench.script = lambda bench, session, text: opens.wait(HELD_S)
    client = bench.ask(parameters=DEADLINE)
    (session,) = bench.sessions()
    client.cancelled = end == "CANCELLED"
    if end == "DEADLINE_EXCEEDED":
        bench.pass_time()
    assert client.outcome() == end
    assert bench.writer.cancelled == [], "its cancel would overtake the open"
    opens.set()
    wait_until(lambda: bench.writer.cancelled == [session])


def test_a_refusal_after_the_end_is_no_news(bench):
    opens = bench.hold()

    def script(bench, session, text):
        opens.wait(HELD_S)
        raise InvalidRequest("that is too long", "shorten it")

    bench.script = script
    client = bench.ask(parameters=DEADLINE)
    bench.sessions()
    bench.pass_time()
    assert client.outcome() == "DEADLINE_EXCEEDED"
    opens.set()
    bench.check()
    assert bench.writer.cancelled == []


def test_stages_that_were_open_are_cancelled_when_the_next_one_refuses(bench):
    client = refuse_in_the_stage(bench)
    assert client.outcome() == "INVALID_ARG" and bench.singer.cancelled == []
    client = bench.speak()
    assert client.outcome() == "INVALID_ARG"
    wait_until(lambda: bench.singer.cancelled == bench.sessions("singer"))


def test_a_stage_that_finished_is_not_cancelled(bench):
    bench.script = lambda bench, session, text: bench.writer.finish(session)
    client = bench.speak(parameters=DEADLINE)
    (session,) = bench.sessions()
    wait_until(lambda: has_ended(bench, "writer", session))
    bench.pass_time()
    assert client.outcome() == "DEADLINE_EXCEEDED"
    wait_until(lambda: bench.singer.cancelled)
    assert bench.writer.cancelled == []


def sequence_log(bench):
    return [what for _, what in bench.wave.log]


def end_by_cancel(bench, client):
    client.cancelled = True
    return "CANCELLED"


def end_by_deadline(bench, client):
    bench.pass_time()
    return "DEADLINE_EXCEEDED"


def end_by_stage_error(bench, client):
    bench.writer.fail(bench.sessions()[0], "INTERNAL", "a fault")
    return "INTERNAL"


def end_by_drain(bench, client):
    wire.connect(bench.address).send(wire.Drain())
    return "UNAVAILABLE"


@pytest.mark.parametrize("end", [end_by_cancel, end_by_deadline, end_by_stage_error, end_by_drain])
def test_a_sequence_is_ended_once_its_running_chunk_has_returned(bench, end):
    returns = bench.hold()
    bench.script, bench.on_chunk = speaks_a_word, lambda call: returns.wait(HELD_S)
    client = bench.speak(parameters=DEADLINE)
    wait_until(lambda: sequence_log(bench) == [START])
    expected = end(bench, client)
    assert client.outcome() == expected
    time.sleep(0.05)
    assert sequence_log(bench) == [START], "the end overtook the chunk"
    returns.set()
    wait_until(lambda: sequence_log(bench) == [START, RETURNED, END, RETURNED])


def test_a_sequence_between_two_chunks_is_ended(bench):
    bench.script = speaks_a_word
    client = bench.speak()
    wait_until(lambda: "audio" in client.texts("event"))
    client.cancelled = True
    assert client.outcome() == "CANCELLED"
    wait_until(lambda: sequence_log(bench) == [START, RETURNED, END, RETURNED])


def test_a_sequence_whose_chunk_failed_is_ended(bench):
    client = fail_in_a_chunk(bench)
    assert client.outcome() == "INTERNAL"
    wait_until(lambda: sequence_log(bench) == [START, RETURNED, END, RETURNED])


def test_a_drop_that_fails_is_logged_and_nothing_more(bench):
    def fault(call):
        raise fake.TritonError("TRITONE_UNAVAILABLE: the engine is restarting; try again")

    bench.script, bench.on_drop = speaks_a_word, fault
    client = bench.speak()
    wait_until(lambda: "audio" in client.texts("event"))
    client.cancelled = True
    assert client.outcome() == "CANCELLED"
    bench.check()
    assert any("restarting" in line for _, line in fake.Logger.lines)


def test_an_answer_that_ends_by_itself_ends_its_sequence_with_its_last_chunk(bench):
    assert bench.speak("ab").outcome() == "done"
    bench.check()
    assert sequence_log(bench) == [START, RETURNED, END, RETURNED]


@pytest.mark.parametrize("end", [end_by_cancel, end_by_stage_error, end_by_drain])
def test_no_sequence_is_ended_whose_last_chunk_is_under_way(bench, end):
    returns = bench.hold()
    bench.script, bench.on_chunk = sings_all, lambda call: call.end and returns.wait(HELD_S)
    client = bench.speak(parameters=DEADLINE)
    wait_until(lambda: sequence_log(bench) == [START, RETURNED, END])
    expected = end(bench, client)
    assert client.outcome() == expected
    returns.set()
    bench.check()
    assert sequence_log(bench) == [START, RETURNED, END, RETURNED]


def sings_all(bench, session, text):
    if bench.is_heard("singer", session):
        bench.sing(session, 0, "ab", last=True)
        bench.singer.finish(session)


def test_a_last_chunk_that_fails_has_ended_its_sequence(bench):
    def fails(call):
        if call.end:
            raise fake.TritonError("TRITONE_INTERNAL: stage wave failed; see the log")

    bench.script, bench.on_chunk = sings_all, fails
    assert bench.speak().outcome() == "INTERNAL"
    bench.check()
    assert sequence_log(bench) == [START, RETURNED, END, RETURNED]


def test_a_sequence_whose_last_chunk_does_not_reach_its_stage_is_ended(bench):
    def full(request):
        if request.bits & fake.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END and not refused:
            refused.append(request)
            raise fake.TritonError("Exceeds maximum queue size")
        return bench.wave(request)

    refused, fake.MODELS["echo_wave"], bench.script = [], full, sings_all
    assert bench.speak().outcome() == "UNAVAILABLE"
    bench.check()
    assert refused and sequence_log(bench) == [START, RETURNED, END, RETURNED]


def test_no_sequence_is_ended_that_never_began(bench):
    bench.script = silent
    client = bench.speak()
    bench.sessions()
    client.cancelled = True
    assert client.outcome() == "CANCELLED"
    bench.check()
    assert bench.wave.log == []


def test_a_sequence_is_ended_also_when_every_bls_thread_is_busy(make_bench):
    bench = make_bench(bls_threads=1)
    opens = bench.hold()

    def script(bench, session, text):
        if text == "busy":
            opens.wait(HELD_S)

    bench.script = script
    client = bench.speak()
    (session,) = bench.sessions()
    wait_until(lambda: len(bench.orchestrator._sessions[session].endpoints) == 2)
    busy = bench.ask("busy")
    bench.sessions(count=2)
    bench.sing(session, 0, "abcd")
    wait_until(lambda: bench.orchestrator._sessions[session].chunk_calls)
    client.cancelled = True
    assert client.outcome() == "CANCELLED"
    assert bench.wave.log == []
    opens.set()
    wait_until(lambda: sequence_log(bench) == [START, RETURNED, END, RETURNED])
    busy.cancelled = True
    assert busy.outcome() == "CANCELLED"


# -- time ------------------------------------------------------------------------------------------------


def test_no_deadline_is_lost_while_mail_keeps_arriving(make_bench):
    """A deadline and a message often become due in one turn of the event loop."""
    num = 60
    bench = make_bench(max_in_flight=num)
    bench.script = silent
    clients = [bench.ask(parameters={"deadline_ms": DEADLINE["deadline_ms"] + 5 * i}) for i in range(num)]
    sessions = bench.sessions(count=num)
    numbers = itertools.count()

    def mail():
        number = next(numbers)
        for session in sessions:
            bench.writer.piece(session, number, {"text": "w "})
        return all(client.ended.is_set() for client in clients)

    mail()
    wait_until(lambda: all("w " in client.texts("text_output") for client in clients))
    bench.pass_time(DEADLINE_S - 0.3)  # some are due soon, and the last ones half a second later
    wait_until(mail, what="a deadline was lost")
    assert {client.outcome() for client in clients} == {"done"}
    assert all(json.loads(c.texts("finish_reason")[0]) == {"text": "deadline"} for c in clients)


@pytest.mark.parametrize("stage", ["writer", "singer"])
def test_an_engine_that_dies_before_its_open_is_answered_ends_the_request_at_once(bench, stage):
    def script(bench, session, text):
        engine = getattr(bench, stage)
        engine.die()
        wait_until(lambda: engine.address in bench.orchestrator._lost_s)

    bench.script = script
    client = bench.speak()
    assert client.outcome() == "UNAVAILABLE" and f"engine of stage {stage} died" in client.message


def ends_undelivered(bench, session, text):
    """A script whose writer has given everything, some of which the singer has not taken."""
    if bench.is_heard("writer", session):
        bench.writer.piece(session, 0, {"text": "hi "}, last=True)
    bench.writer.finish_undelivered(session)


def has_ended(bench, stage, session):
    held = bench.orchestrator._sessions.get(session)
    return held is not None and stage in held.finished


def test_an_engine_that_dies_with_what_it_still_had_to_deliver_ends_the_request_at_once(bench):
    bench.script = ends_undelivered
    client = bench.speak()
    (session,) = bench.sessions()
    wait_until(lambda: has_ended(bench, "writer", session))
    bench.writer.die()
    assert client.outcome() == "UNAVAILABLE" and "engine of stage writer died" in client.message


def test_an_engine_that_has_delivered_everything_may_die(bench):
    bench.script = ends_undelivered
    client = bench.speak()
    (session,) = bench.sessions()
    bench.writer.deliver(session)
    wait_until(lambda: has_ended(bench, "writer", session))
    wait_until(lambda: not bench.orchestrator._sessions[session].undelivered)
    bench.writer.die()
    bench.sing(session, 0, "ab")
    bench.singer.piece(session, 1, {}, last=True)
    bench.singer.finish(session)
    assert client.outcome() == "done"


def test_a_death_that_matters_no_more_when_it_is_heard_of_fails_nothing(bench):
    bench.script = ends_undelivered
    client = bench.speak()
    (session,) = bench.sessions()
    wait_until(lambda: has_ended(bench, "writer", session))
    taken = wire.Delivered(session, bench.writer._model)
    died = wire.Failed(session, bench.writer._model, "ENGINE_LOST", "the engine died", "try again")
    loop = bench.orchestrator._loop
    loop.call_soon_threadsafe(lambda: [bench.orchestrator._deliver(message) for message in (taken, died)])
    bench.sing(session, 0, "ab")
    bench.singer.piece(session, 1, {}, last=True)
    bench.singer.finish(session)
    assert client.outcome() == "done"


def test_an_answer_is_complete_when_those_that_take_have_ended(bench):
    bench.script = ends_undelivered
    client = bench.speak()
    (session,) = bench.sessions()
    bench.sing(session, 0, "ab")
    bench.singer.piece(session, 1, {}, last=True)
    bench.singer.finish(session)
    assert client.outcome() == "done", "whether or not it is told that all was taken"
    wait_until(lambda: session in bench.writer.cancelled)


def test_a_cancel_reaches_a_stage_that_has_ended_and_not_delivered(bench):
    bench.script = ends_undelivered
    client = bench.speak()
    (session,) = bench.sessions()
    wait_until(lambda: has_ended(bench, "writer", session))
    client.cancelled = True
    assert client.outcome() == "CANCELLED"
    wait_until(lambda: session in bench.writer.cancelled)


def test_a_dead_engine_ends_its_own_sessions_only(make_bench):
    bench = make_bench(max_in_flight=4)
    bench.script = silent
    text, speech = bench.ask(), bench.speak()
    sessions = bench.sessions(count=2)
    wait_until(lambda: sum(len(s.endpoints) for s in list(bench.orchestrator._sessions.values())) == 3)
    bench.singer.die()
    assert speech.outcome() == "UNAVAILABLE"
    assert not text.ended.is_set()
    (session,) = [session for session in sessions if session not in bench.opened["singer"]]
    answer(bench, session, "hi")
    assert text.outcome() == "done"


@pytest.fixture
def patient_pings(monkeypatch):
    """A ping that is under way as time is let pass is answered all the same."""
    from tritone import stage_calls

    monkeypatch.setattr(stage_calls, "PING_TIMEOUT_S", 1000.0)


@pytest.mark.usefixtures("patient_pings")
def test_silence_of_healthy_stages_lasts_until_the_deadline(make_bench):
    bench = make_bench(stall_s=0.1)
    bench.script = silent
    client = bench.ask(parameters=DEADLINE)
    wait_until(lambda: bench.pings["writer"] >= 2, what="nobody looked after the stage")
    assert not client.ended.is_set()
    bench.pass_time()
    assert client.outcome() == "DEADLINE_EXCEEDED"


def test_silence_of_a_stage_that_is_ill_ends_the_request(make_bench):
    bench = make_bench(stall_s=0.1)
    bench.script, bench.ill["writer"] = silent, "its loop has not turned for 40 s"
    client = bench.ask()
    assert client.outcome() == "UNAVAILABLE" and "not turned for 40 s" in client.message


def test_silence_ends_the_request_when_the_door_of_the_stage_does_not_answer_a_ping(make_bench, monkeypatch):
    from tritone import stage_calls

    monkeypatch.setattr(stage_calls, "PING_TIMEOUT_S", 0.1)
    bench = make_bench(stall_s=0.1)
    bench.script, pongs = silent, bench.hold()
    writer = fake.MODELS["echo_writer"]

    def deaf_to_pings(request):
        if b'"ping"' in request.tensors["control"].tobytes():
            pongs.wait(HELD_S)
        return writer(request)

    fake.MODELS["echo_writer"] = deaf_to_pings
    client = bench.ask()
    assert client.outcome() == "UNAVAILABLE" and "did not answer" in client.message


def test_a_close_ends_a_look_at_the_stages(make_bench):
    bench = make_bench()
    pongs, asked, writer = bench.hold(), threading.Event(), fake.MODELS["echo_writer"]

    def deaf(request):
        asked.set()
        pongs.wait(HELD_S)
        return writer(request)

    fake.MODELS["echo_writer"] = deaf
    looks = ThreadPoolExecutor(1)
    look = looks.submit(bench.orchestrator.states, 30)
    assert asked.wait(PATIENCE_S)
    bench.orchestrator.close()
    with pytest.raises(CancelledError):
        look.result(PATIENCE_S)
    looks.shutdown()


@pytest.mark.usefixtures("patient_pings")
def test_an_illness_of_a_stage_that_is_not_waited_for_disturbs_nobody(make_bench):
    bench = make_bench(stall_s=0.1)
    bench.script, bench.ill["singer"] = silent, "it is restarting"
    client = bench.ask(parameters=DEADLINE)
    wait_until(lambda: bench.pings["writer"] >= 2)
    bench.pass_time()
    assert client.outcome() == "DEADLINE_EXCEEDED"


# -- who may come in, and how the server ends ------------------------------------------------------------


def test_the_whole_answer_twin_refuses_to_stream(make_bench):
    bench = make_bench(may_stream=False)
    client = bench.ask(decoupled=False, stream=True)
    assert client.outcome() == "INVALID_ARG" and "call echo" in client.message
    assert not bench.opened["writer"]
    assert bench.ask(decoupled=False, stream=False).outcome() == "done"


def hung_up_after(channel):
    """A future of when (time.monotonic()) the other end hangs up."""
    when = Future()

    def wait():
        with contextlib.suppress(wire.Disconnected):
            while True:
                channel.receive()
        when.set_result(time.monotonic())

    threading.Thread(target=wait, daemon=True).start()
    return when


def test_a_drain_ends_what_runs_refuses_what_comes_and_hangs_up_last(bench):
    returns = bench.hold()
    bench.script, bench.on_chunk = speaks_a_word, lambda call: returns.wait(HELD_S)
    running = [bench.ask(), bench.speak()]
    wait_until(lambda: sequence_log(bench) == [START])
    requester = wire.connect(bench.address)
    requester.send(wire.Drain())
    hung_up = hung_up_after(requester)
    for client in running:
        assert client.outcome() == "UNAVAILABLE" and "shutting down" in client.message
    late = bench.ask()
    assert late.outcome() == "UNAVAILABLE" and "shutting down" in late.message
    time.sleep(0.05)
    assert not hung_up.done(), "a sequence has yet to be ended"
    returns.set()
    hung_up.result(PATIENCE_S)
    assert sequence_log(bench) == [START, RETURNED, END, RETURNED]
    requester.close()


def test_a_drain_of_an_idle_orchestrator_hangs_up_at_once(bench):
    requester = wire.connect(bench.address)
    requester.send(wire.Drain())
    hung_up_after(requester).result(PATIENCE_S)
    requester.close()


def test_what_is_no_message_of_an_engine_is_passed_over(bench):
    stranger = wire.connect(bench.address)
    stranger.send(wire.Ping(1))  # asyncio would complain of a fault
    stranger.send(wire.Drain())
    hung_up_after(stranger).result(PATIENCE_S)
    stranger.close()


def test_a_close_ends_what_runs(bench):
    bench.script = silent
    client = bench.ask()
    bench.sessions()
    bench.orchestrator.close()
    assert client.outcome(0.1) == "UNAVAILABLE" and "shutting down" in client.message


def test_one_more_than_max_in_flight_is_refused_and_the_others_are_unharmed(make_bench):
    bench = make_bench(max_in_flight=2)
    bench.script = silent
    clients = [bench.ask(), bench.ask()]
    sessions = bench.sessions(count=2)
    surplus = bench.ask()
    assert surplus.outcome() == "UNAVAILABLE" and "max_in_flight is 2" in surplus.message
    for session in sessions:
        answer(bench, session, "fine")
    assert [client.outcome() for client in clients] == ["done", "done"]
    bench.script = answer
    wait_until(lambda: bench.is_idle)
    assert bench.ask().outcome() == "done", "a place that was given up is free"


def test_a_ping_says_how_every_stage_is(bench):
    client = bench.ask(op="ping")
    assert client.outcome() == "done"
    info = json.loads(client.texts("info")[0])
    assert set(info["stages"]) == {"writer", "singer", "wave"} and info["sessions"] == 0
    bench.ill["wave"] = "its engine is restarting"
    client = bench.ask(op="ping")
    assert client.outcome() == "UNAVAILABLE" and "stage wave is not ready" in client.message


def test_an_unknown_op_is_refused(bench):
    assert bench.ask(op="dance").outcome() == "INVALID_ARG"


# -- mail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [(1,), (0, 0), (0, 2)])
def test_pieces_out_of_order_are_an_internal_error(bench, numbers):
    def script(bench, session, text):
        for number in numbers:
            bench.writer.piece(session, number, {"text": "w "})

    bench.script = script
    client = bench.ask()
    assert client.outcome() == "INTERNAL" and f"piece {numbers[-1]} of stage writer" in client.message


def test_mail_of_a_session_that_is_unknown_or_over_is_ignored(bench):
    first = bench.ask()
    assert first.outcome() == "done"
    (session,) = bench.sessions()
    so_far = len(first.responses)
    for stale in (session, "echo/1-999", ""):
        bench.writer.piece(stale, 0, {"text": "late "})
        bench.writer.fail(stale, "INTERNAL", "late")
        bench.writer.finish(stale)
    assert bench.ask().outcome() == "done"
    assert len(first.responses) == so_far


def test_mail_of_a_stage_that_the_pipeline_does_not_have_ends_its_session_only(bench):
    bench.script = lambda bench, session, text: bench.writer.push(
        wire.Piece(session, "stranger", "", 0, {"text": "w "}, False)
    )
    assert bench.ask().outcome() == "INTERNAL"
    bench.script = answer
    assert bench.ask().outcome() == "done"


# -- what a client receives ------------------------------------------------------------------------------


def test_only_the_requested_outputs_are_sent(bench):
    client = bench.ask(outputs=["text_output", "event"])
    assert client.outcome() == "done"
    assert all(set(response) == {"text_output", "event"} for response in client.responses)


def loud(bench, session, text):
    """A script for an answer of 2 MiB of 16-bit samples."""
    bench.singer.piece(session, 0, {"frames": np.zeros((13108, 1), np.float32), "segment_end": True}, True)
    bench.singer.finish(session)
    bench.writer.finish(session)


def fill_shared_memory(monkeypatch, free_bytes):
    from tritone import triton

    usage = triton.shutil.disk_usage("/")
    monkeypatch.setattr(triton.shutil, "disk_usage", lambda path: usage._replace(free=free_bytes))


@pytest.mark.parametrize("audio_format", ["s16", "f32", "wav"])
def test_an_answer_larger_than_the_free_shared_memory_is_refused(bench, monkeypatch, audio_format):
    fill_shared_memory(monkeypatch, 1 << 20)
    bench.script = loud
    client = bench.speak(decoupled=False, audio_format=audio_format)
    assert client.outcome() == "UNAVAILABLE" and "shared memory" in client.message


def test_an_answer_that_fits_the_free_shared_memory_is_sent(bench, monkeypatch):
    fill_shared_memory(monkeypatch, 8 << 20)
    bench.script = loud
    assert bench.speak(decoupled=False).outcome() == "done"


def test_the_cancel_watcher_outlives_an_exception(bench):
    bench.script = silent
    faulty, left = bench.ask(), bench.ask()
    bench.sessions(count=2)
    faulty.cancel_fault = RuntimeError("the server does not say")
    wait_until(lambda: any("does not say" in line for _, line in fake.Logger.lines))
    left.cancelled = True
    assert left.outcome() == "CANCELLED"
    faulty.cancel_fault, faulty.cancelled = None, True
    assert faulty.outcome() == "CANCELLED"


def test_compressing_sound_holds_up_nobody_else(bench, monkeypatch):
    encoding, encoded = threading.Event(), bench.hold()

    class SlowEncoder:
        def __init__(self, *args, **kwargs):
            pass

        def push(self, samples):
            encoding.set()
            encoded.wait(HELD_S)
            return b"sound"

        def finish(self):
            return b"."

    monkeypatch.setattr("tritone.answer.AudioEncoder", SlowEncoder)
    slow = bench.speak(audio_format="opus")
    assert encoding.wait(PATIENCE_S)
    other = bench.ask("quick")
    assert other.outcome() == "done" and "".join(other.texts("text_output")) == "quick "
    assert not slow.ended.is_set()
    encoded.set()
    assert slow.outcome() == "done"


# -- all of it at once -----------------------------------------------------------------------------------


def disorder(bench, session, text):
    bench.writer.piece(session, 7, {"text": "w "})


def fail(bench, session, text):
    bench.writer.fail(session, "INTERNAL", "a fault")


def die(bench, session, text):
    random.choice([bench.writer, bench.singer]).die()


SCRIPTS = [answer, silent, speaks_a_word, disorder, refuse, fail, die]


@pytest.mark.usefixtures("patient_pings")
@pytest.mark.parametrize("seed", range(3))
def test_fifty_requests_of_all_fates_leave_nothing(make_bench, seed):
    rng, stages = random.Random(seed), random.Random(seed)  # what is asked is the same each time
    bench = make_bench(max_in_flight=24, bls_threads=4, stall_s=0.1)

    def script(bench, session, text):
        time.sleep(stages.choice([0, 0, 0.02]))
        {script.__name__: script for script in SCRIPTS}[text](bench, session, text)

    def chunk(call):
        time.sleep(stages.choice([0, 0, 0.02]))
        if stages.random() < 0.1:
            raise fake.TritonError("TRITONE_INTERNAL: stage wave failed; see the log")

    bench.script, bench.on_chunk = script, chunk
    clients = []
    for _ in range(50):
        clients.append(
            bench.ask(
                rng.choice(SCRIPTS).__name__,
                parameters=rng.choice([{"deadline_ms": rng.randint(1, 600)}, DEADLINE]),
                modalities=rng.choice(["text", "audio", "text,audio"]),
                decoupled=rng.random() < 0.7,
            )
        )
        if rng.random() < 0.3:
            rng.choice(clients).cancelled = True
        time.sleep(rng.choice([0, 0.002, 0.02]))
    wait_until(lambda: Counter(client.ended.is_set() for client in clients)[False] < 20)
    bench.pass_time()
    ends = Counter(client.outcome() for client in clients)
    assert len(ends) > 3 and "UNMARKED" not in ends, ends
    bench.check()
    bench.script, bench.on_chunk = answer, lambda call: None
    assert bench.speak().outcome() == "done"


# -- async_chunk and sync ----------------------------------------------------------------------------------


class Chain(Bench):
    """An orchestrator over the real engines of the echo pipeline, each in a host of its own."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.loops, self.chunks = {}, {}  # by session: the frames of each chunk that was sung
        self._hosts, self._voice, self._turn = {}, echo.Wave(None, None), threading.Lock()
        for stage in ("writer", "singer"):
            address = f"tritone-test/{uuid.uuid4().hex}"
            host = Host(address, wire.listen(address))
            loops = build_loops(self.orchestrator._deploy, (stage,), "cpu", host.peers)
            host.serve()
            host.become(wire.Ready(0.0), loops)
            self.loops.update(loops)
            self._hosts[stage] = address, host

    def _engine_stage(self, stage, request):
        call = control.decode(request.tensors["control"])
        messages = request.tensors.get("messages")
        message = wire.Open(
            call=1,
            stage=f"echo_{stage}",
            session=call.session,
            inbox=call.inbox,
            inputs={} if messages is None else {"messages": messages[0].decode()},
            sources=call.sources,
            settings=call.settings,
            routes=call.routes,
            whole=call.whole,
        )
        answers, (address, host) = queue.Queue(), self._hosts[stage]
        host.open(message, answers.put)
        assert isinstance(answers.get(timeout=PATIENCE_S), wire.Opened)
        return self._reply({"endpoint": address})

    def _wave(self, request):
        call = control.decode(request.tensors["control"])
        if isinstance(call, control.DropStream):
            return self._reply({}, True)
        values = {name: array[0] for name, array in request.tensors.items() if name == "frames"}
        chunk = wire.StreamChunk(call.session, values, call.start, call.end, {})
        with self._turn:
            self.chunks.setdefault(call.session, []).append(len(values.get("frames", ())))
            (sound,) = self._voice.run([chunk])
        return self._sound(sound["pcm"][None])


TEXTS = ["a", "hello my dear world", "one two three four", "x" * 90]


def answers_of(mode):
    """By text: the words, the sound, and the sizes of its chunks."""
    chain = Chain(mode=mode)
    try:
        clients = [chain.ask(text, modalities="text,audio", audio_format="f32") for text in TEXTS]
        assert [client.outcome() for client in clients] == ["done"] * len(TEXTS)
        chain.check()
        sounds = [
            np.concatenate([answer["audio_f32"] for answer in client.responses if "audio_f32" in answer])
            for client in clients
        ]
        words = [[word for word in client.texts("text_output") if word] for client in clients]
        sessions = sorted(chain.chunks, key=lambda session: int(session.rpartition("-")[2]))
        return words, sounds, [chain.chunks[session] for session in sessions]
    finally:
        chain.close()


@pytest.mark.parametrize(("mode", "whole"), [("async_chunk", False), ("sync", True)])
def test_stages_are_told_of_the_mode(make_bench, mode, whole):
    bench = make_bench(mode=mode)
    assert bench.speak().outcome() == "done"
    assert [call.whole for stage in bench.opened.values() for call in stage.values()] == [whole, whole]


async def test_a_whole_feed_gives_no_chunk_before_the_last_frame():
    calls = []

    async def call(chunk, first):
        calls.append((chunk.frames[:, 0].tolist() if len(chunk.frames) else [], chunk.last, first))
        return np.zeros(0, np.float32)

    class Silent:
        ahead_s = 0.0

        async def audio(self, samples):
            pass

    feed = ChunkFeed(Chunks(initial_codec_chunk_frames=1, codec_chunk_frames=2), call, Silent(), whole=True)
    running = asyncio.create_task(feed.run())
    feed.push(np.arange(5.0)[:, None], segment_end=True)
    feed.push(np.arange(3.0)[:, None], segment_end=False)
    for _ in range(10):
        await asyncio.sleep(0)
    assert calls == []
    feed.end()
    await running
    assert calls == [([0, 1, 2, 3, 4], False, True), ([0, 1, 2], True, False)]


def test_text_that_came_before_a_failure_is_told_before_it(make_bench):
    bench = make_bench()

    def script(bench, session, text):
        for number, word in enumerate(("one ", "two ", "three ")):
            bench.writer.piece(session, number, {"text": word})
        bench.writer.fail(session, "INTERNAL", "a fault")

    bench.script = script
    client = bench.ask()
    assert client.outcome() == "INTERNAL"
    assert "".join(client.texts("text_output")) == "one two three "


def test_sync_mode_gives_the_same_answers_of_whole_segments():
    words, sounds, chunks = answers_of("async_chunk")
    sync_words, sync_sounds, sync_chunks = answers_of("sync")
    assert "".join(sync_words[1]) == "hello my dear world "
    # Into how many responses it is cut is up to how fast they go out.
    assert list(map("".join, sync_words)) == list(map("".join, words))
    for text, sound, sync_sound in zip(TEXTS, sounds, sync_sounds, strict=True):
        np.testing.assert_array_equal(sound, echo.expected_pcm(text + " "))
        assert sync_sound.tobytes() == sound.tobytes()
    assert chunks[1] == [4, 2, 3, 5, 6, 0] and chunks[3] == [4, 25, 25, 25, 12, 0]
    assert sync_chunks[1] == [6, 3, 5, 6, 0] and sync_chunks[3] == [91, 0]


# -- turns -------------------------------------------------------------------------------------------------


def test_requests_above_the_limit_wait_in_a_bounded_queue_by_priority(make_bench):
    bench = make_bench(max_in_flight=1, max_queued=2)
    release = bench.hold()

    order = []

    def script(bench, session, text):
        order.append(text)
        if text == "first":
            release.wait(HELD_S)
        answer(bench, session, text)

    bench.script = script
    first = bench.ask("first")
    wait_until(lambda: bench.opened["writer"])
    late = bench.ask("late", {"queue_priority": 9})
    wait_until(lambda: bench.orchestrator._admission.queued == 1)
    soon = bench.ask("soon")
    wait_until(lambda: bench.orchestrator._admission.queued == 2)
    refused = bench.ask("refused")
    assert refused.outcome() == "UNAVAILABLE" and "max_queued is 2 and as many wait" in refused.message
    assert len(bench.opened["writer"]) == 1, "who waits has opened nothing"
    release.set()
    assert [client.outcome() for client in (first, soon, late)] == ["done"] * 3
    assert order == ["first", "soon", "late"]


def test_a_deadline_counts_while_a_request_waits_for_its_turn(make_bench):
    bench = make_bench(max_in_flight=1, max_queued=1)
    bench.script = silent
    first = bench.ask("first")
    wait_until(lambda: bench.opened["writer"])
    waiting = bench.ask("second", DEADLINE)
    wait_until(lambda: bench.orchestrator._admission.queued == 1)
    bench.pass_time()
    assert waiting.outcome() == "DEADLINE_EXCEEDED" and "deadline" in waiting.message
    assert bench.orchestrator._admission.queued == 0 and len(bench.opened["writer"]) == 1
    first.cancelled = True
    assert first.outcome() == "CANCELLED"


@pytest.mark.usefixtures("patient_pings")
def test_stages_that_answer_pings_but_give_nothing_end_a_request(make_bench):
    bench = make_bench(stall_s=0.1, stall_limit_s=60)
    bench.script = silent
    client = bench.speak("x")
    wait_until(lambda: bench.pings["writer"] >= 2)
    bench.pass_time(60)
    assert client.outcome() == "UNAVAILABLE"
    assert "stage singer, writer gave nothing for 60 s" in client.message


# -- an engine that comes back -----------------------------------------------------------------------------


def dying_after(deaths, text="one two three"):
    """A script whose singer dies `deaths` times, each time when the client has the first two words."""
    left = [deaths]

    def die(bench, session):
        answer = bench.orchestrator._sessions[session].answer
        wait_until(lambda: (answer._said + "".join(answer._texts)).endswith("two "))
        bench.singer.die()

    def script(bench, session, _):
        if not left[0]:
            answer(bench, session, text)
            return
        left[0] -= 1
        for number, word in enumerate(text.split()[:2]):
            if bench.is_heard("writer", session):
                bench.writer.piece(session, number, {"text": f"{word} "})
            bench.sing(session, number, f"{word} ")
        threading.Thread(target=die, args=(bench, session), daemon=True).start()

    return script


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_stream_goes_on_where_it_was_when_its_engine_comes_back(make_bench, deaths):
    bench = make_bench(resumes=2, chunks={"initial_codec_chunk_frames": 2, "codec_chunk_frames": 3})
    bench.script = dying_after(deaths)
    client = bench.ask(modalities="text,audio")
    assert client.outcome() == "done"
    assert "".join(client.texts("text_output")) == "one two three "
    chunks = [response for response in client.responses if "audio_output" in response]
    offsets = [int(chunk["sample_offset"][0]) for chunk in chunks]
    lengths = [len(chunk["audio_output"]) for chunk in chunks]
    assert offsets == [sum(lengths[:i]) for i in range(len(lengths))], "no sample twice, none left out"
    assert sum(lengths) == len("one two three ") * SAMPLES_PER_FRAME
    assert len(bench.opened["singer"]) == deaths + 1, "each time under a new name"
    bench.check()
    bench.close()
    assert counted() == {("ok", "OK"): 1}
    labels = (("model", "echo"), ("pipeline", "echo"))
    assert fake.MetricFamily.shown["tritone_resumes_total", labels] == deaths


def test_a_whole_answer_is_made_anew(make_bench):
    bench = make_bench(resumes=1, may_stream=False)
    bench.script = dying_after(1)
    client = bench.ask(modalities="text,audio", decoupled=False)
    assert client.outcome() == "done" and client.texts("text_output") == ["one two three "]
    assert len(client.responses[0]["audio_output"]) == len("one two three ") * SAMPLES_PER_FRAME


def test_a_request_resumes_no_oftener_than_deploy_says(make_bench):
    bench = make_bench(resumes=1)
    bench.script = dying_after(2)
    client = bench.ask(modalities="text,audio")
    assert client.outcome() == "UNAVAILABLE" and "died" in client.message
    assert len(bench.opened["singer"]) == 2


def test_a_request_waits_until_the_stages_serve_again(make_bench):
    bench = make_bench(resumes=1)
    bench.script = dying_after(1)
    bench.ill = {"singer": "its engine is restarting"}
    client = bench.ask(modalities="text,audio")
    wait_until(lambda: bench.pings["singer"] >= 3)
    assert len(bench.opened["singer"]) == 1, "nothing is opened on a stage that does not serve"
    bench.ill.clear()
    assert client.outcome() == "done"


def test_a_text_that_comes_out_differently_is_no_resumption(make_bench):
    bench = make_bench(resumes=1)
    once = dying_after(1)

    def script(bench, session, text):
        if len(bench.opened["writer"]) == 1:
            once(bench, session, text)
        else:
            answer(bench, session, "one too many")

    bench.script = script
    client = bench.ask(modalities="text,audio")
    assert client.outcome() == "UNAVAILABLE" and "came out differently" in client.message


async def test_sound_is_not_made_long_before_it_is_heard(monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)
        listener.ahead_s = 1.0

    class Listener:
        ahead_s = 0.0

        async def audio(self, samples):
            self.ahead_s += len(samples)

    async def call(chunk, first):
        return chunk.frames

    listener = Listener()
    feed = ChunkFeed(
        Chunks(initial_codec_chunk_frames=1, codec_chunk_frames=2, max_ahead_s=2.5), call, listener
    )
    feed.push(np.zeros(6), segment_end=False)
    feed.end()
    monkeypatch.setattr(asyncio, "sleep", sleep)
    await feed.run()
    # 1 and 2 s of sound are 0.5 s too far ahead; after the pause 2 more are again.
    assert slept == [pytest.approx(0.5), pytest.approx(0.5)]


# -- sequences that wait -----------------------------------------------------------------------------------


def test_a_sequence_that_waits_for_more_is_kept_until_its_end_and_no_longer(make_bench, monkeypatch):
    from tritone import bls

    monkeypatch.setattr(bls, "KEEP_EVERY_S", 0.02)
    bench = make_bench()
    bench.script = speaks_a_word
    client = bench.speak()
    wait_until(lambda: [flags for _, flags in bench.wave.log].count(0) >= 3)
    (number,) = bench.wave.live
    client.cancelled = True
    wait_until(lambda: not bench.wave.live)
    ended_at = bench.wave.log.index((number, END))
    time.sleep(0.1)
    # One that was under way as the end came may follow it, and is refused.
    assert [flags for _, flags in bench.wave.log[ended_at + 1 :]].count(0) <= 1


# -- media by URL ----------------------------------------------------------------------------------------


class Site:
    """A web server whose file comes when `open` is set; `left` is set when somebody hangs up before.

    `asked` is set when somebody has asked for it.
    """

    def __init__(self):
        self.asked, self.open, self.left = threading.Event(), threading.Event(), threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        port = self._server.getsockname()[1]
        self.url = f"http://media.example:{port}/a".encode()
        self.urls = {"allow": ["media.example"], "ports": [port], "timeout_s": HELD_S}
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with contextlib.suppress(OSError):
            connection, _ = self._server.accept()
            with connection:
                connection.recv(4096)
                self.asked.set()
                while not self.open.wait(0.01):
                    connection.sendall(b"")
                    connection.settimeout(0.01)
                    with contextlib.suppress(TimeoutError):
                        if not connection.recv(1):
                            self.left.set()
                            return
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\npicture")

    def close(self):
        self.open.set()
        with contextlib.suppress(OSError):  # it is closed already
            self._server.shutdown(socket.SHUT_RDWR)  # also wakes the thread that accepts


@pytest.fixture
def site(monkeypatch):
    from tritone import fetch

    site, here = Site(), fetch.Network(lambda *_: ["127.0.0.1"], lambda _: True)
    monkeypatch.setattr(fetch, "Network", lambda: here)
    yield site
    site.close()


def plan_with_pictures(request):
    """The writer is told how many bytes each picture has, in place of the conversation."""
    sizes = " ".join(str(len(file)) for file in request.media["image"])
    messages = [{"content": [{"type": "text", "text": sizes}]}]
    settings = {"sampling": request.sampling["writer"].as_dict()}
    return {"writer": echo.StageCall({"messages": json.dumps(messages)}, settings)}


@pytest.fixture
def seeing_bench(make_bench, site):
    return make_bench(plan=plan_with_pictures, accepts=(contract.IMAGE,), urls=site.urls)


def test_a_url_is_fetched_before_any_stage_is_opened(seeing_bench, site):
    client = seeing_bench.ask(image=[site.url, b"12345"])
    assert site.asked.wait(PATIENCE_S)
    time.sleep(0.05)
    assert not seeing_bench.opened["writer"] and not client.ended.is_set()
    site.open.set()
    assert client.outcome() == "done" and "".join(client.texts("text_output")).split() == ["7", "5"]


def test_a_request_that_is_cancelled_while_its_file_is_fetched_opens_nothing(seeing_bench, site):
    client = seeing_bench.ask(image=[site.url])
    assert site.asked.wait(PATIENCE_S)
    client.cancelled = True
    assert client.outcome() == "CANCELLED" and not seeing_bench.opened["writer"]
    assert site.left.wait(PATIENCE_S)


def test_the_deadline_of_a_request_holds_while_its_file_is_fetched(seeing_bench, site):
    client = seeing_bench.ask(image=[site.url], parameters=DEADLINE)
    assert site.asked.wait(PATIENCE_S)
    seeing_bench.pass_time()
    assert client.outcome() == "DEADLINE_EXCEEDED" and site.left.wait(PATIENCE_S)


def test_a_file_that_cannot_be_fetched_is_an_invalid_request_and_opens_nothing(seeing_bench, site):
    site.close()
    client = seeing_bench.ask(image=[site.url])
    assert (
        client.outcome() == "INVALID_ARG" and "image cannot be fetched from media.example" in client.message
    )
    assert not seeing_bench.opened["writer"]
