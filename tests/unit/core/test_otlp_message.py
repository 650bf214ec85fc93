"""Our OTLP messages against those of OpenTelemetry's own exporter, and who sends them."""

import numpy as np
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

from trace_collector import Collector
from tritone.otlp import Exporter, OtlpTracer, process_resource
from tritone.otlp_message import KINDS

from .calls import calls_of

RESOURCE = process_resource("fake_singer.engine", {"tritone.stage": "singer"})
TRACE_ID, SPAN_ID = "f" * 32, "0" * 15 + "8"
CALLER = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
OFFSET_NS = 1_764_489_600_123_456_789


class Processor:
    """Keeps what has ended."""

    def __init__(self):
        self.spans = []

    def on_end(self, span):
        assert span.context.trace_flags.sampled, "the SDK's processors pass on no other"
        self.spans.append(span)


@pytest.fixture
def tracer():
    return OtlpTracer(Processor(), RESOURCE)


def ended(tracer, *spans, error="", **attributes):
    for span in spans:
        span.end(35.5, error, attributes)
    return tracer.record.__self__.spans[-len(spans) :]


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def exporter(collector):
    exporter = Exporter(f"{collector.url}/v1/traces", RESOURCE)
    yield exporter
    exporter.shutdown()


def check(exporter, spans):
    """Byte for byte what the SDK makes of the same spans."""
    readable = exporter.message_of.readable(spans, OFFSET_NS)
    assert exporter.message_of(spans, OFFSET_NS) == encode_spans(readable).SerializeToString()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", [{}, {"tracestate": "vendor=1,other=2"}], ids=str)
def test_a_message_of_spans_above_and_below_is_that_of_the_sdk(exporter, tracer, kind, state):
    root = tracer.begin("chat fake", {}, 12.25, {"gen_ai.operation.name": "chat"})
    called = tracer.begin("chat fake", {**CALLER, **state}, 12.25)
    remote = tracer.child("session fake_singer", {**CALLER, **state}, kind, 12.5)
    spans = ended(tracer, root, called, remote, called.child("queue", kind, 13.0), remote.child("prefill"))
    assert [span.parent_id for span in spans] == ["", SPAN_ID, SPAN_ID, called.span_id, remote.span_id]
    check(exporter, spans)


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"text": "größer 聪明", "none": "", "yes": True, "no": False},
        {"zero": 0, "least": -(1 << 63), "most": (1 << 63) - 1, "real": -0.25, "none": 0.0},
        {"yes": True, "one": 1, "real": 1.0},
        {"reasons": ["stop", "length"], "nothing": []},
        {"mean": np.float64(1.5)},
        {"error": "ENGINE_LOST", "tritone.batch": 2},
    ],
    ids=lambda facts: " ".join(facts) or "nothing",
)
def test_a_message_of_any_attributes_is_that_of_the_sdk(exporter, tracer, attributes):
    spans = [tracer.child("run", CALLER, "server", 12.5, {"tritone.stage": "wave"}) for _ in range(3)]
    check(exporter, ended(tracer, *spans, **attributes))


def test_attributes_that_are_equal_but_of_another_type_are_told_apart(exporter, tracer):
    for value in (1, True, 1.0):
        span = ended(tracer, tracer.child("run", CALLER), same=value)
        check(exporter, span)


def test_numbers_that_the_sdk_would_drop_are_kept(exporter, tracer):
    spans = ended(tracer, tracer.child("run", CALLER), n=np.int64(3))
    message = ExportTraceServiceRequest.FromString(exporter.message_of(spans, OFFSET_NS))
    (told,) = message.resource_spans[0].scope_spans[0].spans
    assert told.attributes[0].value.double_value == 3


def test_one_message_leaves_nothing_in_the_next(exporter, tracer):
    check(exporter, ended(tracer, *(tracer.child("run", CALLER) for _ in range(600)), batch=2))
    check(exporter, ended(tracer, tracer.child("compute", CALLER)))


def test_a_span_costs_few_calls_until_it_is_sent_and_fewer_then(exporter):
    processor = BatchSpanProcessor(exporter, schedule_delay_millis=60_000)
    tracer = OtlpTracer(processor, RESOURCE)
    attributes = {"tritone.batch": 2, "tritone.stage": "wave"}
    assert calls_of(lambda: tracer.child("run", CALLER, "server").end(attributes=attributes)) <= 25
    spans = [tracer.child("run", CALLER, "server", 12.5, attributes) for _ in range(100)]
    assert calls_of(lambda: exporter.message_of(spans, OFFSET_NS)) <= 15 * len(spans)
    processor.shutdown()


def test_the_installed_sdk_sends_them_as_they_are(exporter, tracer, collector, monkeypatch):
    """Fails where a release of the SDK keeps its sender elsewhere; messages then cost what its own do."""
    monkeypatch.delattr(OTLPSpanExporter, "export")
    assert exporter.export(ended(tracer, tracer.child("session", CALLER))) is SpanExportResult.SUCCESS
    (told,) = collector.until(lambda spans: spans)
    assert (told.name, told.trace_id, told.parent_id) == ("session", TRACE_ID, SPAN_ID)
    assert told.resource["service.name"] == "fake_singer.engine"
    collector.status = 400
    assert exporter.export(ended(tracer, tracer.child("session", CALLER))) is SpanExportResult.FAILURE


def test_an_sdk_that_keeps_its_sender_elsewhere_sends_its_own(exporter, tracer, collector, monkeypatch):
    given = []

    def export(self, spans):
        given.extend(spans)
        return SpanExportResult.SUCCESS

    monkeypatch.setattr(OTLPSpanExporter, "export", export)
    monkeypatch.setattr(exporter, "_client", None)
    assert exporter.export(ended(tracer, tracer.child("session", CALLER))) is SpanExportResult.SUCCESS
    assert [span.name for span in given] == ["session"] and encode_spans(given)
