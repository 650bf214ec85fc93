"""Our OTLP messages against those of OpenTelemetry's own exporter, and who sends them."""

import numpy as np
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from trace_collector import Collector
from tritone.otlp import SCOPE, Exporter, process_resource

RESOURCE = process_resource("fake_singer.engine", {"tritone.stage": "singer"})
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
OWN = SpanContext((1 << 128) - 1, 1 << 63, False, SAMPLED)
FOREIGN = SpanContext(7, 8, True, SAMPLED, TraceState([("vendor", "1"), ("other", "2")]))
NANOSECONDS = 1_764_489_600_123_456_789


def span(**facts):
    facts = {
        "context": OWN,
        "attributes": {},
        "start_time": NANOSECONDS,
        "end_time": NANOSECONDS + 5,
        **facts,
    }
    return ReadableSpan("session fake_singer", resource=RESOURCE, instrumentation_scope=SCOPE, **facts)


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


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"parent": OWN},
        {"parent": FOREIGN},
        {"context": FOREIGN},
        *({"kind": kind} for kind in SpanKind),
        {"status": Status(StatusCode.ERROR, "ENGINE_LOST")},
        {"status": Status()},
        {"attributes": {"text": "größer 聪明", "none": "", "yes": True, "no": False}},
        {"attributes": {"zero": 0, "least": -(1 << 63), "most": (1 << 63) - 1, "real": -0.25, "none": 0.0}},
        {"attributes": {"reasons": ["stop", "length"], "nothing": [], "steps": (1, 2)}},
        {"attributes": {"mean": np.float64(1.5)}},
    ],
    ids=lambda facts: " ".join(facts) or "nothing",
)
def test_a_message_is_byte_for_byte_that_of_the_sdk(exporter, facts):
    spans = [span(**facts), span(parent=FOREIGN), span(**facts)]
    assert exporter.message_of(spans) == encode_spans(spans).SerializeToString()


def test_numbers_that_the_sdk_would_drop_are_kept(exporter):
    message = ExportTraceServiceRequest.FromString(exporter.message_of([span(attributes={"n": np.int64(3)})]))
    (told,) = message.resource_spans[0].scope_spans[0].spans
    assert told.attributes[0].value.double_value == 3


def test_one_message_leaves_nothing_in_the_next(exporter):
    exporter.message_of([span(attributes={"tritone.batch": 2})] * 100)
    spans = [span()]
    assert exporter.message_of(spans) == encode_spans(spans).SerializeToString()
    assert exporter.message_of([]) != b"", "resource and scope are there"


def test_the_installed_sdk_sends_them_as_they_are(exporter, collector, monkeypatch):
    """Fails where a release of the SDK keeps its sender elsewhere; messages then cost what its own do."""
    monkeypatch.delattr(OTLPSpanExporter, "export")
    assert exporter.export([span(parent=FOREIGN)]) is SpanExportResult.SUCCESS
    (told,) = collector.until(lambda spans: spans)
    assert (told.name, told.parent_id) == ("session fake_singer", f"{8:016x}")
    assert told.resource["service.name"] == "fake_singer.engine"
    collector.status = 400
    assert exporter.export([span()]) is SpanExportResult.FAILURE


def test_an_sdk_that_keeps_its_sender_elsewhere_sends_its_own(exporter, monkeypatch):
    given = []
    monkeypatch.setattr(
        OTLPSpanExporter, "export", lambda self, spans: given.append(spans) or SpanExportResult.SUCCESS
    )
    monkeypatch.setattr(exporter, "_client", None)
    spans = [span()]
    assert exporter.export(spans) is SpanExportResult.SUCCESS and given == [spans]
