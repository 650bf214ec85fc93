"""The asynchronous client: one gRPC stream per request, over one connection.

client.stream("Hello?")  ──►  Request (tensors)  ──gRPC──►  pipeline
        Event  ◄── ResponseReader  ◄──────────────────────────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Unpack

import grpc
import tritonclient.grpc.aio
from tritonclient.utils import InferenceServerException

from tritone_client.answer import Answer, gather
from tritone_client.errors import BrokenStream, Cancelled, InvalidRequest, ServerFault, from_triton
from tritone_client.events import Done, Event
from tritone_client.request import Request, RequestOptions, build_request, operation_request
from tritone_client.response import ResponseReader

DEFAULT_URL = "127.0.0.1:8001"
DEFAULT_PIPELINE = "smoltalk"
CLOSE_S = 1.0
"""How long a stream may stay open after `done`: closing it is the server's part."""


@dataclass(frozen=True, slots=True)
class PipelineDescription:
    """What a pipeline publishes about itself in its Triton model configuration."""

    name: str
    contract_version: int | None
    modalities: tuple[str, ...]  # what it can answer with
    sample_rate_hz: int | None  # of the audio it makes
    speakers: tuple[str, ...]
    limits: Mapping[str, float]  # e.g. max_in_flight, max_text_bytes, max_audio_s
    parameters: Mapping[str, str]  # everything published, as written


