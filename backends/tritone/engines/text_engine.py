"""The part of an autoregressive engine that writes: token ids drawn, text told.

hidden state ─► logits ─► sampler ─► token id ─► whole characters ─► stop strings ─► text delta
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tritone.engines.base import DECODE, Delta, Value, Values
from tritone.engines.slot_engine import SlotEngine, SlotOptions, SlotSession
from tritone.errors import ConfigError, InvalidRequest
from tritone.sampling import Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from tritone.engines.text import ChatTokenizer, Detokenizer, StopStrings
    from tritone.networks.decoder import Decoder, Span


@dataclass(eq=False, kw_only=True)
class TextSession(SlotSession):
    """One request that is answered with text."""

    keys: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # the prompt, then the answer
    detokenizer: Detokenizer
    stops: StopStrings
    told_tokens: int = 0  # of the answer, behind the deltas so far

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def usage(self) -> dict[str, int | float]:
        """Counts and durations of a session that is done."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            **self.durations,
        }


T = TypeVar("T", bound=TextSession)


class TextEngine(SlotEngine[T], Generic[T]):
    """Draws the tokens of many sessions and tells their text."""

    def __init__(
        self, options: SlotOptions, decoder: Decoder, tokenizer: ChatTokenizer, reuse: bool = True
    ) -> None:
        from tritone.engines import sampler, text

        super().__init__(options, decoder, reuse)
        self._text, self._sampler, self._tokenizer = text, sampler, tokenizer

    # -- for subclasses -------------------------------------------------------------------------------------

    def _writing(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What a new session needs to write: its sampling settings, detokeniser and stop strings."""
        sampling = sampling_of(settings)
        return {
            "sampling": sampling,
            "detokenizer": self._text.Detokenizer(self._tokenizer.token_bytes),
            "stops": self._text.StopStrings(sampling.stop),
        }

    def _ready(self, session: T, tokens: list[int], keys: list[int] | None = None) -> None:
        """The prompt of a session is known: it waits for a slot. InvalidRequest if none can hold it.

        keys: of the prompt's rows, if its token ids do not tell what is in them.
        """
        self._check_length(len(tokens))
        session.tokens, session.prompt_tokens = tokens, len(tokens)
        session.keys = tokens if keys is None else keys
        self._queue(session)

    def _check_length(self, prompt_tokens: int) -> None:
        most = self._slot_options.max_context_tokens
        if prompt_tokens >= most:
            raise InvalidRequest(
                f"messages has {prompt_tokens} tokens, and prompt and answer together may have {most}",
                "send a shorter conversation",
            )

    def _extras(self, session: T, token: int, text: str, finished: bool) -> dict[str, Value]:
        """Outputs beside the text that a drawn token gives."""
        return {}

    def _greet(self, inputs: Values) -> None:
        """Touch every weight by a greeting, and leave the system prompt in a slot for the first caller.

        ConfigError when even that has no place in the context.
        """
        try:
            self.add_request("warm-up", inputs, {"sampling": {"max_tokens": 2, "ignore_eos": True}})
        except InvalidRequest as error:
            most = self._slot_options.max_context_tokens
            raise ConfigError(
                f"max_context_tokens is {most}, too few for a greeting ({error.what})",
                "give more, or a shorter system_prompt",
            ) from None
        self._run_out()

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
        drawn = self._sampler.sample(self._decoder.logits(hidden), [self._row(session) for session in due])
        deltas = []
        for session, token in zip(due, drawn.tolist(), strict=True):
            session.tokens.append(token)
            if session.keys is not session.tokens:
                session.keys.append(token)
            self._counts["generated_tokens"] += 1
            if session.completion_tokens == 1:
                session.first_token_s = time.monotonic()
                self.note_phase(session.id, DECODE)
            text, finish_reason = self._read(session, token)
            outputs: dict[str, Value] = {}
            if text:
                outputs = {"text": text, "num_tokens": session.completion_tokens - session.told_tokens}
                session.told_tokens = session.completion_tokens
            outputs |= self._extras(session, token, text, finish_reason is not None)
            if finish_reason is not None:
                deltas.append(Delta(session.id, outputs, finish_reason, session.usage))
                self.abort(session.id)
            elif outputs:
                deltas.append(Delta(session.id, outputs))
        return deltas

    def _row(self, session: T) -> Any:
        """What the sampler must know of a session."""
        sampling = session.sampling
        return self._sampler.Row(
            sampling,
            position=len(session.tokens),
            penalised=session.tokens,
            banned=tuple(self._eos_ids) if session.completion_tokens < sampling.min_tokens else (),
        )

    @property
    def _eos_ids(self) -> frozenset[int]:
        return self._tokenizer.eos_ids

    def _read(self, session: T, token: int) -> tuple[str, str | None]:
        """The text that a session's newest token settles, and the finish reason if it is the last one."""
        sampling, stops = session.sampling, session.stops
        if token in self._eos_ids and not sampling.ignore_eos:
            return stops.flush(), "stop"
        text = session.detokenizer.push(token)
        if session.completion_tokens >= sampling.min_tokens:
            text = stops.push(text)
            if stops.found:
                return text, "stop"
        is_full = len(session.tokens) >= self._slot_options.max_context_tokens
        if is_full or session.completion_tokens >= sampling.max_tokens:
            return text + stops.flush(), "length"
        return text, None


def sampling_of(settings: Mapping[str, Any]) -> Sampling:
    """The sampling settings of a request; its seed is 0 when nobody set one."""
    given = {name: value for name, value in settings.get("sampling", {}).items() if value is not None}
    return Sampling(seed=settings.get("seed", 0)).merged(given)
