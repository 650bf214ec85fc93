"""Which rows of which slots go through a decoder in one pass, and which of them attend in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one slot in a forward pass."""

    slot: int
    start: int  # place of the first row: how many tokens the slot holds already
    count: int = 1

    @property
    def end(self) -> int:
        return self.start + self.count


class Block(NamedTuple):
    """Spans of equal start and length in neighbouring slots, which attend in one call."""

    slot: int  # the first
    slots: int
    start: int
    rows: int  # of each slot

    @property
    def end(self) -> int:
        return self.start + self.rows


def in_blocks(spans: Sequence[Span]) -> list[Block]:
    """The spans in their order, those taken together that can be."""
    blocks: list[Block] = []
    for span in spans:
        last = blocks[-1] if blocks else Block(-1, 0, 0, 0)
        if (last.slot + last.slots, last.start, last.rows) == (span.slot, span.start, span.count):
            blocks[-1] = last._replace(slots=last.slots + 1)
        else:
            blocks.append(Block(span.slot, 1, span.start, span.count))
    return blocks
