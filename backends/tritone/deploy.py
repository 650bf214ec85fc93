"""A deploy file: the numbers of one pipeline on one machine, read from YAML and checked.

Precedence: request > `--set` override > profile > deploy.yaml > pipeline default. An unknown key is an error
with a suggestion; engine options are checked against the engine's own `Options`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from tritone.checkpoint import checkpoint_dir, require_checkpoint, require_released
from tritone.device import Device
from tritone.errors import ConfigError, InvalidRequest, suggestion
from tritone.pipeline import Checkpoint, Pipeline, Stage
from tritone.profile_file import laid_over, read_profile, read_yaml
from tritone.sampling import Sampling

HOST = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")
"""A name of a host in lower case. Its last label begins with a letter, as no number does in any notation."""
COLLECTOR = re.compile(r"https?://[^\s/?#]+[^\s?#]*")
MAX_CHUNK_GROWTH = 4096
MODES = ("async_chunk", "sync")
OWN_VARIABLES = {  # of an engine's environment, and the keys that they are made from
    "OMP_NUM_THREADS": "threads",
    "MKL_NUM_THREADS": "threads",
    "CUDA_VISIBLE_DEVICES": "device",
    "CUDA_DEVICE_ORDER": "device",
    "CUDA_MPS_CLIENT_PRIORITY": "urgency",
}
RENDER_VERSION = 2  # part of the digest: raise it when the rendering of pbtxt changes

T = TypeVar("T")


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
        return _engine_class(self.pipeline.stage(stage), self.stages[stage].engine, stage)


def load(path: Path, overrides: Sequence[str] = (), profile: str | None = None) -> Deploy:
    """Read `path` (a deploy.yaml), lay `profile` and "key.path=value" overrides over it, check everything.

    profile: the name of one that comes with the pipeline, or a file. Raises ConfigError naming the file, the
    key, the value and what to do.
    """
    raw = read_yaml(path, "deploy.yaml")
    if str(raw.get("pipeline")).endswith(".py"):  # relative to the file that says it
        raw["pipeline"] = str((path.parent / raw["pipeline"]).resolve())
    if profile is not None:
        raw = laid_over(raw, read_profile(profile, str(raw.get("pipeline"))))
    for override in overrides:
        _override(raw, override)
    return from_mapping(raw, str(path))


def from_mapping(raw: Mapping[str, Any], where: str) -> Deploy:
    """The checked Deploy of an already parsed file; `where` names it in errors."""
    from tritone import pipelines  # pipelines import nothing from here; avoids loading all of them for one

    fields = dict(raw)
    name = fields.pop("pipeline", None)
    if not isinstance(name, str):
        raise ConfigError(f"{where} has no `pipeline:`", f"add one of {', '.join(pipelines.names())}")
    pipeline = pipelines.get(name)
    checkpoint = fields.pop("checkpoint", None)
    stage_blocks = fields.pop("stages", None) or {}
    if not isinstance(stage_blocks, dict):
        raise ConfigError(
            f"{where}: `stages` is {stage_blocks!r}", "make it a mapping from stage name to settings"
        )
    known = [stage.name for stage in pipeline.stages]
    for stage_name in stage_blocks:
        if stage_name not in known:
            raise ConfigError(f"{where}: unknown stage '{stage_name}'", suggestion(stage_name, known))
    given: dict[str, Any] = {}
    for key, value in fields.items():
        if key in _BLOCKS:
            given[key] = read_dataclass(_BLOCKS[key], value, f"{where}: {key}")
        else:
            given[key] = value
    top = read_dataclass(
        _Top, {key: value for key, value in given.items() if key not in _BLOCKS}, where, tuple(_BLOCKS)
    )
    deploy = Deploy(
        pipeline=pipeline,
        checkpoint=Path(checkpoint).expanduser() if checkpoint else checkpoint_dir(name),
        stages={
            stage.name: _stage(
                pipeline, stage, stage_blocks.get(stage.name) or {}, f"{where}: stages.{stage.name}"
            )
            for stage in pipeline.stages
        },
        digest=_digest(raw),
        **dataclasses.asdict(top),
        **{key: given[key] for key in _BLOCKS if key in given},
        source=dict(raw),
    )
    _check(deploy, where)
    return deploy


@dataclass(frozen=True)
class _Top:
    """The plain numbers at the head of a deploy file."""

    max_in_flight: int = Deploy.max_in_flight
    max_queued: int = Deploy.max_queued
    bls_threads: int = Deploy.bls_threads
    deadline_s: float = Deploy.deadline_s
    stall_s: float = Deploy.stall_s
    stall_limit_s: float = Deploy.stall_limit_s
    resumes: int = Deploy.resumes
    metrics: bool = Deploy.metrics
    mps: bool = Deploy.mps
    profiling: bool = Deploy.profiling
    mode: str = Deploy.mode


_BLOCKS: dict[str, type[Any]] = {
    "chunks": Chunks,
    "limits": Limits,
    "connector": ConnectorLimits,
    "urls": Urls,
    "memory": Memory,
    "tracing": Tracing,
}


def _stage(pipeline: Pipeline, stage: Stage, block: Mapping[str, Any], where: str) -> StageDeploy:
    block = {"model": f"{pipeline.name}_{stage.name}", "urgency": stage.urgency, **block}
    engine = block.pop("engine", None) or {}
    if not isinstance(engine, Mapping | str):
        raise ConfigError(f"{where}.engine is {engine!r}", "give its kind, or a mapping of options")
    engine_block = {"kind": engine} if isinstance(engine, str) else dict(engine)
    changes = block.pop("sampling", None) or {}
    kind = engine_block.pop("kind", next(iter(stage.engines)))
    options = read_dataclass(_engine_class(stage, kind, where).Options, engine_block, f"{where}.engine")
    sampling = stage.sampling
    if changes and sampling is None:
        raise ConfigError(f"{where}.sampling is given, but the stage does not sample", "remove it")
    if sampling is not None:
        try:
            sampling = sampling.merged(changes, f"{where}.sampling")
        except InvalidRequest as error:
            raise ConfigError(error.what, error.cure) from None
    if "options" in block:
        raise ConfigError(f"{where}: unknown key 'options'", "engine options go under `engine:`")
    settings = read_dataclass(StageDeploy, block, where)
    return dataclasses.replace(settings, engine=kind, options=options, sampling=sampling)


def _engine_class(stage: Stage, kind: str, where: str) -> Any:
    if kind not in stage.engines:
        raise ConfigError(f"{where}: unknown engine kind '{kind}'", suggestion(kind, stage.engines))
    module, _, name = stage.engines[kind].partition(":")
    return getattr(importlib.import_module(module), name)


def read_dataclass(kind: type[T], values: Any, where: str, more_keys: Sequence[str] = ()) -> T:
    """A frozen dataclass from a mapping; unknown keys and wrong types are ConfigErrors that name `where`.

    more_keys: those that are known beside the fields, for the suggestion.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} is {values!r}", "make it a mapping")
    known = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise ConfigError(f"{where}: unknown key '{key}'", suggestion(str(key), [*known, *more_keys]))
    try:
        return msgspec.convert(dict(values), type=kind, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}", "mend the value") from None


