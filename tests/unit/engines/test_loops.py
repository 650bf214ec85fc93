"""The loop around an engine: what wakes it, what it gives engine and connector, and in which order."""

import errno
import threading
import time
import uuid

import numpy as np
import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tritone import wire
from tritone.connectors.base import Budget, Connector, Delivery, Key
from tritone.engines.base import BatchEngine, Delta, Engine
from tritone.engines.batch_loop import BatchLoop
from tritone.engines.host import Host
from tritone.engines.stage_loop import StageLoop
from tritone.errors import EngineLost, TritoneError, Unavailable
from tritone.otlp import OtlpTracer, Readable
from waiting import PATIENCE_S, wait_until

INBOX, NEXT = "an inbox", "the next stage"


class Inboxes:
    """Stands for Peers: what the orchestrator is sent."""

    def __init__(self):
        self.sent = []

    def send(self, address, message):
        assert address == INBOX
        self.sent.append(message)


class Hand(Connector):
    """A connector whose other ends are the test: `came` by session is what `get` gives."""

    def __init__(self, limit_bytes=1000):
        self.budget = Budget(limit_bytes)
        self.calls, self.came, self.sent = [], {}, []
        self.is_full = False
        self.untaken = set()  # sessions

    def attach(self, arrived, consumer_lost, delivered):
        self.arrived, self.consumer_lost, self.delivered = arrived, consumer_lost, delivered

    def is_delivered(self, session):
        return session not in self.untaken

    def put(self, address, key, values, last):
        if self.is_full:
            raise Unavailable("the queues are full", "wait")
        self.sent.append((address, key, dict(values), last))

    def expect(self, session):
        self.calls.append(("expect", session))

    def get(self, session):
        came = self.came.pop(session, [])
        if isinstance(came, Exception):
            raise came
        return came

    def ignore(self, session):
        self.calls.append(("ignore", session))

    def cleanup(self, session):
        self.calls.append(("cleanup", session))

    def close(self):
        pass

    def stats(self):
        return {"connector_late": 7}


class Notes(Engine):
    """Writes down what it is told; `made` are the deltas of its next step."""

    Options = None

    def __init__(self, placement=None, options=None):
        self.told, self.made, self.num_steps = [], [], 0
        self.refusal = self.fault = None

    def add_request(self, session, inputs, settings):
        self.note_phase(session, "queued")
        if self.refusal is not None:
            raise self.refusal

    def push(self, session, inputs, last):
        if self.fault is not None:
            raise self.fault
        self.told.append((session, dict(inputs), last))

    def step(self):
        self.num_steps += 1
        made, self.made = self.made, []
        return made

    @property
    def has_work(self):
        return bool(self.made)

    def abort(self, session):
        self.told.append((session, "abort"))

    def stats(self):
        return {"active": 0}


class Stage:
    """A loop that turns when the test says so."""

    def __init__(self, inboxes=None, **connector_settings):
        self.engine, self.hand = Notes(), Hand(**connector_settings)
        self.inboxes = Inboxes() if inboxes is None else inboxes
        self.exporter = InMemorySpanExporter()
        self.tracer = OtlpTracer(SimpleSpanProcessor(Readable(self.exporter, Resource({}))), Resource({}))
        self.loop = StageLoop("m", self.engine, self.inboxes, self.hand, 60.0, self.tracer)
        self.answers = []

    def open(self, session="s", sources=1, whole=False, trace=None, inbox=INBOX):
        routes = [wire.Route(NEXT, "n", {"rows": "in"}), wire.Route(inbox, "", {"text": "text"})]
        message = wire.Open(1, "m", session, inbox, {}, sources, {}, routes, whole, trace or {})
        self.loop.open(message, self.answers.append)

    def comes(self, session, *chunks):
        """chunks: (source, value, last) each."""
        self.hand.came[session] = [
            Delivery(Key(session, (source, "m"), number), {"x": value}, last, 100)
            for number, (source, value, last) in enumerate(chunks)
        ]
        self.hand.arrived(session)
        self.turn()

    def makes(self, *deltas):
        self.engine.made += deltas
        self.turn()

    def turn(self):
        self.loop.post(lambda: None)  # or it would wait for a task
        self.loop._turn()


