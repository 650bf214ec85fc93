"""Spans by OpenTelemetry's SDK: sampled, sent in batches over HTTP, and never waited for.

    begin, child ─► OtlpSpan ─end─► BatchSpanProcessor ─thread─► Sender ─► Exporter ─► collector

On a request's way a span is a few strings and two times; what a collector wants of them is worked out in the
processor's thread. The SDK decides who is sampled, keeps the queue and sends; its own spans, and the records
and messages that it makes of them, take several times as long. With otlp_message.py the only module that
imports OpenTelemetry.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import tritone
from tritone.deploy import Tracing
from tritone.otlp_message import MessageOf, wall_offset_ns
from tritone.tracing import NO_SPAN, NOTHING, Attribute, Carrier, Kind, Span, Tracer

log = logging.getLogger("tritone.tracing")

TRACES_PATH = "/v1/traces"
CLOSE_S = 1.0
SCHEDULE = "OTEL_BSP_SCHEDULE_DELAY"
SEND_EVERY_S = 10.0  # or as soon as there are 512 spans, unless the environment gives a schedule
MAX_TRACESTATE_CHARACTERS = 512  # what W3C asks everybody to pass on; a longer one is dropped
SAMPLED = TraceFlags.SAMPLED
ANY_SAMPLED = SpanContext(1, 1, False, TraceFlags(SAMPLED))
RANDOM = 2  # flag of W3C Trace Context, level 2: the trace id was drawn at random; passed on as it came

_propagator = TraceContextTextMapPropagator()


class Trace(NamedTuple):
    """What all spans of a request have in common, as carriers have it."""

    id: str  # 32 hex digits
    flags: str  # 2 hex digits
    state: str  # tracestate; "" if there is none


class OtlpSpan(Span):
    """A span that is recorded. Ids are hex digits, as carriers have them."""

    context = ANY_SAMPLED  # what the SDK's processors look at, to see that it is to be sent

    def __init__(
        self,
        tracer: OtlpTracer,
        name: str,
        kind: Kind,
        trace: Trace,
        parent_id: str,
        is_parent_remote: bool,
        began_s: float,
        attributes: Mapping[str, Attribute],
    ) -> None:
        """parent_id: "": it has none."""
        self._tracer = tracer
        self.name, self.kind = name, kind
        self.trace = trace
        self.parent_id, self.is_parent_remote = parent_id, is_parent_remote
        self.span_id = tracer.draw_id()
        self.began_s, self.ended_s = began_s, 0.0
        self.attributes = attributes
        self.error = ""
        self._carrier: Carrier | None = None  # once it was asked for: a stage gives it with every chunk

    @property
    def trace_id(self) -> str:
        return self.trace.id

    @property
    def carrier(self) -> Carrier:
        if self._carrier is None:
            id_, flags, state = self.trace
            self._carrier = {"traceparent": f"00-{id_}-{self.span_id}-{flags}"}
            if state:
                self._carrier["tracestate"] = state
        return self._carrier

    def child(
        self,
        name: str,
        kind: Kind = "internal",
        began_s: float | None = None,
        attributes: Mapping[str, Attribute] = NOTHING,
    ) -> Span:
        began_s = time.monotonic() if began_s is None else began_s
        return OtlpSpan(self._tracer, name, kind, self.trace, self.span_id, False, began_s, attributes)

    def end(
        self, at_s: float | None = None, error: str = "", attributes: Mapping[str, Attribute] = NOTHING
    ) -> None:
        if self.ended_s:
            return
        self.ended_s = time.monotonic() if at_s is None else at_s
        self.error = error
        if error:
            self.attributes = {**self.attributes, **attributes, "error.type": error}
        elif attributes:
            self.attributes = {**self.attributes, **attributes}
        self._tracer.record(self)


class OtlpTracer(Tracer):
    """Hands the spans of one process to a processor of the SDK."""

    def __init__(self, processor: SpanProcessor, resource: Resource, sampler: Sampler | None = None) -> None:
        """processor: its exporter takes OtlpSpan, see Exporter and Readable.

        sampler: None: as the environment says, e.g. OTEL_TRACES_SAMPLER; all, if it says nothing.
        """
        provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        self._sampler, self._ids = provider.sampler, provider.id_generator
        self._processor = processor
        on_end: Any = processor.on_end
        self.record: Callable[[OtlpSpan], None] = on_end
        self._closed = False
        self._complained = False

    def draw_id(self) -> str:
        return f"{self._ids.generate_span_id():016x}"

    def begin(
        self, name: str, headers: Carrier, began_s: float, attributes: Mapping[str, Attribute] = NOTHING
    ) -> Span:
        parent = self._caller(headers)
        trace_id = self._ids.generate_trace_id() if parent is None else parent.trace_id
        decision = self._sampler.should_sample(
            None if parent is None else trace.set_span_in_context(trace.NonRecordingSpan(parent)),
            trace_id,
            name,
            SpanKind.SERVER,
            attributes,
        )
        if decision.decision is not Decision.RECORD_AND_SAMPLE:
            return NO_SPAN
        flags = SAMPLED if parent is None else SAMPLED | parent.trace_flags & RANDOM
        state = decision.trace_state.to_header() if decision.trace_state else ""
        whole = Trace(f"{trace_id:032x}", f"{flags:02x}", state)
        parent_id = "" if parent is None else f"{parent.span_id:016x}"
        return OtlpSpan(self, name, "server", whole, parent_id, True, began_s, attributes)

    def child(
        self,
        name: str,
        carrier: Carrier,
        kind: Kind = "internal",
        began_s: float | None = None,
        attributes: Mapping[str, Attribute] = NOTHING,
    ) -> Span:
        if not carrier or self._closed:
            return NO_SPAN
        _, trace_id, parent_id, flags = carrier["traceparent"].split("-")  # our own, so it is well formed
        whole = Trace(trace_id, flags, carrier.get("tracestate", ""))
        began_s = time.monotonic() if began_s is None else began_s
        return OtlpSpan(self, name, kind, whole, parent_id, True, began_s, attributes)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        last = threading.Thread(target=self._processor.shutdown, daemon=True, name="last spans")
        last.start()
        last.join(CLOSE_S)

    def _caller(self, headers: Carrier) -> SpanContext | None:
        """The caller's span; None where it names none, or none that is valid: W3C begins a new trace then."""
        if not headers.get("traceparent"):
            return None
        known = dict(headers)
        if len(known.get("tracestate", "")) > MAX_TRACESTATE_CHARACTERS:
            del known["tracestate"]
        context = trace.get_current_span(_propagator.extract(known)).get_span_context()
        if context.is_valid:
            return context
        if not self._complained:
            self._complained = True
            log.warning("a traceparent is not valid and begins no child; more of them are not told")
        return None


