"""The autoregressive engine in plain torch: a chat goes in, text comes out token by token.

    add_request ─► [transcripts come] ─► waits ─► gets a slot ─► prompt, in pieces ─► a token a step ─► done

One step is one forward pass: the next token of every running session, together with a piece of the one
prompt that is being read. Running streams therefore keep their pace while others arrive, and two prompts
with the same beginning are read one after the other, so that the second finds the beginning done.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tritone.checkpoint import read_config
from tritone.engines.base import Delta, Engine, Placement, Value, Values
from tritone.engines.chat import Conversation
from tritone.engines.slots import Slot, Slots
from tritone.errors import ConfigError, InvalidRequest, TritoneError, Unavailable
from tritone.sampling import Sampling

if TYPE_CHECKING:
    from tritone.engines.text import Detokenizer, StopStrings

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class TorchOptions:
    """Options of `TorchEngine`."""

    max_slots: int = 16  # sessions that generate at the same time
    max_context_tokens: int = 2048  # prompt and answer of one session
    prefill_chunk_tokens: int = 32  # prompt tokens a step: more is faster, less keeps a steadier pace
    max_waiting: int = 64  # sessions beyond the slots, before new ones are refused
    dtype: str = "float32"
    system_prompt: str = ""  # for conversations without a system message
    prefix_cache: bool = True  # start a prompt from what a slot remembers of one with the same beginning

    def __post_init__(self) -> None:
        for name, least in (
            ("max_slots", 1),
            ("max_context_tokens", 2),
            ("prefill_chunk_tokens", 1),
            ("max_waiting", 0),
        ):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name} is {value}", f"give at least {least}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is '{self.dtype}'", f"use one of {', '.join(DTYPES)}")


@dataclass(eq=False)
class _Session:
    """All there is of one request."""

    id: str
    conversation: Conversation
    sampling: Sampling
    detokenizer: Detokenizer
    stops: StopStrings
    tokens: list[int] = field(default_factory=list)  # the prompt, then the answer
    prompt_tokens: int = 0  # 0 until the prompt is complete
    cached_tokens: int = 0  # of the prompt, not computed but copied
    told_tokens: int = 0  # of the answer, behind the deltas so far
    slot: Slot | None = None  # None until it is this session's turn
    ready_s: float = 0.0  # clock when the prompt was complete
    started_s: float = 0.0  # clock when it got its slot
    first_token_s: float = 0.0

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def pending(self) -> int:
        """Tokens that are known but not in the cache: 1 while it generates."""
        return len(self.tokens) - self.held.filled

    @property
    def held(self) -> Slot:
        assert self.slot is not None
        return self.slot


class TorchEngine(Engine):
    """Llama-, Qwen2- and Qwen3-shaped chat models with continuous batching.

    Ports in: `messages` (JSON list of chat messages) and, pushed once for each audio part in them,
    `transcript`. Ports out: `text` and `num_tokens`, how many tokens are behind it. Settings: `sampling`, as
    `Sampling.as_dict` gives it.
    """

    Options = TorchOptions

    def __init__(self, placement: Placement, options: TorchOptions) -> None:
        import torch

        from tritone.engines import sampler, text
        from tritone.networks.decoder import Decoder, DecoderConfig, Span
        from tritone.networks.weights import Weights

        if placement.device == "cpu":
            torch.set_num_threads(placement.threads)
        config = DecoderConfig.from_hf(read_config(placement.checkpoint))
        if options.max_context_tokens > config.max_positions:
            raise ConfigError(
                f"max_context_tokens is {options.max_context_tokens}",
                f"the model was made for {config.max_positions}; give at most that",
            )
        self._options = options
        self._text, self._sampler, self._span = text, sampler, Span
        self._tokenizer = text.ChatTokenizer(placement.checkpoint)
        self._decoder = Decoder(
            config,
            Weights(placement.checkpoint),
            slots=options.max_slots,
            context_tokens=options.max_context_tokens,
            device=placement.device,
            dtype=getattr(torch, options.dtype),
        )
        self._slots = Slots(options.max_slots, reuse=options.prefix_cache)
        self._sessions: dict[str, _Session] = {}
        self._waiting: deque[_Session] = deque()  # prompt complete, no slot yet
        self._running: dict[str, _Session] = {}  # with a slot, in the order they got it
        self._refused: list[Delta] = []  # errors found outside `step`, to be told by the next one
        self._counts = {"prompt_tokens": 0, "cached_tokens": 0, "generated_tokens": 0, "steps": 0}
        self._warm_up()

    # -- the interface --------------------------------------------------------------------------------------

    def add_request(self, session: str, inputs: Values, settings: Mapping[str, Any]) -> None:
        capacity = self._options.max_slots + self._options.max_waiting
        if len(self._sessions) >= capacity:
            limits = f"max_slots {self._options.max_slots} and max_waiting {self._options.max_waiting}"
            raise Unavailable(f"{capacity} sessions are open, as many as {limits} allow", "try again later")
        if session in self._sessions:
            raise InvalidRequest(f"session '{session}' is open already", "use another id")
        messages = inputs.get("messages")
        if not isinstance(messages, str):
            raise InvalidRequest("messages is missing", "send the JSON list of chat messages")
        sampling = _sampling(settings)
        new = _Session(
            id=session,
            conversation=Conversation.parse(messages),
            sampling=sampling,
            detokenizer=self._text.Detokenizer(self._tokenizer.token_bytes),
            stops=self._text.StopStrings(sampling.stop),
        )
        if "transcript" in inputs:
            new.conversation.hear(str(inputs["transcript"]))
        if not new.conversation.missing:
            self._queue(new)
        self._sessions[session] = new

    def push(self, session: str, inputs: Values, last: bool) -> None:
        known = self._sessions.get(session)
        if known is None:
            return
        conversation = known.conversation
        try:
            if "transcript" in inputs:
                conversation.hear(str(inputs["transcript"]))
                if not conversation.missing:
                    self._queue(known)
            if last and conversation.missing:
                raise InvalidRequest(
                    f"{conversation.audio_parts - conversation.missing} transcripts came for the "
                    f"{conversation.audio_parts} audio parts of messages",
                    "attach audio for every audio part",
                )
        except TritoneError as error:
            self.abort(session)
            self._refused.append(Delta(session, error=error))

    def step(self) -> list[Delta]:
        deltas, self._refused = self._refused, []
        self._start_waiting()
        due = self._advance()
        if due:
            deltas += self._extend(due)
        return deltas

    @property
    def has_work(self) -> bool:
        return bool(self._refused or self._waiting or self._running)

    def abort(self, session: str) -> None:
        known = self._sessions.pop(session, None)
        self._refused = [delta for delta in self._refused if delta.session != session]
        if known is None:
            return
        if known.slot is not None:
            del self._running[session]
            self._slots.release(known.slot)
        elif known in self._waiting:
            self._waiting.remove(known)

    def stats(self) -> dict[str, int | float]:
        return {
            "active": len(self._sessions),
            "running": len(self._running),
            "waiting": len(self._waiting),
            "slots": self._options.max_slots,
            **self._counts,
        }

    def check_integrity(self) -> None:
        """AssertionError unless sessions, queue and slots agree with each other."""
        self._slots.check_integrity()
        owners = {slot.owner: slot for slot in self._slots.all if slot.owner is not None}
        assert owners.keys() == self._running.keys()
        assert self._slots.free == self._options.max_slots - len(self._running)
        for session in self._running.values():
            assert session is self._sessions[session.id] and session.slot is owners[session.id]
            assert session.held.tokens is session.tokens
            assert session.pending >= 1 and len(session.tokens) <= self._options.max_context_tokens
        assert sum(session.pending > 1 for session in self._running.values()) <= 1
        queued = [s for s in self._sessions.values() if s.slot is None and s.prompt_tokens > 0]
        assert sorted(map(id, queued)) == sorted(map(id, self._waiting))

    # -- the life of a session ------------------------------------------------------------------------------

    def _queue(self, session: _Session) -> None:
        """Let a session with a complete conversation wait for a slot; InvalidRequest if none can hold it."""
        tokens = self._tokenizer.prompt(session.conversation.messages(self._options.system_prompt))
        if len(tokens) >= self._options.max_context_tokens:
            raise InvalidRequest(
                f"messages has {len(tokens)} tokens, and prompt and answer together may have "
                f"{self._options.max_context_tokens}",
                "send a shorter conversation",
            )
        session.tokens, session.prompt_tokens = tokens, len(tokens)
        session.ready_s = time.monotonic()
        self._waiting.append(session)

    def _start_waiting(self) -> None:
        """Give slots to those who wait, until one of them has a prompt to read."""
        while self._waiting and self._slots.free and all(s.pending == 1 for s in self._running.values()):
            session = self._waiting.popleft()
            session.slot, source = self._slots.take(session.id, session.tokens)
            session.cached_tokens = session.slot.filled
            if source is not None:
                self._decoder.copy_prefix(source.index, session.slot.index, session.cached_tokens)
            session.started_s = time.monotonic()
            self._running[session.id] = session
            self._counts["prompt_tokens"] += session.prompt_tokens
            self._counts["cached_tokens"] += session.cached_tokens

    def _advance(self) -> list[tuple[_Session, int]]:
        """Run one forward pass; the sessions that are due a token, with the token drawn for each."""
        if not self._running:
            return []
        sessions = list(self._running.values())
        most = self._options.prefill_chunk_tokens
        spans = [self._span(s.held.index, s.held.filled, min(s.pending, most)) for s in sessions]
        tokens: list[int] = []
        due: dict[int, _Session] = {}  # by its last row, those whose prompt and answer are all computed
        for session, span in zip(sessions, spans, strict=True):
            tokens += session.tokens[span.start : span.end]
            if span.end == len(session.tokens):
                due[len(tokens) - 1] = session
        hidden = self._decoder.forward(self._decoder.embed(tokens), spans)
        for session, span in zip(sessions, spans, strict=True):
            session.held.filled = span.end
        self._counts["steps"] += 1
        if not due:
            return []
        logits = self._decoder.logits(hidden[list(due)])
        drawn = self._sampler.sample(logits, [self._row(session) for session in due.values()])
        return list(zip(due.values(), drawn.tolist(), strict=True))

    def _row(self, session: _Session) -> Any:
        """What the sampler must know of a session."""
        sampling = session.sampling
        return self._sampler.Row(
            sampling,
            position=len(session.tokens),
            penalised=session.tokens,
            banned=tuple(self._tokenizer.eos_ids) if session.completion_tokens < sampling.min_tokens else (),
        )

    def _extend(self, due: list[tuple[_Session, int]]) -> list[Delta]:
        """Append the drawn tokens; what there is to say of each session."""
        deltas = []
        for session, token in due:
            session.tokens.append(token)
            self._counts["generated_tokens"] += 1
            if session.completion_tokens == 1:
                session.first_token_s = time.monotonic()
            text, finish_reason = self._read(session, token)
            outputs: dict[str, Value] = {}
            if text:
                outputs = {"text": text, "num_tokens": session.completion_tokens - session.told_tokens}
                session.told_tokens = session.completion_tokens
            if finish_reason is not None:
                deltas.append(Delta(session.id, outputs, finish_reason, _usage(session)))
                self.abort(session.id)
            elif outputs:
                deltas.append(Delta(session.id, outputs))
        return deltas

    def _read(self, session: _Session, token: int) -> tuple[str, str | None]:
        """The text that a session's newest token settles, and the finish reason if it is the last one."""
        sampling, stops = session.sampling, session.stops
        if token in self._tokenizer.eos_ids and not sampling.ignore_eos:
            return stops.flush(), "stop"
        text = session.detokenizer.push(token)
        if session.completion_tokens >= sampling.min_tokens:
            text = stops.push(text)
            if stops.found:
                return text, "stop"
        is_full = len(session.tokens) >= self._options.max_context_tokens
        if is_full or session.completion_tokens >= sampling.max_tokens:
            return text + stops.flush(), "length"
        return text, None

    def _warm_up(self) -> None:
        """Touch every weight, and leave the system prompt in a slot for the first caller."""
        greeting = {"messages": '[{"role": "user", "content": "Hello"}]'}
        try:
            self.add_request("warm-up", greeting, {"sampling": {"max_tokens": 2, "ignore_eos": True}})
        except InvalidRequest as error:
            most = self._options.max_context_tokens
            raise ConfigError(
                f"max_context_tokens is {most}, too few for a greeting ({error.what})",
                "give more, or a shorter system_prompt",
            ) from None
        while self.has_work:
            self.step()
        self._counts = dict.fromkeys(self._counts, 0)


def _sampling(settings: Mapping[str, Any]) -> Sampling:
    """The sampling settings of a request; its seed is 0 when nobody set one."""
    given = {name: value for name, value in settings.get("sampling", {}).items() if value is not None}
    return Sampling(seed=settings.get("seed", 0)).merged(given)


def _usage(session: _Session) -> dict[str, int | float]:
    """Counts and durations of a session that is done."""
    return {
        "prompt_tokens": session.prompt_tokens,
        "completion_tokens": session.completion_tokens,
        "cached_tokens": session.cached_tokens,
        "queue_s": round(session.started_s - session.ready_s, 6),
        "prefill_s": round(session.first_token_s - session.started_s, 6),
        "decode_s": round(time.monotonic() - session.first_token_s, 6),
    }
