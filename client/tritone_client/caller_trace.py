"""The trace that a caller's request belongs to: what it names, or the span that is active where it asks.

W3C Trace Context. OpenTelemetry is not needed: only a program that has imported it can have an active span.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from tritone_client.errors import InvalidRequest

TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def trace_parameters(traceparent: str | None) -> dict[str, str]:
    """The request parameters for a trace; none if there is none.

    Raises:
        InvalidRequest: `traceparent` is not one.
    """
    if traceparent is None:
        return _active_span()
    if not TRACEPARENT.fullmatch(traceparent):
        raise InvalidRequest(
            f"traceparent is {traceparent[:80]!r}; give 00-<32 hex digits>-<16 hex digits>-01"
        )
    return {"traceparent": traceparent}


def _active_span() -> dict[str, str]:
    """That of the caller's task or thread, if it has one."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return {}
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    flags = int(context.trace_flags)
    found = {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"}
    if context.trace_state:
        found["tracestate"] = context.trace_state.to_header()
    return found
