"""What Tritone shows on the server's own `/metrics`: the families, and what hands their values to Triton.

    orchestrator, doors ─count, observe, set─► Publisher: adds up ─ its thread, once a second ─► Triton

A call to Triton crosses to the server's process and takes some 40 µs; two at a time on one series end the
server, and so does a call on a series that another process has ended. So one thread of a process makes all
of them, and every series belongs to one process: that is what the labels `model` and `instance` are for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

PUBLISH_EVERY_S = 1.0
CLOSE_TIMEOUT_S = 5.0

LATENCY_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0)
TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)
RTF_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 5.0)

REQUEST = ("pipeline", "model")  # model: the Triton model that was called, the pipeline's own or its twin
ANSWER = (*REQUEST, "modality", "streamed")
STAGE = ("pipeline", "stage", "instance")  # instance: device and number, e.g. cpu/0


@dataclass(frozen=True, eq=False)
class Family:
    """One metric family, declared once; docker/METRICS.md lists them all."""

    name: str  # with its unit
    kind: str  # COUNTER, GAUGE or HISTOGRAM
    labels: tuple[str, ...]
    doc: str
    buckets: tuple[float, ...] = ()  # upper bounds, of a histogram


TTFT = Family(
    "tritone_ttft_seconds",
    "HISTOGRAM",
    ANSWER,
    "From the arrival of a request to its first text (TTFT).",
    LATENCY_BUCKETS_S,
)
TTFP = Family(
    "tritone_ttfp_seconds",
    "HISTOGRAM",
    ANSWER,
    "From the arrival of a request to its first packet of sound (TTFP).",
    LATENCY_BUCKETS_S,
)
TPOT = Family(
    "tritone_tpot_seconds",
    "HISTOGRAM",
    ANSWER,
    "Time of one text token after the first (TPOT), of each answer with two tokens or more.",
    TOKEN_BUCKETS_S,
)
E2EL = Family(
    "tritone_e2el_seconds",
    "HISTOGRAM",
    ANSWER,
    "From the arrival of a request to the end of the modality (E2EL).",
    LATENCY_BUCKETS_S,
)
RTF = Family(
    "tritone_rtf_ratio",
    "HISTOGRAM",
    ANSWER,
    "Time from the arrival of a request to the end of its sound, by the length of the sound (RTF).",
    RTF_BUCKETS,
)
GAP = Family(
    "tritone_chunk_gap_seconds",
    "HISTOGRAM",
    ANSWER,
    "Time between two packets of a streamed sound, one after the other.",
    LATENCY_BUCKETS_S,
)
REQUESTS = Family(
    "tritone_requests_total",
    "COUNTER",
    (*REQUEST, "streamed", "outcome", "code"),
    "Requests that have ended, by outcome (ok, cancelled, refused, failed, deadline) and code.",
)
RESUMES = Family(
    "tritone_resumes_total", "COUNTER", REQUEST, "Times that a request began again since an engine had died."
)
TEXT_TOKENS = Family(
    "tritone_text_tokens_total",
    "COUNTER",
    (*REQUEST, "direction"),
    "Text tokens that were read (in) and written (out).",
)
CODEC_FRAMES = Family("tritone_codec_frames_total", "COUNTER", REQUEST, "Codec frames that were made.")
AUDIO_SECONDS = Family(
    "tritone_audio_seconds_total", "COUNTER", REQUEST, "Length of the sound that clients were sent."
)
IMAGES = Family("tritone_images_total", "COUNTER", (*REQUEST, "direction"), "Images that requests brought.")
IN_FLIGHT = Family("tritone_requests_in_flight", "GAUGE", REQUEST, "Requests that run.")
IN_FLIGHT_LIMIT = Family(
    "tritone_requests_in_flight_limit", "GAUGE", REQUEST, "Requests that may run at a time (max_in_flight)."
)
QUEUED = Family("tritone_requests_queued", "GAUGE", REQUEST, "Requests that wait for their turn.")

BLOCKS = Family(
    "tritone_pipeline_blocks", "GAUGE", REQUEST, "What is alive in Python's allocator in an orchestrator."
)

ENGINE_UP = Family(
    "tritone_engine_up", "GAUGE", STAGE, "1 while the engine of a stage serves, 0 while it is restarted."
)
ENGINE_RESTARTS = Family(
    "tritone_engine_restarts_total", "COUNTER", STAGE, "Times that the engine of a stage came back."
)
SESSIONS = Family("tritone_stage_sessions", "GAUGE", STAGE, "Requests that a stage holds.")
QUEUE = Family("tritone_stage_queue", "GAUGE", STAGE, "Requests of a stage that wait for a slot.")
SLOTS = Family("tritone_stage_slots", "GAUGE", STAGE, "Slots of the KV cache of a stage.")
SLOTS_USED = Family("tritone_stage_slots_used", "GAUGE", STAGE, "Slots that are taken.")
KV_TOKENS = Family("tritone_stage_kv_tokens", "GAUGE", STAGE, "Tokens of live requests in the KV cache.")
KV_CAPACITY = Family("tritone_stage_kv_capacity_tokens", "GAUGE", STAGE, "Tokens that fit into the KV cache.")
STATE_BYTES = Family("tritone_stage_state_bytes", "GAUGE", STAGE, "State of the streams of a decoder.")
BATCH_SIZE = Family(
    "tritone_stage_batch_size", "GAUGE", STAGE, "Mean of the steps since the value before, 0 without any."
)
BATCHES = Family("tritone_stage_batches_total", "COUNTER", STAGE, "Steps that gave something, or batches.")
BATCHED = Family(
    "tritone_stage_batched_total", "COUNTER", STAGE, "Requests in all steps, or chunks in all batches."
)
DOOR_BLOCKS = Family(
    "tritone_stage_door_blocks", "GAUGE", STAGE, "What is alive in Python's allocator in the door of a stage."
)
ENGINE_BLOCKS = Family(
    "tritone_stage_engine_blocks", "GAUGE", STAGE, "What is alive in Python's allocator in an engine."
)
CONNECTOR_BYTES = Family(
    "tritone_connector_bytes_total", "COUNTER", STAGE, "What a stage took from the stages before it."
)
CONNECTOR_CHUNKS = Family(
    "tritone_connector_chunks_total", "COUNTER", STAGE, "Chunks that a stage took from the stages before it."
)
CONNECTOR_LATENCY = Family(
    "tritone_connector_latency_seconds_total",
    "COUNTER",
    STAGE,
    "Time from the making of a chunk until it is taken, of all chunks together.",
)
CONNECTOR_QUEUED = Family(
    "tritone_connector_queued_bytes", "GAUGE", STAGE, "Output of a stage that waits to be sent."
)
CONNECTOR_IN_FLIGHT = Family(
    "tritone_connector_in_flight_bytes", "GAUGE", STAGE, "Output of a stage that was sent and not taken yet."
)

FAMILIES = tuple(value for value in list(globals().values()) if isinstance(value, Family))

MakeFamily = Callable[[Family], Any]
"""Makes Triton's own object of a family; it has `Metric(labels=…, buckets=…)`."""
Series = tuple[Family, tuple[tuple[str, str], ...]]
"""A family and sorted labels with their values."""


