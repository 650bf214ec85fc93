"""What a pipeline's door tells a server that asks its models themselves whether they are ready.

server ──is_ready()──► verdict, a flag ◄── looks every LOOK_EVERY_S, while somebody asks

Servers do so from python_backend r26.03 on, on the thread that also serves a stub's BLS calls: whoever looked
at the stages there would wait for itself. Older ones never ask, and then nobody looks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

LOOK_EVERY_S = 2.0
ASKED_S = 60.0  # after the last question, looking ends
LOOK_TIMEOUT_S = 5.0


class Readiness:
    """Thread-safe."""

    def __init__(self, look: Callable[[float], Mapping[str, Mapping[str, Any]]]) -> None:
        """look: within so many seconds the state of every stage, with "error" if it cannot serve."""
        self._look = look
        self._lock = threading.Lock()
        self._asked_s = 0.0  # monotonic
        self._watched = False
        self._ready = True  # until somebody has looked: the model has loaded
        self._closing = threading.Event()

    def __call__(self) -> bool:
        """Whether all stages served when they were last looked at; returns at once."""
        with self._lock:
            self._asked_s = time.monotonic()
            if not self._watched and not self._closing.is_set():
                self._watched = True
                threading.Thread(target=self._watch, daemon=True, name="readiness").start()
            return self._ready

    def close(self) -> None:
        self._closing.set()

    def _watch(self) -> None:
        while not self._closing.is_set():  # else there may be nobody to ask any more
            ready = self._sound()
            with self._lock:
                self._ready = ready
                if time.monotonic() - self._asked_s > ASKED_S:
                    self._watched, self._ready = False, True
                    return
            self._closing.wait(LOOK_EVERY_S)

    def _sound(self) -> bool:
        try:
            return not any("error" in state for state in self._look(LOOK_TIMEOUT_S).values())
        except Exception:
            return False  # an orchestrator that does not answer serves nobody
