from __future__ import annotations

import random

from tritone.engines.slots import Slot, Slots


def fill(slots: Slots, owner: str, tokens: list[int]) -> Slot:
    """Run a session to its end: everything but its last token is in the cache."""
    slot, _ = slots.take(owner, tokens)
    slot.filled = len(tokens) - 1
    slots.release(slot)
    return slot


def test_the_least_recently_used_slot_is_taken_first() -> None:
    slots = Slots(3)
    first = fill(slots, "a", [1, 2, 3])
    fill(slots, "b", [4, 5, 6])
    fill(slots, "c", [7, 8, 9])
    slot, source = slots.take("d", [0, 0])
    assert slot is first and source is None and slot.filled == 0
    assert slots.free == 2


def test_a_beginning_is_copied_from_a_slot_that_others_may_want() -> None:
    slots = Slots(3)
    old = fill(slots, "a", [1, 2, 3, 4, 5])
    slot, source = slots.take("b", [1, 2, 9, 9])
    assert source is old and slot is not old and slot.filled == 2
    busy, from_busy = slots.take("c", [1, 2, 9, 9, 9])
    assert from_busy is old and busy.filled == 2  # "b" has not computed its own tokens yet
    slots.check_integrity()


def test_a_conversation_goes_on_in_its_slot() -> None:
    slots = Slots(3)
    old = fill(slots, "a", [1, 2, 3, 4])
    slot, source = slots.take("b", [1, 2, 3, 4, 5, 6])
    assert slot is old and source is None and slot.filled == 3


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    slots = Slots(2)
    fill(slots, "a", [1, 2, 3, 4, 5])
    slot, _ = slots.take("b", [1, 2, 3])
    assert slot.filled == 2


def test_the_only_slot_is_its_own_source() -> None:
    slots = Slots(1)
    fill(slots, "a", [1, 2, 3, 4])
    slot, source = slots.take("b", [1, 2, 9])
    assert source is None and slot.filled == 2


def test_without_reuse_nothing_is_remembered() -> None:
    slots = Slots(2, reuse=False)
    fill(slots, "a", [1, 2, 3])
    slot, source = slots.take("b", [1, 2, 3, 4])
    assert source is None and slot.filled == 0


def test_no_more_is_copied_than_the_caller_can_use() -> None:
    slots = Slots(3)
    old = fill(slots, "a", [1, 2, 3, 4, 5, 6])
    slot, source = slots.take("b", [1, 2, 3, 4, 9], most=2)
    assert source is old and slot is not old and slot.filled == 2
    assert old.tokens == [1, 2, 3, 4, 5], "what others may still want stays"
    none, nobody = slots.take("c", [1, 2, 3, 4, 9], most=0)
    assert nobody is None and none is not old and none.filled == 0
    more, from_old = slots.take("d", [1, 2, 3], most=99)
    assert more is old and from_old is None and more.filled == 2  # the last slot left is its own source
    slots.check_integrity()


def test_a_limit_that_is_all_that_a_slot_holds_goes_on_in_place() -> None:
    slots = Slots(2)
    old = fill(slots, "a", [1, 2, 3])
    slot, source = slots.take("b", [1, 2, 8, 9], most=2)
    assert slot is old and source is None and slot.filled == 2


def test_invariants_hold_in_any_order() -> None:
    chance = random.Random(0)
    slots, owned = Slots(4), []
    for i in range(500):
        if slots.free and chance.random() < 0.6:
            slot, source = slots.take(
                str(i),
                [chance.randrange(2) for _ in range(chance.randrange(1, 9))],
                chance.choice((None, 0, 1, 3)),
            )
            assert source is not slot and (source is None or source.filled >= slot.filled > 0)
            owned.append(slot)
        elif owned:
            slot = owned.pop(chance.randrange(len(owned)))
            slot.filled = chance.randrange(slot.filled, len(slot.tokens) + 1)
            slots.release(slot)
        slots.check_integrity()
