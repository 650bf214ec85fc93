"""A run as a JSON file: versioned, complete enough to draw every plot again, and checked when it is read.

    {"schema": "tritone-bench/1", "environment": …, "server": …, "plan": …, "request_set": …, "levels": […]}

`client/bench/report.schema.json` is the JSON Schema of it. Files of another version are refused: the
meaning of a figure must not be guessed.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from tritone_bench.environment import Environment, ServerFacts
from tritone_bench.level import LevelReport
from tritone_bench.load import Consume
from tritone_client.errors import InvalidRequest

Schema: TypeAlias = Literal["tritone-bench/1"]
SCHEMA: Schema = get_args(Schema)[0]


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """How the load was put on."""

    consume: Consume
    duration_s: float | None
    num_warmup_requests: int
    num_repeats: int
    delivery: dict[str, Any]  # options of every request that change how an answer comes, not what is asked


@dataclass(frozen=True, slots=True)
class RequestSetFacts:
    """What was asked."""

    source: str
    digest: str  # equal exactly for sets that ask the same
    num_different: int  # requests before they repeat
    num_requests: int | None  # at every level; None: as many as its duration allowed
    first_seed: int
    options: dict[str, Any]  # of every request


@dataclass(frozen=True, slots=True)
class Document:
    """One run of `tritone bench`."""

    schema: Schema
    environment: Environment
    server: ServerFacts
    plan: PlanFacts
    request_set: RequestSetFacts
    levels: tuple[LevelReport, ...]


def write(document: Document, path: Path) -> None:
    """Write the file, or replace it at once. Raises OSError."""
    draft = path.with_name(f".tritone-{secrets.token_hex(8)}.json")
    try:
        draft.write_bytes(encode(document))
        os.replace(draft, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
    finally:
        draft.unlink(missing_ok=True)


def encode(document: Document) -> bytes:
    """UTF-8 JSON, one level a line, so that two files can be diffed."""
    import msgspec

    head = msgspec.json.encode({**_shallow(document), "levels": []})
    levels = b",\n".join(msgspec.json.encode(level) for level in document.levels)
    return head.removesuffix(b"[]}") + b"[\n" + levels + b"\n]}\n"


def read(path: Path) -> Document:
    """Read and check a file.

    Raises:
        InvalidRequest: it is no such document, or one of another version.
        OSError: it cannot be read.
    """
    import msgspec

    data = path.read_bytes()
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidRequest(f"{path} is not JSON; give a file that `tritone bench --json` wrote") from None
    version = found.get("schema") if isinstance(found, dict) else None
    if version != SCHEMA:
        raise InvalidRequest(
            f"{path} has schema {version!r}, this program reads {SCHEMA!r}; measure again with --json"
        )
    try:
        return msgspec.convert(found, Document)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{path} is not a whole report ({error}); measure again with --json") from None


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a document."""
    import msgspec

    return msgspec.json.schema(Document)


def _shallow(document: Document) -> dict[str, Any]:
    return {field.name: getattr(document, field.name) for field in dataclasses.fields(document)}
