"""The health of everything that `tritone serve` runs, and the small HTTP server that tells it.

    watches ──fault of a pipeline──► Board ◄──GET /live, /ready, /ready/<pipeline>── probes
    supervisor ──what it does────────┘            200 or 503, JSON, a sentence for all that is wrong

The server's own readiness stays good when a door or an engine is dead; this one asks them.
"""

from __future__ import annotations

import json
import math
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PAGES = ("/live", "/ready")
SERVING, ENDING = "serving", "shutting down"  # what a supervisor does; its other states are told as they are
LATE_S = 10.0  # a pipeline that nobody could look at for so long is not called ready
STUCK_S = 60.0  # the same of the supervisor itself, for /live
MAX_CONNECTIONS = 32  # at once; further ones are closed
READ_TIMEOUT_S = 5.0  # of one request
NUM_QUEUED = 32

Report = tuple[int, dict[str, Any]]  # HTTP status and body


class Board:
    """What is known of every pipeline and stage. Thread-safe."""

    def __init__(self, stages: Mapping[str, Sequence[str]]) -> None:
        """stages: their names, by pipeline."""
        self._stages = dict(stages)
        self._lock = threading.Lock()
        self._doing = "loading"
        self._beat_s = time.monotonic()
        self._due_s: float | None = None  # when a server that is gone is expected back, monotonic
        self._faults: dict[str, tuple[float, str | None]] = {}  # by pipeline: when it was seen, None: well

    def beat(self, doing: str | None = None) -> None:
        """The supervisor is at work. doing: one or some words, when that is new, e.g. "restarting"."""
        with self._lock:
            self._beat_s = time.monotonic()
            if doing is not None and doing != self._doing:
                self._doing = doing
                self._faults.clear()  # of a server that is not the one to come

    def expect(self, in_s: float) -> None:
        """A server that is gone serves again in about so many seconds."""
        with self._lock:
            self._due_s = time.monotonic() + in_s

    def note(self, pipeline: str, fault: str | None) -> None:
        """fault: one sentence, None when the pipeline serves."""
        with self._lock:
            self._faults[pipeline] = (time.monotonic(), fault)

    def live(self) -> Report:
        """Whether the supervisor itself works; a server that is being restarted needs no other help."""
        with self._lock:
            age_s, doing = time.monotonic() - self._beat_s, self._doing
        live = doing != SERVING or age_s < STUCK_S
        fault = "" if live else f"the supervisor has done nothing for {age_s:.0f} s; restart it"
        return (200 if live else 503), {"live": live, "state": doing, "fault": fault}

    def ready(self, pipeline: str | None = None) -> Report:
        """Whether every pipeline serves, or the one that is named; when a server that is gone is due."""
        if pipeline is not None and pipeline not in self._stages:
            known = ", ".join(self._stages)
            return 404, {"ready": False, "fault": f"there is no pipeline '{pipeline}'; served are {known}"}
        names = list(self._stages) if pipeline is None else [pipeline]
        with self._lock:
            doing, due_s, faults = self._doing, self._due_s, {name: self._fault(name) for name in names}
        pipelines = {
            name: {
                "ready": fault is None,
                "fault": fault or "",
                "stages": {
                    stage: {"ready": told is None, "fault": told or ""}
                    for stage, told in stage_faults(fault, self._stages[name]).items()
                },
            }
            for name, fault in faults.items()
        }
        ready = all(fault is None for fault in faults.values())
        body: dict[str, Any] = {"ready": ready, "state": doing, "pipelines": pipelines}
        if due_s is not None and doing not in (SERVING, ENDING):
            body["retry_after_s"] = max(1, math.ceil(due_s - time.monotonic()))
        return (200 if ready else 503), body

    def _fault(self, name: str) -> str | None:
        """What keeps a pipeline from being called ready."""
        seen = self._faults.get(name)
        if self._doing != SERVING:
            return f"the server is {self._doing}"
        if seen is None:
            return "nobody has looked yet"
        age_s, fault = time.monotonic() - seen[0], seen[1]
        if fault is None and age_s > LATE_S:
            return f"nobody has looked for {age_s:.0f} s"
        return fault


def stage_faults(fault: str | None, stages: Sequence[str]) -> dict[str, str | None]:
    """By stage: what the fault of a pipeline says about it; None where it serves.

    A fault that names no stage, or was cut short, leaves the others unknown.
    """
    if fault is None:
        return dict.fromkeys(stages)
    parts = re.split(r"(?:, |^|TRITONE_UNAVAILABLE: )stage (\S+) is not ready: ", fault)
    told = dict(zip(parts[1::2], parts[2::2], strict=True))
    whole = bool(told) and "…" not in fault
    unknown = None if whole else f"not known, since: {fault}"
    return {stage: told.get(stage, unknown) for stage in stages}


class HealthServer:
    """Answers on a thread of its own until it is closed."""

    def __init__(self, listening: socket.socket, board: Board) -> None:
        """listening: a bound socket; it is taken over."""
        handler = type("Handler", (_Handler,), {"board": board})
        self._server = _Server(listening, handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True, name="health"
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, listening: socket.socket, handler: type[BaseHTTPRequestHandler]) -> None:
        host, port = listening.getsockname()[:2]
        super().__init__((host, port), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        listening.listen(NUM_QUEUED)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A probe that went away is nothing to report."""


class _Handler(BaseHTTPRequestHandler):
    """One request a connection (HTTP/1.0); a body is not read."""

    board: Board
    timeout = READ_TIMEOUT_S
    server_version = "tritone"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].rstrip("/")
        page, _, pipeline = path[1:].partition("/")
        if page == "live" and not pipeline:
            self._answer(*self.board.live())
        elif page == "ready":
            self._answer(*self.board.ready(pipeline or None))
        else:
            self._answer(404, {"fault": f"there is no such page; ask {' or '.join(PAGES)}"})

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        """Probes come every few seconds; they are not logged."""

    def _answer(self, status: int, body: Mapping[str, Any]) -> None:
        data = json.dumps(body).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        if "retry_after_s" in body:
            self.send_header("Retry-After", str(body["retry_after_s"]))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