@pytest.fixture
def stage():
    return Stage()


# -- what wakes it -----------------------------------------------------------------------------------------


def test_an_engine_without_a_loop_may_wake_nobody():
    Notes().wake()


def test_wake_turns_a_sleeping_loop_from_any_thread(stage, monkeypatch):
    monkeypatch.setattr("tritone.engines.loop.IDLE_WAIT_S", None)  # sleep until something is posted
    turn = threading.Thread(target=stage.loop._turn, daemon=True)
    turn.start()

    def work():
        stage.engine.made.append(Delta("nobody"))
        stage.engine.wake()

    threading.Thread(target=work).start()
    turn.join(60)
    assert not turn.is_alive() and stage.engine.num_steps == 1


# -- what comes --------------------------------------------------------------------------------------------


def test_chunks_reach_the_engine_as_they_come_and_the_last_of_all_sources_ends_the_input(stage):
    stage.open(sources=2)
    stage.comes("s", ("a", 1, False), ("b", 2, True))
    stage.comes("s", ("a", 3, False))
    stage.comes("s", ("a", 4, True))
    assert stage.engine.told == [
        ("s", {"x": 1}, False),
        ("s", {"x": 2}, False),
        ("s", {"x": 3}, False),
        ("s", {"x": 4}, True),
    ]


def test_a_stage_of_sync_mode_gets_the_same_when_all_its_sources_have_ended(stage):
    stage.open(sources=2, whole=True)
    stage.comes("s", ("a", 1, False), ("b", 2, True))
    stage.comes("s", ("a", 3, False))
    assert stage.engine.told == [] and stage.hand.budget.used_bytes == 300
    stage.comes("s", ("a", 4, True))
    assert stage.engine.told == [
        ("s", {"x": 1}, False),
        ("s", {"x": 2}, False),
        ("s", {"x": 3}, False),
        ("s", {"x": 4}, True),
    ]
    assert stage.hand.budget.used_bytes == 0


def test_the_first_stage_of_sync_mode_begins_at_once(stage):
    stage.open(sources=0, whole=True)
    assert stage.engine.told == [("s", {}, True)]


def test_what_sync_mode_holds_is_limited_and_only_that_session_fails():
    stage = Stage(limit_bytes=250)
    stage.open("s", whole=True)
    stage.open("t", whole=True)
    stage.comes("t", ("a", 0, False))
    stage.comes("s", ("a", 1, False), ("a", 2, False), ("a", 3, False))
    (failure,) = stage.inboxes.sent
    assert (failure.session, failure.code) == ("s", "UNAVAILABLE") and "queued_bytes is 250" in failure.what
    assert stage.engine.told == [("s", "abort")] and stage.hand.budget.used_bytes == 100
    stage.comes("t", ("a", 4, True))
    assert stage.engine.told[1:] == [("t", {"x": 0}, False), ("t", {"x": 4}, True)]


def test_what_sync_mode_holds_is_freed_by_a_cancel(stage):
    stage.open(whole=True)
    stage.comes("s", ("a", 1, False))
    stage.loop.cancel("s")
    assert stage.hand.budget.used_bytes == 0 and ("cleanup", "s") in stage.hand.calls


def test_a_session_whose_chunks_can_never_be_complete_fails(stage):
    stage.open()
    stage.open("t")
    stage.hand.came["s"] = EngineLost("the stage before is dead", "try again")
    stage.hand.arrived("s")
    stage.turn()
    (failure,) = stage.inboxes.sent
    assert (failure.session, failure.code, failure.what) == ("s", "ENGINE_LOST", "the stage before is dead")
    assert stage.loop.stats()["sessions"] == 1


def test_what_an_engine_does_not_take_fails_its_session_and_the_rest_is_not_offered(stage):
    stage.open()
    stage.engine.fault = Unavailable("too many rows", "send fewer")
    stage.comes("s", ("a", 1, False), ("a", 2, False))
    assert [message.what for message in stage.inboxes.sent] == ["too many rows"]


def test_a_refused_session_is_expected_no_longer(stage):
    stage.engine.refusal = Unavailable("full", "wait")
    stage.open()
    assert isinstance(stage.answers[0], wire.Refused)
    assert stage.hand.calls == [("expect", "s"), ("ignore", "s")]


