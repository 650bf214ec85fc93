"""What a collector is told of spans that have ended: OTLP messages, or the SDK's own kind of span.

    OtlpSpan ─┬─► ExportTraceServiceRequest: resource_spans[0].scope_spans[0].spans, one each
              └─► ReadableSpan, for exporters that make their messages themselves

Resource and scope are the same for all spans of a process, so the SDK writes them once, and then only what
differs between spans is filled in. Attributes repeat, so that most of them were made before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import SpanFlags
from opentelemetry.proto.trace.v1.trace_pb2 import Status as StatusMessage
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

import tritone

if TYPE_CHECKING:
    from tritone.otlp import OtlpSpan

SCOPE = InstrumentationScope("tritone", tritone.__version__)
KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
OWN_PARENT = int(SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK)
FOREIGN_PARENT = OWN_PARENT | int(SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK)
FAILED, UNSET = StatusMessage.STATUS_CODE_ERROR, StatusMessage.STATUS_CODE_UNSET

_MESSAGE_KINDS = {name: SpanMessage.SpanKind.Value(f"SPAN_KIND_{kind.name}") for name, kind in KINDS.items()}
_FIELDS = {
    str: "string_value",
    bool: "bool_value",
    int: "int_value",
    float: "double_value",
}  # a bool is an int


def wall_offset_ns() -> int:
    """To add to time.monotonic(). Of now, for all times of a batch: clocks that are set stretch no span."""
    return time.time_ns() - time.monotonic_ns()


class MessageOf:
    """Called with spans of one process; gives their message, serialized."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        nobody = SpanContext(1, 1, False)
        frame = encode_spans([ReadableSpan("", nobody, resource=resource, instrumentation_scope=SCOPE)])
        del frame.resource_spans[0].scope_spans[0].spans[:]
        self._frame: ExportTraceServiceRequest = frame

    def __call__(self, spans: Sequence[OtlpSpan], offset_ns: int) -> bytes:
        """offset_ns: see wall_offset_ns."""
        message = ExportTraceServiceRequest()
        message.CopyFrom(self._frame)
        add = message.resource_spans[0].scope_spans[0].spans.add
        for span in spans:
            _fill(add(), span, offset_ns)
        return message.SerializeToString()

    def readable(self, spans: Sequence[OtlpSpan], offset_ns: int) -> list[ReadableSpan]:
        """The same spans for the SDK."""
        return [_readable(span, self._resource, offset_ns) for span in spans]


def _fill(message: Any, span: OtlpSpan, offset_ns: int) -> None:
    id_, _, state = span.trace
    message.trace_id = bytes.fromhex(id_)
    message.span_id = bytes.fromhex(span.span_id)
    message.name = span.name
    message.kind = _MESSAGE_KINDS[span.kind]
    message.start_time_unix_nano = offset_ns + int(span.began_s * 1e9)
    message.end_time_unix_nano = offset_ns + int(span.ended_s * 1e9)
    message.flags = OWN_PARENT
    if span.parent_id:
        message.parent_span_id = bytes.fromhex(span.parent_id)
        if span.is_parent_remote:
            message.flags = FOREIGN_PARENT
    if state:
        message.trace_state = state
    message.status.code = FAILED if span.error else UNSET
    if span.error:
        message.status.message = span.error
    if span.attributes:
        message.attributes.extend(
            [
                _pair(key, tuple(value) if isinstance(value, list) else value)
                for key, value in span.attributes.items()
            ]
        )


@lru_cache(maxsize=1024, typed=True)
def _pair(key: str, value: Any) -> KeyValue:
    """value: as tracing.Attribute, a list as a tuple."""
    return KeyValue(key=key, value=_any_value(value))


def _any_value(value: Any) -> AnyValue:
    if isinstance(value, tuple):
        return AnyValue(array_value=ArrayValue(values=[_any_value(item) for item in value]))
    field = next((field for kind, field in _FIELDS.items() if isinstance(value, kind)), None)
    if field is None:  # a number of numpy's
        return AnyValue(double_value=float(value))
    return AnyValue(**{field: value})


def _readable(span: OtlpSpan, resource: Resource, offset_ns: int) -> ReadableSpan:
    id_, bits, state = span.trace
    trace_id, flags = int(id_, 16), TraceFlags(int(bits, 16))
    trace_state = TraceState.from_header([state]) if state else None
    context = SpanContext(trace_id, int(span.span_id, 16), False, flags, trace_state)
    parent = None
    if span.parent_id:
        parent = SpanContext(trace_id, int(span.parent_id, 16), span.is_parent_remote, flags, trace_state)
    return ReadableSpan(
        span.name,
        context,
        parent,
        resource,
        span.attributes,
        kind=KINDS[span.kind],
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
        start_time=offset_ns + int(span.began_s * 1e9),
        end_time=offset_ns + int(span.ended_s * 1e9),
        instrumentation_scope=SCOPE,
    )
