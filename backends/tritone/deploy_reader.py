"""A deploy file read from YAML, with what is laid over it, and checked.

Precedence: request > `--set` override > profile > deploy.yaml > pipeline default. An unknown key is an error
with a suggestion; engine options are checked against the engine's own `Options`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from tritone import deploy_rules
from tritone.checkpoint import checkpoint_dir
from tritone.deploy import Chunks, ConnectorLimits, Deploy, Limits, Memory, StageDeploy, Tracing, Urls
from tritone.errors import ConfigError, InvalidRequest, suggestion
from tritone.pipeline import Pipeline, Stage
from tritone.profile_file import laid_over, read_profile, read_yaml

RENDER_VERSION = 2  # part of the digest: raise it when the rendering of pbtxt changes

T = TypeVar("T")


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
    stage_blocks = _stage_blocks(fields.pop("stages", None) or {}, pipeline, where)
    blocks = {
        key: read_dataclass(_BLOCKS[key], value, f"{where}: {key}")
        for key, value in fields.items()
        if key in _BLOCKS
    }
    plain = {key: value for key, value in fields.items() if key not in _BLOCKS}
    top = read_dataclass(_Top, plain, where, tuple(_BLOCKS))
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
        **blocks,
        source=dict(raw),
    )
    deploy_rules.check(deploy, where)
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


def _stage_blocks(blocks: Any, pipeline: Pipeline, where: str) -> Mapping[str, Any]:
    """What the file says of stages, by their names, which the pipeline has."""
    if not isinstance(blocks, dict):
        raise ConfigError(f"{where}: `stages` is {blocks!r}", "make it a mapping from stage name to settings")
    known = [stage.name for stage in pipeline.stages]
    for name in blocks:
        if name not in known:
            raise ConfigError(f"{where}: unknown stage '{name}'", suggestion(name, known))
    return blocks


def _stage(pipeline: Pipeline, stage: Stage, block: Mapping[str, Any], where: str) -> StageDeploy:
    block = {"model": f"{pipeline.name}_{stage.name}", "urgency": stage.urgency, **block}
    engine = block.pop("engine", None) or {}
    if not isinstance(engine, Mapping | str):
        raise ConfigError(f"{where}.engine is {engine!r}", "give its kind, or a mapping of options")
    engine_block = {"kind": engine} if isinstance(engine, str) else dict(engine)
    changes = block.pop("sampling", None) or {}
    kind = engine_block.pop("kind", next(iter(stage.engines)))
    options = read_dataclass(stage.engine_class(kind, where).Options, engine_block, f"{where}.engine")
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
