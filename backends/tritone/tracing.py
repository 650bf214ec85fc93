"""Spans of requests, for an OpenTelemetry collector.

    traceparent ─► begin ─► request ─ child ─► queue, stage ── carrier, in a message ──► child ─► session
    of a client               └──────────────────┴─────────────► otlp.py ─► collector ◄─────────────────┘

Every process has a tracer of its own. Where tracing is off, nothing of OpenTelemetry is imported. A carrier
is what W3C Trace Context puts into headers; it is empty where no span is recorded, and then what is below
costs nothing. Times are by time.monotonic(), which all processes of a machine share.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Literal

from tritone.deploy import Tracing

log = logging.getLogger("tritone.tracing")

HEADERS = ("traceparent", "tracestate")
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
SPOKEN = "http/protobuf"

Kind = Literal["server", "client", "internal"]
Attribute = str | bool | int | float | list[str]
Carrier = dict[str, str]

NOTHING: Mapping[str, Attribute] = {}
NO_CARRIER: Carrier = {}


class Span:
    """Something that one process does for one request; this one is not recorded."""

    @property
    def trace_id(self) -> str:
        """32 hex digits, or ""."""
        return ""

    @property
    def carrier(self) -> Carrier:
        """For its children in other processes."""
        return NO_CARRIER

    def child(
        self,
        name: str,
        kind: Kind = "internal",
        began_s: float | None = None,
        attributes: Mapping[str, Attribute] = NOTHING,
    ) -> Span:
        """A span below this one. began_s: None: now."""
        return NO_SPAN

    def end(
        self, at_s: float | None = None, error: str = "", attributes: Mapping[str, Attribute] = NOTHING
    ) -> None:
        """Once; later calls are ignored.

        at_s: None: now. error: TritoneError.code, "" if it went well.
        """


NO_SPAN = Span()


class Tracer:
    """Makes the spans of one process; this one records none."""

    def begin(
        self, name: str, headers: Carrier, began_s: float, attributes: Mapping[str, Attribute] = NOTHING
    ) -> Span:
        """The first span of a request here.

        headers: of the caller, as they came. Its trace is gone on with, or not recorded, as it says; one that
        says nothing valid begins a trace, if sampling wants it.
        """
        return NO_SPAN

    def child(
        self,
        name: str,
        carrier: Carrier,
        kind: Kind = "internal",
        began_s: float | None = None,
        attributes: Mapping[str, Attribute] = NOTHING,
    ) -> Span:
        """A span below one of another process, which gave `carrier`. began_s: None: now."""
        return NO_SPAN

    def close(self) -> None:
        """Send what has ended, within a second; nothing is recorded afterwards. May be called again."""


def is_on(tracing: Tracing, env: Mapping[str, str] = os.environ) -> bool:
    """Whether the deploy file, or else the standard variables of OpenTelemetry, name a collector."""
    if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if tracing.otlp_endpoint:
        return True
    if env.get("OTEL_TRACES_EXPORTER", "otlp").strip() != "otlp":
        return False
    if not any(env.get(name) for name in ENDPOINTS):
        return False
    protocol = next(filter(None, map(env.get, PROTOCOLS)), SPOKEN)
    if protocol != SPOKEN:
        log.warning("no spans are sent: the OTLP protocol is %s; %s is spoken here", protocol, SPOKEN)
    return protocol == SPOKEN


def open_tracer(tracing: Tracing, service: str, facts: Mapping[str, str]) -> Tracer:
    """The tracer of this process. service: its name. facts: e.g. its stage. Both go with every span."""
    if not is_on(tracing):
        return Tracer()
    try:
        from tritone.otlp import open_otlp
    except ImportError as error:
        log.warning("no spans are sent: %s; pip install 'tritone[tracing]' for this interpreter", error)
        return Tracer()
    return open_otlp(tracing, service, facts)
