"""The slots of an engine's cache: who holds which, and what each still remembers.

A slot keeps its tokens after its session has left, until it is taken again, so that a later prompt with
the same beginning (the system prompt, the earlier turns of a conversation) starts from a copy and not from
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Slot:
    index: int
    owner: str | None = None  # session
    tokens: list[int] = field(default_factory=list)  # while owned the session's own list, which grows
    filled: int = 0  # how many of `tokens` have keys and values in the cache


class Slots:
    """All slots; the least recently used free one is taken first."""

    def __init__(self, count: int, reuse: bool = True) -> None:
        """reuse: start from what other slots remember."""
        self.all = [Slot(index) for index in range(count)]
        self._free = list(self.all)  # in order of use
        self.reuse = reuse

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, owner: str, tokens: list[int], most: int | None = None) -> tuple[Slot, Slot | None]:
        """A slot for a session that will run `tokens`, and the slot to copy its first `filled` tokens from.

        At most `most` tokens are copied, and at least the last one is left to compute: the answer begins
        from it.
        """
        slot, source, shared = self._free[0], None, 0
        if self.reuse:
            source = max(self.all, key=lambda slot: _shared(slot, tokens))
            shared = min(_shared(source, tokens), len(tokens) - 1, len(tokens) if most is None else most)
            if source.owner is None and source.filled == shared:
                slot = source  # it remembers nothing else, so that going on in place loses nothing
        self._free.remove(slot)
        slot.owner, slot.tokens, slot.filled = owner, tokens, shared
        return slot, source if shared and source is not slot else None

    def remembered(self, tokens: Sequence[int]) -> int:
        """How many tokens at the beginning of `tokens` some slot has in its cache."""
        return max(_shared(slot, tokens) for slot in self.all)

    def release(self, slot: Slot) -> None:
        slot.owner = None
        slot.tokens = slot.tokens[: slot.filled]
        self._free.append(slot)

    def check_integrity(self) -> None:
        """AssertionError unless every slot is either free or owned, and none claims more than it has."""
        assert len(set(self._free)) == len(self._free)
        for slot in self.all:
            assert (slot.owner is None) == (slot in self._free), slot
            assert 0 <= slot.filled <= len(slot.tokens), slot
            assert slot.owner is not None or slot.filled == len(slot.tokens), slot


def _shared(slot: Slot, tokens: Sequence[int]) -> int:
    """How many tokens at the beginning of `tokens` the slot has in its cache."""
    for i, (mine, other) in enumerate(zip(slot.tokens[: slot.filled], tokens, strict=False)):
        if mine != other:
            return i
    return min(slot.filled, len(tokens))