# -- what goes ---------------------------------------------------------------------------------------------


def test_each_route_has_its_values_its_numbers_and_its_end(stage):
    stage.open()
    stage.makes(Delta("s", {"rows": 1, "text": "a"}))
    stage.makes(Delta("s", {"text": "b"}))
    stage.makes(Delta("s", {"rows": 2}), Delta("s", {}, "stop"))
    edge = ("m", "n")
    assert stage.hand.sent == [
        (NEXT, Key("s", edge, 0), {"in": 1}, False),
        (NEXT, Key("s", edge, 1), {"in": 2}, False),
        (NEXT, Key("s", edge, 2), {}, True),
    ]
    pieces = [message for message in stage.inboxes.sent if isinstance(message, wire.Piece)]
    assert [(piece.number, piece.values, piece.last) for piece in pieces] == [
        (0, {"text": "a"}, False),
        (1, {"text": "b"}, False),
        (2, {}, True),
    ]
    assert isinstance(stage.inboxes.sent[-1], wire.Finished)


def test_frames_go_out_as_they_fill_a_chunk_and_with_the_end(stage):
    routes = [wire.Route(INBOX, "", {"codes": "codes"}, (2, 3))]
    stage.loop.open(wire.Open(1, "m", "s", INBOX, {}, 0, {}, routes), stage.answers.append)
    for number in range(6):
        stage.makes(Delta("s", {"codes": np.full((1, 2), number)}))
    stage.makes(Delta("s", {}, "stop"))
    pieces = [message for message in stage.inboxes.sent if isinstance(message, wire.Piece)]
    told = [(piece.number, piece.values["codes"][:, 0].tolist(), piece.last) for piece in pieces]
    assert told == [(0, [0, 1], False), (1, [2, 3, 4], False), (2, [5], True)]


def test_frames_that_wait_end_with_a_session_that_is_cancelled_or_fails(stage):
    routes = [wire.Route(INBOX, "", {"codes": "codes"}, (4, 25))]
    for session in ("cancelled", "failed"):
        stage.loop.open(wire.Open(1, "m", session, INBOX, {}, 0, {}, routes), stage.answers.append)
    stage.makes(*(Delta(session, {"codes": np.zeros((1, 2))}) for session in ("cancelled", "failed")))
    stage.loop.cancel("cancelled")
    stage.makes(Delta("failed", error=TritoneError("broken", "mend it")))
    assert [type(message) for message in stage.inboxes.sent] == [wire.Failed]
    assert not stage.loop._seats


def test_what_a_step_gives_goes_in_one_packet_and_ahead_of_every_end(stage):
    for session in ("s", "t", "u"):
        stage.open(session)
    stage.makes(*(Delta(session, {"text": session}) for session in ("s", "t", "u")))
    (packet,) = stage.inboxes.sent
    assert [(piece.session, piece.values) for piece in packet.pieces] == [
        (session, {"text": session}) for session in ("s", "t", "u")
    ]
    del stage.inboxes.sent[:]
    fault = TritoneError("broken", "mend it")
    stage.makes(Delta("s", {"text": "a"}), Delta("t", {}, "stop"), Delta("u", error=fault))
    kinds = [type(message) for message in stage.inboxes.sent]
    assert kinds == [wire.Pieces, wire.Finished, wire.Failed]
    assert [(piece.session, piece.last) for piece in stage.inboxes.sent[0].pieces] == [
        ("s", False),
        ("t", True),
    ]


def test_sessions_of_an_orchestrator_that_is_gone_are_dropped(stage):
    stage.open("s")
    stage.open("t")

    def send(address, message):
        raise wire.Disconnected("gone")

    stage.inboxes.send = send
    stage.makes(Delta("s", {"text": "a"}), Delta("t", {"text": "b"}))
    assert stage.loop.stats()["sessions"] == 0
    assert [told for told in stage.engine.told if told[1] == "abort"] == [("s", "abort"), ("t", "abort")]


def test_a_stage_that_ended_wants_no_more_but_what_it_gave_still_goes(stage):
    stage.open()
    stage.makes(Delta("s", {}, "stop"))
    assert stage.hand.calls == [("expect", "s"), ("ignore", "s")]


