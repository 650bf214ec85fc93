"""What is remembered of tapped rows, and what is forgotten."""

from __future__ import annotations

import numpy as np

from tritone.engines.vllm.row_memory import RowMemory

KEYS = [7, -1, -2, 8, 9, -3, 5]
PLACES = np.array([1, 2, 5])
ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_a_prompt_is_recalled_whole_or_by_its_beginning():
    memory = RowMemory(1 << 10)
    assert memory.recall(KEYS, PLACES, [2, 3]) is None
    memory.keep(KEYS, PLACES[:2], ROWS[:2])
    assert np.array_equal(memory.recall(KEYS, PLACES, [2, 3]), ROWS[:2])
    memory.keep(KEYS, PLACES, ROWS)
    assert np.array_equal(memory.recall([*KEYS[:6], 1, 2], PLACES, [2, 3]), ROWS)


def test_what_comes_before_tells_prompts_apart():
    memory = RowMemory(1 << 10)
    memory.keep(KEYS, PLACES, ROWS)
    assert memory.recall([6, *KEYS[1:]], PLACES, [3]) is None
    assert memory.recall([*KEYS[:5], -4, 5], PLACES, [3]) is None


def test_the_least_recently_used_is_forgotten():
    memory = RowMemory(2 * ROWS.nbytes)
    one, two, three = ([number, *KEYS[1:]] for number in (1, 2, 3))
    for keys in (one, two):
        memory.keep(keys, PLACES, ROWS)
    memory.keep(one, PLACES, ROWS)
    memory.recall(two, PLACES, [3])
    memory.keep(three, PLACES, ROWS)
    known = [memory.recall(keys, PLACES, [3]) is not None for keys in (one, two, three)]
    assert known == [False, True, True] and memory.size_bytes == 2 * ROWS.nbytes


def test_more_than_there_is_room_for_is_not_kept():
    memory = RowMemory(ROWS.nbytes - 1)
    memory.keep(KEYS, PLACES, ROWS)
    assert memory.size_bytes == 0
