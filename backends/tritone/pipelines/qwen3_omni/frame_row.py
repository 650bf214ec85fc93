"""What the talker's schedule says of a frame that it asks for, and may hear instead of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tritone.sampling import Sampling

if TYPE_CHECKING:
    from torch import Tensor

NOT_A_NUMBER = -1  # in place of code 0: what it was to be drawn from was not a number


@dataclass(frozen=True)
class FrameRow:
    """What a slot brings to its next frame."""

    slot: int
    place: int  # of the row in its slot
    position: float | None  # that turns it, if that is not its place
    text: Tensor  # [H]: the row but for the last frame's embeddings
    begins: bool  # the last row of a prompt: there was no frame before
    sampling: Sampling  # of code 0
    draws: int  # that the slot's sequence had before this one
    drawn: Sequence[int]  # code 0 of the draws that are known by now
    bars_end: bool  # the end sign must not come
    is_last: bool  # code 0 ends the sequence whatever it is: no frame is asked for
