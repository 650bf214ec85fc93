"""What the log says of an exception: where it came from and what kind it is, and nothing that a client sent.

The words of an exception often repeat the value that it is about (`int("my secret")`). Those of the machine
and of the interpreter do not, and are shown.
"""

from __future__ import annotations

import linecache
import logging
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from tritone.errors import Cancelled, DeadlineExceeded, Unavailable

TELLING = (
    *(OSError, MemoryError, RuntimeError, ImportError, AttributeError, NameError, TypeError, IndexError),
    *(ArithmeticError, Unavailable, DeadlineExceeded, Cancelled),
)
MAX_CHARACTERS = 300


def described(error: BaseException) -> str:
    """One line about an exception, e.g. "KeyError at text.py:81"."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        place = f" at {Path(frame.f_code.co_filename).name}:{line}"
    return f"{_named(error)}{place}"


class FaultFormatter(logging.Formatter):
    """Formats tracebacks without the words of exceptions that may repeat a request."""

    def formatException(
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        error: Any = ei[1]
        parts: list[str] = []
        shown: set[str] = set()
        while error is not None and len(parts) < 8:
            frames = traceback.extract_tb(error.__traceback__)
            shown.update(frame.filename for frame in frames)
            told = "".join(traceback.format_list(frames))
            parts.append(f"Traceback (most recent call last):\n{told}{_named(error)}")
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        for name in shown:
            linecache.cache.pop(name, None)  # it would keep every line of the files that were shown
        return "\n\nthen, while that was handled:\n\n".join(reversed(parts))


def _named(error: BaseException) -> str:
    """The kind of an exception, and what it says if that is no secret."""
    kind = type(error).__name__
    if not isinstance(error, TELLING) or isinstance(error, ValueError | KeyError):
        return kind
    words = " ".join(str(error).split())
    return f"{kind}: {words[:MAX_CHARACTERS]}" if words else kind
