"""Where requests arrive: each becomes a task on the orchestrator's loop, and gets exactly one end.

door ─submit─► task: guard ─► work ─► sends its own end
                 ▲       └─ an error, a cancellation ─► reply.fail
                 └─ cancelled when its client has left, or by a drain
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from tritone.errors import Cancelled, TritoneError, Unavailable
from tritone.fault_log import described
from tritone.triton import Reply, log_error

CANCEL_POLL_S = 0.05

Work = Callable[[Mapping[str, Any], Mapping[str, Any], Reply], Coroutine[Any, Any, None]]
"""Answers a request: its input values, its parameters, and where the responses go. Raises TritoneError."""


class Reception:
    """The requests of one pipeline model that have come and not ended."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, work: Work) -> None:
        """name: of the orchestrator, for the log. loop: runs in another thread."""
        self._name = name
        self._loop = loop
        self._work = work
        self._tasks: dict[Reply, asyncio.Task[None]] = {}
        self._draining: Unavailable | None = None  # what new requests are told
        self._closing = threading.Event()
        threading.Thread(target=self._watch_cancels, daemon=True, name="cancels").start()

    # -- any thread ------------------------------------------------------------------------------------------

    def submit(self, values: Mapping[str, Any], parameters: Mapping[str, Any], reply: Reply) -> None:
        """Answer a request through `reply`, later; never raises."""
        self._loop.call_soon_threadsafe(self._accept, values, parameters, reply)

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

    def _accept(self, values: Mapping[str, Any], parameters: Mapping[str, Any], reply: Reply) -> None:
        task = self._loop.create_task(self._guard(values, parameters, reply))
        self._tasks[reply] = task
        task.add_done_callback(partial(self._note_gone, reply))

    def _note_gone(self, reply: Reply, task: asyncio.Task[None]) -> None:
        self._tasks.pop(reply, None)
        if task.cancelled():  # before its first step, so that `_guard` could not say it
            self._fail(reply, self._draining or Cancelled("the request was cancelled"))

    async def _guard(self, values: Mapping[str, Any], parameters: Mapping[str, Any], reply: Reply) -> None:
        """Whatever happens inside, the client gets exactly one end."""
        try:
            await self._work(values, parameters, reply)
        except TritoneError as error:
            self._fail(reply, error)
        except asyncio.CancelledError:
            self._fail(reply, self._draining or Cancelled("the request was cancelled"))
        except Exception as error:
            log_error(f"{self._name}: {described(error)}")
            self._fail(
                reply, TritoneError(f"the pipeline failed: {error}", "report this with the server log")
            )

    def _fail(self, reply: Reply, error: TritoneError) -> None:
        try:
            reply.fail(error)
        except Exception as failure:
            log_error(f"{self._name}: cannot tell a client {error.code}: {described(failure)}")

    # -- a thread of its own ---------------------------------------------------------------------------------

    def _watch_cancels(self) -> None:
        """Asks Triton about each live request, and ends those whose client left."""
        while not self._closing.wait(CANCEL_POLL_S):
            for reply, task in self._tasks.copy().items():
                try:
                    if reply.is_cancelled():
                        self._loop.call_soon_threadsafe(task.cancel)
                except Exception as error:
                    log_error(f"{self._name}: cannot ask about a cancellation: {described(error)}")
