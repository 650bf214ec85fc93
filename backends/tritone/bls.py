"""Calls from a pipeline model to its stage models: the only maker of InferenceRequest.

Each call is one single-response BLS `exec` on a thread of a pool that stays below the server's own thread
pool, so responses to clients always find a free server thread. Decoupled BLS is never used: it deadlocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import triton_python_backend_utils as pb_utils

from tritone import control
from tritone.contract import CONTROL, REPLY
from tritone.control import Control, PingStage, RunChunk
from tritone.errors import TritoneError, Unavailable, from_code
from tritone.ports import Array, Port


class Stages:
    """The stage models of a pipeline, as coroutines.

    A call cannot be taken back: whoever stops waiting for one must still see to what it did.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "bls")

    async def control(self, model: str, call: Control, inputs: Mapping[Port, Any]) -> dict[str, Any]:
        """One control call to a stage that batches by itself; its JSON reply. Raises what the stage says."""
        tensors = {port.name: port.pack(value) for port, value in inputs.items()}
        tensors[CONTROL.name] = CONTROL.pack(control.encode(call))
        outputs = await self._run(model, tensors, [REPLY.name])
        reply: dict[str, Any] = msgspec.json.decode(outputs[REPLY.name][0])
        return reply

    async def sequence(
        self, model: str, number: int, call: Control, inputs: Mapping[Port, Any], output: Port | None = None
    ) -> tuple[dict[str, Any], Array | None]:
        """One call to a stage that Triton batches, as part of sequence `number`.

        Its JSON reply and, if asked for, one output, unbatched.
        A chunk begins and ends its sequence as it says, a drop ends it, a ping is a sequence of its own.
        """
        tensors = {port.name: port.pack(value)[np.newaxis] for port, value in inputs.items()}
        tensors[CONTROL.name] = CONTROL.pack(control.encode(call))[np.newaxis]
        starts = call.start if isinstance(call, RunChunk) else isinstance(call, PingStage)
        ends = call.end if isinstance(call, RunChunk) else True
        flags = (pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START if starts else 0) | (
            pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END if ends else 0
        )
        names = [REPLY.name] if output is None else [REPLY.name, output.name]
        outputs = await self._run(model, tensors, names, correlation_id=number, flags=flags)
        reply: dict[str, Any] = msgspec.json.decode(outputs[REPLY.name].reshape(-1)[0])
        return reply, None if output is None else outputs[output.name][0]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run(
        self, model: str, tensors: Mapping[str, Array], outputs: list[str], **more: Any
    ) -> dict[str, Array]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, _execute, model, tensors, outputs, more)


def _execute(
    model: str, tensors: Mapping[str, Array], outputs: list[str], more: Mapping[str, Any]
) -> dict[str, Array]:
    request = pb_utils.InferenceRequest(
        model_name=model,
        requested_output_names=outputs,
        inputs=[pb_utils.Tensor(name, array) for name, array in tensors.items()],
        **more,
    )
    answer = request.exec()
    if answer.has_error():
        raise _stage_error(model, answer.error().message())
    return {tensor.name(): tensor.as_numpy() for tensor in answer.output_tensors()}


def _stage_error(model: str, text: str) -> TritoneError:
    """The error that the stage's door sent, or one that says what Triton said about it."""
    _, marker, rest = text.partition("TRITONE_")
    if marker:
        code, _, sentence = rest.partition(": ")
        what, _, cure = sentence.partition("; ")
        return from_code(code, what, cure)
    return Unavailable(
        f"stage {model} cannot be called: {text}", "try again; if it lasts, restart the server"
    )
