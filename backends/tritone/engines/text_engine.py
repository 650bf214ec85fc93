"""The part of an autoregressive engine in plain torch that draws: rows in, token ids out.

rows ─► hidden state ─► logits ─► sampler ─► token id ─► TextWriter ─► text delta
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tritone.engines.base import Delta
from tritone.engines.slot_engine import SlotEngine, SlotOptions
from tritone.engines.text_writer import TextSession, TextWriter

if TYPE_CHECKING:
    from torch import Tensor

    from tritone.engines.text import ChatTokenizer
    from tritone.networks.decoder import Decoder
    from tritone.networks.spans import Span

T = TypeVar("T", bound=TextSession)


class TextEngine(SlotEngine[T], TextWriter[T], Generic[T]):
    """Draws the tokens of many sessions and tells their text."""

    def __init__(
        self, options: SlotOptions, decoder: Decoder, tokenizer: ChatTokenizer, reuse: bool = True
    ) -> None:
        from tritone.engines import sampler
        from tritone.engines.token_buffers import NOT_A_NUMBER

        super().__init__(options, decoder, reuse)
        self._write_with(tokenizer)
        self._sampler, self._not_a_number = sampler, NOT_A_NUMBER

    # -- inside a step --------------------------------------------------------------------------------------

    def _advance(self) -> list[Delta]:
        """Run one forward pass over what is pending, and draw for the sessions that are due."""
        sessions = [session for session in self._running.values() if session.pending]
        if not sessions:
            return []
        most = self._slot_options.prefill_chunk_tokens
        spans = [self._span(s.held.index, s.held.filled, min(s.pending, most)) for s in sessions]
        hidden = self._pass(sessions, spans)
        due: dict[int, T] = {}  # by its last row
        row = -1
        for session, span in zip(sessions, spans, strict=True):
            row += span.count
            session.held.filled = span.end
            if not session.pending:
                due[row] = session
        self._counts["steps"] += 1
        return self._draw(list(due.values()), hidden[list(due)]) if due else []

    def _pass(self, sessions: Sequence[T], spans: Sequence[Span]) -> Tensor:
        """Run the rows of the spans; hidden states [N, H]."""
        rows = self._joined([self._rows(s, span) for s, span in zip(sessions, spans, strict=True)])
        return self._decoder.forward(rows, spans).hidden

    def _rows(self, session: T, span: Span) -> Tensor:
        return self._decoder.embed(session.tokens[span.start : span.end])

    def _draw(self, due: Sequence[T], hidden: Tensor) -> list[Delta]:
        """Append a token to each session; what there is to say of it."""
        logits = self._decoder.logits(hidden)
        wrong = logits.amax(-1).isnan()  # before the draw, which overwrites them
        drawn = self._sampler.sample(logits, [self._row(session) for session in due])
        deltas = []
        for session, token in zip(due, drawn.masked_fill(wrong, self._not_a_number).tolist(), strict=True):
            delta = self._hear(session, token)
            if delta is not None:
                deltas.append(delta)
                if delta.finish_reason is not None or delta.error is not None:
                    self.abort(session.id)
        return deltas

    def _hear(self, session: T, token: int) -> Delta | None:
        """What there is to say of a drawn token, or of one that could not be drawn."""
        if token != self._not_a_number:
            return self._told(session, token)
        session.held.filled = 0  # its rows may not be numbers either: no later prompt begins with them
        return self._not_drawn(session)

    def _row(self, session: T) -> Any:
        """What the sampler must know of a session."""
        sampling = session.sampling
        return self._sampler.Row(
            sampling,
            position=len(session.tokens),
            penalised=session.tokens,
            banned=tuple(self._eos_ids) if session.completion_tokens < sampling.min_tokens else (),
        )
