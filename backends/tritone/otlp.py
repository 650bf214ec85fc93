"""Spans as OpenTelemetry's SDK has them: sampled, sent in batches over HTTP, and never waited for.

    begin, child ─► OtlpSpan ─end─► ReadableSpan ─► BatchSpanProcessor ─thread─► Sender ─► collector

All times of a span are known when it ends, so it becomes the SDK's immutable record then, and the SDK's live
span, whose cost is seven times that, is not needed. With otlp_message.py the only module that imports
OpenTelemetry.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import tritone
from tritone.deploy import Tracing
from tritone.otlp_message import MessageOf
from tritone.tracing import NO_SPAN, NOTHING, Attribute, Carrier, Kind, Span, Tracer

log = logging.getLogger("tritone.tracing")

TRACES_PATH = "/v1/traces"
CLOSE_S = 1.0
SCHEDULE = "OTEL_BSP_SCHEDULE_DELAY"
SEND_EVERY_S = 10.0  # or as soon as there are 512 spans, unless the environment gives a schedule
MAX_TRACESTATE_CHARACTERS = 512  # what W3C asks everybody to pass on; a longer one is dropped
SCOPE = InstrumentationScope("tritone", tritone.__version__)
WELL = Status()
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
RANDOM = 2  # flag of W3C Trace Context, level 2: the trace id was drawn at random; passed on as it came

_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
_propagator = TraceContextTextMapPropagator()


class OtlpSpan(Span):
    """A span that is recorded."""

    def __init__(
        self,
        tracer: OtlpTracer,
        name: str,
        kind: Kind,
        context: SpanContext,
        parent: SpanContext | None,
        began_s: float,
        attributes: Mapping[str, Attribute],
    ) -> None:
        self._tracer = tracer
        self._name, self._kind = name, kind
        self._context, self._parent = context, parent
        self._began_s = began_s
        self._attributes = attributes
        self._ended = False
        self._carrier: Carrier | None = None  # once it was asked for: a stage gives it with every chunk

    @property
    def trace_id(self) -> str:
        return f"{self._context.trace_id:032x}"

    @property
    def carrier(self) -> Carrier:
        if self._carrier is None:
            trace_id, span_id, _, flags, state, _ = self._context
            self._carrier = {"traceparent": f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}"}
            if state:
                self._carrier["tracestate"] = state.to_header()
        return self._carrier

    def child(
        self,
        name: str,
        kind: Kind = "internal",
        began_s: float | None = None,
        attributes: Mapping[str, Attribute] = NOTHING,
    ) -> Span:
        return self._tracer.below(self._context, name, kind, began_s, attributes)

    def end(
        self, at_s: float | None = None, error: str = "", attributes: Mapping[str, Attribute] = NOTHING
    ) -> None:
        if self._ended:
            return
        self._ended = True
        values = {**self._attributes, **attributes}
        if error:
            values["error.type"] = error
        # Both by the offset of now: clocks that are set meanwhile do not stretch a span.
        wall_ns = time.time_ns() - time.monotonic_ns()
        ended_s = time.monotonic() if at_s is None else at_s
        self._tracer.record(
            ReadableSpan(
                self._name,
                self._context,
                self._parent,
                self._tracer.resource,
                values,
                kind=_KINDS[self._kind],
                status=Status(StatusCode.ERROR, error) if error else WELL,
                start_time=wall_ns + int(self._began_s * 1e9),
                end_time=wall_ns + int(ended_s * 1e9),
                instrumentation_scope=SCOPE,
            )
        )


class OtlpTracer(Tracer):
    """Hands the spans of one process to a processor of the SDK."""

    def __init__(self, processor: SpanProcessor, resource: Resource, sampler: Sampler | None = None) -> None:
        """sampler: None: as the environment says, e.g. OTEL_TRACES_SAMPLER; all, if it says nothing."""
        provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        self.resource = resource
        self._sampler, self._ids = provider.sampler, provider.id_generator
        self._processor = processor
        self._closed = False
        self._complained = False

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
        flags = SAMPLED if parent is None else TraceFlags(TraceFlags.SAMPLED | parent.trace_flags & RANDOM)
        context = SpanContext(trace_id, self._ids.generate_span_id(), False, flags, decision.trace_state)
        return OtlpSpan(self, name, "server", context, parent, began_s, attributes)

    def child(
        self,
        name: str,
        carrier: Carrier,
        kind: Kind = "internal",
        began_s: float | None = None,
        attributes: Mapping[str, Attribute] = NOTHING,
    ) -> Span:
        if not carrier:
            return NO_SPAN
        _, trace_id, span_id, bits = carrier["traceparent"].split("-")  # our own, so it is well formed
        state = TraceState.from_header([carrier["tracestate"]]) if "tracestate" in carrier else None
        parent = SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(bits, 16)), state)
        return self.below(parent, name, kind, began_s, attributes)

    def below(
        self,
        parent: SpanContext,
        name: str,
        kind: Kind,
        began_s: float | None,
        attributes: Mapping[str, Attribute],
    ) -> Span:
        """A span of this process below any other."""
        if self._closed:
            return NO_SPAN
        trace_id, _, _, flags, state, _ = parent
        context = SpanContext(trace_id, self._ids.generate_span_id(), False, flags, state)
        began_s = time.monotonic() if began_s is None else began_s
        return OtlpSpan(self, name, kind, context, parent, began_s, attributes)

    def record(self, span: ReadableSpan) -> None:
        """It has ended."""
        self._processor.on_end(span)

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
    """The SDK's exporter, with messages made in a sixth of the time."""

    def __init__(self, endpoint: str | None, resource: Resource) -> None:
        """endpoint: None: the environment says it. resource: of this process, and so of every span."""
        super().__init__(endpoint=endpoint)
        self.message_of = MessageOf(resource, SCOPE)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        post = getattr(getattr(self, "_client", None), "export", None)
        if post is None:  # other releases of the SDK keep it elsewhere: their own message does as well
            return super().export(spans)
        went_well = post(self.message_of(spans)).success
        return SpanExportResult.SUCCESS if went_well else SpanExportResult.FAILURE


class Sender(SpanExporter):
    """Sends batches by another exporter; says when that has failed, and when it goes well again."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._fails = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
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
