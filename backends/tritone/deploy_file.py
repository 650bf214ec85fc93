"""The text of a deploy.yaml, changed by one line: comments and layout stay as they are."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import yaml

from tritone.errors import ConfigError


def set_value(file: Path, key: str, value: str) -> None:
    """Give the top-level `key` of the file another plain value, in place; the file is never half written.

    Raises ConfigError when that would change anything else, as with a value that spans lines.
    """
    before = file.read_text(encoding="utf-8")
    after = _changed(before, key, value)
    if yaml.safe_load(after) != {**yaml.safe_load(before), key: value}:
        raise ConfigError(f"cannot change `{key}:` in {file}", f"write it there by hand: {key}: {value}")
    if after == before:
        return
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=file.parent, prefix=f".{file.name}-", delete=False
    ) as scratch:
        scratch.write(after)
    Path(scratch.name).chmod(file.stat().st_mode)
    os.replace(scratch.name, file)


def _changed(text: str, key: str, value: str) -> str:
    line = yaml.safe_dump({key: value}, width=1 << 20, allow_unicode=True).rstrip("\n")
    old = r"""(?:'[^'\n]*'|"[^"\n]*"|.*?)"""
    present = re.search(rf"^{key}[ \t]*:[ \t]*{old}(?P<comment>[ \t]+#.*)?$", text, re.MULTILINE)
    if present:
        return text[: present.start()] + line + (present["comment"] or "") + text[present.end() :]
    first = re.search(r"^pipeline[ \t]*:.*$", text, re.MULTILINE)
    place = first.end() if first else 0
    return f"{text[:place]}\n{line}{text[place:]}" if first else f"{line}\n{text}"
