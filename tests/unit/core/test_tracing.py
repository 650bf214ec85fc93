"""Spans: who begins one, below what, how it is told, and that nobody ever waits for a collector."""

import http.server
import logging
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode

from tritone import deploy_reader
from tritone.deploy import Tracing
from tritone.errors import ConfigError
from tritone.otlp import CLOSE_S, OtlpTracer, Readable, Sender, open_otlp, process_resource
from tritone.request_trace import RequestTrace
from tritone.timeline import StageTimeline
from tritone.tracing import NO_SPAN, Tracer, is_on, open_tracer
from waiting import PATIENCE_S

from .calls import calls_of

ROOT = Path(__file__).parents[3]
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CALLER = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-00"}
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class Kept:
    """A tracer, and what it has recorded."""

    def __init__(self, ratio=None):
        self.exporter = InMemorySpanExporter()
        sampler = None if ratio is None else ParentBased(TraceIdRatioBased(ratio))
        resource = process_resource("test", {"tritone.stage": "talker"})
        self.tracer = OtlpTracer(SimpleSpanProcessor(Readable(self.exporter, resource)), resource, sampler)

    @property
    def spans(self):
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def begin(self, headers=CALLER):
        return self.tracer.begin("request", headers, time.monotonic())


@pytest.fixture
def kept():
    return Kept()


# -- who begins one, and below what ------------------------------------------------------------------------


def test_a_request_goes_on_with_the_trace_of_its_caller(kept):
    request = kept.begin()
    assert request.trace_id == TRACE_ID
    request.end()
    (span,) = kept.spans.values()
    assert span.kind is SpanKind.SERVER
    assert f"{span.context.trace_id:032x}" == TRACE_ID and f"{span.parent.span_id:016x}" == SPAN_ID


def test_spans_of_other_processes_hang_below_by_the_carrier_alone(kept):
    request = kept.begin()
    other = Kept()
    stage = other.tracer.child("stage", dict(request.carrier), "client")
    session = Kept().tracer.child("session", dict(stage.carrier))
    for span in (session, stage, request):
        span.end()
    stage_span, request_span = other.spans["stage"], kept.spans["request"]
    assert stage_span.parent.span_id == request_span.context.span_id
    assert stage_span.context.trace_id == request_span.context.trace_id
    assert session.carrier["traceparent"].split("-")[1] == TRACE_ID
    assert stage_span.kind is SpanKind.CLIENT


def test_spans_of_the_same_process_hang_below_without_a_carrier(kept):
    request = kept.begin()
    stage = request.child("stage", "client", attributes={"tritone.stage": "talker"})
    stage.child("queued", began_s=time.monotonic()).end()
    stage.end()
    request.end()
    spans = kept.spans
    assert spans["queued"].parent == spans["stage"].context
    assert spans["stage"].parent == spans["request"].context and not spans["stage"].parent.is_remote
    assert spans["request"].parent.is_remote
    assert spans["stage"].attributes["tritone.stage"] == "talker"


@pytest.mark.parametrize(
    "traceparent",
    [
        "hello",
        f"00-{TRACE_ID}-{SPAN_ID}",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID.upper()[:31]}G-{SPAN_ID}-01",
        "0" * 100_000,
        "",
    ],
    ids=lambda text: text[:40] or "empty",
)
def test_a_traceparent_that_is_not_valid_begins_a_new_trace_without_its_state(kept, traceparent):
    request = kept.begin({"traceparent": traceparent, "tracestate": "a=b"})
    assert request.trace_id not in ("", TRACE_ID) and set(request.carrier) == {"traceparent"}
    request.end()
    assert kept.spans["request"].parent is None


def test_that_is_logged_once_and_without_repeating_it(kept, caplog):
    for _ in range(3):
        kept.begin({"traceparent": "my secret"})
    (line,) = [record.getMessage() for record in caplog.records if record.name == "tritone.tracing"]
    assert "traceparent" in line and "secret" not in line


def test_a_caller_who_does_not_sample_is_obeyed_down_to_the_stages(kept):
    request = kept.begin(UNSAMPLED)
    assert request is NO_SPAN and request.carrier == {}
    stage = kept.tracer.child("stage", request.carrier)
    assert stage is NO_SPAN
    stage.end()
    request.end()
    assert kept.spans == {}


