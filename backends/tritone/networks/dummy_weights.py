"""Random weights in the shapes that a config.json asks for: to measure a model whose weights are not at hand.

config.json ─► the model class of `transformers`, without memory ─► name, shape ─► noise of unit gain
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import torch
from torch import Tensor

from tritone.checkpoint import read_config
from tritone.networks.weights import Weights


class DummyWeights(Weights):
    """In place of `Weights`; the same name always gives the same numbers on the same kind of device."""

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        """folder: with config.json. Weights are made on the device, which is much faster than here."""
        import transformers

        self.folder = folder
        [name] = read_config(folder)["architectures"]
        config = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = getattr(transformers, name)(config)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._device, self._dtype = device, dtype

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        generator = torch.Generator(device=self._device).manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(shape, generator=generator, device=self._device, dtype=self._dtype)
        if len(shape) > 1:
            return noise.mul_(1 / math.sqrt(math.prod(shape[1:]) if "conv" in name else shape[-1]))
        return noise.mul_(0.1) if name.endswith("bias") else noise.mul_(0.1).add_(1.0)
