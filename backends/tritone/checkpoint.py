"""Where a pipeline's weights lie on this machine, and whether they are all there.

    <root>/<pipeline>/<FORMAT>/manifest.json         written last: names every other file
                               <stage>/config.json   what the stage's engine reads, never typed elsewhere
                               <stage>/...           weights

Built by `python build/<pipeline>.py`; read-only afterwards.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tritone.errors import ConfigError

FORMAT = "1"  # of the folder above; a build of another format lies beside it and is left alone
MANIFEST = "manifest.json"


def checkpoint_dir(pipeline: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of `pipeline`'s checkpoint: under `$TRITONE_CACHE`, else under `~/.cache/tritone`."""
    root = environ.get("TRITONE_CACHE") or "~/.cache/tritone"
    return Path(root).expanduser() / pipeline / FORMAT


def require_checkpoint(path: Path, stage: str) -> Path:
    """The folder of `stage` in the checkpoint `path`, with every file there that the manifest lists for it.

    Raises ConfigError naming what is missing and the command that builds it.
    """
    command = f"run `make weights`, or `python build/{path.parent.name}.py` in the environment"
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise ConfigError(f"no complete checkpoint in '{path}': it has no {MANIFEST}", command)
    try:
        sizes = {
            name: int(entry["bytes"]) for name, entry in json.loads(manifest.read_bytes())["files"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"'{manifest}' cannot be read", f"delete '{path}' and {command}") from None
    mine = {name: size for name, size in sizes.items() if name.startswith(f"{stage}/")}
    if not mine:
        raise ConfigError(f"the checkpoint in '{path}' has no stage '{stage}'", f"delete it and {command}")
    for name, size in mine.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            raise ConfigError(
                f"the checkpoint in '{path}' is damaged at '{name}'", f"delete it and {command}"
            )
    return path / stage


def read_config(stage_folder: Path) -> dict[str, Any]:
    """A stage's config.json; ConfigError when there is none."""
    file = stage_folder / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError:
        pipeline = stage_folder.parent.parent.name
        raise ConfigError(
            f"the checkpoint folder '{stage_folder}' has no config.json",
            f"run `make weights`, or `python build/{pipeline}.py` in the environment",
        ) from None
    except ValueError as fault:
        raise ConfigError(f"'{file}' is not JSON: {fault}", "build the checkpoint again") from None
    if not isinstance(config, dict):
        raise ConfigError(f"'{file}' does not hold a JSON object", "build the checkpoint again")
    return config