def cost(tracer, num_chunks):
    """How many functions are called for the spans of a request."""

    def trace():
        request = RequestTrace(tracer, "fake", {}, 0.0)
        request.note_queued()
        request.note_turn()
        for _ in range(num_chunks):
            request.stage("code2wav")
        request.end_stage("code2wav", StageTimeline())
        request.end()

    return calls_of(trace)


def test_who_is_not_sampled_pays_for_the_decision_alone():
    off, on = Tracer(), Kept(ratio=0.0).tracer
    cost(on, 1)
    assert cost(off, 100) <= cost(on, 100) <= cost(off, 100) + 25
    assert cost(on, 100) - cost(on, 1) == cost(off, 100) - cost(off, 1)


def test_a_chunk_of_a_sampled_request_costs_a_look_at_its_stage():
    on = Kept().tracer
    assert cost(on, 101) - cost(on, 1) <= 4 * 100


def test_that_an_id_is_random_is_passed_on(kept):
    caller = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-03"}
    stage = kept.tracer.child("stage", kept.begin(caller).carrier)
    assert stage.carrier["traceparent"].endswith("-03")
    assert kept.tracer.child("stage", kept.begin().carrier).carrier["traceparent"].endswith("-01")


@pytest.mark.parametrize(("state", "passed_on"), [("vendor=1,other=2", True), (f"vendor={'x' * 600}", False)])
def test_tracestate_is_passed_on_as_far_as_w3c_asks(kept, state, passed_on):
    request = kept.begin({**CALLER, "tracestate": state})
    stage = kept.tracer.child("stage", request.carrier)
    assert request.carrier.get("tracestate") == (state if passed_on else None)
    assert stage.carrier.get("tracestate") == request.carrier.get("tracestate")


@pytest.mark.parametrize(("ratio", "least", "most"), [(0.0, 0, 0), (0.25, 50, 150), (1.0, 400, 400)])
def test_where_the_caller_says_nothing_the_ratio_decides(ratio, least, most):
    kept = Kept(ratio)
    sampled = sum(kept.begin({}) is not NO_SPAN for _ in range(400))
    assert least <= sampled <= most
    assert kept.begin(CALLER) is not NO_SPAN, "a caller that samples is obeyed at any ratio"


