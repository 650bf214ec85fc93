"""Finding the folder of a pipeline: `<folder>/deploy.yaml` beside `<folder>/<Triton model>/config.pbtxt`.

Such a folder is one Triton model repository. The commonest mistakes are to name the folder above it, which
holds several of them, or a model folder inside it; both get the right path as the answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tritone import pbtxt, pipelines
from tritone.deploy import Deploy
from tritone.errors import ConfigError, suggestion
from tritone.server import checkout_root

DEPLOY = "deploy.yaml"
CONFIG = "config.pbtxt"
FOLDER = "model_repository"


def shelves() -> list[Path]:
    """Where a pipeline's folder is looked up by name: here, then in the library's checkout."""
    checkout = checkout_root()
    found = [Path(FOLDER)]
    if checkout is not None:
        found.append(checkout.parent / FOLDER)
    return found


def find(target: str, places: Iterable[Path] | None = None) -> Path:
    """The folder of `target`, a pipeline's name or a path. Raises ConfigError naming a near one."""
    places = shelves() if places is None else list(places)
    path = Path(target).expanduser()
    if path.name == DEPLOY and path.is_file():
        path = path.parent
    if (path / DEPLOY).is_file():
        return path
    for place in places:
        if (place / target / DEPLOY).is_file():
            return place / target
    if path.is_dir():
        raise misplaced(path)
    known = {folder.name for place in places for folder in below(place)} | set(pipelines.names())
    if target in known:
        where = " nor in ".join(f"'{place}'" for place in places)
        raise ConfigError(
            f"pipeline '{target}' has no folder in {where}", "name the folder that holds its deploy.yaml"
        )
    raise ConfigError(f"'{target}' is neither a pipeline nor a folder", suggestion(target, known))


def misplaced(path: Path) -> ConfigError:
    """What is wrong with a folder that has no deploy.yaml, and which folder is meant."""
    inside = below(path)
    if inside:
        names = ", ".join(f"'{folder}'" for folder in inside)
        return ConfigError(f"'{path}' holds the folders of pipelines and is none itself", f"use {names}")
    for above in list(path.resolve().parents)[:2]:
        if (above / DEPLOY).is_file():
            return ConfigError(f"'{path}' lies inside the folder of a pipeline", f"use '{above}'")
    return ConfigError(f"'{path}' holds no {DEPLOY}", f"name a folder such as '{FOLDER}/<pipeline>'")


def below(path: Path) -> list[Path]:
    """The folders of pipelines directly inside `path`."""
    if not path.is_dir():
        return []
    return sorted(folder for folder in path.iterdir() if (folder / DEPLOY).is_file())


def stale(deploy: Deploy, folder: Path) -> list[str]:
    """The models in `folder` whose config.pbtxt is missing or not what `deploy` renders to."""
    return [
        name
        for name, text in pbtxt.texts(deploy).items()
        if not (folder / name / CONFIG).is_file()
        or (folder / name / CONFIG).read_text(encoding="utf-8") != text
    ]


def strangers(deploy: Deploy, folder: Path) -> list[str]:
    """Model folders that the pipeline no longer has; Triton would try to load them."""
    own = pbtxt.texts(deploy)
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.is_dir() and not entry.name.startswith(".") and entry.name not in own
    )
