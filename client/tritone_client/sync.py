"""The client for code without asyncio: a thin face over the asynchronous one, whose loop runs in a thread."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import aclosing
from types import TracebackType
from typing import Any, TypeVar, Unpack

from tritone_client.answer import Answer
from tritone_client.client import DEFAULT_PIPELINE, DEFAULT_URL, AsyncTritoneClient, PipelineDescription
from tritone_client.errors import Cancelled
from tritone_client.events import Event
from tritone_client.request import RequestOptions

T = TypeVar("T")


class TritoneClient:
    """`AsyncTritoneClient` for ordinary code: the same calls, arguments and errors. A context manager.

    Threads may share it. `connection` are the keyword arguments of `AsyncTritoneClient` (ssl, headers, …).
    """

    def __init__(self, url: str = DEFAULT_URL, pipeline: str = DEFAULT_PIPELINE, **connection: Any):
        self.url = url
        self.pipeline = pipeline
        self._loop: asyncio.AbstractEventLoop
        self._client: AsyncTritoneClient
        self._stop: asyncio.Event
        self._closed = False
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(connection, started)), name="tritone-client", daemon=True
        )
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self._thread.join()
            raise

    def __enter__(self) -> TritoneClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end the thread; streams of other threads end with `Cancelled`."""
        if not self._closed:
            self._closed = True
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def stream(self, prompt: str | None = None, **options: Unpack[RequestOptions]) -> Iterator[Event]:
        """Ask, and yield the answer event by event; `Done` comes last. Leaving early cancels the request.

        Arguments and errors are those of `AsyncTritoneClient.stream`.
        """
        return self._iterate(self._client.stream(prompt, **options))

    def say(self, text: str, **options: Unpack[RequestOptions]) -> Iterator[Event]:
        """Speak a given text; otherwise like `stream`."""
        return self._iterate(self._client.say(text, **options))

    def ask(self, prompt: str | None = None, **options: Unpack[RequestOptions]) -> Answer:
        """Ask, and wait for the whole answer."""
        return self._run(self._client.ask(prompt, **options))

    def ping(self, deadline_s: float = 5.0) -> dict[str, Any]:
        """What every stage says of itself, by its name; raises `Unavailable` if the pipeline cannot serve."""
        return self._run(self._client.ping(deadline_s))

    def describe(self, deadline_s: float = 5.0) -> PipelineDescription:
        """What the pipeline publishes about itself."""
        return self._run(self._client.describe(deadline_s))

    def limits(self, deadline_s: float = 5.0) -> Mapping[str, float]:
        """The limits the pipeline publishes, by name."""
        return self._run(self._client.limits(deadline_s))

    async def _serve(self, connection: Mapping[str, Any], started: Future[None]) -> None:
        """Life of the loop's thread: own the asynchronous client until `close`."""
        try:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            self._client = AsyncTritoneClient(self.url, self.pipeline, **connection)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        async with self._client:
            await self._stop.wait()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = self._submit(coroutine)
        try:
            return future.result()
        except CancelledError:
            raise Cancelled("the client was closed while the answer was awaited") from None
        finally:
            future.cancel()  # after an interrupt (Ctrl-C) the coroutine still runs

    def _iterate(self, events: AsyncGenerator[Event, None]) -> Iterator[Event]:
        arrived: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
        pump = self._submit(_pump(events, arrived))
        try:
            while (item := arrived.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            pump.cancel()

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed:
            coroutine.close()
            raise RuntimeError("this client is closed; make a new one")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


async def _pump(
    events: AsyncGenerator[Event, None], arrived: queue.SimpleQueue[Event | BaseException | None]
) -> None:
    """Move events from the loop's thread to the caller's; the last item is None or the error."""
    try:
        async with aclosing(events):
            async for event in events:
                arrived.put(event)
        arrived.put(None)
    except asyncio.CancelledError:
        arrived.put(Cancelled("the client was closed while the answer was streaming"))
        raise
    except Exception as error:
        arrived.put(error)
