"""Deploy profiles: what a deploy.yaml says differently on a certain machine, as a file with a name.

    deploy.yaml ◄─ over ─ one_h200.yaml ◄─ over ─ dummy_one_h200.yaml ◄─ over ─ --set

A profile has the keys of a deploy.yaml, without `pipeline`. `over: <profile>` puts it over another one. Those
of a pipeline lie beside its code, in `profiles/`; a path names one of the user's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tritone.errors import ConfigError, suggestion

OVER = "over"


def read_yaml(path: Path, kind: str) -> dict[str, Any]:
    """The mapping in a YAML file. ConfigError naming the file; kind: of file that it should have been."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", f"name a {kind} file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {str(error).splitlines()[0]}", "mend the file") from None
    if not isinstance(raw, dict):
        start = "pipeline: <name>" if kind == "deploy.yaml" else "stages:"
        raise ConfigError(f"{path} holds no mapping", f"start it with `{start}`")
    return raw


def read_profile(name: str, pipeline: str) -> dict[str, Any]:
    """What a profile changes. name: of one that comes with the pipeline, or a path.

    ConfigError naming the profiles that there are, or what is wrong with this one.
    """
    from tritone import pipelines

    known = pipelines.profiles(pipeline)
    changes: dict[str, Any] = {}
    read: list[Path] = []
    while name:
        path = known.get(name, Path(name).expanduser())
        if name not in known and not path.is_file():
            if not known:
                raise ConfigError(f"pipeline '{pipeline}' has no profile '{name}'", "name a file")
            raise ConfigError(f"pipeline '{pipeline}' has no profile '{name}'", suggestion(name, known))
        if path in read:
            raise ConfigError(f"profile '{name}' lies over itself", f"mend `{OVER}:` in {path}")
        read.append(path)
        raw = read_yaml(path, "profile")
        if "pipeline" in raw:
            raise ConfigError(
                f"{path} has the key 'pipeline'", "leave it out: a profile changes a deploy.yaml"
            )
        name = str(raw.pop(OVER, ""))
        changes = laid_over(raw, changes)
    return changes


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`below` with the values of `above`, mapping by mapping."""
    merged = dict(below)
    for key, value in above.items():
        inner = below.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[key] = laid_over(inner, value) if both else value  # type: ignore[arg-type]
    return merged