def test_an_end_says_whether_the_stages_after_it_have_everything(stage):
    stage.open("s")
    stage.open("t")
    stage.hand.untaken.add("s")
    stage.makes(Delta("s", {}, "stop"), Delta("t", {}, "stop"))
    ends = [message for message in stage.inboxes.sent if isinstance(message, wire.Finished)]
    assert [(end.session, end.is_delivered) for end in ends] == [("s", False), ("t", True)]
    del stage.inboxes.sent[:]
    stage.hand.delivered("s")  # by one consumer, before there was anything for another
    stage.turn()
    assert stage.inboxes.sent == []
    stage.hand.untaken.clear()
    for session in ("s", "t", "s"):
        stage.hand.delivered(session)
    stage.turn()
    assert stage.inboxes.sent == [wire.Delivered("s", "m")]


def test_a_consumer_that_is_lost_with_what_it_had_not_taken_fails_a_session_that_had_ended(stage):
    stage.open("s")
    stage.open("t")
    stage.hand.untaken.add("s")
    stage.makes(Delta("s", {}, "stop"), Delta("t", {}, "stop"))
    del stage.inboxes.sent[:]
    stage.hand.consumer_lost(NEXT, {"s"})
    stage.turn()
    [failure] = stage.inboxes.sent
    assert failure.source == "n", "who died, not who noticed"
    assert (failure.session, failure.code, failure.what) == (
        "s",
        "ENGINE_LOST",
        "the engine of stage n died under the request",
    )
    stage.hand.delivered("s")
    stage.turn()
    assert stage.inboxes.sent == [failure]


@pytest.mark.parametrize("end", ["cancel", "orchestrator"])
def test_what_was_not_taken_is_forgotten_with_its_session(stage, end):
    stage.open("s")
    stage.hand.untaken.add("s")
    stage.makes(Delta("s", {}, "stop"))
    del stage.inboxes.sent[:]
    if end == "cancel":
        stage.loop.cancel("s")
    else:
        stage.loop.peer_lost(INBOX)
    assert ("cleanup", "s") in stage.hand.calls
    stage.hand.consumer_lost(NEXT, {"s"})
    stage.hand.delivered("s")
    stage.turn()
    assert stage.inboxes.sent == [] and stage.loop._undelivered == {}


def test_a_full_connector_fails_that_session_only(stage):
    stage.open("s")
    stage.open("t")
    stage.hand.is_full = True
    stage.makes(Delta("s", {"rows": 1}), Delta("t", {"text": "fine"}))
    failure, piece = stage.inboxes.sent
    assert (failure.session, failure.what) == ("s", "the queues are full")
    assert (piece.session, piece.values) == ("t", {"text": "fine"})
    assert ("cleanup", "s") in stage.hand.calls and stage.engine.told == [("s", "abort")]


def test_a_lost_consumer_fails_the_sessions_of_which_it_lacks_something(stage):
    stage.open("s")
    stage.open("t")
    stage.hand.consumer_lost(NEXT, set())
    stage.turn()
    assert stage.inboxes.sent == []
    stage.hand.consumer_lost(NEXT, {"s", "gone"})
    stage.turn()
    [failure] = stage.inboxes.sent
    assert (failure.session, failure.what) == ("s", "the engine of stage n died under the request")
    assert ("cleanup", "gone") in stage.hand.calls


def test_steps_that_gave_something_are_counted_and_the_sessions_in_them(stage):
    stage.open("s")
    stage.open("t")
    stage.makes(Delta("s", {"text": "a"}), Delta("t", {"text": "b"}))
    stage.makes(Delta("s", {"text": "c"}))
    stage.turn()
    stats = stage.loop.stats()
    assert (stats["batches"], stats["batched"]) == (2, 3)


def test_the_figures_of_the_connector_are_among_those_of_the_stage(stage):
    stage.open()
    stage.turn()
    stats = stage.loop.stats()
    assert (stats["sessions"], stats["active"], stats["connector_late"]) == (1, 0, 7)


# -- inboxes at sockets ------------------------------------------------------------------------------------


