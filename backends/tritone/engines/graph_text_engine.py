"""A text engine whose steps are CUDA graphs where there is a GPU; else the one that it is made of.

    prompts ─► pieces, all their rows but the last ─┐          (of many prompts at once, where kernels can)
    last rows, and the tokens drawn since ──────────┴─► step k + 1 is launched ─► tokens of step k are told

What is drawn is on the device the next row of its slot, so a step needs no word of the host's. Only when a
token has come does the host know that it ends its answer: a row may then be on its way for nothing, and what
comes of it is nobody's. Running streams are late by a step's pieces of prompts and by nothing else. Pieces
that hold more than text (`_is_text`) are launched kernel by kernel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from tritone.engines.base import Delta, Placement
from tritone.engines.slot_engine import SlotOptions
from tritone.engines.text_engine import TextEngine
from tritone.engines.text_writer import TextSession

if TYPE_CHECKING:
    from torch import Tensor

    from tritone.engines.prompt_graph import PromptGraphs
    from tritone.engines.text import ChatTokenizer
    from tritone.engines.token_buffers import TokenRow
    from tritone.engines.token_graph import TokenFlight, TokenGraphs
    from tritone.networks.decoder import Decoder
    from tritone.networks.spans import Span

# Rows that another prompt is about to read, too: to wait for a step costs less than to read them twice.
WORTH_WAITING = 256


@dataclass(frozen=True)
class GraphOptions:
    """How the steps of a text engine run on a GPU."""

    cuda_graphs: bool = True  # on a GPU: a step is one launch; else operation by operation
    kernels: bool = True  # in kernels of our own; else in plain torch
    overlap: bool = True  # a step may begin before the step before it was told
    batch_invariant: bool = False  # always the kernels of the largest batch: tokens never depend on the load


@dataclass(eq=False, kw_only=True)
class GraphTextSession(TextSession):
    """One request, of whose answer some tokens may be on their way."""

    ahead: int = 0  # tokens that were launched and not told
    turn: int = 0  # grows when those on their way count for nothing

    @property
    def draws(self) -> int:
        """Tokens of the answer that were launched."""
        return self.completion_tokens + self.ahead

    @property
    def launched(self) -> int:
        """Rows that are in the cache when all that was launched is done, once the prompt has been read."""
        return self.prompt_tokens - 1 + self.draws


T = TypeVar("T", bound=GraphTextSession)


class _Launched(NamedTuple, Generic[T]):
    """Tokens on their way, whose they are, and in which of their turns."""

    flight: TokenFlight
    sessions: list[T]
    turns: list[int]


class GraphTextEngine(TextEngine[T], Generic[T]):
    """Draws the tokens of many sessions, and tells their text."""

    def __init__(
        self,
        options: SlotOptions,
        decoder: Decoder,
        tokenizer: ChatTokenizer,
        reuse: bool = True,
    ) -> None:
        """decoder: with a cleared cache of one slot more than sessions use, if `_capture` is to be called."""
        super().__init__(options, decoder, tokenizer, reuse)
        self._on_their_way: deque[_Launched[T]] = deque()
        self._steps: TokenGraphs | None = None
        self._prompts: PromptGraphs | None = None

    @staticmethod
    def _has_graphs(placement: Placement, options: GraphOptions) -> bool:
        return options.cuda_graphs and placement.device != "cpu"

    def _capture(self, options: GraphOptions) -> None:
        """To be called once, before the first session, if steps are to be graphs."""
        from tritone.engines.prompt_graph import prompt_graphs
        from tritone.engines.token_buffers import TokenRow
        from tritone.engines.token_graph import token_graphs

        self._token_row = TokenRow
        self._overlaps = options.overlap
        self._prompts = prompt_graphs(
            self._decoder,
            self._slot_options.prefill_chunk_tokens,
            slots=self._slot_options.max_slots,
            kernels=options.kernels,
            one_bucket=options.batch_invariant,
        )
        self._reads_in_turn = not self._prompts.takes_many
        self._steps = token_graphs(
            self._decoder,
            sorted(self._eos_ids),
            slots=self._slot_options.max_slots,
            kernels=options.kernels,
            one_bucket=options.batch_invariant,
        )
        self._steps.warm_up()

    @property
    def has_work(self) -> bool:
        return super().has_work or bool(self._on_their_way)

    # -- for subclasses -------------------------------------------------------------------------------------

    def _is_text(self, session: T, span: Span) -> bool:
        """Whether rows of a prompt are embeddings of its tokens, and no more is wanted than their keys."""
        return True

    def _read_more_than_text(self, sessions: Sequence[T], spans: Sequence[Span]) -> None:
        """Run pieces that are not text, each of another session."""
        raise NotImplementedError

    def _positions(self, sessions: Sequence[T], spans: Sequence[Span]) -> Tensor | None:
        """Positions of rows, float32 [3, N] on the host; None: of each its place."""
        return None

    def _position(self, session: T, place: int) -> float | None:
        """Position of a row of the answer; None: its place."""
        return None

    # -- a step ---------------------------------------------------------------------------------------------

    def _advance(self) -> list[Delta]:
        if self._steps is None:
            return super()._advance()
        deltas = self._read_pieces()
        due = [session for session in self._running.values() if self._is_due(session)]
        if due:
            self._launch(due, self._steps)
        left = int(bool(due) and self._overlaps)
        while len(self._on_their_way) > left:
            deltas += self._landed(self._on_their_way.popleft(), self._steps)
        return deltas

    def _may_begin(self, session: T) -> bool:
        """Not while another reads what this one could copy afterwards."""
        if not super()._may_begin(session):
            return False
        return (
            self._reads_in_turn
            or not self._slots.reuse
            or not any(
                other.pending > 1 and self._is_worth_waiting(session, other)
                for other in self._running.values()
            )
        )

    def _is_worth_waiting(self, session: T, other: T) -> bool:
        end = other.held.filled + WORTH_WAITING
        if end > min(len(other.keys), self._reusable(session)) or other.keys[:end] != session.keys[:end]:
            return False
        return end > self._slots.remembered(session.keys)

    def _read_pieces(self) -> list[Delta]:
        """Run pieces of prompts; what there is to say of those that begin behind them."""
        assert self._prompts is not None
        most = left = self._slot_options.prefill_chunk_tokens
        deltas: list[Delta] = []
        while left > 0:
            sessions, spans = [], []
            for session in self._running.values():
                count = min(session.pending - 1, most)
                if 0 < count <= left:  # no piece is cut because of another
                    sessions.append(session)
                    spans.append(self._span(session.held.index, session.held.filled, count))
                    left -= max(count, self._prompts.least_piece)
            if not sessions:
                break
            self._run_pieces(sessions, spans)
            deltas += self._start_waiting()
        return deltas

    def _run_pieces(self, sessions: Sequence[T], spans: Sequence[Span]) -> None:
        """Run pieces of prompts: those of text together."""
        assert self._prompts is not None
        texts: list[tuple[T, Span]] = []
        others: list[tuple[T, Span]] = []
        for session, span in zip(sessions, spans, strict=True):
            (texts if self._is_text(session, span) else others).append((session, span))
        if texts:
            tokens = [token for session, span in texts for token in session.tokens[span.start : span.end]]
            readers, read = [session for session, _ in texts], [span for _, span in texts]
            self._prompts.read(self._decoder.embed(tokens), read, self._positions(readers, read))
        if others:
            self._read_more_than_text([session for session, _ in others], [span for _, span in others])
        for session, span in zip(sessions, spans, strict=True):
            session.held.filled = span.end

    def _is_due(self, session: T) -> bool:
        """Its prompt has been read but for the last row, and not all tokens of its answer were launched."""
        if not session.draws:
            return session.pending == 1
        most = self._slot_options.max_context_tokens
        return session.draws < session.sampling.max_tokens and session.prompt_tokens + session.draws < most

    def _launch(self, due: list[T], steps: TokenGraphs) -> None:
        """Begin a token for each session."""
        rows = []
        for session in due:
            if not session.draws and session.sampling.repetition_penalty != 1.0:
                steps.begin(session.held.index, session.tokens)
            rows.append(self._token_row_of(session))
            session.ahead += 1
            self._note_filled(session)
        self._on_their_way.append(_Launched(steps.launch(rows), due, [session.turn for session in due]))
        self._counts["steps"] += 1

    def _token_row_of(self, session: T) -> TokenRow:
        place = session.launched
        return self._token_row(
            slot=session.held.index,
            place=place,
            position=self._position(session, place),
            token=None if session.ahead else session.tokens[-1],
            sampling=session.sampling,
            draw=place + 1,
            bars_end=session.draws < session.sampling.min_tokens,
        )

    def _landed(self, launched: _Launched[T], steps: TokenGraphs) -> list[Delta]:
        """What there is to say of tokens; those of sessions that have ended meanwhile are nobody's."""
        deltas: list[Delta] = []
        drawn = launched.flight.tokens()
        for session, turn, (token, is_other) in zip(launched.sessions, launched.turns, drawn, strict=True):
            if self._sessions.get(session.id) is not session or session.turn != turn:
                continue
            session.ahead -= 1
            delta = self._hear(session, token)
            if delta is not None:
                deltas.append(delta)
                if delta.finish_reason is not None or delta.error is not None:
                    self.abort(session.id)
                    continue
            if is_other:
                self._turn_back(session, steps)
            self._note_filled(session)
        return deltas

    def _turn_back(self, session: T, steps: TokenGraphs) -> None:
        """What is on its way follows a token that was not drawn: it begins once more behind the right one."""
        session.turn += 1
        session.ahead = 0
        if session.sampling.repetition_penalty != 1.0:
            steps.begin(session.held.index, session.tokens)

    def _note_filled(self, session: T) -> None:
        """Rows in the cache whose tokens are known."""
        session.held.filled = min(session.launched, len(session.keys))