class Publisher:
    """The values of one process on their way to Triton. Thread-safe; costs its callers a few microseconds.

    Counts and observations all arrive, a moment later; of a gauge the last value does.
    """

    def __init__(
        self,
        labels: Mapping[str, str],
        make_family: MakeFamily | None,
        complain: Callable[[str], None],
        every_s: float = PUBLISH_EVERY_S,
    ) -> None:
        """labels: of all series. make_family: None publishes nothing. complain: logs why that has ended."""
        self._labels = dict(labels)
        self._make_family = make_family
        self._is_on = make_family is not None
        self._complain = complain
        self._every_s = every_s
        self._lock = threading.Lock()
        self._amounts: dict[Series, float] = {}
        self._observed: deque[tuple[Series, float]] = deque()
        self._levels: dict[Series, float] = {}
        self._sources: list[Callable[[], None]] = []
        self._families: dict[Family, Any] = {}  # Triton forgets a family that nobody refers to
        self._metrics: dict[Series, Any] = {}
        self._shown: dict[Series, float] = {}  # what each gauge was set to
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, *sources: Callable[[], None]) -> None:
        """Begin to publish. sources: called by the thread before each turn, to set gauges; may not raise."""
        self._sources += sources
        if self._is_on:
            self._thread = threading.Thread(target=self._run, daemon=True, name="metrics")
            self._thread.start()

    def count(self, family: Family, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter; 0 shows a series that has counted nothing yet."""
        if self._is_on:
            series = self._series(family, labels)
            with self._lock:
                self._amounts[series] = self._amounts.get(series, 0.0) + amount

    def observe(self, family: Family, value: float, **labels: str) -> None:
        """Add an observation to a histogram."""
        if self._is_on:
            self._observed.append((self._series(family, labels), value))

    def set(self, family: Family, value: float, **labels: str) -> None:
        """Set a gauge."""
        if self._is_on:
            series = self._series(family, labels)
            with self._lock:
                self._levels[series] = value

    def close(self) -> None:
        """Publish what is left, then take all series back."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _series(self, family: Family, labels: Mapping[str, str]) -> Series:
        return family, tuple(sorted({**self._labels, **labels}.items()))

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            last = False
            while not last:
                last = self._closing.wait(self._every_s)
                for source in self._sources:
                    source()
                self._publish()
        except Exception as error:
            self._is_on = False
            self._complain(f"no more metrics are published: {error}")
        self._metrics.clear()  # before their families
        self._families.clear()

    def _publish(self) -> None:
        with self._lock:
            amounts, self._amounts = self._amounts, {}
            levels, self._levels = self._levels, {}
        for series, amount in amounts.items():
            if amount or series not in self._metrics:
                self._metric(series).increment(amount)
        for _ in range(len(self._observed)):
            series, value = self._observed.popleft()
            self._metric(series).observe(value)
        for series, level in levels.items():
            if self._shown.get(series) != level:
                self._metric(series).set(level)
                self._shown[series] = level

    def _metric(self, series: Series) -> Any:
        if series not in self._metrics:
            family, labels = series
            if tuple(sorted(family.labels)) != tuple(name for name, _ in labels):
                raise ValueError(f"{family.name} has the labels {family.labels}, and was given {labels}")
            if family not in self._families:
                assert self._make_family is not None
                self._families[family] = self._make_family(family)
            more = {"buckets": list(family.buckets)} if family.buckets else {}
            self._metrics[series] = self._families[family].Metric(labels=dict(labels), **more)
        return self._metrics[series]
