"""The numbers of one pipeline on one machine: every key of a deploy file with its default.

    deploy.yaml ─► deploy_reader.py ─► Deploy ─► deploy_rules.py, which refuses values that cannot be

The comments beside the fields are the words of model_repository/DEPLOY.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tritone.checkpoint import require_checkpoint, require_released
from tritone.device import Device
from tritone.pipeline import Checkpoint, Pipeline
from tritone.sampling import Sampling

HOST = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")
"""A name of a host in lower case. Its last label begins with a letter, as no number does in any notation."""
MAX_CHUNK_GROWTH = 4096
MODES = ("async_chunk", "sync")


@dataclass(frozen=True)
class Chunks:
    """How codec frames are cut before they go to code2wav."""

    initial_codec_chunk_frames: int = 4  # the first chunk of an answer: small, for an early first packet
    codec_chunk_frames: int = 25  # every later one, as soon as growth allows
    codec_chunk_growth: float = 0  # at most so many times the size before; 0: full size from the second on
    max_ahead_s: float = 60.0  # how far streamed sound may be ahead of its listener; 0: as far as it gets


def is_chunk_growth(value: float) -> bool:
    return value == 0 or 1 <= value <= MAX_CHUNK_GROWTH


@dataclass(frozen=True)
class Limits:
    """What a request may bring; checked before anything is allocated for it."""

    deadline_s: float = 600.0  # the longest that a request may ask for
    text_bytes: int = 16384  # of text_input, messages or sampling_parameters
    audio_s: float = 300.0  # of all audio of a request together
    audio_bytes: int = 64 << 20  # of one encoded audio file, as it is sent
    image_bytes: int = 32 << 20  # of one encoded image file, as it is sent
    image_pixels: int = 64_000_000  # of one decoded image
    video_bytes: int = 256 << 20  # of one encoded video file, as it is sent
    video_s: float = 300.0  # of one video
    media_parts: int = 16  # images, audios and videos together


@dataclass(frozen=True)
class Urls:
    """Which media a request may name by URL, in place of the file itself; see fetch.py."""

    allow: tuple[str, ...] = ()  # hosts, or *.domain for all below one; none: URLs are refused
    ports: tuple[int, ...] = (80, 443)  # that a URL may name
    max_bytes: int = 64 << 20  # of one file; what `limits` gives its kind holds as well
    timeout_s: float = 10.0  # of one file, from the first look-up to the last byte
    per_request: int = 4  # files
    at_once: int = 8  # of all requests of one orchestrator together


@dataclass(frozen=True)
class Tracing:
    """Where the spans of requests go; see tracing.py. Without an endpoint the environment may name one."""

    otlp_endpoint: str = ""  # URL of a collector that takes OTLP over HTTP, e.g. http://127.0.0.1:4318
    sample_ratio: float | None = None  # of requests without a trace of their own; else OTEL_TRACES_SAMPLER


@dataclass(frozen=True)
class ConnectorLimits:
    """What may be on its way from one stage to the next."""

    window_bytes: int = 32 << 20  # of one session and edge: sent, and not yet taken by the consuming stage
    queued_bytes: int = 256 << 20  # of one engine process: waiting to be sent, or (sync) for the end of input

    @property
    def credit_bytes(self) -> int:
        """A consumer tells its producer what it took whenever that is more than this."""
        return self.window_bytes // 4


@dataclass(frozen=True)
class Memory:
    """What the memory plan counts with in place of what this machine has, e.g. to plan for another one."""

    gpu_gib: float | None = None  # of each GPU
    ram_gib: float | None = None  # of the machine


@dataclass(frozen=True)
class StageDeploy:
    """One stage on this machine."""

    model: str  # name of the Triton model that serves the stage
    instances: int = 1  # engine processes that share the stage's work
    device: str | tuple[str, ...] = "cpu"  # cpu, gpu, gpu:<number>, or a list to spread it over
    threads: int = 1  # intra-op threads of one engine on a CPU
    colocate: str | None = None  # stages with the same word share one engine process
    own_stream: bool = True  # in such a process on a GPU: a CUDA stream for it; else torch's default one
    urgency: int = 0  # of that stream, with `mps` of the process: higher goes first; default: the pipeline's
    python: str | None = None  # interpreter of the engine; default: the one that runs the server's stubs
    env: Mapping[str, str] = field(
        default_factory=dict
    )  # variables of the engine's environment, e.g. of vLLM
    load_timeout_s: float = 300.0  # from the start of an engine until it serves
    call_timeout_s: float = 30.0  # one control call or one batch
    lease_s: float = 660.0  # a session that waits for input this long is dropped; above every deadline
    max_batch_size: int = 16  # Triton-batched stages only
    max_queue_delay_ms: float = 2.0  # Triton-batched stages only: how long a batch waits for company
    engine: str = ""  # kind: a key of Stage.engines
    options: Any = None  # the engine's own Options
    sampling: Sampling | None = None

    @property
    def placed(self) -> Device:
        """`device`, understood. ConfigError when it is none."""
        return Device.parse(self.device, f"device of {self.model}")

    @property
    def reads_weights(self) -> bool:
        """False if the engine makes up its weights and reads nothing but the configuration."""
        return bool(getattr(self.options, "load_format", "auto") != "dummy")


@dataclass(frozen=True)
class Deploy:
    """One pipeline on one machine."""

    pipeline: Pipeline
    checkpoint: Path  # laid out as pipeline.checkpoint says
    stages: Mapping[str, StageDeploy]
    digest: str  # of the effective file; pbtxt files carry it
    max_in_flight: int = 32  # requests of one orchestrator that run at a time
    max_queued: int = 0  # others that wait for their turn, by priority; more are refused UNAVAILABLE
    bls_threads: int = 24  # BLS calls at once; must stay below the server's thread pool (32 by default)
    deadline_s: float = 300.0  # of a request that names none
    stall_s: float = 30.0  # a request to which no stage gives anything for this long has its stages pinged
    stall_limit_s: float = 120.0  # … and for this long is ended
    resumes: int = 0  # times that a request whose engine died begins again, unheard up to where it was
    metrics: bool = True  # shown by the server's /metrics
    mps: bool = False  # `tritone serve` runs NVIDIA's MPS for the engines on GPUs
    chunks: Chunks = field(default_factory=Chunks)
    limits: Limits = field(default_factory=Limits)
    connector: ConnectorLimits = field(default_factory=ConnectorLimits)
    urls: Urls = field(default_factory=Urls)
    memory: Memory = field(default_factory=Memory)
    tracing: Tracing = field(default_factory=Tracing)
    profiling: bool = False  # the user who runs the server may profile its processes
    mode: str = MODES[0]  # sync: each stage waits for all that the stages before it give; for debugging
    source: Mapping[str, Any] = field(default_factory=dict)  # the effective mapping, for rendering

    def stage(self, name: str) -> StageDeploy:
        return self.stages[name]

    def stage_folder(self, stage: str) -> Path:
        """The folder that the engine of a stage reads."""
        if self.pipeline.checkpoint is Checkpoint.RELEASED:
            return self.checkpoint
        return self.checkpoint / stage

    def require_checkpoint(self, stage: str) -> Path:
        """The same folder; ConfigError naming what is missing in it and how to get it."""
        match self.pipeline.checkpoint:
            case Checkpoint.BUILT:
                require_checkpoint(self.checkpoint, stage)
            case Checkpoint.RELEASED:
                needs_weights = self.stages[stage].reads_weights
                require_released(self.checkpoint, self.pipeline.name, needs_weights)
        return self.stage_folder(stage)

    def hosted_with(self, stage: str) -> tuple[str, ...]:
        """The stages that share an engine process with `stage`, itself included, in pipeline order."""
        word = self.stages[stage].colocate
        if word is None:
            return (stage,)
        return tuple(s.name for s in self.pipeline.stages if self.stages[s.name].colocate == word)

    def engine_group(self, stage: str) -> str:
        """Names the engine processes that host a stage, in their sockets."""
        settings = self.stages[stage]
        return f"{self.pipeline.name}+{settings.colocate}" if settings.colocate else settings.model

    def mps_priority(self, stage: str) -> int | None:
        """CUDA_MPS_CLIENT_PRIORITY of the engine process: 0 normal, 1 below; None: there is no MPS."""
        if not self.mps or not self.stages[stage].placed.is_gpu:
            return None
        return int(not any(self.stages[mate].urgency for mate in self.hosted_with(stage)))

    def engine_class(self, stage: str) -> Any:
        """The engine class of a stage; imports its module (never torch, see engines/base.py)."""
        return self.pipeline.stage(stage).engine_class(self.stages[stage].engine, stage)
