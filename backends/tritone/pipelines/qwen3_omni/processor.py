"""The processor of a released checkpoint: its chat template, its tokenizer, its feature extractors.

    checkpoint folder ─► load_processor ─► messages ─► text with a mark for each medium
                                           text, images, sound, frames ─► token ids and features

All of it comes from files of the folder; nothing is ever fetched.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tritone.errors import ConfigError

INSTALL = "pip install 'tritone[qwen3-omni]'"

# What torchvision's compiled part would declare, as its version 0.28 does.
_OPERATORS = {
    "torchvision::nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "torchvision::qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def load_processor(folder: Path) -> Any:
    """The Qwen3OmniMoeProcessor of the checkpoint in `folder`.

    Raises ConfigError when a package is missing or the folder holds no complete processor.
    """
    transformers = import_transformers()
    try:
        return transformers.Qwen3OmniMoeProcessor.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
        reason = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
        raise ConfigError(
            f"the checkpoint in '{folder}' has no usable processor: {reason}",
            "give the whole folder of a released checkpoint, with its tokenizer and preprocessor files",
        ) from None


def import_transformers() -> ModuleType:
    """transformers, offline, with all that its processors and models import; use it for every first import.

    Raises ConfigError naming the package that is missing.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import_torchvision()
        importlib.import_module("PIL.Image")
        return importlib.import_module("transformers")
    except ImportError as missing:
        raise ConfigError(f"package '{missing.name or missing}' cannot be imported", INSTALL) from None


def import_torchvision() -> None:
    """Import torchvision, also beside a torch that it was not compiled for.

    Its compiled part does not load then, and the import fails at the first operator that it should have
    declared, as does every import of transformers afterwards. Transforms need none of the operators, so
    declarations without code are enough.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError as fault:
        if "torchvision::" not in str(fault):
            raise
        import torch

        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for operator, signature in _OPERATORS.items():
            torch.library.define(operator, signature)
        importlib.import_module("torchvision")
