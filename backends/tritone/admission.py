"""Who may run: so many requests at a time, and a bounded number of others that wait for their turn.

request ─► room? ─► runs
             └─ no ─► room to wait? ─► waits: the lowest priority number first, then who came first
                            └─ no ─► refused at once, with the limit named
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tritone.errors import Unavailable


class Admission:
    """Turns of one pipeline model; for one event loop."""

    def __init__(self, max_in_flight: int, max_queued: int) -> None:
        self._max_in_flight = max_in_flight
        self._max_queued = max_queued
        self._running = 0
        self._arrivals = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # heap: priority, arrival, turn

    @property
    def running(self) -> int:
        return self._running

    @property
    def queued(self) -> int:
        return sum(not turn.done() for _, _, turn in self._waiting)

    @asynccontextmanager
    async def turn(self, priority: int = 0) -> AsyncIterator[None]:
        """Holds a turn while it is entered; waits for one if there is room to wait.

        Raises Unavailable naming the limit when there is none.
        """
        if self._running < self._max_in_flight:
            self._running += 1
        else:
            await self._wait(priority)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, priority: int) -> None:
        if self.queued >= self._max_queued:
            raise Unavailable(self._full(), "try again later")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._arrivals), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # it was given the turn that it will not take
            raise

    def _pass_on(self) -> None:
        """Give the turn to whoever is next, or keep it free."""
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():  # else it left while it waited
                turn.set_result(None)
                return
        self._running -= 1

    def _full(self) -> str:
        what = f"max_in_flight is {self._max_in_flight} and as many requests are in flight"
        return what + (f", max_queued is {self._max_queued} and as many wait" if self._max_queued else "")
