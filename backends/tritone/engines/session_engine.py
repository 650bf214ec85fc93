"""What every engine that batches by itself knows of its sessions: who may come, who is refused, what is done.

    add_request ─► [there is room] ─► prompt becomes known ─► queued ─► … ─► done, aborted or refused

Subclasses say what waiting means, and how a step runs; they call `step`, `has_work`, `abort` and `stats` of
this class for what is the same for all.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Generic, TypeVar

from tritone.engines.base import Delta, Engine
from tritone.errors import InvalidRequest, TritoneError, Unavailable

if TYPE_CHECKING:
    from tritone.engines.slot_engine import SlotOptions

S = TypeVar("S")


class SessionEngine(Engine, Generic[S]):
    """Sessions by id, and the refusals that the next step tells."""

    def __init__(self, options: SlotOptions) -> None:
        self._slot_options = options
        self._sessions: dict[str, S] = {}
        self._refused: list[Delta] = []  # errors found outside `step`, to be told by the next one
        self._counts = {"prompt_tokens": 0, "cached_tokens": 0, "generated_tokens": 0, "steps": 0}

    def step(self) -> list[Delta]:
        """Tell the refusals; subclasses do their piece of work after it."""
        deltas, self._refused = self._refused, []
        return deltas

    @property
    def has_work(self) -> bool:
        return bool(self._refused)

    def abort(self, session: str) -> None:
        self._refused = [delta for delta in self._refused if delta.session != session]
        self._sessions.pop(session, None)

    def stats(self) -> dict[str, int | float]:
        return {"active": len(self._sessions), "slots": self._slot_options.max_slots, **self._counts}

    @abstractmethod
    def _queue(self, session: S) -> None:
        """Let a session whose prompt is known wait for its turn."""

    def _check_room(self, session: str) -> None:
        """Unavailable when no more sessions are taken, InvalidRequest when this one is open already."""
        options = self._slot_options
        capacity = options.max_slots + options.max_waiting
        if len(self._sessions) >= capacity:
            limits = f"max_slots {options.max_slots} and max_waiting {options.max_waiting}"
            raise Unavailable(f"{capacity} sessions are open, as many as {limits} allow", "try again later")
        if session in self._sessions:
            raise InvalidRequest(f"session '{session}' is open already", "use another id")

    def _refuse(self, session: str, error: TritoneError) -> None:
        """End a session outside `step`."""
        self.abort(session)
        self._refused.append(Delta(session, error=error))

    def _run_out(self) -> None:
        """Step until nothing is left of a warm-up, which then counts for nothing."""
        while self.has_work:
            self.step()
        self._counts = dict.fromkeys(self._counts, 0)
