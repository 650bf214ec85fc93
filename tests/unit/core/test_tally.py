"""What is counted of requests and engines, and how it is computed."""

import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from tritone import metrics as m
from tritone import wire
from tritone.admission import Admission
from tritone.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineLost,
    InvalidRequest,
    NotFound,
    TritoneError,
    Unavailable,
    Unsupported,
)
from tritone.pace import Pace
from tritone.tally import RequestTally, StageTally, end_of


class Sheet:
    """In place of a Publisher: what was counted, observed and set, by family and labels."""

    def __init__(self):
        self.counts, self.observed, self.levels = {}, {}, {}

    def count(self, family, amount=1.0, **labels):
        key = (family, *labels.values())
        self.counts[key] = self.counts.get(key, 0) + amount

    def observe(self, family, value, **labels):
        self.observed.setdefault((family, *labels.values()), []).append(value)

    def set(self, family, value, **labels):
        self.levels[family] = value


def a_session(stream=True, started=True, modalities=("text", "audio"), reasons=None, **more):
    pace = Pace(time.monotonic())
    pace.first_s = {"text": 0.1, "audio": 0.3}
    pace.last_s = {"text": 0.7, "audio": 1.5}
    pace.gaps_s = [0.5, 0.7]
    answer = SimpleNamespace(
        pace=pace, audio_s=3.0, num_text_tokens=4, finish_reasons=reasons or dict.fromkeys(modalities, "stop")
    )
    request = SimpleNamespace(stream=stream, modalities=modalities, parts=lambda kind: 2)
    usage = {"writer": {"prompt_tokens": 11, "completion_tokens": 4}, "singer": {"codec_frames": 150}}
    values = {"usage": usage, "num_frames": 7, "resumed": 0, "writer": "writer", **more}
    return SimpleNamespace(request=request, answer=answer, started=started, **values)


def tally(session, error=None, may_stream=True, values=None):
    sheet = Sheet()
    requests = RequestTally(sheet, may_stream, 4, Admission(4, 0))
    shown = dict(sheet.counts)
    stream = session is not None and session.request.stream
    arrival = SimpleNamespace(values={"stream": stream} if values is None else values, session=session)
    requests.ended(arrival, error)
    sheet.counts = {key: n for key, n in sheet.counts.items() if n or key not in shown}
    return sheet


@pytest.mark.parametrize(
    ("error", "started", "end"),
    [
        (None, True, ("ok", "OK")),
        (InvalidRequest("x"), False, ("refused", "INVALID_ARG")),
        (InvalidRequest("x"), True, ("refused", "INVALID_ARG")),  # as a stage found out
        (NotFound("x"), False, ("refused", "NOT_FOUND")),
        (Unsupported("x"), False, ("refused", "UNSUPPORTED")),
        (Unavailable("full"), False, ("refused", "UNAVAILABLE")),
        (Unavailable("a stage is silent"), True, ("failed", "UNAVAILABLE")),
        (EngineLost("x"), True, ("failed", "UNAVAILABLE")),
        (TritoneError("x"), True, ("failed", "INTERNAL")),
        (TritoneError("x"), False, ("failed", "INTERNAL")),
        (Cancelled("x"), True, ("cancelled", "CANCELLED")),
        (DeadlineExceeded("x"), True, ("deadline", "DEADLINE_EXCEEDED")),
        (DeadlineExceeded("in the queue"), False, ("deadline", "DEADLINE_EXCEEDED")),
    ],
)
def test_an_end_has_an_outcome_and_the_code_that_the_client_reads(error, started, end):
    assert end_of(a_session(started=started), error) == end


def test_an_error_before_there_is_a_session_is_a_refusal():
    assert end_of(None, Unavailable("draining")) == ("refused", "UNAVAILABLE")


def test_an_answer_that_the_deadline_cut_is_not_ok():
    session = a_session(reasons={"text": "stop", "audio": "deadline"})
    assert end_of(session, None) == ("deadline", "OK")
    sheet = tally(session)
    assert sheet.observed[m.TTFT, "text", "true"] == [0.1] and (m.E2EL, "text", "true") not in sheet.observed


