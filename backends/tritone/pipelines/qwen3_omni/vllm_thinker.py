"""Qwen3-Omni's Thinker on vLLM: paged KV cache, prefix caching, tensor parallelism, quantised checkpoints.

    Prompt ─► tokens, rows of media, positions ─► LLMEngine ─► tokens ─► text, talker
                                                     └─ layer `accept_hidden_layer` at media tokens ─► talker

The prompt, its towers and its positions are the torch Thinker's own, so that both read a request alike: see
thinking.py. vLLM runs in a Python of its own (`python:` of the stage): README.md beside this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import Meta

from tritone.engines.base import Placement
from tritone.engines.memory import Ground, Term
from tritone.engines.torch_setup import prepared_torch
from tritone.engines.vllm.engine_args import ModelOnVllm, prepare, spread, start
from tritone.engines.vllm.request import POSITION_UNIT, RunnerRequest, TappedRows
from tritone.engines.vllm.row_memory import RowMemory
from tritone.engines.vllm.text_engine import VllmTextEngine
from tritone.pipelines.qwen3_omni.config import OmniConfig
from tritone.pipelines.qwen3_omni.memory import vllm_thinker_terms
from tritone.pipelines.qwen3_omni.thinking import GREETING, ThinkerSession, Thinking, ThinkingOptions
from tritone.ports import Array

if TYPE_CHECKING:
    from tritone.pipelines.qwen3_omni.prompt import MediaRows

MODEL = "tritone.pipelines.qwen3_omni.vllm_model"
NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True)
class VllmThinkerOptions(ThinkingOptions):
    """Those of every Thinker, and vLLM's."""

    prefill_chunk_tokens: int = 2048  # prompt tokens a step, beside the tokens that are drawn
    remembered_bytes: Annotated[int, Meta(ge=0)] = 256 << 20  # of media's hidden states, for the next turn
    engine_args: dict[str, Any] = field(default_factory=dict)  # to vLLM's EngineArgs, unchanged


class VllmThinker(Thinking, VllmTextEngine[ThinkerSession]):
    """Ports and settings: those of `Thinking`."""

    Options = VllmThinkerOptions
    spans_gpus = True
    leaves_default_stream = True

    def __init__(self, placement: Placement, options: VllmThinkerOptions) -> None:
        super().__init__(options)
        engine_args = spread(options.engine_args, placement.num_gpus)
        device = prepare(placement.device, engine_args)
        torch = prepared_torch(placement)
        from tritone.pipelines.qwen3_omni.processor import import_transformers, load_processor

        import_transformers()
        from tritone.engines.text import ChatTokenizer
        from tritone.networks.decoder_config import DecoderConfig
        from tritone.pipelines.qwen3_omni.checkpoint_weights import open_weights
        from tritone.pipelines.qwen3_omni.prompt import PromptReader
        from tritone.pipelines.qwen3_omni.towers import Towers

        self._torch = torch
        self._memory = RowMemory(options.remembered_bytes)
        config = OmniConfig.read(placement.checkpoint)
        shape = DecoderConfig.from_hf(config.thinker["text_config"], family="qwen3_moe")
        options.check_context(shape.max_positions)
        model = ModelOnVllm(
            MODEL, config.accept_hidden_layer, shape.num_kv_heads, shape.num_layers, shape.head_dim
        )
        self._draw_with(
            start(
                placement.checkpoint,
                device,
                options,
                options.prefix_cache,
                options.load_format,
                engine_args,
                model,
                placement.stream,
            )
        )
        processor = load_processor(placement.checkpoint)
        tokenizer = ChatTokenizer(placement.checkpoint, processor.tokenizer.backend_tokenizer)
        dtype = getattr(torch, options.dtype)
        weights = open_weights(replace(placement, device=device), options.load_format, dtype)
        towers = Towers(config.thinker, weights, device, dtype)
        reader = PromptReader(config, tokenizer, processor, towers, options.max_context_tokens)
        self._think_with(options, config, tokenizer, reader, placement.stream)
        if device != "cpu":  # where nothing is compiled in a step
            self._warm_up()
        self._greet(GREETING)

    @classmethod
    def memory(cls, ground: Ground, options: VllmThinkerOptions) -> list[Term]:
        return vllm_thinker_terms(ground, options)

    # -- what vLLM is given ---------------------------------------------------------------------------------

    def _prompt_input(self, session: ThinkerSession) -> Mapping[str, Any]:
        from tritone.engines.vllm.media import prompt_input

        media = self._prompt_of(session).media
        if media is None:
            return prompt_input(session.tokens, session.keys)
        tokens = np.asarray(session.tokens)
        tokens[media.index] = self._config.tokens.image  # vLLM is told of one kind of media
        return prompt_input(tokens.tolist(), session.keys, self._pieces(media))

    def _pieces(self, media: MediaRows) -> list[tuple[int, Any]]:
        """Rows that follow each other; beside what is seen stands what is added behind the first layers."""
        from tritone.engines.vllm.media import pieces

        seen = np.isin(media.index, media.visual_index)
        order = np.cumsum(seen) - 1  # of a row that is seen, its place in `layers`
        found = []
        for first, end in pieces(media.index, np.diff(seen, prepend=seen[:1])):
            rows = media.values[first:end]
            if seen[first]:
                span = slice(int(order[first]), int(order[end - 1]) + 1)
                rows = self._torch.cat([rows, *(layer[span] for layer in media.layers)], dim=1)
            found.append((int(media.index[first]), rows))
        return found

    def _runner_request(self, session: ThinkerSession) -> RunnerRequest:
        prompt = self._prompt_of(session)
        wanted = self._wanted(session) if session.speaks else NOTHING
        if prompt.positions is None:
            return RunnerRequest(session.id, None, 0, wanted)
        return RunnerRequest(
            session.id,
            _units(prompt.positions.table.numpy()),
            round(prompt.positions.shift * POSITION_UNIT),
            wanted,
        )

    def _wanted(self, session: ThinkerSession) -> Array:
        """Places whose hidden states the talker needs and nobody remembers."""
        media = self._prompt_of(session).media
        if media is None:
            return NOTHING
        ends = [*(np.flatnonzero(np.diff(media.index) > 1) + 1), len(media.index)]
        known = self._memory.recall(session.keys, media.index, ends)
        if known is None:
            return media.index
        session.heard_rows.append(known)
        return media.index[len(known) :]

    def _take_rows(self, session: ThinkerSession, tapped: TappedRows) -> None:
        fresh = tapped.rows[max(0, session.heard - tapped.first) :]
        if tapped.first > session.heard or not len(fresh):
            return
        session.heard += len(fresh)
        session.heard_rows.append(fresh)
        media = self._prompt_of(session).media
        if media is not None and self._has_rows(session):
            self._memory.keep(session.keys, media.index, np.concatenate(session.heard_rows))

    def _has_rows(self, session: ThinkerSession) -> bool:
        return session.heard == len(self._requests[session.id].wanted)


def _units(positions: Array) -> Array:
    """Positions float32 [3, P] as int64, in the units of `RunnerRequest`."""
    units: Array = np.rint(positions.astype(np.float64) * POSITION_UNIT).astype(np.int64)
    return units