class Mailbox:
    """An inbox that reads when the test says so."""

    def __init__(self):
        self.address = f"tritone-test/{uuid.uuid4().hex}"
        self._server = wire.listen(self.address)

    def accept(self):
        self._channel = wire.accept(self._server)
        assert isinstance(self._channel.receive(), wire.Hello)

    def read(self):
        assert self._channel.wait_readable(PATIENCE_S), "nothing came"
        return self._channel.receive()

    def read_to_the_end(self):
        """The texts of the pieces, and what is not a piece."""
        texts = []
        while isinstance(message := self.read(), wire.Piece):
            assert message.number == len(texts)
            texts.append(message.values.get("text"))
        return texts, message

    def close(self):
        self._channel.close()
        self._server.close()


@pytest.fixture
def two_inboxes():
    """A stage with session `s` of an inbox that does not read, and `t` of another; both inboxes."""
    host, deaf, other = Host("tritone-test/engine", None), Mailbox(), Mailbox()
    stage = Stage(host.peers)
    host._loops = {"m": stage.loop}  # which turns when the test says so
    for session, inbox in (("s", deaf), ("t", other)):
        host.peers.ensure(inbox.address)
        inbox.accept()
        stage.open(session, inbox=inbox.address)
    yield stage, deaf, other
    for inbox in (deaf, other):
        inbox.close()


def steps_for_both(stage, other):
    """Far more than a socket holds, of which the other inbox has its part at once; the texts."""
    texts = [f"{number:20000}" for number in range(40)]
    for number, text in enumerate(texts):
        stage.makes(Delta("s", {"text": text}), Delta("t", {"text": number}))
        assert other.read().values == {"text": number}
    return texts


def test_an_inbox_that_does_not_read_holds_up_no_step_and_gets_everything_in_order(two_inboxes):
    stage, deaf, other = two_inboxes
    texts = steps_for_both(stage, other)
    stage.makes(Delta("s", {}, "stop"))
    outbox = stage.inboxes._outboxes[deaf.address]
    assert outbox.waiting_bytes > 400_000
    told, end = deaf.read_to_the_end()
    assert told == [*texts, None] and isinstance(end, wire.Finished)
    wait_until(lambda: outbox.waiting_bytes == 0)


@pytest.mark.parametrize("limit", ["wire.lane.SEND_TIMEOUT_S", "engines.peers.MOST_WAITING_BYTES"])
def test_an_inbox_that_does_not_read_for_too_long_loses_its_own_sessions(two_inboxes, monkeypatch, limit):
    monkeypatch.setattr(f"tritone.{limit}", 0.05 if "TIMEOUT" in limit else 100_000)
    stage, deaf, other = two_inboxes
    texts = steps_for_both(stage, other)
    wait_until(lambda: stage.turn() or stage.loop.stats()["sessions"] == 1)
    stage.makes(Delta("s", {"text": "for nobody"}), Delta("t", {"text": "and on"}))
    assert other.read().values == {"text": "and on"}
    told, failure = deaf.read_to_the_end()
    assert told == texts[: len(told)], "what was sent before comes first, and in order"
    assert (failure.session, failure.code) == ("s", "UNAVAILABLE") and "does not read" in failure.what
    assert ("cleanup", "s") in stage.hand.calls and ("s", "abort") in stage.engine.told


def test_a_session_whose_inbox_cannot_be_reached_is_refused_and_its_door_stays_connected(monkeypatch):
    stage, answers = Stage(), []
    host = Host("tritone-test/engine", None)
    host._loops = {"m": stage.loop}

    def none_left():
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("tritone.wire.channel._socket", none_left)
    host.open(wire.Open(1, "m", "s", "an inbox", {}, 1, {}, []), answers.append)
    [refusal] = answers
    assert (refusal.code, refusal.cure) == ("UNAVAILABLE", "try again") and "open files" in refusal.what


# -- when what happened ------------------------------------------------------------------------------------

CALLER = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}


def spans(exporter):
    return {span.name: span for span in exporter.get_finished_spans()}