def test_a_streamed_answer_gives_each_family_its_value():
    sheet = tally(a_session())
    assert sheet.observed == {
        (m.TTFT, "text", "true"): [0.1],
        (m.TTFP, "audio", "true"): [0.3],
        (m.GAP, "audio", "true"): [0.5, 0.7],
        (m.E2EL, "text", "true"): [0.7],
        (m.E2EL, "audio", "true"): [1.5],
        (m.RTF, "audio", "true"): [0.5],
        (m.TPOT, "text", "true"): [pytest.approx(0.2)],
    }
    assert sheet.counts == {
        (m.REQUESTS, "true", "ok", "OK"): 1,
        (m.TEXT_TOKENS, "in"): 11,
        (m.TEXT_TOKENS, "out"): 4,
        (m.CODEC_FRAMES,): 150,
        (m.AUDIO_SECONDS,): 3.0,
        (m.IMAGES, "in"): 2,
        (m.RESUMES,): 0,
    }


def test_a_whole_answer_ends_when_it_is_sent_and_has_no_gaps():
    session = a_session(stream=False)
    session.answer.pace._received_s -= 2.0
    sheet = tally(session)
    longest_s = time.monotonic() - session.answer.pace._received_s
    [e2el_s], [rtf] = sheet.observed[m.E2EL, "text", "false"], sheet.observed[m.RTF, "audio", "false"]
    assert 2.0 <= e2el_s <= longest_s and 2 / 3 <= rtf <= longest_s / 3
    assert (m.GAP, "audio", "false") not in sheet.observed


@pytest.mark.parametrize("error", [Cancelled("x"), TritoneError("x"), EngineLost("x")])
def test_a_broken_stream_counts_what_was_heard_of_it(error):
    sheet = tally(a_session(usage={}), error)
    assert {family for family, *_ in sheet.observed} == {m.TTFT, m.TTFP, m.GAP}
    assert sheet.counts[m.TEXT_TOKENS, "out"] == 4 and sheet.counts[m.CODEC_FRAMES,] == 7
    assert sheet.counts[m.AUDIO_SECONDS,] == 3.0


def test_of_a_whole_answer_that_failed_nothing_was_heard():
    sheet = tally(a_session(stream=False), TritoneError("x"))
    assert sheet.observed == {} and (m.AUDIO_SECONDS,) not in sheet.counts


def test_a_request_that_never_ran_is_counted_and_nothing_else():
    sheet = tally(a_session(started=False), Unavailable("full"))
    assert sheet.observed == {} and sheet.counts == {(m.REQUESTS, "true", "refused", "UNAVAILABLE"): 1}


def test_the_twin_never_streams_whatever_it_is_asked_for():
    sheet = tally(None, InvalidRequest("stream is true"), may_stream=False, values={"stream": True})
    assert sheet.counts == {(m.REQUESTS, "false", "refused", "INVALID_ARG"): 1}


def test_an_operation_is_no_request():
    assert tally(None, Unavailable("a stage is down"), values={"op": "ping"}).counts == {}


def test_the_known_ends_are_shown_before_there_are_any():
    sheet = Sheet()
    RequestTally(sheet, True, 4, Admission(4, 0))
    assert sheet.counts[m.REQUESTS, "true", "ok", "OK"] == 0 and len(sheet.counts) == 16
    sheet = Sheet()
    RequestTally(sheet, False, 4, Admission(4, 0))
    assert {key[1] for key in sheet.counts} == {"false"} and len(sheet.counts) == 8


async def test_gauges_say_who_runs_and_who_waits(monkeypatch):
    monkeypatch.setattr("tritone.tally.num_blocks", lambda: 90_000)
    sheet, admission = Sheet(), Admission(4, 2)
    requests = RequestTally(sheet, True, 4, admission)
    async with admission.turn():
        requests.look()
    assert sheet.levels == {m.IN_FLIGHT: 1, m.QUEUED: 0, m.IN_FLIGHT_LIMIT: 4, m.BLOCKS: 90_000}


