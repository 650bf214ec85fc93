"""What the orchestrator asks of a stage model, as JSON in its `control` input. Typed on both sides."""

from __future__ import annotations

import hmac
from typing import Any

import msgspec

from tritone.errors import InvalidRequest
from tritone.ports import Array
from tritone.wire import Route


class OpenSession(msgspec.Struct, frozen=True, tag_field="op", tag="open"):
    """Start a session on an engine of this stage; answered {"endpoint": the engine's address}."""

    session: str
    inbox: str  # address of the orchestrator's inbox
    sources: int  # how many upstream stages will send pieces
    settings: dict[str, Any]
    routes: list[Route]
    whole: bool = False  # the engine gets nothing of its upstream stages before all of them have ended
    trace: dict[str, str] = {}  # carrier of the span above, see tracing; {}: none is recorded


class RunChunk(msgspec.Struct, frozen=True, tag_field="op", tag="chunk"):
    """One chunk of a stream through a Triton-batched stage; answered with its outputs."""

    session: str
    start: bool
    end: bool
    settings: dict[str, Any] = {}
    trace: dict[str, str] = {}  # as for OpenSession


class DropStream(msgspec.Struct, frozen=True, tag_field="op", tag="drop"):
    """Forget a stream; ends its Triton sequence."""

    session: str


class KeepStream(msgspec.Struct, frozen=True, tag_field="op", tag="keep"):
    """Answered at once; keeps Triton from ending a sequence that waits for its listener."""


class PingStage(msgspec.Struct, frozen=True, tag_field="op", tag="ping"):
    """Answered with the figures of every engine of the stage."""


Control = OpenSession | RunChunk | DropStream | KeepStream | PingStage
KEEP_EVERY_S = 10.0  # a sequence without a call for this long gets a KeepStream
ASK_THE_PIPELINE = "call the pipeline model instead"


class _Letter(msgspec.Struct, frozen=True):
    """What the `control` input holds."""

    key: str  # of the server, see server_key
    call: Control


_decoder = msgspec.json.Decoder(_Letter)


def encode(control: Control, key: str = "") -> bytes:
    return msgspec.json.encode(_Letter(key, control))


def decode(data: bytes | Array, key: str = "") -> Any:
    """The call in a `control` input, uint8 [n].

    Raises InvalidRequest without the right key: a stranger has called.
    """
    try:
        letter = _decoder.decode(bytes(data))
    except msgspec.MsgspecError:
        raise InvalidRequest("control is not a call that stages know", ASK_THE_PIPELINE) from None
    if not hmac.compare_digest(letter.key.encode(), key.encode()):
        raise InvalidRequest("stage models are internal to their server", ASK_THE_PIPELINE)
    return letter.call
