"""What the orchestrator asks of a stage model, as JSON in its `control` input. Typed on both sides."""

from __future__ import annotations

from typing import Any

import msgspec

from tritone.errors import InvalidRequest
from tritone.wire import Route


class OpenSession(msgspec.Struct, frozen=True, tag_field="op", tag="open"):
    """Start a session on an engine of this stage; answered {"endpoint": the engine's address}."""

    session: str
    inbox: str  # address of the orchestrator's inbox
    sources: int  # how many upstream stages will send pieces
    settings: dict[str, Any]
    routes: list[Route]
    whole: bool = False  # the engine gets nothing of its upstream stages before all of them have ended


class RunChunk(msgspec.Struct, frozen=True, tag_field="op", tag="chunk"):
    """One chunk of a stream through a Triton-batched stage; answered with its outputs."""

    session: str
    start: bool
    end: bool
    settings: dict[str, Any] = {}


class DropStream(msgspec.Struct, frozen=True, tag_field="op", tag="drop"):
    """Forget a stream; ends its Triton sequence."""

    session: str


class PingStage(msgspec.Struct, frozen=True, tag_field="op", tag="ping"):
    """Answered with the figures of every engine of the stage."""


Control = OpenSession | RunChunk | DropStream | PingStage

_decoder = msgspec.json.Decoder(Control)


def encode(control: Control) -> bytes:
    return msgspec.json.encode(control)


def decode(text: str) -> Any:
    """Raises InvalidRequest: stage models are internal, so a stranger has called."""
    try:
        return _decoder.decode(text)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(
            f"control is not a call that stages know ({error})", "call the pipeline model"
        ) from None
