"""Write model_repository/DEPLOY.md, every key of a deploy file, from the dataclasses that read it.

    deploy.py, sampling.py, each engine's Options ─► fields, defaults, the comments beside them ─► tables

python build/deploy_page.py [--check]
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import io
import re
import sys
import textwrap
import tokenize
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from tritone import pipelines
from tritone.deploy import Deploy, StageDeploy
from tritone.sampling import Sampling

PAGE = Path(__file__).parents[1] / "model_repository" / "DEPLOY.md"
BLOCKS: dict[str, Any] = {
    field.name: field.default_factory
    for field in dataclasses.fields(Deploy)
    if dataclasses.is_dataclass(field.default_factory)
}
BESIDE = ("pipeline", "checkpoint", "stages", "digest", "source")  # fields of Deploy that are no plain keys
HEAD = """\
<!-- Written by `python build/deploy_page.py` from the dataclasses that read it: edit those, not this. -->
# Every key of deploy.yaml

A deploy file says how one pipeline runs on one machine. What it leaves out has the default below, or the
pipeline's own; an unknown key is refused, with the one that was probably meant. Precedence: request >
`--set` > profile > deploy.yaml > pipeline. After a change run `tritone render <pipeline>`; `tritone serve`
does it by itself.

```yaml
pipeline: smoltalk        # its name, or the path of a Python file that declares one
checkpoint: /models/mine  # folder of its weights; default: $TRITONE_CACHE, or ~/.cache/tritone
max_in_flight: 32         # and the other keys of the first table
chunks:                   # and the other blocks
  codec_chunk_frames: 25
stages:                   # each has the keys under "A stage"
  thinker:
    device: gpu:0
    engine:               # `kind` where a stage has several, and the engine's options
      max_slots: 16
    sampling:             # of requests that say nothing
      temperature: 0.7
```
"""


def comments(kind: type) -> dict[str, str]:
    """By field that a dataclass declares itself: the comment beside it."""
    source = textwrap.dedent(inspect.getsource(kind))
    found: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found[token.start[0]] = token.string.lstrip("# ")
    [declared] = ast.parse(source).body
    assert isinstance(declared, ast.ClassDef)
    return {
        item.target.id: " ".join(
            found[line] for line in range(item.lineno, (item.end_lineno or item.lineno) + 1) if line in found
        )
        for item in declared.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


def default_of(field: dataclasses.Field[Any]) -> str:
    value: Any = field.default
    if value is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is None or value is dataclasses.MISSING:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"`{value}` ({value >> 20:,} MiB)"
    if isinstance(value, tuple):
        value = list(value)
    return f"`{value!r}`".replace("'", '"')


def rows(kind: type, without: Collection[str] = ()) -> Iterator[str]:
    """A table row a field, those of base classes first."""
    said: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        said |= comments(base)
    for field in dataclasses.fields(kind):
        if field.name not in without:
            meaning = re.sub(r"\s+", " ", said[field.name]).replace("|", "\\|")
            yield f"| `{field.name}` | {default_of(field)} | {meaning} |"


def table(title: str, lines: Iterator[str], level: int = 2) -> str:
    return "\n".join((f"{'#' * level} {title}\n", "| key | default | |", "|---|---|---|", *lines, ""))


def engine_tables() -> Iterator[str]:
    for name in pipelines.names():
        pipeline = pipelines.get(name)
        for stage in pipeline.stages:
            for kind in stage.engines:
                options = stage.engine_class(kind, name).Options
                title = f"{name} {stage.name}" + (f", `kind: {kind}`" if len(stage.engines) > 1 else "")
                if dataclasses.fields(options):
                    yield table(title, rows(options), level=3)


def page() -> str:
    return "\n".join(
        (
            HEAD,
            table("The pipeline", rows(Deploy, without=(*BLOCKS, *BESIDE))),
            *(table(f"`{name}:`", rows(kind)) for name, kind in BLOCKS.items()),
            table("A stage", rows(StageDeploy, without=("engine", "options", "sampling"))),
            table("`sampling:` of a stage that draws tokens", rows(Sampling)),
            "Each pipeline has its own defaults, and a request goes before all of them.\n",
            "## Engine options, `engine:` of a stage\n",
            *engine_tables(),
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Write model_repository/DEPLOY.md from the dataclasses that read deploy files."
    )
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    if parser.parse_args().check:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
