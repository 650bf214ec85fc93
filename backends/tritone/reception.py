"""Where requests arrive: each becomes a task on the orchestrator's loop, and gets exactly one end.

door ─submit─► task: guard ─► work ─► sends its own end
                 ▲       └─ an error, a cancellation ─► reply.fail
                 └─ cancelled when its client has left, or by a drain
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from tritone.errors import Cancelled, TritoneError, Unavailable
from tritone.fault_log import described
from tritone.session import Session
from tritone.triton import Reply, log_error

CANCEL_POLL_S = 0.05


@dataclass(eq=False)
class Arrival:
    """A request that has come."""

    values: Mapping[str, Any]  # inputs by name, unpacked
    parameters: Mapping[str, Any]
    reply: Reply
    session: Session | None = None  # once it is read and found right


Work = Callable[[Arrival], Coroutine[Any, Any, None]]
"""Answers a request, and sends the end of the answer. Raises TritoneError."""
Ended = Callable[[Arrival, TritoneError | None], None]
"""Is told of the end of each request, and which error the client got instead of an answer."""


class Reception:
    """The requests of one pipeline model that have come and not ended."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, work: Work, ended: Ended) -> None:
        """name: of the orchestrator, for the log. loop: runs in another thread, where both are called."""
        self._name = name
        self._loop = loop
        self._work = work
        self._ended = ended
        self._tasks: dict[Arrival, asyncio.Task[None]] = {}
        self._draining: Unavailable | None = None  # what new requests are told
        self._closing = threading.Event()
        threading.Thread(target=self._watch_cancels, daemon=True, name="cancels").start()

    # -- any thread ------------------------------------------------------------------------------------------

    def submit(self, values: Mapping[str, Any], parameters: Mapping[str, Any], reply: Reply) -> None:
        """Answer a request through `reply`, later; never raises."""
        self._loop.call_soon_threadsafe(self._accept, Arrival(values, parameters, reply))

    def refuse(self, reply: Reply, error: TritoneError) -> None:
        """End a request whose inputs cannot be read."""
        self._loop.call_soon_threadsafe(self._fail, Arrival({}, {}, reply), error)

    def close(self) -> None:
        """Ask about no cancellation any more."""
        self._closing.set()

    # -- the loop's thread -----------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raises Unavailable when no more requests are taken."""
        if self._draining:
            raise self._draining

    async def drain(self, grace_s: float, why: str, timeout_s: float) -> None:
        """Take no more requests; end those that run, when the grace is over at the latest.

        timeout_s: how long their ends may take then.
        """
        self._draining = Unavailable(why, "ask again when it is back")
        if self._tasks and grace_s > 0:
            await asyncio.wait(set(self._tasks.values()), timeout=grace_s)
        for task in list(self._tasks.values()):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks.values()), timeout=timeout_s)

    def _accept(self, arrival: Arrival) -> None:
        task = self._loop.create_task(self._guard(arrival))
        self._tasks[arrival] = task
        task.add_done_callback(lambda task: self._note_gone(arrival, task))

    def _note_gone(self, arrival: Arrival, task: asyncio.Task[None]) -> None:
        self._tasks.pop(arrival, None)
        if task.cancelled():  # before its first step, so that `_guard` could not say it
            self._fail(arrival, self._draining or Cancelled("the request was cancelled"))

    async def _guard(self, arrival: Arrival) -> None:
        """Whatever happens inside, the client gets exactly one end."""
        try:
            await self._work(arrival)
        except TritoneError as error:
            self._fail(arrival, error)
        except asyncio.CancelledError:
            self._fail(arrival, self._draining or Cancelled("the request was cancelled"))
        except Exception as error:
            log_error(f"{self._name}: {described(error)}")
            self._fail(
                arrival, TritoneError(f"the pipeline failed: {error}", "report this with the server log")
            )
        else:
            self._ended(arrival, None)

    def _fail(self, arrival: Arrival, error: TritoneError) -> None:
        try:
            arrival.reply.fail(error)
        except Exception as failure:
            log_error(f"{self._name}: cannot tell a client {error.code}: {described(failure)}")
        self._ended(arrival, error)

    # -- a thread of its own ---------------------------------------------------------------------------------

    def _watch_cancels(self) -> None:
        """Asks Triton about each live request, and ends those whose client left."""
        while not self._closing.wait(CANCEL_POLL_S):
            self._look_for_cancels()  # and hold no request while waiting

    def _look_for_cancels(self) -> None:
        for arrival, task in self._tasks.copy().items():
            try:
                if arrival.reply.is_cancelled():
                    self._loop.call_soon_threadsafe(task.cancel)
            except Exception as error:
                log_error(f"{self._name}: cannot ask about a cancellation: {described(error)}")