def test_without_a_ratio_the_environment_decides(monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    assert Kept().begin({}) is NO_SPAN
    monkeypatch.delenv("OTEL_TRACES_SAMPLER")
    assert Kept().begin({}) is not NO_SPAN


# -- how it is told ----------------------------------------------------------------------------------------


def test_a_span_has_its_times_on_the_wall_clock_and_its_process(kept):
    before_s, began_s = time.time(), time.monotonic() - 10
    span = kept.tracer.child("session", CALLER, began_s=began_s, attributes={"tritone.stage": "talker"})
    span.end(began_s + 4, attributes={"tritone.frames": 7})
    after_s = time.time()
    told = kept.spans["session"]
    assert before_s - 10.01 <= told.start_time / 1e9 <= after_s - 9.99
    assert (told.end_time - told.start_time) / 1e9 == pytest.approx(4, abs=1e-6)
    assert dict(told.attributes) == {"tritone.stage": "talker", "tritone.frames": 7}
    assert told.status.status_code is StatusCode.UNSET
    facts = told.resource.attributes
    assert (facts["service.namespace"], facts["service.name"]) == ("tritone", "test")
    assert facts["tritone.stage"] == "talker" and facts["process.pid"] > 0


def test_a_span_ends_once(kept):
    span = kept.tracer.child("session", CALLER)
    span.end(error="INTERNAL")
    span.end()
    (told,) = kept.spans.values()
    assert told.status.status_code is StatusCode.ERROR and told.attributes["error.type"] == "INTERNAL"


# -- on and off --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "env", "on"),
    [
        ("", {}, False),
        ("http://c:4318", {}, True),
        ("", {ENDPOINT: "http://c:4318"}, True),
        ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ("", {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4318"}, False),
        ("", {ENDPOINT: "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ("http://c:4318", {"OTEL_SDK_DISABLED": "true"}, False),
        ("", {ENDPOINT: "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, False),
        ("http://c:4318", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, True),
    ],
    ids=str,
)
def test_a_collector_that_is_named_switches_it_on(endpoint, env, on):
    assert is_on(Tracing(endpoint), env) is on


def test_off_nothing_of_opentelemetry_is_imported():
    code = (
        "import sys, types; sys.modules['triton_python_backend_utils'] = types.ModuleType('pb');"
        "import tritone.orchestrator, tritone.stage_door, tritone.engines.host;"
        "from tritone.deploy import Tracing; from tritone.tracing import Tracer, open_tracer;"
        "assert type(open_tracer(Tracing(), 's', {})) is Tracer;"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "backends")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_an_interpreter_without_opentelemetry_serves_without_spans(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "tritone.otlp", None)
    tracer = open_tracer(Tracing("http://127.0.0.1:1"), "s", {})
    assert type(tracer) is Tracer
    assert [record.getMessage() for record in caplog.records if "tritone[tracing]" in record.getMessage()]


@pytest.mark.parametrize(
    ("block", "what"),
    [
        ({"otlp_endpoint": "collector:4318"}, "tracing.otlp_endpoint is 'collector:4318'"),
        ({"otlp_endpoint": "ftp://c"}, "tracing.otlp_endpoint is 'ftp://c'"),
        ({"otlp_endpoint": "http://c/?token=1"}, "tracing.otlp_endpoint"),
        ({"sample_ratio": 1.5}, "tracing.sample_ratio is 1.5"),
        ({"sample_ratio": -1}, "tracing.sample_ratio is -1"),
        ({"ratio": 0.5}, "unknown key 'ratio'"),
    ],
    ids=str,
)
def test_a_tracing_block_that_cannot_be_meant_starts_no_server(block, what):
    with pytest.raises(ConfigError, match=what.replace("[", "\\[").replace("?", "\\?")):
        deploy_reader.from_mapping({"pipeline": "fake", "tracing": block}, "test")


def test_a_tracing_block_is_read():
    block = {"otlp_endpoint": "https://collector.example.org:4318/otlp", "sample_ratio": 0.1}
    deploy = deploy_reader.from_mapping({"pipeline": "fake", "tracing": block}, "test")
    assert deploy.tracing == Tracing("https://collector.example.org:4318/otlp", 0.1)


# -- the collector -----------------------------------------------------------------------------------------


class Moody(SpanExporter):
    """Answers as the list says."""

    def __init__(self, *answers):
        self._answers = list(answers)

    def export(self, spans):
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_collector_that_fails_is_told_once_and_again_when_it_is_back(caplog):
    fails, goes = SpanExportResult.FAILURE, SpanExportResult.SUCCESS
    sender = Sender(Moody(goes, fails, OSError("down"), fails, goes, goes, fails), "http://c")
    for _ in range(7):
        sender.export([])
    lines = [record.getMessage() for record in caplog.records]
    assert [("takes no spans" in line, "again" in line) for line in lines] == [
        (True, False),
        (False, True),
        (True, False),
    ]


def test_with_no_collector_nobody_waits_and_the_log_has_one_line(caplog):
    tracer = open_otlp(Tracing("http://127.0.0.1:9"), "s", {})
    began_s = time.monotonic()
    for _ in range(3000):  # more than a queue holds
        tracer.child("session", CALLER).end()
    tracer.close()
    assert time.monotonic() - began_s < PATIENCE_S
    tracer.child("session", CALLER).end()
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 1


def test_a_collector_that_never_answers_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    with socket.create_server(("127.0.0.1", 0)) as server:
        tracer = open_otlp(Tracing(f"http://127.0.0.1:{server.getsockname()[1]}"), "s", {})
        tracer.child("session", CALLER).end()
        began_s = time.monotonic()
        tracer.close()
        assert time.monotonic() - began_s < CLOSE_S + PATIENCE_S


@pytest.mark.parametrize("path", ["", "/", "/v1/traces", "/prefix"])
def test_what_has_ended_is_sent_at_the_close(path):
    came = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            came.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tracer = open_otlp(Tracing(f"http://127.0.0.1:{server.server_address[1]}{path}"), "singer.engine", {})
    tracer.child("session", CALLER).end()
    tracer.close()
    tracer.close()
    server.shutdown()
    server.server_close()
    ((where, body),) = came
    assert where == ("/prefix/v1/traces" if path == "/prefix" else "/v1/traces")
    assert bytes.fromhex(TRACE_ID) in body and b"singer.engine" in body


def test_the_environment_names_headers_and_resources(monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab")
    facts = process_resource("fake", {}).attributes
    assert facts["deployment.environment.name"] == "lab" and facts["service.name"] == "fake"
    assert isinstance(process_resource("fake", {}), Resource)