class AsyncTritoneClient:
    """Talks to one pipeline of one Triton server. An async context manager; use it in one event loop.

    Args:
        url: `host:port` of the server's gRPC port.
        pipeline: the Triton model to ask, e.g. `smoltalk`.
        ssl: use TLS; the next three are paths of PEM files for it.
        headers: sent with every call, e.g. {"authorization": "Bearer …"}.

    Every call raises a `TritoneError`: see `tritone_client.errors`. Any number of calls may run at once.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        pipeline: str = DEFAULT_PIPELINE,
        *,
        ssl: bool = False,
        root_certificates: str | None = None,
        private_key: str | None = None,
        certificate_chain: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        if "://" in url:
            raise InvalidRequest(f"url is {url!r}; give host:port of the gRPC port, without a scheme")
        if (private_key is None) != (certificate_chain is None):
            raise InvalidRequest("private_key and certificate_chain belong together; give both or none")
        self.url = url
        self.pipeline = pipeline
        self._headers = dict(headers or {})
        self._closed = False
        self._grpc = tritonclient.grpc.aio.InferenceServerClient(
            url,
            ssl=ssl,
            root_certificates=root_certificates,
            private_key=private_key,
            certificate_chain=certificate_chain,
        )

    async def __aenter__(self) -> AsyncTritoneClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; streams that still run end with `Cancelled`."""
        self._closed = True
        await self._grpc.close()

    def stream(
        self, prompt: str | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[Event, None]:
        """Ask, and yield the answer event by event; `Done` comes last.

        The request is sent when the first event is awaited. Leaving early cancels it on the server: by
        cancelling the task, by `aclose()`, or by breaking out of an `async for` over the call itself. An
        iterator that is kept in a variable needs `contextlib.aclosing` for that.

        Args:
            prompt: the user's words; or give `messages`, or media.
            options: see `RequestOptions`.

        Raises:
            InvalidRequest: at once, if the request makes no sense; other errors while iterating.
        """
        return self._events(build_request(prompt, **options))

    def say(self, text: str, **options: Unpack[RequestOptions]) -> AsyncGenerator[Event, None]:
        """Speak a given text; otherwise like `stream`.

        A conversation that already ends with the assistant's words is spoken as it is.
        """
        return self.stream(**_spoken(text, options))

    async def ask(self, prompt: str | None = None, **options: Unpack[RequestOptions]) -> Answer:
        """Ask, and wait for the whole answer. Arguments and errors are those of `stream`."""
        async with aclosing(self.stream(prompt, **options)) as events:
            return await gather(events)

    async def ping(self, deadline_s: float = 5.0) -> dict[str, Any]:
        """What every stage says of itself, by its name; raises `Unavailable` if the pipeline cannot serve."""
        async with aclosing(self._events(operation_request("ping", deadline_s))) as events:
            answer = await gather(events)
        stages = answer.done.info.get("stages")
        if not isinstance(stages, dict):
            raise BrokenStream(f"pipeline {self.pipeline} answered the ping without its stages")
        return stages

    async def describe(self, deadline_s: float = 5.0) -> PipelineDescription:
        """What the pipeline publishes: contract version, sample rate, speakers, limits."""
        self._check_open()
        try:
            response = await self._grpc.get_model_config(
                self.pipeline, headers=self._headers, client_timeout=deadline_s
            )
        except (grpc.RpcError, InferenceServerException) as error:
            raise from_triton(error, self.url, self.pipeline, deadline_s) from None
        return _description(response.config)

    async def limits(self, deadline_s: float = 5.0) -> Mapping[str, float]:
        """The limits the pipeline publishes, by name."""
        return (await self.describe(deadline_s)).limits

    async def _events(self, request: Request) -> AsyncGenerator[Event, None]:
        self._check_open()
        reader = ResponseReader(request.audio_format)
        call = self._grpc.stream_infer(
            request.as_stream(self.pipeline),
            stream_timeout=request.client_timeout_s,
            # Not `triton_grpc_error`, which ends a stream with a status: a 2.51 server may crash at that. The
            # code of an error stands in its message.
            headers=self._headers,
        )
        try:
            async for result, error in call:
                if error is not None:
                    await _wait_for_end(call)
                    raise error
                for event in reader.read(result):
                    yield event
                    if isinstance(event, Done):
                        await _wait_for_end(call)
                        return
            raise BrokenStream("the stream ended without `done`; send the request again")
        except (grpc.RpcError, InferenceServerException) as error:
            raise from_triton(error, self.url, self.pipeline, request.deadline_s) from None
        except asyncio.CancelledError:
            # gRPC raises it also when the channel is closed under a call; only a cancelled task may see it.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Cancelled("the client was closed while the answer was streaming") from None
        finally:
            call.cancel()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this client is closed; make a new one")


async def _wait_for_end(call: Any) -> None:
    """Let the server close the stream: at a cancel that crosses the last response, an error above all, a
    2.51 server may keep the request for ever, and then does not unload its model.

    Raises:
        BrokenStream: another response follows the last.
    """
    try:
        async with asyncio.timeout(CLOSE_S):
            async for _result, _error in call:
                raise BrokenStream("a response follows the last one")
    except (TimeoutError, grpc.RpcError):
        return  # the answer is complete either way


def _spoken(text: str, options: RequestOptions) -> RequestOptions:
    if "messages" in options:
        raise InvalidRequest("say takes the text to speak, not messages; use stream for a conversation")
    if options.get("system") is not None:
        raise InvalidRequest("say speaks the text as it is, whatever the system text; leave system out")
    if not text.strip():
        raise InvalidRequest("the text is empty; give some words")
    spoken: RequestOptions = {"modalities": "audio", **options}
    spoken["messages"] = [{"role": "assistant", "content": text}]
    return spoken


def _description(config: Any) -> PipelineDescription:
    """From a Triton ModelConfig message."""
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    limits = {name: _number(name, value) for name, value in parameters.items() if name.startswith("max_")}
    contract_version, rate_hz = parameters.get("contract_version"), parameters.get("sample_rate_hz")
    return PipelineDescription(
        name=config.name,
        contract_version=None
        if contract_version is None
        else int(_number("contract_version", contract_version)),
        modalities=_words(parameters.get("modalities", "")),
        sample_rate_hz=None if rate_hz is None else int(_number("sample_rate_hz", rate_hz)),
        speakers=_words(parameters.get("speakers", "")),
        limits=limits,
        parameters=parameters,
    )


def _words(comma_list: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in comma_list.split(",") if word.strip())


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ServerFault(f"model configuration parameter {name} is not a number: {text!r}") from None