def test_the_end_tells_when_the_stage_had_the_session_and_with_whom(stage):
    before_s = time.monotonic()
    stage.open("s")
    stage.open("t")
    stage.engine.note_phase("s", "prefill")
    stage.makes(Delta("s", {"text": "a"}), Delta("t", {"text": "a"}))
    stage.makes(Delta("s", {"text": "b"}))
    stage.makes(Delta("s", {}, "stop"))
    times = stage.inboxes.sent[-1].times
    moments = [before_s, times.opened_s, times.first_output_s, times.last_output_s, times.ended_s]
    assert moments == sorted(moments) and times.first_output_s < times.last_output_s
    assert (times.steps, times.batch) == (2, 1.5), "once with another, once alone"
    assert 0 < times.queued_s < times.ended_s - times.opened_s


def test_an_engine_without_a_queue_and_an_output_says_so(stage):
    stage.engine.note_phase = lambda session, phase: None
    stage.open()
    stage.makes(Delta("s", {}, "stop"))
    times = stage.inboxes.sent[-1].times
    assert (times.first_output_s, times.last_output_s, times.queued_s) == (None, None, None)
    assert (times.steps, times.batch) == (0, None)


def test_a_traced_session_has_a_span_and_its_phases_fill_it(stage):
    stage.open(trace=CALLER)
    for phase in ("prefill", "decode"):
        stage.engine.note_phase("s", phase)
    stage.makes(Delta("s", {"text": "a"}, "stop", {"completion_tokens": 3}))
    told = spans(stage.exporter)
    session = told.pop("session m")
    assert f"{session.parent.span_id:016x}" == "cd" * 8
    assert session.attributes["tritone.usage.completion_tokens"] == 3
    assert "error.type" not in session.attributes
    assert list(told) == ["queued", "prefill", "decode"]
    assert all(span.parent.span_id == session.context.span_id for span in told.values())
    times = [time_ns for span in told.values() for time_ns in (span.start_time, span.end_time)]
    assert np.diff(times).min() >= -2000, "each begins where the one before ends, to 2 us"
    assert session.start_time - 2000 <= times[0] and times[-1] <= session.end_time + 2000


@pytest.mark.parametrize("end", ["cancel", "fail", "refuse"])
def test_a_traced_session_says_how_it_was_ended(stage, end):
    if end == "refuse":
        stage.engine.refusal = Unavailable("full", "wait")
    stage.open(trace=CALLER)
    if end == "cancel":
        stage.loop.cancel("s")
    if end == "fail":
        stage.makes(Delta("s", error=TritoneError("it broke")))
    codes = {"cancel": "CANCELLED", "fail": "INTERNAL", "refuse": "UNAVAILABLE"}
    assert spans(stage.exporter)["session m"].attributes["error.type"] == codes[end]


def test_a_session_that_is_not_traced_has_no_span(stage):
    stage.open()
    stage.makes(Delta("s", {"text": "a"}, "stop"))
    assert stage.exporter.get_finished_spans() == ()


class Halves(BatchEngine):
    """Fails every second chunk of a batch; all of it when told so."""

    Options = None

    def __init__(self):
        self.fault = None

    def run(self, chunks):
        if self.fault is not None:
            raise self.fault
        return [Unavailable("odd") if number % 2 else {"pcm": [b""]} for number in range(len(chunks))]

    def abort(self, session):
        pass

    def stats(self):
        return {"active": 0}


@pytest.mark.parametrize(("fault", "errors"), [(None, ["", "UNAVAILABLE"]), (OSError(), ["INTERNAL"] * 2)])
def test_each_traced_chunk_of_a_batch_has_a_span(fault, errors):
    exporter = InMemorySpanExporter()
    engine = Halves()
    engine.fault = fault
    loop = BatchLoop(
        "w", engine, 60.0, OtlpTracer(SimpleSpanProcessor(Readable(exporter, Resource({}))), Resource({}))
    )
    chunks = [wire.StreamChunk(name, {}, True, False, {}, CALLER) for name in "ab"]
    chunks.append(wire.StreamChunk("c", {}, True, False, {}))
    answers = []
    loop.batch(wire.Run(1, "w", chunks), answers.append)
    told = exporter.get_finished_spans()
    assert [span.name for span in told] == ["compute w"] * 2
    assert [span.attributes.get("error.type", "") for span in told] == errors
    assert {span.attributes["tritone.batch"] for span in told} == {3}
    if fault is None:
        assert [result.batch for result in answers[0].results if not result.code] == [3, 3]
