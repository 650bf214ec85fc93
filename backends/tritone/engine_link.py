"""A door's side of one engine process: start it when it is absent, call it, restart it when it dies.

Any door of a colocated group may start the process; the one that binds the address first wins, the others
join. An engine process that dies fails its calls at once and is started again with back-off. One that hangs
is ended by the door that started it: when a loop of it has not turned, or it has not answered, for too long.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tritone import wire
from tritone.engine_process import EngineEnded, EngineProcess, EngineSpec
from tritone.engines.loop import IDLE_WAIT_S
from tritone.errors import ConfigError, EngineLost, TritoneError, Unavailable, from_code

log = logging.getLogger("tritone.door")

CONNECT_RETRY_S = 0.05
BACKOFF_S = (0.1, 0.5, 2.0, 5.0, 15.0, 30.0)
STABLE_S = 60.0  # a process that lived this long starts the back-off anew
LOADED_BACKOFF_S = 1.0  # at most, for one that had loaded: it is needed, and its load already paces the rest
FIRST_TRIES = 3  # ends before the very first Ready until the load counts as failed
BEAT_EVERY_S = 1.0  # how often an engine is asked when its loops last turned
BEAT_TIMEOUT_S = 1.0  # for the answer
MIN_TURN_LIMIT_S = 3 * IDLE_WAIT_S  # a loop that has nothing to do turns that seldom
LATE_BEATS = 2  # in a row until it counts as hung: one alone may follow a pause of the whole machine


class EngineLink:
    """The connection of one door to one engine process. Thread-safe.

    stage: for messages. spec: how to start the process; None joins one that another door starts.
    turn_limit_s: how long one turn of a loop in the process may take; None: as long as a call.
    """

    def __init__(
        self,
        stage: str,
        address: str,
        spec: EngineSpec | None,
        call_timeout_s: float,
        turn_limit_s: float | None = None,
    ) -> None:
        self.address = address
        self.process = EngineProcess(spec) if spec is not None else None
        self._stage = stage
        self._call_timeout_s = call_timeout_s
        self._turn_limit_s = max(turn_limit_s or call_timeout_s, MIN_TURN_LIMIT_S)
        self._late_beats = 0  # in a row
        self._heard_s = 0.0  # when a beat was last asked for with success
        self._beat: Future[Any] | None = None  # of the process that was asked last
        self._calls: dict[int, tuple[Future[Any], float]] = {}  # by number: future and monotonic deadline
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._channel: wire.Channel | None = None
        self._ready = threading.Event()
        self._failure: ConfigError | None = None
        self.loads = 0  # how often the process, or another at its address, became ready
        self._load_s: float | None = None  # how long the last load took; None: it never loaded
        self._began_s = time.monotonic()  # when the present load began
        self._due_s = 0.0  # when an engine that is lost is expected back, monotonic
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True, name=f"link {address}")
        self._keeper.start()
        threading.Thread(target=self._watch_deadlines, daemon=True, name="deadlines").start()

    # -- for the door ----------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    @property
    def in_flight(self) -> int:
        return len(self._calls)

    def wait_ready(self, timeout_s: float) -> None:
        """Raises ConfigError when the engine refuses to load, or does not within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self._ready.wait(0.05):
            if self._failure is not None:
                raise self._failure
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"the engine of stage {self._stage} did not load within {timeout_s:g} s",
                    "raise load_timeout_s in deploy.yaml",
                )

    def call(self, make: Callable[[int], wire.AnyMessage], timeout_s: float | None = None) -> Future[Any]:
        """Send the message that `make` builds around a call number. timeout_s: None: of every call.

        The future gives the answer message, or fails with the TritoneError that the engine or its loss means.
        """
        future: Future[Any] = Future()
        number = next(self._numbers)
        channel = self._channel
        if channel is None or not self._ready.is_set():
            future.set_exception(self._restarting())
            return future
        message = make(number)
        with self._lock:
            self._calls[number] = (future, time.monotonic() + (timeout_s or self._call_timeout_s))
        try:
            channel.send(message)
        except wire.Disconnected:
            self._settle(number, error=self._restarting())
        return future

    def tell(self, message: wire.AnyMessage) -> None:
        """Send without an answer; a lost engine needs no telling."""
        channel = self._channel
        if channel is not None:
            with contextlib.suppress(wire.Disconnected):
                channel.send(message)

    def close(self) -> None:
        """End the link, and the process if this door started it."""
        self._closing.set()
        if self.process is not None:
            self.process.end()
        channel = self._channel
        if channel is not None:
            channel.shutdown()
        self._keeper.join(timeout=5)

    # -- the keeper thread -----------------------------------------------------------------------------------

    def _keep(self) -> None:
        failures = 0
        while not self._closing.is_set():
            self._began_s = time.monotonic()
            reason, loaded = self._serve_once()
            if self._closing.is_set():
                break
            if self.process is None:
                self._closing.wait(CONNECT_RETRY_S)
                continue
            self.process.end()
            failures = 0 if time.monotonic() - self._began_s > STABLE_S else failures + 1
            if self._load_s is None and failures >= FIRST_TRIES and self._failure is None:
                self._failure = ConfigError(reason, "the server log has the details")
            pause_s = BACKOFF_S[min(max(failures - 1, 0), len(BACKOFF_S) - 1)]
            if loaded:
                pause_s = min(pause_s, LOADED_BACKOFF_S)
            self._due_s += pause_s
            log.warning("stage %s: %s; starting its engine again in %.1f s", self._stage, reason, pause_s)
            self._closing.wait(pause_s)

    def _serve_once(self) -> tuple[str, bool]:
        """Reach the process and read from it until it is gone; returns why it is, and if it had loaded."""
        reason = "the engine process is gone"
        try:
            self._channel = self._reach()
            self._read(self._channel)
        except (wire.Disconnected, EngineEnded, OSError) as error:
            reason = str(error)
        loaded = self._ready.is_set()
        self._due_s = time.monotonic() + (self._load_s or 0.0)
        self._ready.clear()
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()  # before the calls fail, so that a call that is being sent fails too
        for number in list(self._calls):
            what = f"the engine of stage {self._stage} died under the request"
            self._settle(number, error=EngineLost(what, "try again"))
        return reason, loaded

    def _reach(self) -> wire.Channel:
        """Connect; start the process first when nobody serves the address."""
        while not self._closing.is_set():
            try:
                channel = wire.connect(self.address)
                channel.send(wire.Hello(""))
                return channel
            except wire.Disconnected:
                if self.process is not None and not self.process.lives():
                    self.process.start()
            self._closing.wait(CONNECT_RETRY_S)
        raise wire.Disconnected("the door is closing")

    def _read(self, channel: wire.Channel) -> None:
        while True:
            self._take(channel.receive())  # and hold nothing of it while waiting

    def _take(self, message: Any) -> None:
        """Raises Disconnected when the engine says that it cannot load."""
        match message:
            case wire.Ready(load_s=load_s):
                self._load_s = load_s
                self.loads += 1
                self._failure = None
                self._ready.set()
            case wire.LoadFailed(what=what, cure=cure):
                self._failure = ConfigError(what, cure)
                raise wire.Disconnected(f"it cannot load: {what}; {cure}")
            case wire.Refused(call=call, code=code, what=what, cure=cure):
                self._settle(call, error=from_code(code, what, cure))
            case wire.Opened(call=call) | wire.Ran(call=call) | wire.Pong(call=call):
                self._settle(call, message)
            case wire.Loading():
                pass
            case _:
                log.warning("unexpected %s", type(message).__name__)

    def _settle(self, number: int, answer: Any = None, error: TritoneError | None = None) -> None:
        with self._lock:
            future, _ = self._calls.pop(number, (None, 0.0))
        if future is not None:
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(answer)

    def _restarting(self) -> Unavailable:
        """Why a call cannot be made now, with the expected time."""
        left_s = max(self._due_s - time.monotonic(), 1.0)
        what = f"the engine of stage {self._stage} is restarting"
        return EngineLost(what, f"try again in about {left_s:.0f} s")

    def _watch_deadlines(self) -> None:
        """A thread: calls that are not answered in time fail; a load that takes too long is started again.

        So is an engine that hangs.
        """
        next_beat_s = 0.0
        while not self._closing.wait(0.25):
            now = time.monotonic()
            if now > next_beat_s and self.process is not None and self.process.runs:
                next_beat_s = now + BEAT_EVERY_S
                self._check_beat()
            self._fail_late(now)  # and hold no answer while waiting
            if self.process is not None and not self._ready.is_set():
                limit_s = self.process.spec.load_timeout_s
                if now - self._began_s > limit_s and self.process.pid is not None:
                    log.error("stage %s: its engine did not load within %g s", self._stage, limit_s)
                    self.process.end()

    def _fail_late(self, now: float) -> None:
        for number, (_, deadline) in self._calls.copy().items():
            if now > deadline:
                what = f"the engine of stage {self._stage} did not answer within {self._call_timeout_s:g} s"
                self._settle(number, error=Unavailable(what, "try again; the server log may tell why"))

    def _check_beat(self) -> None:
        """Look at the last beat, end the process if it hangs, and ask for the next."""
        if self._beat is not None and not self._beat.done():
            return  # the deadline of the call bounds this
        fault = self._hang(self._beat)
        self._late_beats = self._late_beats + 1 if fault else 0
        self._beat = self.call(wire.Ping, BEAT_TIMEOUT_S) if self._ready.is_set() else None
        if fault and self._late_beats >= LATE_BEATS:
            self._late_beats, self._beat = 0, None
            log.error("stage %s: %s; ending its engine", self._stage, fault)
            assert self.process is not None
            self.process.kill()

    def _hang(self, beat: Future[Any] | None) -> str | None:
        """What an answer to a ping, or its absence, says against the engine; None: nothing."""
        error = beat.exception() if beat is not None else None
        if beat is None or isinstance(error, EngineLost):
            self._heard_s = time.monotonic()
            return None  # the keeper knows of a process that is gone
        if error is not None:
            silent_s = time.monotonic() - self._heard_s
            return f"it has not answered for {silent_s:.0f} s" if silent_s > self._turn_limit_s else None
        self._heard_s = time.monotonic()
        for model, stats in beat.result().stats.items():
            if stats["beat_age_s"] > self._turn_limit_s:
                return f"the loop of {model} has not turned for {stats['beat_age_s']:.0f} s"
        return None
