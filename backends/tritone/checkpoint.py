"""Where a pipeline's weights lie on this machine, and whether they are all there.

built by `python build/<pipeline>.py`, read-only afterwards:

    <root>/<pipeline>/<FORMAT>/manifest.json         written last: names every other file
                               <stage>/config.json   what the stage's engine reads, never typed elsewhere
                               <stage>/...           weights

released by a model's author, in the Hugging Face layout, anywhere:

    <folder>/config.json
             model.safetensors.index.json            names the file of every tensor
             model-00001-of-00015.safetensors ...    or one model.safetensors and no index
             ...                                     tokenizer and processor
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tritone.errors import ConfigError

FORMAT = "1"  # of the folder above; a build of another format lies beside it and is left alone
MANIFEST = "manifest.json"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


def checkpoint_dir(pipeline: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of `pipeline`'s checkpoint, below `cache_dir`."""
    return cache_dir(environ) / pipeline / FORMAT


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """What is built and fetched: `$TRITONE_CACHE`, else `~/.cache/tritone`."""
    return Path(environ.get("TRITONE_CACHE") or "~/.cache/tritone").expanduser()


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


def require_released(path: Path, pipeline: str, with_weights: bool = True) -> Path:
    """`path`, with config.json and, if they are wanted, every weight file there whole.

    Raises ConfigError naming what is missing and what to do.
    """
    cure = (
        f"give the folder of a released checkpoint with --checkpoint DIR, "
        f"or run `python build/{pipeline}_tiny.py` for a tiny one"
    )
    if not (path / CONFIG).is_file():
        raise ConfigError(f"no checkpoint in '{path}': it has no {CONFIG}", cure)
    for name in _weight_files(path, cure) if with_weights else ():
        file = path / name
        if not file.is_file():
            raise ConfigError(f"the checkpoint in '{path}' lacks '{name}'", cure)
        if file.stat().st_size != max((end for _, end in _tensors(file).values()), default=-1):
            raise ConfigError(f"the checkpoint in '{path}' is damaged at '{name}'", "fetch that file again")
    return path


def released_bytes(path: Path) -> dict[str, int]:
    """Weights of a released checkpoint in bytes, by the first part of the tensor names; {} if it has none."""
    sizes: dict[str, int] = {}
    with contextlib.suppress(ConfigError, OSError):
        for name in _weight_files(path, ""):
            for tensor, (start, end) in _tensors(path / name).items():
                part = tensor.partition(".")[0]
                sizes[part] = sizes.get(part, 0) + end - start
    return sizes


def released_elements(path: Path) -> dict[str, int]:
    """Elements of every tensor of a released checkpoint, by its name; ConfigError if it has no weights."""
    cure = "give the folder of a released checkpoint, or `load_format: dummy` for random weights"
    return {
        name: math.prod(entry["shape"])
        for file in _weight_files(path, cure)
        if (path / file).is_file()
        for name, entry in _entries(path / file)[0].items()
    }


def _weight_files(path: Path, cure: str) -> list[str]:
    """The names of the files with weights; ConfigError when nothing says which."""
    index = path / INDEX
    if not index.is_file():
        if not (path / WEIGHTS).is_file():
            raise ConfigError(f"no weights in '{path}': it has neither {INDEX} nor {WEIGHTS}", cure)
        return [WEIGHTS]
    try:
        return sorted({str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"'{index}' cannot be read", "fetch that file again") from None


def _tensors(file: Path) -> dict[str, tuple[int, int]]:
    """Name of each tensor of a safetensors file to its first and last byte; {} when the head is broken."""
    entries, base = _entries(file)
    try:
        offsets = {name: entry["data_offsets"] for name, entry in entries.items()}
        return {name: (base + start, base + end) for name, (start, end) in offsets.items()}
    except (ValueError, TypeError, KeyError):
        return {}


def _entries(file: Path) -> tuple[dict[str, Any], int]:
    """Of each tensor of a safetensors file what its head says, by name, and where the data begin; {} when
    the head is broken."""
    with file.open("rb") as head:
        length = int.from_bytes(head.read(8), "little")
        if length >= file.stat().st_size:
            return {}, 0
        try:
            entries: dict[str, Any] = json.loads(head.read(length))
            entries.pop("__metadata__", None)
        except (ValueError, TypeError, AttributeError):
            return {}, 0
    return entries, 8 + length


def read_config(stage_folder: Path) -> dict[str, Any]:
    """A stage's config.json; ConfigError when there is none."""
    file = stage_folder / CONFIG
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
