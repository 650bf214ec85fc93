"""Batches of spans as OTLP messages, as the SDK makes them but with a sixth of its work.

    spans ─► ExportTraceServiceRequest ─► resource_spans[0] ─► scope_spans[0] ─► a Span each

Resource and scope are the same for all spans of a process, so the SDK writes them once, and then only what
differs between spans is filled in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import SpanFlags
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, StatusCode

OWN_PARENT = int(SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK)
FOREIGN_PARENT = OWN_PARENT | int(SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK)
NOBODY = SpanContext(1, 1, False)

_KINDS = {kind: SpanMessage.SpanKind.Value(f"SPAN_KIND_{kind.name}") for kind in SpanKind}
_STATUS = {code: code.value for code in StatusCode}
_FIELDS = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}


class MessageOf:
    """Called with spans of one resource and scope that have ended; gives the message, serialized."""

    def __init__(self, resource: Resource, scope: InstrumentationScope) -> None:
        frame = encode_spans([ReadableSpan("", NOBODY, resource=resource, instrumentation_scope=scope)])
        del frame.resource_spans[0].scope_spans[0].spans[:]
        self._frame: ExportTraceServiceRequest = frame

    def __call__(self, spans: Sequence[ReadableSpan]) -> bytes:
        message = ExportTraceServiceRequest()
        message.CopyFrom(self._frame)
        add = message.resource_spans[0].scope_spans[0].spans.add
        for span in spans:
            _fill(add(), span)
        return message.SerializeToString()


def _fill(message: Any, span: ReadableSpan) -> None:
    trace_id, span_id, _, _, state, _ = span.context
    parent = span.parent
    message.trace_id = trace_id.to_bytes(16, "big")
    message.span_id = span_id.to_bytes(8, "big")
    message.name = span.name
    message.kind = _KINDS[span.kind]
    message.start_time_unix_nano = span.start_time
    message.end_time_unix_nano = span.end_time
    message.flags = OWN_PARENT
    if parent is not None:
        _, above, is_remote, *_ = parent
        message.parent_span_id = above.to_bytes(8, "big")
        if is_remote:
            message.flags = FOREIGN_PARENT
    if state:
        message.trace_state = state.to_header()
    status = span.status
    message.status.code = _STATUS[status.status_code]
    if status.description:
        message.status.message = status.description
    attribute = message.attributes.add
    for key, value in (span.attributes or {}).items():
        pair = attribute()
        pair.key = key
        _put(pair.value, value)


def _put(message: Any, value: Any) -> None:
    """value: as tracing.Attribute."""
    field = _FIELDS.get(type(value)) or _field(value)
    if field is not None:
        setattr(message, field, value)
    elif isinstance(value, Sequence):
        message.array_value.SetInParent()
        for item in value:
            _put(message.array_value.values.add(), item)
    else:  # a number of numpy's
        message.double_value = float(value)


def _field(value: Any) -> str | None:
    """Of a value whose class is derived from a known one."""
    return next((field for kind, field in _FIELDS.items() if isinstance(value, kind)), None)
