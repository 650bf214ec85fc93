"""Qwen3-Omni's Thinker in plain torch: the rows of a prompt, media among them, through the slots' decoder.

    Prompt ─► rows: embeddings, and what the towers made of media ─► decoder ─► hidden state ─► a token
                                                                       └─ accept_hidden_layer ─► talker

How it reads a request, and what it tells the talker, is in thinking.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tritone.engines.base import Placement
from tritone.engines.graph_text_engine import GraphOptions, GraphTextEngine
from tritone.engines.memory import Ground, Term
from tritone.engines.torch_setup import prepared_torch
from tritone.pipelines.qwen3_omni.config import OmniConfig
from tritone.pipelines.qwen3_omni.memory import thinker_terms
from tritone.pipelines.qwen3_omni.thinking import GREETING, ThinkerSession, Thinking, ThinkingOptions

if TYPE_CHECKING:
    from torch import Tensor

    from tritone.networks.spans import Span


@dataclass(frozen=True)
class ThinkerOptions(GraphOptions, ThinkingOptions):
    """Those of every Thinker, and of steps on a GPU."""


class _Rows(NamedTuple):
    """What a pass is given."""

    rows: Tensor  # [N, H]
    additions: list[tuple[Tensor, Tensor]]  # see Decoder.forward
    heard: list[tuple[ThinkerSession, Tensor]]  # whose hidden states are wanted, and of which rows
    tap: int | None


class Thinker(Thinking, GraphTextEngine[ThinkerSession]):
    """Ports and settings: those of `Thinking`."""

    Options = ThinkerOptions

    def __init__(self, placement: Placement, options: ThinkerOptions) -> None:
        torch = prepared_torch(placement)
        from tritone.pipelines.qwen3_omni.processor import load_processor

        processor = load_processor(placement.checkpoint)
        from tritone.engines.text import ChatTokenizer
        from tritone.networks.decoder import Decoder
        from tritone.networks.decoder_config import DecoderConfig
        from tritone.networks.transfer import array_on_device, begun_on_host
        from tritone.pipelines.qwen3_omni.checkpoint_weights import open_weights
        from tritone.pipelines.qwen3_omni.positions import positions_of
        from tritone.pipelines.qwen3_omni.prompt import PromptReader
        from tritone.pipelines.qwen3_omni.towers import Towers

        config = OmniConfig.read(placement.checkpoint)
        shape = DecoderConfig.from_hf(config.thinker["text_config"], family="qwen3_moe")
        options.check_context(shape.max_positions)
        dtype = getattr(torch, options.dtype)
        weights = open_weights(placement, options.load_format, dtype)
        graphs = self._has_graphs(placement, options)
        decoder = Decoder(
            shape,
            weights,
            slots=options.max_slots + graphs,
            context_tokens=options.max_context_tokens,
            device=placement.device,
            dtype=dtype,
            prefix="thinker.model.",
            head="thinker.lm_head.weight",
            cleared=graphs,
        )
        tokenizer = ChatTokenizer(placement.checkpoint, processor.tokenizer.backend_tokenizer)
        super().__init__(options, decoder, tokenizer, options.prefix_cache)
        self._torch = torch
        self._positions_of = positions_of
        self._on_device, self._begun_on_host = array_on_device, begun_on_host
        towers = Towers(config.thinker, weights, placement.device, dtype)
        reader = PromptReader(config, tokenizer, processor, towers, options.max_context_tokens)
        self._think_with(options, config, tokenizer, reader, placement.stream)
        if graphs:
            self._capture(options)
        self._greet(GREETING)

    @classmethod
    def memory(cls, ground: Ground, options: ThinkerOptions) -> list[Term]:
        return thinker_terms(ground, options)

    # -- a forward pass -------------------------------------------------------------------------------------

    def _reusable(self, session: ThinkerSession) -> int:
        """A talker needs the hidden states behind media, which a slot does not remember."""
        prompt = self._prompt_of(session)
        if prompt.media is None or not session.speaks:
            return len(session.keys)
        return int(prompt.media.index[0])

    def _pass(self, sessions: Sequence[ThinkerSession], spans: Sequence[Span]) -> Tensor:
        asked = self._gathered(sessions, spans)
        passed = self._decoder.forward(
            asked.rows,
            spans,
            positions=self._positions(sessions, spans),
            additions=asked.additions,
            tap=asked.tap,
        )
        self._keep_heard(asked, passed.tapped)
        return passed.hidden

    def _read_more_than_text(self, sessions: Sequence[ThinkerSession], spans: Sequence[Span]) -> None:
        assert self._prompts is not None
        asked = self._gathered(sessions, spans)
        positions = self._positions(sessions, spans)
        self._keep_heard(asked, self._prompts.run(asked.rows, spans, positions, asked.additions, asked.tap))

    def _gathered(self, sessions: Sequence[ThinkerSession], spans: Sequence[Span]) -> _Rows:
        parts = [self._rows(session, span) for session, span in zip(sessions, spans, strict=True)]
        additions: list[tuple[list[Tensor], list[Tensor]]] = []  # by layer: rows, and what is added to them
        heard: list[tuple[ThinkerSession, Tensor]] = []
        first = 0
        for session, span, rows in zip(sessions, spans, parts, strict=True):
            media = self._prompt_of(session).media
            if media is not None and span.start <= media.index[-1]:
                low, high = np.searchsorted(media.index, (span.start, span.end))
                places = self._on_device(media.index[low:high] - span.start, rows.device)
                rows[places] = media.values[low:high].to(rows.dtype)
                if session.speaks and high > low:
                    heard.append((session, first + places))
                low, high = np.searchsorted(media.visual_index, (span.start, span.end))
                if high > low:
                    places = self._on_device(media.visual_index[low:high] - span.start, rows.device)
                    for layer, values in enumerate(media.layers):
                        if layer == len(additions):
                            additions.append(([], []))
                        additions[layer][0].append(first + places)
                        additions[layer][1].append(values[low:high].to(rows.dtype))
            first += span.count
        return _Rows(
            self._joined(parts),
            [(self._torch.cat(rows), self._torch.cat(values)) for rows, values in additions],
            heard,
            self._config.accept_hidden_layer if heard else None,
        )

    def _keep_heard(self, asked: _Rows, tapped: Tensor | None) -> None:
        """Keep for the talker what the media became; it is told with a token, which is drawn after it."""
        for session, places in asked.heard:
            assert tapped is not None
            session.heard_rows.append(self._begun_on_host(tapped[places].float()).numpy())

    def _is_text(self, session: ThinkerSession, span: Span) -> bool:
        media = self._prompt_of(session).media
        if media is None:
            return True
        low, high = np.searchsorted(media.index, (span.start, span.end))
        return bool(low == high)

    def _positions(self, sessions: Sequence[ThinkerSession], spans: Sequence[Span]) -> Tensor | None:
        return self._positions_of([self._prompt_of(session).positions for session in sessions], spans)

    def _position(self, session: ThinkerSession, place: int) -> float | None:
        positions = self._prompt_of(session).positions
        return None if positions is None else positions.of(place)

    def _rows(self, session: ThinkerSession, span: Span) -> Tensor:
        return super()._rows(session, span).clone()
