"""What every autoregressive engine in plain torch does: many sessions share a decoder and its cache of slots.

    session ─► [prompt becomes known] ─► waits ─► gets a slot ─► prompt, in pieces ─► a draw a step ─► done

One step is the next row of every session that has one, together with pieces of prompts, as many rows as
`prefill_chunk_tokens` says. Running streams therefore keep their pace while others arrive. Two prompts with
the same beginning are read one after the other, where the second gains by finding the beginning done.

A *row* is one position of a sequence: a token of text, a code frame, a patch of a picture. Subclasses say
what the rows of a session are, how they are run, and what is drawn from them.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from tritone.engines.base import PREFILL, QUEUED, Delta
from tritone.engines.session_engine import SessionEngine
from tritone.engines.slots import Slot, Slots
from tritone.errors import ConfigError
from tritone.sampling import Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from tritone.networks.decoder import Decoder
    from tritone.networks.spans import Span

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class SlotOptions:
    """Options of every engine with slots."""

    max_slots: int = 16  # sessions that generate at the same time
    max_context_tokens: int = 2048  # prompt and answer of one session
    prefill_chunk_tokens: int = 32  # prompt tokens a step: more is faster, less keeps a steadier pace
    max_waiting: int = 64  # sessions beyond the slots, before new ones are refused
    dtype: str = "float32"  # of weights, caches and arithmetic: float32, bfloat16 or float16

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

    def check_context(self, max_positions: int) -> None:
        """ConfigError when the model was not made for that many positions."""
        if self.max_context_tokens > max_positions:
            raise ConfigError(
                f"max_context_tokens is {self.max_context_tokens}",
                f"the model was made for {max_positions}; give at most that",
            )


@dataclass(eq=False, kw_only=True)
class SlotSession:
    """One request on an engine with slots."""

    id: str
    sampling: Sampling
    keys: list[int]  # one a known row; where two sequences begin with equal keys, they begin with equal rows
    prompt_tokens: int = 0  # rows of the prompt; 0 until it is complete
    cached_tokens: int = 0  # of the prompt, not computed but copied
    slot: Slot | None = None  # None until it is this session's turn
    ready_s: float = 0.0  # clock when it could start
    started_s: float = 0.0  # clock when it got its slot
    first_token_s: float = 0.0

    @property
    def pending(self) -> int:
        """Rows that are known but not in the cache: at most 1 while it generates."""
        return len(self.keys) - self.held.filled

    @property
    def held(self) -> Slot:
        assert self.slot is not None
        return self.slot

    @property
    def durations(self) -> dict[str, float]:
        """How long it waited for a slot, read its prompt and generated."""
        return {
            "queue_s": round(self.started_s - self.ready_s, 6),
            "prefill_s": round(self.first_token_s - self.started_s, 6),
            "decode_s": round(time.monotonic() - self.first_token_s, 6),
        }


S = TypeVar("S", bound=SlotSession)


class SlotEngine(SessionEngine[S], Generic[S]):
    """The sessions' queue and their slots. `_decoder` runs the rows."""

    _reads_in_turn = True  # one prompt after the other

    def __init__(self, options: SlotOptions, decoder: Decoder, reuse: bool) -> None:
        """reuse: start a prompt from what a slot remembers of one that begins with the same keys."""
        import torch

        from tritone.networks.spans import Span

        super().__init__(options)
        self._inference_mode = torch.inference_mode
        self._join = torch.cat
        self._span = Span
        self._decoder = decoder
        self._slots = Slots(options.max_slots, reuse=reuse)
        self._waiting: deque[S] = deque()  # could start, but there is no slot yet
        self._running: dict[str, S] = {}  # with a slot, in the order they got it

    # -- the interface --------------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        with self._inference_mode():
            return super().step() + self._start_waiting() + self._advance()

    @property
    def has_work(self) -> bool:
        can_start = bool(self._waiting) and self._slots.free > 0
        return super().has_work or can_start or any(s.pending for s in self._running.values())

    def abort(self, session: str) -> None:
        known = self._sessions.get(session)
        super().abort(session)
        if known is None:
            return
        if known.slot is not None:
            del self._running[session]
            self._slots.release(known.slot)
        elif known in self._waiting:
            self._waiting.remove(known)

    def stats(self) -> dict[str, int | float]:
        return {
            **super().stats(),
            "running": len(self._running),
            "waiting": len(self._waiting),
            "kv_tokens": sum(session.held.filled for session in self._running.values()),
            "kv_capacity_tokens": self._slot_options.max_slots * self._slot_options.max_context_tokens,
        }

    def check_integrity(self) -> None:
        """AssertionError unless sessions, queue and slots agree with each other."""
        self._slots.check_integrity()
        owners = {slot.owner: slot for slot in self._slots.all if slot.owner is not None}
        assert owners.keys() == self._running.keys()
        assert self._slots.free == self._slot_options.max_slots - len(self._running)
        for session in self._running.values():
            assert session is self._sessions[session.id] and session.slot is owners[session.id]
            assert session.held.tokens is session.keys
            assert session.pending >= 0 and len(session.keys) <= self._slot_options.max_context_tokens
        assert not self._reads_in_turn or sum(s.pending > 1 for s in self._running.values()) <= 1
        for session in self._waiting:
            assert session is self._sessions[session.id] and session.slot is None and session.keys

    # -- for subclasses -------------------------------------------------------------------------------------

    @abstractmethod
    def _rows(self, session: S, span: Span) -> Tensor:
        """Input rows [span.count, H] of a session."""

    @abstractmethod
    def _advance(self) -> list[Delta]:
        """Run what is pending, a bounded piece of it; what came out."""

    def _reusable(self, session: S) -> int:
        """How many rows at the beginning of a session may be copied instead of computed."""
        return len(session.keys)

    def _begun(self, session: S) -> list[Delta]:
        """What there is to say when a session gets its slot."""
        return []

    def _joined(self, parts: list[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else self._join(parts)

    def _queue(self, session: S) -> None:
        """Let a session that has rows wait for a slot."""
        session.ready_s = time.monotonic()
        self.note_phase(session.id, QUEUED)
        self._waiting.append(session)

    def _may_begin(self, session: S) -> bool:
        """Whether the prompt of a session that waits is to be read now, beside others or not."""
        if self._reads_in_turn:
            return all(s.pending <= 1 for s in self._running.values())
        unread = sum(max(0, s.pending - 1) for s in self._running.values())
        return unread < self._slot_options.prefill_chunk_tokens

    # -- inside a step --------------------------------------------------------------------------------------

    def _start_waiting(self) -> list[Delta]:
        """Give slots to those who wait, until there is enough to read."""
        deltas: list[Delta] = []
        while self._waiting and self._slots.free and self._may_begin(self._waiting[0]):
            session = self._waiting.popleft()
            session.slot, source = self._slots.take(session.id, session.keys, self._reusable(session))
            self._running[session.id] = session
            session.cached_tokens = session.slot.filled
            if source is not None:
                session.slot.filled = 0  # until it has them: a copy may fail
                self._decoder.copy_prefix(source.index, session.slot.index, session.cached_tokens)
                session.slot.filled = session.cached_tokens
            session.started_s = time.monotonic()
            self.note_phase(session.id, PREFILL)
            self._counts["prompt_tokens"] += len(session.keys)
            self._counts["cached_tokens"] += session.cached_tokens
            deltas += self._begun(session)
        return deltas
