"""Sound of codec frames for streams in slots, and the ways to make it.

    shares: slot, frames [F, codebooks] ─► Waves ─► samples of each
                                            └─ the state of every slot

`EagerWaves` passes shares of equal length through the network, operation by operation, and is the reference.
The others make passes in fixed shapes (`wave_steps.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tritone.networks.waveform_config import WaveformConfig
from tritone.ports import Array

if TYPE_CHECKING:
    from tritone.networks.waveform_decoder import WaveformDecoder, WaveformState


@dataclass(frozen=True)
class Share:
    """What one stream brings to a batch."""

    slot: int
    frames: Array  # int32 [F, codebooks], F >= 0


class Waves(ABC):
    """Makes samples of the frames of some slots."""

    config: WaveformConfig
    state_bytes: int  # of one stream

    @abstractmethod
    def begin(self, slot: int) -> None:
        """A new stream begins in a slot."""

    @abstractmethod
    def end(self, slot: int) -> None:
        """The stream in a slot is over."""

    @abstractmethod
    def decode(self, shares: Sequence[Share]) -> list[Array]:
        """The new samples of each share, float32 [n] in [-1, 1]; shares are of different slots."""


class EagerWaves(Waves):
    """Operation by operation, whatever the device; a stream has memory from its begin to its end."""

    def __init__(self, decoder: WaveformDecoder) -> None:
        import torch

        from tritone.networks.waveform_decoder import Piece

        self.config, self.state_bytes = decoder.config, decoder.state_bytes
        self._torch, self._piece = torch, Piece
        self._decoder = decoder
        self._states: dict[int, WaveformState] = {}

    def begin(self, slot: int) -> None:
        self._states[slot] = self._decoder.new_state()

    def end(self, slot: int) -> None:
        self._states.pop(slot, None)

    def decode(self, shares: Sequence[Share]) -> list[Array]:
        if not shares:
            return []
        samples = self._decoder.forward(
            [self._piece(self._torch.from_numpy(share.frames), self._states[share.slot]) for share in shares]
        )
        lengths = [len(mine) for mine in samples]
        # One transfer from the device, whatever the number of streams.
        joined = self._torch.cat(samples).float().cpu().numpy()
        return np.split(joined, np.cumsum(lengths)[:-1])
