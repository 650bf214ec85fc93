from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle, islice

import pytest

from tritone.pipelines.qwen3_omni.loop_guard import LONGEST_LOOP, LoopGuard

BEFORE = [40, 41, 42, 43, 41, 40, 50]


def heard(codes: Iterable[int], most: int) -> int | None:
    """Frames until the guard has heard enough; None: it never has."""
    guard = LoopGuard(most)
    return next((number for number, code in enumerate(codes, 1) if guard.hear((code, 0, 0))), None)


def looped(length: int, frames: int) -> list[int]:
    return list(islice(cycle(range(length)), frames))


@pytest.mark.parametrize("length", [1, 3, LONGEST_LOOP])
@pytest.mark.parametrize("most", [5, 40])
def test_a_loop_is_cut_after_so_many_repeated_frames(length: int, most: int) -> None:
    assert heard(BEFORE + looped(length, 200), most) == len(BEFORE) + length + most


@pytest.mark.parametrize(
    "codes",
    [
        pytest.param(looped(LONGEST_LOOP + 1, 120), id="longer than any loop that is known"),
        pytest.param([*looped(3, 8), 9, 0, 1], id="left by a frame that is new"),
        pytest.param([0] * 5 + [1] * 4 + [0] * 3 + [1] * 2, id="left by one that is known"),
        pytest.param([*looped(3, 8), *looped(2, 5)], id="one loop after another"),
        pytest.param(range(60), id="no frame twice"),
    ],
)
def test_what_is_no_loop_goes_on(codes: Iterable[int]) -> None:
    assert heard(codes, 6) is None


def test_a_guard_of_no_frames_hears_no_loop() -> None:
    assert heard([7] * 150, 0) is None


def test_frames_that_differ_in_their_last_code_are_no_loop() -> None:
    guard = LoopGuard(5)
    assert not any(guard.hear((7, 0, number % 50)) for number in range(100))
