"""What the log of a tritonserver tells: which models are loaded, and what went wrong."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

NUM_ERROR_LINES = 5
NOISE = ("CudaDriverHelper has not been initialized",)  # errors that every server without a GPU logs


class Progress:
    """Reads a growing server log for models that finished loading."""

    _LOADED = re.compile(rb"successfully loaded '([^']+)'")

    def __init__(self, log: Path | None, offset: int = 0) -> None:
        """offset: where the run that is meant begins."""
        self._log = log
        self._offset = offset

    def news(self) -> list[str]:
        """Names of the models that were loaded since the last call."""
        if self._log is None or not self._log.exists():
            return []
        with self._log.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [name.decode() for name in self._LOADED.findall(complete)]


def size(log: Path | None) -> int:
    """Bytes in the log; a later run begins there."""
    return log.stat().st_size if log is not None and log.exists() else 0


def append(log: Path | None, line: str) -> None:
    """A line of our own among the server's, if it can be written."""
    if log is not None:
        with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def last_errors(log: Path | None, limit: int = NUM_ERROR_LINES, offset: int = 0) -> list[str]:
    """The last distinct errors in a server log, without their time stamps; those of models come first.

    offset: where the run that is meant begins.
    """
    if log is None or not log.exists():
        return []
    lines = log.read_bytes()[offset:].decode(errors="replace").splitlines()
    errors = [
        match.group(1).strip()
        for line in lines
        if (match := re.match(r"E\d{4} [\d:.]+ \d+ \S+\] ?(.*)", line))
    ]
    # What follows "At:" is a traceback.
    sentences = (error.strip('"').partition(r"\n\nAt:")[0] for error in errors)
    distinct = [sentence for sentence in dict.fromkeys(sentences) if not sentence.startswith(NOISE)]
    telling = [error for error in distinct if "failed to load" in error or "TRITONE_" in error]
    # A server that could not even start its log says why in a line of its own.
    spoke = any(re.match(r"[IWE]\d{4} ", line) for line in lines)
    return (telling or distinct or ([] if spoke else [line for line in lines if line.strip()]))[-limit:]
