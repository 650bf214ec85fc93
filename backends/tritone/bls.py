"""Calls from a pipeline model to its stage models: the only maker of InferenceRequest.

Each call is one single-response BLS `exec` on a thread of a pool that stays below the server's own thread
pool, so responses to clients always find a free server thread. Decoupled BLS is never used: it deadlocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import triton_python_backend_utils as pb_utils

from tritone.contract import CONTROL, REPLY
from tritone.errors import TritoneError, Unavailable, from_code
from tritone.ports import Array, Port


class Stages:
    """The stage models of a pipeline, as coroutines."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "bls")

    async def control(
        self, model: str, control: Mapping[str, Any], inputs: Mapping[Port, Any], timeout_s: float
    ) -> dict[str, Any]:
        """One control call (open, ping); gives the stage's JSON reply. Raises the stage's TritoneError."""
        tensors = {port.name: port.pack(value) for port, value in inputs.items()}
        tensors[CONTROL.name] = CONTROL.pack(msgspec.json.encode(control))
        outputs = await self._run(model, tensors, [REPLY.name], timeout_s)
        reply: dict[str, Any] = msgspec.json.decode(outputs[REPLY.name][0])
        return reply

    async def chunk(
        self,
        model: str,
        correlation_id: int,
        control: Mapping[str, Any],
        inputs: Mapping[Port, Any],
        outputs: Iterable[Port],
        timeout_s: float,
    ) -> dict[str, Array]:
        """One chunk of a stream through a sequence-batched stage; output arrays without the batch dimension.

        control: {"session", "start", "end", "settings"}; start and end also go to Triton's batcher.
        """
        tensors = {port.name: port.pack(value)[np.newaxis] for port, value in inputs.items()}
        tensors[CONTROL.name] = CONTROL.pack(msgspec.json.encode(control))[np.newaxis]
        flags = (pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START if control["start"] else 0) | (
            pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END if control["end"] else 0
        )
        names = [port.name for port in outputs]
        result = await self._run(model, tensors, names, timeout_s, correlation_id=correlation_id, flags=flags)
        return {name: array[0] for name, array in result.items()}

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run(
        self, model: str, tensors: Mapping[str, Array], outputs: list[str], timeout_s: float, **more: Any
    ) -> dict[str, Array]:
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.wait_for(
                loop.run_in_executor(self._pool, _execute, model, tensors, outputs, more), timeout_s
            )
        except TimeoutError:
            raise Unavailable(f"stage {model} did not answer within {timeout_s:g} s", "try again") from None


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
