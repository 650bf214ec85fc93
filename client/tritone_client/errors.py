"""What can go wrong between a caller and a pipeline, as one small tree.

    TritoneError
    ├── ConnectionFailed     nobody answered at the url, or the connection broke     (made by the client)
    ├── InvalidRequest       INVALID_ARG, UNSUPPORTED, ALREADY_EXISTS: change the request
    ├── NotFound             NOT_FOUND: this server has no such pipeline
    ├── Unavailable          UNAVAILABLE: busy or still starting; the same request may work later
    ├── Cancelled            CANCELLED: somebody asked for the request to stop
    ├── DeadlineExceeded     DEADLINE_EXCEEDED: the request took longer than it was allowed to
    └── ServerFault          INTERNAL, UNKNOWN: the server's own fault
        └── BrokenStream     the responses do not add up to an answer               (made by the client)

A pipeline reports `TRITONE_<CODE>: what is wrong; what to do`. The code chooses the class and the rest is the
message. Errors of Triton itself carry no such prefix; their gRPC status chooses the class.
"""

from __future__ import annotations

import re
from typing import ClassVar

import grpc
from tritonclient.utils import InferenceServerException


class TritoneError(Exception):
    """Base of everything this package raises on purpose.

    `str(error)` says what is wrong and what to do; `code` is the contract's word for it, e.g. `INVALID_ARG`.
    """

    default_code: ClassVar[str] = "UNKNOWN"

    def __init__(self, message: str, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code


class ConnectionFailed(TritoneError):
    """Nobody answered at the url, or the connection broke in the middle of an answer."""

    default_code = "UNAVAILABLE"


class InvalidRequest(TritoneError):
    """The request itself is wrong; sending it again cannot help."""

    default_code = "INVALID_ARG"


class NotFound(TritoneError):
    """The server has no such pipeline."""

    default_code = "NOT_FOUND"


class Unavailable(TritoneError):
    """The pipeline is busy or still starting; the same request may work later."""

    default_code = "UNAVAILABLE"


class Cancelled(TritoneError):
    """The request was cancelled, by the server or by closing the client."""

    default_code = "CANCELLED"


class DeadlineExceeded(TritoneError):
    """The request took longer than its deadline."""

    default_code = "DEADLINE_EXCEEDED"


class ServerFault(TritoneError):
    """The server failed; nothing is wrong with the request."""

    default_code = "INTERNAL"


class BrokenStream(ServerFault):
    """The responses do not add up to an answer: a gap in the audio, a lost response, no `done` at the end."""


_CLASS_OF_CODE: dict[str, type[TritoneError]] = {
    "INVALID_ARG": InvalidRequest,
    "UNSUPPORTED": InvalidRequest,
    "ALREADY_EXISTS": InvalidRequest,
    "NOT_FOUND": NotFound,
    "UNAVAILABLE": Unavailable,
    "CANCELLED": Cancelled,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "INTERNAL": ServerFault,
    "UNKNOWN": ServerFault,
}
# Where gRPC has another word for what Triton calls INVALID_ARG and UNSUPPORTED.
_CODE_OF_STATUS = {
    "INVALID_ARGUMENT": "INVALID_ARG",
    "FAILED_PRECONDITION": "INVALID_ARG",
    "OUT_OF_RANGE": "INVALID_ARG",
    "UNIMPLEMENTED": "UNSUPPORTED",
    "RESOURCE_EXHAUSTED": "UNAVAILABLE",
}
# What Triton refuses before the pipeline sees it comes over a stream as a bare string, despite the header.
_CODE_OF_WORDING = (
    (re.compile(r"no available versions|not ready|queue size|stopping|shutting down", re.I), "UNAVAILABLE"),
    (re.compile(r"unknown model", re.I), "NOT_FOUND"),
    (re.compile(r"unexpected|expected|missing|invalid|unsupported|must ", re.I), "INVALID_ARG"),
)
# Triton puts words of its own before a backend's message, so the prefix may stand anywhere.
_CONTRACT_ERROR = re.compile(r"TRITONE_([A-Z_]+):\s*(.*)", re.DOTALL)
# gRPC uses UNAVAILABLE for its own troubles too. Only the wording tells them from a server that refuses.
_NOT_REACHED = re.compile(r"failed to connect|errors resolving|(dns|name) resolution|handshake", re.I)
_CONNECTION_LOST = re.compile(
    r"socket closed|connection reset|broken pipe|goaway|cancelling all calls|endpoint clos|transport clos"
    r"|recvmsg|stream removed|keepalive|connection closed",
    re.I,
)


def from_triton(
    error: grpc.RpcError | InferenceServerException, url: str, pipeline: str, deadline_s: float | None = None
) -> TritoneError:
    """The error of this tree that says the same as an error of gRPC or of tritonclient.

    Args:
        error: a failed call (`grpc.aio.AioRpcError`) or tritonclient's exception.
        url: `host:port` the call went to, named in connection errors.
        pipeline: name of the pipeline, named in the command that starts it.
        deadline_s: how long the call was allowed to take, if it had a deadline.
    """
    status, details = _status_and_details(error)
    contract_error = _CONTRACT_ERROR.search(details)
    if contract_error:
        code, message = contract_error.groups()
        return _CLASS_OF_CODE.get(code, ServerFault)(message.strip(), code)
    if status == "UNAVAILABLE" and _NOT_REACHED.search(details):
        return ConnectionFailed(
            f"could not reach a Triton server at {url} ({_last_reason(details)}); "
            f"start it with `tritone serve {pipeline}` or give the address of its gRPC port"
        )
    if status == "UNAVAILABLE" and _CONNECTION_LOST.search(details):
        return ConnectionFailed(
            f"the connection to {url} was lost ({_last_reason(details)}); see whether the server still runs, "
            "then send the request again"
        )
    if status == "DEADLINE_EXCEEDED" and deadline_s is not None:
        return DeadlineExceeded(f"no complete answer within {deadline_s:g} s; allow more or ask for less")
    code = _CODE_OF_STATUS.get(status, status)
    if code == "UNKNOWN":
        code = next((code for wording, code in _CODE_OF_WORDING if wording.search(details)), code)
    if code == "NOT_FOUND" and "unknown model" in details:
        details = f"{details}; check the pipeline's name, or load it into the server at {url}"
    return _CLASS_OF_CODE.get(code, ServerFault)(details.strip() or f"the server answered {status}", code)


def _status_and_details(error: grpc.RpcError | InferenceServerException) -> tuple[str, str]:
    """The gRPC status by its bare name, e.g. `UNAVAILABLE`, and the message."""
    if isinstance(error, InferenceServerException):
        status, details = error.status(), error.message()
    else:
        status, details = error.code(), error.details()
    return str(status or "UNKNOWN").removeprefix("StatusCode."), details or ""


def _last_reason(details: str) -> str:
    """The innermost cause of gRPC's nested wording, e.g. `Connection refused`."""
    return details.rstrip(" ]").rsplit(": ", 1)[-1] or details