def _override(raw: dict[str, Any], text: str) -> None:
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override '{text}' is not key.path=value", "write e.g. stage.thinker.threads=2")
    if keys[0] == "stage":
        keys[0] = "stages"
    node = raw
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override '{text}': '{key}' holds a value, not a mapping", "check the path")
    node[keys[-1]] = yaml.safe_load(value)


def _digest(raw: Mapping[str, Any]) -> str:
    text = json.dumps([RENDER_VERSION, raw], sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check(deploy: Deploy, where: str) -> None:
    def at_least(name: str, value: float, low: float) -> None:
        if value < low:
            raise ConfigError(f"{where}: {name} is {value}", f"give at least {low}")

    at_least("max_in_flight", deploy.max_in_flight, 1)
    at_least("bls_threads", deploy.bls_threads, 1)
    at_least("deadline_s", deploy.deadline_s, 0.001)
    at_least("max_queued", deploy.max_queued, 0)
    at_least("resumes", deploy.resumes, 0)
    at_least("stall_s", deploy.stall_s, 0.1)
    at_least("stall_limit_s", deploy.stall_limit_s, deploy.stall_s)
    at_least("chunks.max_ahead_s", deploy.chunks.max_ahead_s, 0)
    if deploy.mode not in MODES:
        raise ConfigError(f"{where}: mode is '{deploy.mode}'", f"give {' or '.join(MODES)}")
    at_least("connector.window_bytes", deploy.connector.window_bytes, 1)
    at_least("connector.queued_bytes", deploy.connector.queued_bytes, 1)
    at_least("chunks.initial_codec_chunk_frames", deploy.chunks.initial_codec_chunk_frames, 1)
    at_least("chunks.codec_chunk_frames", deploy.chunks.codec_chunk_frames, 1)
    at_least("limits.deadline_s", deploy.limits.deadline_s, deploy.deadline_s)
    if not is_chunk_growth(deploy.chunks.codec_chunk_growth):
        raise ConfigError(
            f"{where}: chunks.codec_chunk_growth is {deploy.chunks.codec_chunk_growth}",
            f"give 0 or 1 to {MAX_CHUNK_GROWTH}",
        )
    for limit in ("text_bytes", "audio_bytes", "image_bytes", "image_pixels", "video_bytes", "media_parts"):
        at_least(f"limits.{limit}", getattr(deploy.limits, limit), 1)
    for limit in ("audio_s", "video_s"):
        at_least(f"limits.{limit}", getattr(deploy.limits, limit), 0.1)
    for limit in ("max_bytes", "per_request", "at_once"):
        at_least(f"urls.{limit}", getattr(deploy.urls, limit), 1)
    at_least("urls.timeout_s", deploy.urls.timeout_s, 0.1)
    for pattern in deploy.urls.allow:
        if not HOST.fullmatch(pattern.removeprefix("*.")):
            raise ConfigError(
                f"{where}: urls.allow has '{pattern}'", "give names of hosts in lower case, or *.domain"
            )
    for limit in ("gpu_gib", "ram_gib"):
        at_least(f"memory.{limit}", getattr(deploy.memory, limit) or 1.0, 0.001)
    endpoint, ratio = deploy.tracing.otlp_endpoint, deploy.tracing.sample_ratio
    if endpoint and not COLLECTOR.fullmatch(endpoint):
        raise ConfigError(
            f"{where}: tracing.otlp_endpoint is '{endpoint}'", "give a URL, e.g. http://127.0.0.1:4318"
        )
    if ratio is not None and not 0 <= ratio <= 1:
        raise ConfigError(f"{where}: tracing.sample_ratio is {ratio:g}", "give 0 to 1")
    if deploy.mps and not any(stage.placed.is_gpu for stage in deploy.stages.values()):
        raise ConfigError(
            f"{where}: mps is true, and no stage is on a GPU", "give a stage `device: gpu`, or mps: false"
        )
    for name, stage in deploy.stages.items():
        at_least(f"stages.{name}.lease_s", stage.lease_s, 0.1)
        at_least(f"stages.{name}.call_timeout_s", stage.call_timeout_s, 0.1)
        at_least(f"stages.{name}.load_timeout_s", stage.load_timeout_s, 1)
        at_least(f"stages.{name}.max_queue_delay_ms", stage.max_queue_delay_ms, 0)
        at_least(f"stages.{name}.instances", stage.instances, 1)
        at_least(f"stages.{name}.threads", stage.threads, 1)
        at_least(f"stages.{name}.max_batch_size", stage.max_batch_size, 1)
        at_least(f"stages.{name}.urgency", stage.urgency, 0)
        device = Device.parse(stage.device, f"{where}: stages.{name}.device")
        if device.is_spread and not deploy.engine_class(name).spans_gpus:
            raise ConfigError(
                f"{where}: stages.{name}.device is {device}, and engine '{stage.engine}' runs on one GPU",
                "name one, e.g. gpu:0",
            )
        leads = deploy.hosted_with(name)[0]
        if leads != name and device.is_gpu and deploy.engine_class(name).leaves_default_stream:
            raise ConfigError(
                f"{where}: stages {leads} and {name} share a process, and engine '{stage.engine}' of {name}"
                " must be the first there: it measures the GPU as it starts",
                f"remove colocate of {name}",
            )
        for variable in stage.env.keys() & OWN_VARIABLES.keys():
            raise ConfigError(
                f"{where}: stages.{name}.env has {variable}", f"remove it and give {OWN_VARIABLES[variable]}"
            )
        mates = [mate for mate in deploy.hosted_with(name) if mate != name]
        for mate in mates:
            for key in ("instances", "device", "python", "env"):
                if getattr(deploy.stages[mate], key) != getattr(stage, key):
                    raise ConfigError(
                        f"{where}: stages {name} and {mate} share a process but differ in {key}",
                        f"give both the same {key}",
                    )
