"""Keeps one pipeline of a running server in health: looks at it every second, and mends what it can.

    stub processes ─┐                 ┌─ a stub died or hangs ──► its model is unloaded and loaded
    ping            ├──► look ────────┤
    orders ─────────┘                 └─ that does not help ────► a verdict: the server must start again

A dead engine is none of its business: the engine's door starts it again.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from tritone import doctor
from tritone import server as servers
from tritone.deploy import Deploy
from tritone.errors import ConfigError, TritoneError, Unavailable
from tritone.finding import Level
from tritone.health import Board, stage_faults
from tritone.pipeline import Batching
from tritone.running_server import RunningServer, models_of, pipeline_models, twin_of

LOOK_EVERY_S = 1.0
HANG_S = 30.0  # an orchestrator that answers no ping for so long hangs; one that is busy may be slow
HANG_MARGIN_S = 10.0  # a door, on top of what a call to it may take; one that the server has given up
MAX_MENDS = 5  # of one pipeline within MEND_WINDOW_S; then the server is to start again
MEND_WINDOW_S = 600.0
JOIN_S = 5.0


@dataclass
class State:
    """How one pipeline does, from look to look."""

    fault: str | None = None  # None: it is ready
    down_since_s: float = 0.0  # time.monotonic()

    def note(self, fault: str | None) -> str | None:
        """Take the outcome of a look; gives what to say about it, if it is new."""
        before, self.fault = self.fault, fault
        if fault == before:
            return None
        if before is None:
            self.down_since_s = time.monotonic()
        if fault is None:
            return f"is ready again after {time.monotonic() - self.down_since_s:.1f} s"
        return f"is not ready: {fault}"

    def down_s(self) -> float:
        return 0.0 if self.fault is None else time.monotonic() - self.down_since_s


@dataclass(frozen=True)
class Change:
    """An order to serve the pipeline as another deploy says."""

    deploy: Deploy
    done: Future[str]  # what was done, or the TritoneError


class PipelineWatch:
    """A thread that does one thing at a time for its pipeline."""

    def __init__(self, run: RunningServer, deploy: Deploy, board: Board, note: Callable[[str], None]) -> None:
        """note: takes each line for the log and the console."""
        self.deploy = deploy
        self._models = models_of(deploy)
        self.verdict: TritoneError | None = None  # why only a new server helps
        self._run = run
        self._name = deploy.pipeline.name
        self._board = board
        self._note = note
        self._state = State()
        self._silent_since_s: dict[str, float] = {}  # by model whose door does not answer
        self._mends: deque[float] = deque(maxlen=MAX_MENDS)
        self._orders: queue.SimpleQueue[Change | None] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"watch {self._name}")

    def start(self) -> None:
        self._board.note(self._name, None)
        self._thread.start()

    def stop(self) -> None:
        """Begin nothing any more, and say nothing."""
        self._ending.set()
        self._orders.put(None)

    def join(self) -> None:
        """Wait a little for what is under way: it fails when the server is gone."""
        self._thread.join(JOIN_S)

    def change(self, deploy: Deploy) -> Future[str]:
        """Serve the pipeline as `deploy` says; what that took, or the TritoneError when all is as it was."""
        order = Change(deploy, Future())
        self._orders.put(order)
        if self._ending.is_set():  # perhaps after the thread looked for the last time
            self._refuse_orders()
        return order.done

    def _work(self) -> None:
        while not self._ending.is_set():
            try:
                order = self._orders.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                self._watch()
                continue
            if order is None:
                break
            try:
                order.done.set_result(self._exchange(order.deploy))
            except Exception as error:
                order.done.set_exception(error)
        self._refuse_orders()

    def _refuse_orders(self) -> None:
        """Nobody will follow the orders that are left: those who wait for them are told."""
        with contextlib.suppress(queue.Empty):
            while True:
                order = self._orders.get_nowait()
                if order is not None:
                    what = f"{self._name} was not reloaded, since its server has ended"
                    order.done.set_exception(Unavailable(what, "try again when it is ready"))

    # -- look and mend ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """One look, and what follows from it."""
        lost = self._run.stubs.lost(self._models)
        fault = self._lost(lost) if lost else self._ask()
        if fault is not None and (lost := self._run.stubs.lost(self._models)):
            fault = self._lost(lost)
        if self._ending.is_set():
            return
        self._tell(fault)
        hanging = [] if lost else self._hanging(fault)
        try:
            if lost or hanging:
                self._mend([*lost, *hanging], "died" if lost else "hangs")
            elif self._state.down_s() > self._run.load_timeout_s([self.deploy]):
                what = f"{self._name} has not been ready for {self._state.down_s():.0f} s ({fault})"
                raise TritoneError(what, "the server log has the details")
        except TritoneError as error:
            self.verdict = error

    def _ask(self) -> str | None:
        """Ping the pipeline model, and its twin."""
        fault = self._run.ping(self._name)
        if fault is None:
            fault = self._run.ping(twin_of(self._name))
            if fault is not None and not self._told(fault):
                fault = f"{twin_of(self._name)}: {fault}"
        return fault

    def _told(self, fault: str) -> dict[str, str]:
        """What a fault says of each stage that it names."""
        stages = [stage.name for stage in self.deploy.pipeline.stages]
        faults = stage_faults(fault, stages)
        return {name: text for name, text in faults.items() if text and f"stage {name} is not" in fault}

    def _tell(self, fault: str | None) -> None:
        news = self._state.note(fault)
        self._board.note(self._name, fault)
        if news:
            self._note(f"{self._name} {news}")

    def _lost(self, models: Sequence[str]) -> str:
        """The fault that dead stubs are, worded as a ping words it."""
        stages = {settings.model: name for name, settings in self.deploy.stages.items()}
        parts = [
            f"stage {stages[model]} is not ready: its door died" if model in stages else f"{model} died"
            for model in models
        ]
        return ", ".join(parts)

    def _hanging(self, fault: str | None) -> list[str]:
        """The models whose doors have not answered for too long."""
        silent = self._silent(fault)
        now = time.monotonic()
        self._silent_since_s = {model: self._silent_since_s.get(model, now) for model in silent}
        return [model for model, limit_s in silent.items() if now - self._silent_since_s[model] > limit_s]

    def _silent(self, fault: str | None) -> dict[str, float]:
        """By model that a fault says does not answer: for how many seconds that may be."""
        if fault is None:
            return {}
        told = self._told(fault)
        if not told:
            silent = twin_of(self._name) if fault.startswith(f"{twin_of(self._name)}: ") else self._name
            return {silent: HANG_MARGIN_S if "is not healthy" in fault else HANG_S}
        limits = {}
        for name, text in told.items():
            settings = self.deploy.stage(name)
            if "door did not" in text:
                limits[settings.model] = settings.call_timeout_s + HANG_MARGIN_S
            elif "cannot be called" in text:  # the server itself has given the stub up
                limits[settings.model] = HANG_MARGIN_S
        return limits

    def _mend(self, models: Sequence[str], why: str) -> None:
        """Unload and load models. Raises TritoneError when that does not help, or was needed too often."""
        now = time.monotonic()
        if len(self._mends) == MAX_MENDS and now - self._mends[0] < MEND_WINDOW_S:
            what = f"models of {self._name} had to be loaded again {MAX_MENDS} times"
            raise TritoneError(what, "the server log has the details")
        self._mends.append(now)
        order = self._with_followers(models)
        if set(models) & pipeline_models(self.deploy):
            self._note(
                f"{self._name} hung up on {self._run.hang_up()} connections, whose requests had no end"
            )
        self._note(f"{self._name} loads {', '.join(order)} again, since {', '.join(models)} {why}")
        self._run.load_again(order, self._run.load_timeout_s([self.deploy]))
        self._silent_since_s.clear()
        self._note(f"{self._name} loaded {', '.join(order)} again in {time.monotonic() - now:.1f} s")
        self._tell(self._ask())

    def _with_followers(self, models: Sequence[str]) -> list[str]:
        """`models`, and what must be loaded with them.

        A dead orchestrator cannot end the sequences that its streams hold in stages that Triton batches.
        """
        wanted = set(models)
        if wanted & pipeline_models(self.deploy):
            stages = self.deploy.pipeline.stages
            wanted |= {self.deploy.stage(s.name).model for s in stages if s.batching is Batching.TRITON}
        return [model for model in self._models if model in wanted]

    # -- another deploy --------------------------------------------------------------------------------------

    def _exchange(self, new: Deploy) -> str:
        old = self.deploy
        if new.digest == old.digest:
            return f"{self._name} is as its deploy file says; nothing to do"
        self._check(new)
        began = time.monotonic()
        why = f"pipeline {self._name} is being reloaded"
        self._board.note(self._name, "it is being reloaded")
        self._note(f"{self._name} ends its requests, to be loaded with digest {new.digest}")
        self._run.drain(old, why)
        timeout_s = self._run.load_timeout_s([old, new])
        try:
            self._run.exchange(old, new, timeout_s)
            self.deploy, self._models = new, models_of(new)
            self._wait_ready(timeout_s)
        except TritoneError as error:
            self._note(f"{self._name} does not load with digest {new.digest}: {error}")
            self._restore(new, old, timeout_s)
            raise TritoneError(
                f"{self._name} did not load as its deploy file says, and is as before: {error.what}",
                "mend the file; the server log has the details",
            ) from None
        done = f"{self._name} was loaded with digest {new.digest} in {time.monotonic() - began:.1f} s"
        self._note(done)
        return done

    def _restore(self, new: Deploy, old: Deploy, timeout_s: float) -> None:
        """Back to what served before; when that fails too, the server is to start again with it."""
        self.deploy, self._models = old, models_of(old)
        try:
            self._run.exchange(new, old, timeout_s)
            self._wait_ready(timeout_s)
        except TritoneError as error:
            self.verdict = error
            raise

    def _check(self, new: Deploy) -> None:
        """Raises ConfigError when a server that runs cannot serve `new`."""
        needed = servers.pool_threads([new])
        if needed is not None and needed > self._run.pool_threads:
            raise ConfigError(
                f"bls_threads is {new.bls_threads}, and the server has {self._run.pool_threads} threads",
                "restart it for that",
            )
        for finding in doctor.check_checkpoint(new):
            if finding.level is Level.PROBLEM:
                raise ConfigError(finding.what, finding.cure)

    def _wait_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while (fault := self._ask()) is not None:
            if time.monotonic() > deadline:
                raise TritoneError(f"it was not ready within {timeout_s:g} s ({fault})", "see the server log")
            self._run.check_alive("while a pipeline was loaded")
            time.sleep(LOOK_EVERY_S / 4)
        self._tell(None)
