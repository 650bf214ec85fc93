"""What every engine that answers with text does with a token once it is drawn, whoever drew it.

token id ─► whole characters ─► stop strings ─► text delta, or the end of the answer
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tritone.engines.base import DECODE, Delta, Value, Values
from tritone.engines.session_engine import SessionEngine
from tritone.engines.slot_engine import SlotSession
from tritone.errors import ConfigError, InvalidRequest, not_numbers
from tritone.sampling import Sampling

if TYPE_CHECKING:
    from tritone.engines.text import ChatTokenizer, Detokenizer, StopStrings


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


class TextWriter(SessionEngine[T], Generic[T]):
    """Tells the text of the tokens that are drawn for many sessions."""

    def _write_with(self, tokenizer: ChatTokenizer) -> None:
        """To be called once, before the first session."""
        from tritone.engines import text

        self._text, self._tokenizer = text, tokenizer

    def _writing(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What a new session needs to write: its sampling settings, detokeniser and stop strings."""
        sampling = sampling_of(settings)
        return {
            "sampling": sampling,
            "detokenizer": self._text.Detokenizer(self._tokenizer.token_bytes),
            "stops": self._text.StopStrings(sampling.stop),
        }

    def _ready(self, session: T, tokens: list[int], keys: list[int] | None = None) -> None:
        """The prompt of a session is known: it waits for its turn. InvalidRequest if it is too long.

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
        """Touch every weight by a greeting, and leave the system prompt in the cache for the first caller.

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

    def _told(self, session: T, token: int) -> Delta | None:
        """Append a drawn token to a session; what there is to say of it. A finish reason ends the session."""
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
            return Delta(session.id, outputs, finish_reason, session.usage)
        return Delta(session.id, outputs) if outputs else None

    def _not_drawn(self, session: T) -> Delta:
        """The end of a session whose next token was to be drawn from scores that are not numbers."""
        what = f"the scores for token {session.completion_tokens} of the answer"
        return Delta(session.id, error=not_numbers(what))

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
