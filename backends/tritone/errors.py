"""Every error a user of Tritone can meet, as one small tree.

    TritoneError                 INTERNAL      a fault of ours; the message says what to report
    ├── InvalidRequest           INVALID_ARG   the request is wrong: field, value, what to do
    ├── NotFound                 NOT_FOUND     a name that the server does not know
    ├── Unsupported              UNSUPPORTED   a right request that this deployment cannot serve
    ├── Unavailable              UNAVAILABLE   right request, wrong moment: full, loading, restarting
    │   ├── EngineLost                         the engine process of a stage died under the request
    │   └── NotReached                         Triton says why it did not let a call through to a stage
    ├── DeadlineExceeded         CANCELLED     the request's own deadline passed before any output
    ├── Cancelled                CANCELLED     the client left
    └── ConfigError              (never sent)  a pipeline or deploy file that must not start a server

A message has the form ``TRITONE_<CODE>: what is wrong; what to do`` (contract.md), so that a client whose
protocol drops the status code can still tell the kinds apart.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TritoneError(Exception):
    """Base of all. `what` is one sentence without a full stop; `cure` says what to do about it."""

    code = "INTERNAL"  # the word after TRITONE_ in the message
    triton_code = "INTERNAL"  # name of the constant on pb_utils.TritonError
    public_code = ""  # the same word for a client, where stages tell kinds apart that a client need not

    def __init__(self, what: str, cure: str = "") -> None:
        super().__init__(what)
        self.what = _shown(what)
        self.cure = _shown(cure)

    @property
    def message(self) -> str:
        """The line a client reads."""
        return f"TRITONE_{self.public_code or self.code}: {self}"

    @property
    def internal_message(self) -> str:
        """The line that a stage gives its orchestrator."""
        return f"TRITONE_{self.code}: {self}"

    def __str__(self) -> str:
        return self.what + (f"; {self.cure}" if self.cure else "")


class InvalidRequest(TritoneError):
    code = triton_code = "INVALID_ARG"


class NotFound(TritoneError):
    code = triton_code = "NOT_FOUND"


class Unsupported(TritoneError):
    code = triton_code = "UNSUPPORTED"


class Unavailable(TritoneError):
    code = triton_code = "UNAVAILABLE"


class EngineLost(Unavailable):
    """The engine process died; it is being restarted in place."""

    code, public_code = "ENGINE_LOST", "UNAVAILABLE"


class NotReached(Unavailable):
    """No stage has heard of the call, as far as can be told."""


class DeadlineExceeded(TritoneError):
    code = "DEADLINE_EXCEEDED"
    triton_code = "CANCELLED"


class Cancelled(TritoneError):
    code = triton_code = "CANCELLED"


class ConfigError(TritoneError):
    code = triton_code = "INVALID_ARG"


def not_numbers(what: str) -> TritoneError:
    """What a network computed for one session are not numbers; what: plural, in words."""
    return TritoneError(f"{what} are not numbers", "use dtype float32, or check the weights")


_BY_CODE: dict[str, type[TritoneError]] = {
    kind.code: kind
    for kind in (
        TritoneError,
        InvalidRequest,
        NotFound,
        Unsupported,
        Unavailable,
        EngineLost,
        DeadlineExceeded,
        Cancelled,
    )
}


def from_code(code: str, what: str, cure: str = "") -> TritoneError:
    """The error that crossed a process border as (code, what, cure)."""
    return _BY_CODE.get(code, TritoneError)(what, cure)


MAX_SENTENCE_CHARACTERS = 300
MAX_WORD_CHARACTERS = 64


def _shown(sentence: str) -> str:
    """A sentence as it may be shown: what it repeats of a caller may be long or hold control characters."""
    cut = sentence[:MAX_SENTENCE_CHARACTERS]
    printable = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
    return printable + ("…" if len(sentence) > MAX_SENTENCE_CHARACTERS else "")


def suggestion(word: str, known: Iterable[str]) -> str:
    """What to do about an unknown `word`: the closest known one, else all of them."""
    names = sorted(known)
    close = (
        difflib.get_close_matches(word, names, n=1, cutoff=0.6) if len(word) <= MAX_WORD_CHARACTERS else []
    )
    if close:
        return f"did you mean '{close[0]}'?"
    return "known: " + ", ".join(names) if names else "nothing is accepted here"
