"""The weights that the stages of Qwen3-Omni load: those of the checkpoint, or random ones in their place."""

from __future__ import annotations

import torch

from tritone.engines.base import Placement
from tritone.engines.memory import LoadFormat
from tritone.networks.weights import Weights


def open_weights(placement: Placement, load_format: LoadFormat, dtype: torch.dtype) -> Weights:
    """dummy: drawn on the device, in this dtype and in the shapes of config.json; no file of weights is read.

    ConfigError when there are no weights, or no package to make some with.
    """
    if load_format == "auto":
        return Weights(placement.checkpoint)
    from tritone.pipelines.qwen3_omni.processor import import_transformers

    import_transformers()
    from tritone.networks.dummy_weights import DummyWeights

    return DummyWeights(placement.checkpoint, placement.device, dtype)
