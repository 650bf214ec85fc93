"""One pass of a codec decoder over some frames of B streams: what they remember, and how old they are.

EvenPass     as many frames of each stream, ages known to the host: masks only where they change something
PaddedPass   some of the frames of each, ages in a tensor: the same operations whatever the values
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from tritone.networks.causal_layers import Memory, PaddedMemory


class Pass(Memory):
    """The memory of streams, and what is not yet part of them."""

    @abstractmethod
    def filled(self, past: int, keys: int) -> Tensor | None:
        """Which keys, `past` remembered ones and then those of the pass, are frames; None: all.

        bool [B, 1, 1, keys]
        """

    @abstractmethod
    def lead(self, lead: int, columns: int, length: int) -> Tensor | None:
        """What of a pass of `length` columns, `columns` a frame, belongs to no sample; None: nothing.

        lead: columns that come before the first of a new stream. bool [B, 1, longest lead, at most length]
        """


class EvenPass(Pass):
    """Moves the memory of its streams in place."""

    def __init__(self, rows: Tensor, ages: Sequence[int]) -> None:
        """rows: [B, size of the layout]; ages: frames of each stream before these."""
        super().__init__(rows)
        self._device, self._ages = rows.device, ages

    def filled(self, past: int, keys: int) -> Tensor | None:
        unfilled = [max(0, past - age) for age in self._ages]
        if not any(unfilled):
            return None
        first = torch.tensor(unfilled, device=self._device)[:, None, None, None]
        return torch.arange(keys, device=self._device) >= first

    def lead(self, lead: int, columns: int, length: int) -> Tensor | None:
        leads = [lead - age * columns for age in self._ages]
        longest = min(max(leads), length)
        if longest <= 0:
            return None
        ends = torch.tensor(leads, device=self._device)[:, None, None]
        return torch.arange(longest, device=self._device) < ends


class PaddedPass(PaddedMemory, Pass):
    """Makes the memory of its streams anew."""

    def __init__(self, rows: Tensor, ages: Tensor, valid: Tensor) -> None:
        """ages: int [B], frames of each stream before these; valid: int [B], of these frames."""
        super().__init__(rows, valid)
        self._ages = ages.long()

    def filled(self, past: int, keys: int) -> Tensor:
        return torch.arange(keys, device=self._ages.device) >= (past - self._ages)[:, None, None, None]

    def lead(self, lead: int, columns: int, length: int) -> Tensor:
        # Where a frame is longer than the lead nobody has to ask how long the pass is, not even a trace.
        longest = lead if lead <= columns else min(lead, length)
        return torch.arange(longest, device=self._ages.device) < (lead - self._ages * columns)[:, None, None]
