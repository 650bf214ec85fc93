"""A Triton gRPC server that answers from a script. It runs in a thread, on a free port of 127.0.0.1.

    with FakeTriton([Text("Hel"), Text("lo"), Audio(480), Done()]) as triton:
        …  client talks to triton.url …
        triton.requests[0].inputs["text_input"]

It speaks the tensor contract: `event`, `index` and `text_output` in every response, FINAL on `done`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import (
    deserialize_bytes_tensor,
    np_to_triton_dtype,
    serialize_byte_tensor,
    triton_to_np_dtype,
)

from waiting import PATIENCE_S

RATE_HZ = 24_000
INFO = {
    "usage": {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "audio_s": 0.5,
        "stages": {"thinker": {"prompt_tokens": 5, "completion_tokens": 2}},
    },
    "timings": {"total_s": 0.3, "stages": {"thinker": {"busy_s": 0.1}}},
    "seed": 7,
}


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Audio:
    """`num_samples` of a counting wave, so that a lost or repeated sample shows."""

    num_samples: int
    offset: int | None = None  # None: where the last chunk ended
    rate_hz: int = RATE_HZ
    encoded: bytes | None = None  # sent as `audio_encoded`
    float32: bool = False


@dataclass(frozen=True)
class Done:
    finish_reasons: dict[str, str] = field(default_factory=lambda: {"text": "stop", "audio": "stop"})
    info: dict[str, Any] = field(default_factory=lambda: INFO)


@dataclass(frozen=True)
class Raw:
    """A response with just these outputs."""

    outputs: dict[str, Any]
    is_final: bool = False


@dataclass(frozen=True)
class Wait:
    seconds: float


@dataclass(frozen=True)
class Until:
    """Go on when the condition holds; or after a while all the same, for the test to say what was missing."""

    condition: Callable[[], Any]


@dataclass(frozen=True)
class Fail:
    status: grpc.StatusCode
    message: str


class Hang:
    """Never answer again."""


Step: TypeAlias = Text | Audio | Done | Raw | Wait | Until | Fail | Hang


@dataclass(frozen=True)
class SeenRequest:
    model: str
    inputs: dict[str, np.ndarray]
    parameters: dict[str, Any]
    metadata: dict[str, str]

    def text(self, name: str) -> str:
        return self.inputs[name][0].decode()


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, script: Sequence[Step] | Callable[[SeenRequest], Sequence[Step]] = ()):
        self.script = script
        self.config_parameters: dict[str, str] = {}
        self.requests: list[SeenRequest] = []
        self.cancelled = threading.Event()
        self.max_running = 0
        self._num_running = 0
        self._shared_memory: dict[str, str] = {}

    def __enter__(self) -> FakeTriton:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)))
        self._thread.start()
        assert started.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop at once, in the middle of answers."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        server = grpc.aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, server)
        self.url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        started.set()
        await self._stopping.wait()
        await server.stop(grace=0)

    async def ModelStreamInfer(self, messages: AsyncIterator[Any], context: Any) -> None:
        # Writes by hand: of a generator that is cancelled in a `yield` nobody would hear.
        async for message in messages:
            request = self._record(message, context)
            self._num_running += 1
            self.max_running = max(self.max_running, self._num_running)
            try:
                async for response in self._answers(request):
                    # What a pipeline reports comes as a string in the stream, unless asked otherwise.
                    strict = request.metadata.get("triton_grpc_error") == "true"
                    if isinstance(response, Fail) and (strict or "TRITONE_" not in response.message):
                        await context.abort(response.status, response.message)
                    elif isinstance(response, Fail):
                        error = service_pb2.ModelStreamInferResponse(error_message=response.message)
                        await context.write(error)
                    else:
                        await context.write(service_pb2.ModelStreamInferResponse(infer_response=response))
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
            finally:
                self._num_running -= 1

    async def ModelInfer(self, message: Any, context: Any) -> Any:
        """The unary twin: everything in one response."""
        steps = self._steps(self._record(message, context))
        for step in steps:
            if isinstance(step, Fail):
                await context.abort(step.status, step.message)
        num_samples = sum(step.num_samples for step in steps if isinstance(step, Audio))
        outputs = {
            "event": "done",
            "index": np.uint32([0]),
            "text_output": "".join(step.text for step in steps if isinstance(step, Text)),
            **audio_outputs(Audio(num_samples), 0),
            "finish_reason": json.dumps({"text": "stop", "audio": "stop"}),
            "info": json.dumps(INFO),
        }
        return infer_response(outputs)

    async def ModelConfig(self, message: Any, context: Any) -> Any:
        if message.name != "smoltalk":
            details = f"Request for unknown model: '{message.name}' is not found"
            await context.abort(grpc.StatusCode.NOT_FOUND, details)
        response = service_pb2.ModelConfigResponse()
        response.config.name = message.name
        for name, value in self.config_parameters.items():
            response.config.parameters[name].string_value = value
        return response

    async def SystemSharedMemoryRegister(self, message: Any, context: Any) -> Any:
        self._shared_memory[message.name] = message.key
        return service_pb2.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(self, message: Any, context: Any) -> Any:
        del self._shared_memory[message.name]
        return service_pb2.SystemSharedMemoryUnregisterResponse()

    def _steps(self, request: SeenRequest) -> Sequence[Step]:
        return self.script(request) if callable(self.script) else self.script

    async def _answers(self, request: SeenRequest) -> AsyncIterator[Any]:
        index, offset = 0, 0
        for step in self._steps(request):
            if isinstance(step, Wait):
                await asyncio.sleep(step.seconds)
                continue
            if isinstance(step, Until):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PATIENCE_S):
                        while not step.condition():
                            await asyncio.sleep(0.005)
                continue
            if isinstance(step, Hang):
                await asyncio.sleep(3600)
            if isinstance(step, Fail):
                yield step
                return
            if isinstance(step, Raw):
                yield infer_response(step.outputs, step.is_final)
                continue
            outputs: dict[str, Any] = {"index": np.uint32([index]), "text_output": ""}
            if isinstance(step, Text):
                outputs |= {"event": "text", "text_output": step.text}
            elif isinstance(step, Audio):
                outputs |= {"event": "audio", **audio_outputs(step, offset)}
                offset += step.num_samples
            elif isinstance(step, Done):
                outputs |= {
                    "event": "done",
                    "finish_reason": json.dumps(step.finish_reasons),
                    "info": json.dumps(step.info),
                }
            yield infer_response(outputs, is_final=isinstance(step, Done))
            index += 1

    def _record(self, message: Any, context: Any) -> SeenRequest:
        contents = iter(message.raw_input_contents)
        inputs = {}
        for tensor in message.inputs:
            region = tensor.parameters["shared_memory_region"].string_param
            data = self._read_shared_memory(region) if region else next(contents)
            if tensor.datatype == "BYTES":
                values = deserialize_bytes_tensor(data)
            else:
                values = np.frombuffer(data, triton_to_np_dtype(tensor.datatype))
            inputs[tensor.name] = values[: int(np.prod(tensor.shape))].reshape(tensor.shape)
        parameters = {
            name: getattr(value, value.WhichOneof("parameter_choice"))
            for name, value in message.parameters.items()
        }
        metadata = {name: value for name, value in context.invocation_metadata() if isinstance(value, str)}
        request = SeenRequest(message.model_name, inputs, parameters, metadata)
        self.requests.append(request)
        return request

    def _read_shared_memory(self, region: str) -> bytes:
        descriptor = os.open(f"/dev/shm/{self._shared_memory[region].lstrip('/')}", os.O_RDONLY)
        try:
            with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as memory:
                return memory[:]
        finally:
            os.close(descriptor)


def counting_samples(offset: int, num_samples: int) -> np.ndarray:
    """The wave every scripted answer consists of: sample k is k modulo 1000, int16."""
    return (np.arange(offset, offset + num_samples) % 1000).astype(np.int16)


def audio_outputs(step: Audio, next_offset: int) -> dict[str, Any]:
    offset = next_offset if step.offset is None else step.offset
    place = {"sample_rate": np.int32([step.rate_hz]), "sample_offset": np.int64([offset])}
    samples = counting_samples(offset, step.num_samples)
    if step.encoded is not None:
        return {"audio_encoded": step.encoded, **place}
    if step.float32:
        return {"audio_f32": samples.astype(np.float32) / 32768, **place}
    return {"audio_output": samples, **place}


def infer_response(outputs: dict[str, Any], is_final: bool = False) -> Any:
    """A ModelInferResponse; strings and bytes become STRING [1]."""
    response = service_pb2.ModelInferResponse(model_name="smoltalk", model_version="1")
    for name, value in outputs.items():
        if isinstance(value, str | bytes):
            value = np.array([value.encode() if isinstance(value, str) else value], dtype=np.object_)
        tensor = response.outputs.add(name=name, datatype=np_to_triton_dtype(value.dtype), shape=value.shape)
        is_string = tensor.datatype == "BYTES"
        response.raw_output_contents.append(
            serialize_byte_tensor(value).item() if is_string else value.tobytes()
        )
    response.parameters["triton_final_response"].bool_param = is_final
    return response
