"""Where `tritone serve` takes orders of other commands: a socket for processes of the same user.

`tritone reload PIPELINE`        ──Reload───► desk of a `tritone serve` ──► supervisor
                                 ◄─Reloaded──                           ◄── what was done, or what is wrong
`tritone profile PIPELINE STAGE` ──Profile──► desk                      ──► supervisor
                                 ◄─Profiled──                           ◄── the file, or what is wrong
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from tritone import wire
from tritone.errors import ConfigError, TritoneError, from_code
from tritone.inbox import listening

PREFIX = "tritone/serve/"


class Desk:
    """Answers until it is closed."""

    def __init__(
        self, reload: Callable[[str], str], profile: Callable[[wire.Profile], wire.Profiled]
    ) -> None:
        """reload: does it for one pipeline, "" for all; says what it did, or raises TritoneError.

        profile: takes one, or raises TritoneError.
        """
        self._reload = reload
        self._profile = profile
        self._socket = wire.listen(f"{PREFIX}{os.getpid()}")
        self._thread = threading.Thread(target=self._serve, daemon=True, name="desk")
        self._thread.start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                channel = wire.accept(self._socket)
            except OSError:
                return  # it was closed
            threading.Thread(target=self._attend, args=(channel,), daemon=True, name="order").start()

    def _attend(self, channel: wire.Channel) -> None:
        with contextlib.suppress(wire.Disconnected), contextlib.closing(channel):
            match channel.receive():
                case wire.Reload(pipeline):
                    channel.send(self._answer_reload(pipeline))
                case wire.Profile() as order:
                    channel.send(self._answer_profile(order))

    def _answer_reload(self, pipeline: str) -> wire.Reloaded:
        try:
            return wire.Reloaded(self._reload(pipeline))
        except TritoneError as error:
            return wire.Reloaded(error.what, error.cure, error.code)

    def _answer_profile(self, order: wire.Profile) -> wire.Profiled | wire.Refused:
        try:
            return self._profile(order)
        except TritoneError as error:
            return wire.Refused(0, error.code, error.what, error.cure)


def ask_reload(pipeline: str, pid: int | None = None) -> str:
    """Have a `tritone serve` of this user reload a pipeline, "" for all; what it did.

    pid: of which; needed when several run. Raises TritoneError with what it refuses.
    """
    answer = _ask(wire.Reload(pipeline), pid)
    if answer.code:
        raise from_code(answer.code, answer.what, answer.cure)
    said: str = answer.what
    return said


def ask_profile(order: wire.Profile, pid: int | None = None) -> wire.Profiled:
    """Have a `tritone serve` of this user take a profile; returns when that is done.

    pid: of which; needed when several run. Raises TritoneError with what it refuses.
    """
    answer = _ask(order, pid)
    if isinstance(answer, wire.Profiled):
        return answer
    raise from_code(answer.code, answer.what, answer.cure)


def _ask(order: wire.Reload | wire.Profile, pid: int | None) -> Any:
    """The answer of the one that is meant."""
    running = sorted(int(name.removeprefix(PREFIX)) for name in listening(PREFIX))
    if not running or pid not in (None, *running):
        what = "no `tritone serve` runs here" if pid is None else f"no `tritone serve` runs as process {pid}"
        raise ConfigError(what, f"running are {', '.join(map(str, running))}" if running else "start one")
    if pid is None and len(running) > 1:
        raise ConfigError(
            f"{len(running)} `tritone serve` run here", f"give --pid, one of {', '.join(map(str, running))}"
        )
    try:
        with contextlib.closing(wire.connect(f"{PREFIX}{pid or running[0]}")) as channel:
            channel.send(order)
            return channel.receive()
    except wire.Disconnected as error:
        raise TritoneError(f"`tritone serve` did not answer ({error})", "read what it says") from None
