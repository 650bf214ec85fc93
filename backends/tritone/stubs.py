"""The stub processes of a running tritonserver, one a model instance. Triton starts no dead one again."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from tritone import guard


@dataclass(frozen=True)
class Stub:
    """One process, told from a later one with the same number by its start."""

    pid: int
    started: str  # ticks since the boot, as /proc tells it

    @property
    def lives(self) -> bool:
        state = _state(self.pid)
        return state is not None and state[0] not in "ZX" and state[1] == self.started


class Stubs:
    """Those of one server, by model. Thread-safe.

    A stub's command line holds the shared-memory prefix of its server and the name of its model instance.
    """

    def __init__(self, shm_prefix: str) -> None:
        self._prefix = shm_prefix.encode()
        self._known: dict[str, set[Stub]] = {}
        self._lock = threading.Lock()

    def learn(self, models: Iterable[str]) -> None:
        """Look up the stubs of models that were just loaded."""
        found: dict[str, set[Stub]] = {model: set() for model in models}
        for entry in guard.PROC.iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # it ended meanwhile
            if not any(word.startswith(self._prefix) for word in words):
                continue
            for model, stubs in found.items():
                instance = re.compile(rb"%b(_\d+|_gpu\d+)+" % re.escape(model.encode()))
                started = _started(int(entry.name))
                if started is not None and any(instance.fullmatch(word) for word in words):
                    stubs.add(Stub(int(entry.name), started))
        with self._lock:
            self._known.update(found)

    def lost(self, models: Iterable[str]) -> list[str]:
        """Those of `models` that have a stub that died since `learn`."""
        with self._lock:
            known = {model: self._known.get(model, set()) for model in models}
        return [model for model, stubs in known.items() if not all(stub.lives for stub in stubs)]

    def pids(self, model: str) -> list[int]:
        """Of the stubs of a model that live, the oldest first."""
        with self._lock:
            stubs = self._known.get(model, set())
        lasting = [stub for stub in stubs if stub.lives]
        return [stub.pid for stub in sorted(lasting, key=lambda stub: (int(stub.started), stub.pid))]

    def kill(self, model: str) -> None:
        """End what is left of a model's stubs, so that the server does not wait for one that hangs."""
        with self._lock:
            stubs = self._known.get(model, set())
        for stub in stubs:
            if stub.lives:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stub.pid, signal.SIGKILL)


def _state(pid: int) -> tuple[str, str] | None:
    """The state letter and the start of a process; None when there is none."""
    try:
        fields = (guard.PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]


def _started(pid: int) -> str | None:
    state = _state(pid)
    return state[1] if state is not None else None
