"""When a kernel of a step lets the next one start: programmatic dependent launch.

BEHIND    when it has ended
AHEAD     at once: the next asks for its weights, which no kernel makes, before it waits
NEXT      when it has waited itself: the next is there when this one ends, and no third one is
"""

from __future__ import annotations

from enum import IntEnum

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


class Start(IntEnum):
    """Of the kernel behind."""

    BEHIND = 0
    AHEAD = 1
    NEXT = 2

    @property
    def arguments(self) -> dict[str, int | bool]:
        """Of a launch."""
        return {"START": int(self), **({"launch_pdl": True} if self else {})}

    def on(self, device: torch.device) -> Start:
        """What there is of it on a device: GPUs have it from compute capability 9.0 on."""
        has_it = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        return self if has_it else Start.BEHIND


_AHEAD, _NEXT = tl.constexpr(int(Start.AHEAD)), tl.constexpr(int(Start.NEXT))


@triton.jit
def start_next(START: tl.constexpr):
    """At the start of a kernel."""
    if START == _AHEAD:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(START: tl.constexpr):
    """Before the first load of what another kernel has made."""
    if START > 0:
        gdc_wait()
    if START == _NEXT:
        gdc_launch_dependents()
