"""What a pipeline is: stages, the edges that join them, and which stage makes which modality.

A pipeline is true of a model family and never of a machine; numbers live in `deploy.py`. `check()` refuses
a graph that does not join, so that a bad pipeline never starts a server.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tritone import contract
from tritone.engines.base import Values
from tritone.errors import ConfigError, suggestion
from tritone.ports import Port, by_name
from tritone.sampling import Sampling

if TYPE_CHECKING:
    from tritone.request import Request


class Execution(StrEnum):
    """How a stage runs."""

    LLM_AR = "llm_ar"  # token by token, KV cache
    LLM_GENERATION = "llm_generation"  # one call in, media (or text) out
    DIFFUSION = "diffusion"  # denoising steps


class Batching(StrEnum):
    """Who batches the requests of a stage; decides the door and the engine interface."""

    ENGINE = "engine"  # tritone_engine, engines.base.Engine
    TRITON = "triton"  # tritone_batch, engines.base.BatchEngine, sequence batcher


class Checkpoint(StrEnum):
    """How the weights of a pipeline lie on disk."""

    NONE = "none"  # its engines have none
    BUILT = "built"  # a folder a stage, listed in a manifest
    RELEASED = "released"  # one folder in the Hugging Face layout, which all stages read


@dataclass(frozen=True)
class Stage:
    """One step of a pipeline: a Triton model."""

    name: str
    execution: Execution
    engines: Mapping[str, str]  # kind to "module:Class", imported when needed; the first is the default
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    batching: Batching = Batching.ENGINE
    sampling: Sampling | None = None  # defaults of a stage that samples
    urgency: int = 0  # on a GPU that stages of one process share: those with a higher one go first

    def engine_class(self, kind: str, where: str) -> Any:
        """The engine class of a kind; imports its module. ConfigError naming `where` if there is none."""
        if kind not in self.engines:
            raise ConfigError(f"{where}: unknown engine kind '{kind}'", suggestion(kind, self.engines))
        module, _, name = self.engines[kind].partition(":")
        return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class Edge:
    """Output port of one stage to input port of another, each as "stage.port"."""

    source: str
    target: str


@dataclass(frozen=True)
class StageCall:
    """What one request asks of one stage."""

    inputs: Values = field(default_factory=dict)  # by input port; the rest arrives over edges
    settings: Mapping[str, Any] = field(default_factory=dict)  # JSON values for the engine


Plan = Mapping[str, StageCall]
"""The stages that a request starts, in any order."""


@dataclass(frozen=True)
class Facts:
    """What a checkpoint says and a client may want to know."""

    sample_rate_hz: int | None = None
    speakers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pipeline:
    """A model family as a graph of stages."""

    name: str
    doc: str
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    finals: Mapping[str, str]  # modality to the "stage.port" that makes it
    accepts: tuple[Port, ...]  # inputs of the contract that carry this pipeline's prompt
    plan: Callable[[Request], Plan]  # pure: which stages a request starts, with what
    facts: Callable[[Path], Facts]  # reads the checkpoint folder
    checkpoint: Checkpoint = Checkpoint.BUILT

    def __post_init__(self) -> None:
        check(self)

    def stage(self, name: str) -> Stage:
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise ConfigError(
            f"pipeline '{self.name}' has no stage '{name}'", suggestion(name, [s.name for s in self.stages])
        )

    @property
    def inputs(self) -> tuple[Port, ...]:
        """The contract inputs that the pipeline model declares."""
        speech = (contract.AUDIO_FORMAT,) if "audio" in self.modalities else ()
        return (*self.accepts, *speech, *contract.CONTROL_INPUTS)

    @property
    def outputs(self) -> tuple[Port, ...]:
        """The contract outputs that the pipeline model declares."""
        return (*contract.COMMON_OUTPUTS, *(contract.AUDIO_OUTPUTS if "audio" in self.modalities else ()))

    @property
    def modalities(self) -> tuple[str, ...]:
        return tuple(self.finals)

    def modality_of(self, stage: str, port: str) -> str | None:
        """The modality that this output port is the final source of, if any."""
        place = f"{stage}.{port}"
        return next((m for m, source in self.finals.items() if source == place), None)

    def upstream(self, stage: str) -> set[str]:
        """Every stage that can reach `stage` over edges."""
        found: set[str] = set()
        frontier = {stage}
        while frontier:
            frontier = {split(e.source)[0] for e in self.edges if split(e.target)[0] in frontier} - found
            found |= frontier
        return found

    def consumers_first(self, names: set[str]) -> list[str]:
        """`names` ordered so that a stage comes after every stage it feeds."""
        return sorted(names, key=lambda name: (len(self.upstream(name) & names), name), reverse=True)


def split(place: str) -> tuple[str, str]:
    """ "stage.port" as its two names."""
    stage, _, port = place.partition(".")
    return stage, port


def check(pipeline: Pipeline) -> None:
    """Raise ConfigError unless the graph joins.

    Unique stages; edges that end at existing ports of equal type and not at their own stage; no cycle; at
    least one entry and one final output; no stage that feeds nothing; no text among what Triton batches.
    """

    def refuse(what: str, cure: str) -> None:
        raise ConfigError(f"pipeline '{pipeline.name}': {what}", cure)

    names = [stage.name for stage in pipeline.stages]
    if len(set(names)) != len(names):
        refuse(f"stage names repeat: {names}", "give each stage its own name")
    outputs = {f"{s.name}.{p.name}": p for s in pipeline.stages for p in s.outputs}
    inputs = {f"{s.name}.{p.name}": p for s in pipeline.stages for p in s.inputs}
    for edge in pipeline.edges:
        if edge.source not in outputs:
            refuse(f"edge starts at unknown output '{edge.source}'", suggestion(edge.source, outputs))
        if edge.target not in inputs:
            refuse(f"edge ends at unknown input '{edge.target}'", suggestion(edge.target, inputs))
        source, target = outputs[edge.source], inputs[edge.target]
        if split(edge.source)[0] == split(edge.target)[0]:
            refuse(f"edge {edge.source} -> {edge.target} ends at its own stage", "remove it")
        if (source.dtype, source.dims) != (target.dtype, target.dims):
            refuse(
                f"edge {edge.source} -> {edge.target} joins {source.dtype} {list(source.dims)} "
                f"to {target.dtype} {list(target.dims)}",
                "use one Port for both",
            )
    for name in names:
        if name in pipeline.upstream(name):
            refuse(f"stage '{name}' feeds itself over a cycle", "remove an edge")
    targets = {split(edge.target)[0] for edge in pipeline.edges}
    if all(name in targets for name in names):
        refuse("no stage is an entry", "leave one stage without incoming edges")
    if not pipeline.finals:
        refuse("no modality has a source", "name the final output ports in `finals`")
    for modality, place in pipeline.finals.items():
        if place not in outputs:
            refuse(f"modality '{modality}' comes from unknown output '{place}'", suggestion(place, outputs))
    sources = {split(edge.source)[0] for edge in pipeline.edges}
    useful = {split(place)[0] for place in pipeline.finals.values()} | sources
    for name in names:
        if name not in useful:
            refuse(f"stage '{name}' feeds nothing", "add an edge from it, make it final, or remove it")
    for stage in pipeline.stages:
        if len(by_name((*stage.inputs, *stage.outputs))) != len(stage.inputs) + len(stage.outputs):
            refuse(f"stage '{stage.name}' uses a port name twice", "name its inputs and outputs apart")
        text = [port.name for port in stage.inputs if port.dtype == "STRING"]
        if stage.batching is Batching.TRITON and text:
            # Triton fails all of a batch for one malformed string, and anybody may send one.
            refuse(f"stage '{stage.name}' takes text '{text[0]}' in batches", "send it as UINT8")
