"""Values on their way to a device, and back: nobody waits for the copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritone.ports import Array


def on_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of `values`, nested as its dimensions are.

    From ordinary memory the host would wait until all that the device has to do is done: the values go by
    way of pinned memory, which torch keeps until the copy is over.
    """
    made = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return made.to(device, non_blocking=True)


def array_on_device(array: Array, device: torch.device) -> Tensor:
    """The same for a contiguous array of numbers, of its dtype."""
    made = torch.from_numpy(array)
    return (made.pin_memory() if device.type == "cuda" else made).to(device, non_blocking=True)


def begun_on_host(values: Tensor) -> Tensor:
    """A copy on the host, of the same dtype. It is there when anything that is launched after it is done."""
    made = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type == "cuda")
    return made.copy_(values, non_blocking=True)
