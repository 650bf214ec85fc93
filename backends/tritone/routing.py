"""Who sends what to whom in one request: the pipeline's edges among the stages that the request starts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tritone.pipeline import Batching, Pipeline, Stage, split
from tritone.wire import Route

FRAMES, SEGMENT_END = "frames", "segment_end"
"""Input ports of a Triton-batched stage: codec frames, and whether they end a segment."""
NUM_TOKENS = "num_tokens"
"""Output port of a stage that writes text: tokens behind the delta."""


class Routing:
    """The edges among the started stages of one request."""

    def __init__(self, pipeline: Pipeline, started: Collection[str], modalities: Collection[str]) -> None:
        self._pipeline = pipeline
        self._started = set(started)
        self._modalities = set(modalities)
        joins = [(*split(edge.source), *split(edge.target)) for edge in pipeline.edges]
        # Output port of a started stage to input port of another: producer, port, consumer, target.
        self._joins = [join for join in joins if join[0] in self._started and join[2] in self._started]
        self._targets: dict[tuple[str, str], dict[str, str]] = {}  # by producer and consumer: target by port
        for producer, port, consumer, target in self._joins:
            self._targets.setdefault((producer, consumer), {})[port] = target

    def open_order(self) -> list[Stage]:
        """The started stages that batch by themselves, consumers before their producers."""
        stages = [self._pipeline.stage(name) for name in self._pipeline.consumers_first(self._started)]
        return [stage for stage in stages if stage.batching is Batching.ENGINE]

    def chunked(self) -> list[Stage]:
        """The started stages that Triton batches: the orchestrator calls them chunk by chunk."""
        stages = [stage for stage in self._pipeline.stages if stage.name in self._started]
        return [stage for stage in stages if stage.batching is Batching.TRITON]

    def num_sources(self, name: str) -> int:
        """How many started stages feed stage `name`."""
        return len({producer for producer, consumer in self._targets if consumer == name})

    def routes(
        self,
        stage: Stage,
        models: Mapping[str, str],
        endpoints: Mapping[str, str],
        inbox: str,
        frame_sizes: tuple[int, ...] = (),
    ) -> list[Route]:
        """Where the outputs of `stage` go.

        models: Triton model by stage; endpoints: engine address by open stage; inbox: the orchestrator's.
        frame_sizes: of the chunks that frames are cut into, if they may wait until they fill one.
        """
        to_stages: dict[str, dict[str, str]] = {}
        to_inbox: dict[str, str] = {}
        frames: set[str] = set()
        if self._makes_modality(stage):
            to_inbox = {
                port.name: port.name
                for port in stage.outputs
                if port.name == NUM_TOKENS or self._pipeline.modality_of(stage.name, port.name)
            }
        for producer, port, consumer, target in self._joins:
            if producer != stage.name:
                continue
            if self._pipeline.stage(consumer).batching is Batching.TRITON:
                to_inbox[port] = port
                frames |= {port} if target == FRAMES else set()
            else:
                to_stages.setdefault(consumer, {})[port] = target
        routes = [Route(endpoints[name], models[name], ports) for name, ports in to_stages.items()]
        if to_inbox:
            routes.append(Route(inbox, "", to_inbox, frame_sizes if set(to_inbox) == frames else ()))
        return routes

    def chunk_inputs(self, producer: str, values: Mapping[str, Any], consumer: str) -> dict[str, Any]:
        """What a piece of `producer` holds for the Triton-batched stage `consumer`, by its input port."""
        targets = self._targets.get((producer, consumer), {})
        return {target: values[port] for port, target in targets.items() if port in values}

    def feeds(self, producer: str, consumer: str) -> bool:
        return (producer, consumer) in self._targets

    def maker(self, modality: str) -> str | None:
        """The engine-batched stage whose end ends a modality, or None if the request does not start it."""
        source = split(self._pipeline.finals[modality])[0]
        if source not in self._started:
            return None
        if self._pipeline.stage(source).batching is Batching.ENGINE:
            return source
        return next(producer for producer, consumer in self._targets if consumer == source)

    def _makes_modality(self, stage: Stage) -> bool:
        return any(
            self._pipeline.modality_of(stage.name, port.name) in self._modalities for port in stage.outputs
        )
