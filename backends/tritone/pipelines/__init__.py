"""The table of pipelines: one row a model, imported when asked for."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from tritone.errors import ConfigError, suggestion

if TYPE_CHECKING:
    from tritone.pipeline import Pipeline

_TABLE: dict[str, str] = {
    "fake": "tritone.pipelines.fake",
    "qwen3_omni": "tritone.pipelines.qwen3_omni",
    "smoltalk": "tritone.pipelines.smoltalk",
}


def names() -> list[str]:
    return sorted(_TABLE)


def get(name: str) -> Pipeline:
    """The pipeline in the table under `name`, or PIPELINE of the Python file that `name` is the path of.

    The folder of such a file goes on sys.path, so that engines are found beside it ("echo:Writer").
    """
    pipeline: Pipeline = _module(name).PIPELINE
    return pipeline


def profiles(name: str) -> dict[str, Path]:
    """The deploy profiles that come with a pipeline (as for `get`), by name: `profiles/` beside its code."""
    folder = Path(_module(name).__file__ or "").parent / "profiles"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _module(name: str) -> ModuleType:
    if name.endswith(".py"):
        file = Path(name)
        if not file.is_file():
            raise ConfigError(f"pipeline file '{name}' does not exist", "check `pipeline:` in deploy.yaml")
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))
        return importlib.import_module(file.stem)
    if name not in _TABLE:
        raise ConfigError(f"unknown pipeline '{name}'", suggestion(name, _TABLE))
    return importlib.import_module(_TABLE[name])
