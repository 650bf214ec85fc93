"""What a user asks of `tritone serve`: by its arguments at the start, by signals later."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tritone.server import Listen, uses_tls

DRAIN_S = 30.0


@dataclass(frozen=True)
class ServeOptions:
    """The arguments of `tritone serve`."""

    targets: tuple[str, ...]  # pipelines, or folders with a deploy.yaml
    overrides: tuple[str, ...] = ()  # "key.path=value", or "<pipeline>:key.path=value"
    profiles: tuple[str, ...] = ()  # of the deploy files: "one_h200", or "<pipeline>:one_h200"
    listen: Listen = field(default_factory=Listen)  # port 0 takes a free one
    run_folder: Path | None = None  # None: a fresh temporary one
    log: str | None = None  # "stderr" or a file; None: in the run folder
    load_timeout_s: float | None = None  # None: what the slowest stage is given, and some seconds
    drain_s: float = DRAIN_S  # how long requests that run may go on when an end or a reload is asked for
    open_admin: bool = False  # leave the server's admin APIs open to everybody who reaches it
    check_only: bool = False
    extra: tuple[str, ...] = ()  # options for the server
    certificates: Mapping[str, str] = field(default_factory=dict)  # files of our own client, by its keyword

    @property
    def client(self) -> dict[str, Any]:
        """Keywords of the client that asks the pipelines how they are."""
        secure = uses_tls(self.extra) or bool(self.certificates)
        return {"ssl": True, **self.certificates} if secure else {}


class Asked:
    """Whether somebody asked for the end, once for an orderly one, twice for a quick one, or for a reload."""

    def __init__(self) -> None:
        self._end = threading.Event()
        self._reload = threading.Event()
        self.times = 0

    def listen(self) -> None:
        """Take the signals. SIGHUP means a reload, unless it tells that our terminal is gone."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.note)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGHUP, self.note if has_terminal() else self.note_reload)

    def note(self, *_: object) -> None:
        self.times += 1
        self._end.set()

    def note_reload(self, *_: object) -> None:
        self._reload.set()

    def wait(self, timeout_s: float) -> bool:
        """Whether the end is asked for, within `timeout_s`."""
        return self._end.wait(timeout_s)

    def take_reload(self) -> bool:
        """Whether a reload was asked for since the last call."""
        asked = self._reload.is_set()
        self._reload.clear()
        return asked


def has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
