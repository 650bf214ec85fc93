"""A small collector of spans: takes OTLP over HTTP, as a real one does, and keeps what comes in memory.

python tests/perf/trace_collector.py     prints its URL, and keeps nothing, until its input ends
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage

SPAN_KINDS = {SpanMessage.SPAN_KIND_SERVER: "server", SpanMessage.SPAN_KIND_CLIENT: "client"}


@dataclass(frozen=True)
class CollectedSpan:
    name: str
    trace_id: str
    span_id: str
    parent_id: str  # "" for the root of a trace
    kind: str
    service: str
    began_s: float  # Unix time
    ended_s: float
    error: str  # error.type; "" without an error status
    attributes: dict[str, Any] = field(hash=False)
    resource: dict[str, Any] = field(hash=False)


class Collector:
    """Listens on a free port of 127.0.0.1 until it is closed. status: what it answers to every export."""

    def __init__(self, keep: bool = True) -> None:
        self.status = 200
        self._keep = keep
        self.num_exports = 0
        self._spans: list[CollectedSpan] = []
        self._changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # the connection stays open

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector._take(self.path, body)
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def spans(self, trace_id: str | None = None) -> list[CollectedSpan]:
        """What came so far, of one trace or of all."""
        with self._changed:
            return [span for span in self._spans if trace_id in (None, span.trace_id)]

    def until(
        self,
        condition: Callable[[list[CollectedSpan]], bool],
        trace_id: str | None = None,
        timeout_s: float = 60.0,
    ) -> list[CollectedSpan]:
        """The spans, as soon as they meet the condition."""
        deadline = time.monotonic() + timeout_s
        while not condition(spans := self.spans(trace_id)):
            with self._changed:
                left_s = deadline - time.monotonic()
                assert left_s > 0, f"only these came: {sorted(span.name for span in spans)}"
                self._changed.wait(min(left_s, 0.5))
        return spans

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces", path
        if not self._keep:
            return
        message = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            self.num_exports += 1
            if self.status == 200:
                self._spans += spans_of(message)
            self._changed.notify_all()


def spans_of(message: ExportTraceServiceRequest) -> list[CollectedSpan]:
    found = []
    for group in message.resource_spans:
        resource = _values(group.resource.attributes)
        for scope in group.scope_spans:
            for span in scope.spans:
                attributes = _values(span.attributes)
                failed = span.status.code == span.status.STATUS_CODE_ERROR
                found.append(
                    CollectedSpan(
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        SPAN_KINDS.get(span.kind, "internal"),
                        resource["service.name"],
                        span.start_time_unix_nano / 1e9,
                        span.end_time_unix_nano / 1e9,
                        attributes.get("error.type", "?") if failed else "",
                        attributes,
                        resource,
                    )
                )
    return found


def _values(attributes: Any) -> dict[str, Any]:
    return {item.key: _value(item.value) for item in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


if __name__ == "__main__":
    print(Collector(keep=False).url, flush=True)
    sys.stdin.read()