class Link:
    """An engine as its door sees it; `figures` is what it answers, None an answer that is late."""

    def __init__(self, **figures):
        self.figures, self.loads, self.is_ready, self.asked = figures, 1, True, []

    def call(self, make, timeout_s):
        future = Future()
        assert isinstance(make(1), wire.Ping) and timeout_s > 0
        self.asked.append(future)
        if not self.is_ready:
            future.set_exception(EngineLost("it restarts"))
        elif self.figures is not None:
            future.set_result(wire.Pong(1, {"m": dict(self.figures)}))
        return future


@pytest.fixture
def sheet():
    return Sheet()


def test_what_an_engine_counts_grows_by_what_is_new(sheet):
    link = Link(active=3, batches=10, batched=40, blocks=700, connector_bytes_taken=0)
    stage = StageTally(sheet, link, "m")
    stage.look()
    stage.look()
    assert sheet.levels.pop(m.DOOR_BLOCKS) > 10_000
    assert sheet.levels == {m.ENGINE_UP: 1, m.SESSIONS: 3, m.BATCH_SIZE: 4, m.ENGINE_BLOCKS: 700}
    link.figures.update(active=1, batches=12, batched=43)
    stage.look()
    stage.look()
    assert sheet.counts[m.BATCHES,] == 12 and sheet.counts[m.BATCHED,] == 43
    assert sheet.levels[m.BATCH_SIZE] == 1.5 and sheet.levels[m.SESSIONS] == 1
    stage.look()
    assert sheet.levels[m.BATCH_SIZE] == 0  # nothing was done since
    assert sheet.counts[m.CONNECTOR_BYTES,] == 0 and sheet.counts[m.ENGINE_RESTARTS,] == 0
    assert (m.CONNECTOR_CHUNKS,) not in sheet.counts  # this engine has no such figure


def test_a_new_engine_counts_from_zero_and_its_counters_go_on(sheet):
    link = Link(active=3, batches=10, batched=10)
    stage = StageTally(sheet, link, "m")
    stage.look()
    stage.look()
    link.is_ready = False
    stage.look()  # takes the last answer of the old engine, and finds none to ask
    stage.look()
    assert sheet.levels[m.ENGINE_UP] == 0 and sheet.levels[m.SESSIONS] == 0
    link.is_ready, link.loads, link.figures = True, 2, {"active": 0, "batches": 4, "batched": 4}
    stage.look()
    stage.look()
    assert sheet.counts[m.BATCHES,] == 14 and sheet.counts[m.ENGINE_RESTARTS,] == 1
    assert sheet.levels[m.ENGINE_UP] == 1


def test_the_last_answer_of_an_engine_that_was_restarted_meanwhile_counts_once(sheet):
    link = Link(batches=10, batched=10)
    stage = StageTally(sheet, link, "m")
    stage.look()
    stage.look()
    link.loads, link.figures = 2, {"batches": 3, "batched": 3}
    stage.look()  # the answer that it takes is still the old engine's
    assert sheet.counts[m.BATCHES,] == 10
    stage.look()
    assert sheet.counts[m.BATCHES,] == 13


def test_an_answer_that_is_late_is_waited_for(sheet):
    link = Link(active=5)
    link.figures = None
    stage = StageTally(sheet, link, "m")
    stage.look()
    stage.look()
    assert len(link.asked) == 1
    link.asked[0].set_result(wire.Pong(1, {"m": {"active": 5}}))
    stage.look()
    assert sheet.levels[m.SESSIONS] == 5 and len(link.asked) == 2


def test_a_hung_engine_keeps_its_last_figures(sheet):
    link = Link(active=5)
    stage = StageTally(sheet, link, "m")
    stage.look()
    link.figures = None
    stage.look()
    link.asked[-1].set_exception(Unavailable("no answer"))
    stage.look()
    assert sheet.levels[m.SESSIONS] == 5
