"""Pinned memory of the host beside the buffers of a captured step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Staging:
    """For one step at a time: what the host says, and what was drawn."""

    packed: Tensor  # int32 [B, COLUMNS]
    drawn: Tensor  # as the buffer that the step writes
    done: Any  # CUDA event behind the copy of what was drawn; None on a CPU

    @classmethod
    def beside(cls, packed: Tensor, drawn: Tensor) -> Staging:
        """packed, drawn: on the device of the step."""
        is_cuda = packed.device.type == "cuda"
        packed, drawn = (
            torch.zeros(buffer.shape, dtype=buffer.dtype, pin_memory=is_cuda) for buffer in (packed, drawn)
        )
        return cls(packed, drawn, torch.cuda.Event() if is_cuda else None)  # type: ignore[no-untyped-call]

    def fetch(self, drawn: Tensor) -> None:
        """Begin to copy what was drawn for the first rows."""
        self.drawn[: len(drawn)].copy_(drawn, non_blocking=True)
        if self.done is not None:
            self.done.record()

    def fetched(self, count: int) -> Tensor:
        """What was drawn for the first rows, waited for."""
        if self.done is not None:
            self.done.synchronize()
        return self.drawn[:count]
