"""What an engine of the `fake` pipeline does when a fault is due."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from tritone.errors import TritoneError
from tritone.pipelines.fake.orders import FAULTS, Fault


def read_fault(settings: Any, default: str) -> Fault | None:
    """The fault of a session. settings: [kind, at] or None; default: of the deploy file, "kind@at" or ""."""
    if settings is not None:
        return Fault(*settings)
    kind, _, at = default.partition("@")
    return Fault(kind, int(at or 0)) if default else None


def check_fault(text: str) -> None:
    """Raise ValueError unless `text` is "", a kind of fault, or kind@at."""
    kind, _, at = text.partition("@")
    if text and (kind not in FAULTS or not (at or "0").isdecimal()):
        raise ValueError(f"fault is '{text}'; write one of {', '.join(FAULTS)}, e.g. fail@12")


def strike(fault: Fault) -> TritoneError:
    """Let it happen: gives the error of the one session, raises, ends the process, or never returns."""
    match fault.kind:
        case "raise":
            raise RuntimeError(f"raise@{fault.at} was ordered")
        case "oom":
            raise MemoryError(f"oom@{fault.at} was ordered")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            threading.Event().wait()
    return TritoneError(f"{fault.kind}@{fault.at} was ordered", "leave it out of the prompt")