class Exporter(OTLPSpanExporter):
    """The SDK's exporter, with messages that are made of OtlpSpan."""

    def __init__(self, endpoint: str | None, resource: Resource) -> None:
        """endpoint: None: the environment says it. resource: of this process, and so of every span."""
        super().__init__(endpoint=endpoint)
        self.message_of = MessageOf(resource)

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        offset_ns = wall_offset_ns()
        post = getattr(getattr(self, "_client", None), "export", None)
        if post is None:  # other releases of the SDK keep it elsewhere: their own message does as well
            return super().export(self.message_of.readable(spans, offset_ns))
        went_well = post(self.message_of(spans, offset_ns)).success
        return SpanExportResult.SUCCESS if went_well else SpanExportResult.FAILURE


class Readable(SpanExporter):
    """Gives OtlpSpan to any exporter of the SDK, as the spans that it knows."""

    def __init__(self, exporter: SpanExporter, resource: Resource) -> None:
        self._exporter = exporter
        self._message_of = MessageOf(resource)

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        return self._exporter.export(self._message_of.readable(spans, wall_offset_ns()))

    def shutdown(self) -> None:
        self._exporter.shutdown()


class Sender(SpanExporter):
    """Sends batches by another exporter; says when that has failed, and when it goes well again."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._fails = False

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            log.debug("export: %s", error)
            result = SpanExportResult.FAILURE
        fails = result is not SpanExportResult.SUCCESS
        if fails and not self._fails:
            log.warning("the collector at %s takes no spans; they are dropped until it does", self._endpoint)
        elif self._fails and not fails:
            log.warning("the collector at %s takes spans again", self._endpoint)
        self._fails = fails
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def open_otlp(tracing: Tracing, service: str, facts: Mapping[str, str]) -> OtlpTracer:
    """A tracer that sends to the collector of the deploy file, else of the environment."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it says the same at every try
    resource = process_resource(service, facts)
    exporter = Exporter(_traces_url(tracing.otlp_endpoint), resource)
    sender = Sender(exporter, tracing.otlp_endpoint or "OTEL_EXPORTER_OTLP_ENDPOINT")
    ratio = tracing.sample_ratio
    sampler = None if ratio is None else ParentBased(TraceIdRatioBased(ratio))
    # Its own default is half of that. Every process sends, and sending takes the time of fifty spans.
    delay_ms = None if os.environ.get(SCHEDULE) else SEND_EVERY_S * 1000
    processor = BatchSpanProcessor(sender, schedule_delay_millis=delay_ms)
    return OtlpTracer(processor, resource, sampler)


def process_resource(service: str, facts: Mapping[str, str]) -> Resource:
    """What is said of this process with every span."""
    attributes: dict[str, Any] = {
        "service.namespace": "tritone",
        "service.name": service,
        "service.version": tritone.__version__,
        "service.instance.id": f"{os.uname().nodename}/{os.getpid()}",
        "process.pid": os.getpid(),
    }
    return Resource.create({**attributes, **facts})


def _traces_url(endpoint: str) -> str | None:
    """The address for spans below a collector's; None: the environment says it."""
    if not endpoint:
        return None
    base = endpoint.rstrip("/")
    return base if base.endswith(TRACES_PATH) else base + TRACES_PATH
