"""Calls from a pipeline model to its stage models: the only maker of InferenceRequest.

Each call is one single-response BLS `exec` on a thread of a pool that stays below the server's own thread
pool, so responses to clients always find a free server thread. Decoupled BLS is never used: it deadlocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import triton_python_backend_utils as pb_utils

from tritone import control
from tritone.contract import CONTROL, REPLY
from tritone.control import KEEP_EVERY_S, Control, DropStream, KeepStream, PingStage, RunChunk
from tritone.errors import NotReached, TritoneError, from_code
from tritone.ports import Array, Port

EVICTION_THREADS = 4
MAX_EVICTIONS = 1024  # that wait; beyond them Triton's own idle time ends a sequence


class Stages:
    """The stage models of a pipeline, as coroutines.

    A call cannot be taken back: whoever stops waiting for one must still see to what it did.
    """

    def __init__(self, threads: int, key: str = "") -> None:
        """threads: calls at once. key: of the server, see server_key; stages refuse calls without it."""
        self._pool = ThreadPoolExecutor(threads, "bls")
        self._key = key
        # By model and number of an open sequence: loop time of its last call's end, infinite during a call.
        self._idle_since_s: dict[tuple[str, int], float] = {}
        self._keeping: asyncio.TimerHandle | None = None

    async def control(self, model: str, call: Control, inputs: Mapping[Port, Any]) -> dict[str, Any]:
        """One control call to a stage that batches by itself; its JSON reply. Raises what the stage says."""
        tensors = {port.name: port.pack(value) for port, value in inputs.items()}
        tensors[CONTROL.name] = _control(call, self._key)
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
        tensors[CONTROL.name] = _control(call, self._key)[np.newaxis]
        starts = call.start if isinstance(call, RunChunk) else isinstance(call, PingStage)
        ends = call.end if isinstance(call, RunChunk) else True
        flags = (pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START if starts else 0) | (
            pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END if ends else 0
        )
        names = [REPLY.name] if output is None else [REPLY.name, output.name]
        self._note_call(model, number, ends)
        try:
            outputs = await self._run(model, tensors, names, correlation_id=number, flags=flags)
        finally:
            if (model, number) in self._idle_since_s:
                self._idle_since_s[model, number] = asyncio.get_running_loop().time()
        reply: dict[str, Any] = msgspec.json.decode(outputs[REPLY.name].reshape(-1)[0])
        return reply, None if output is None else outputs[output.name][0]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _note_call(self, model: str, number: int, ends: bool) -> None:
        if ends:
            self._idle_since_s.pop((model, number), None)
            return
        self._idle_since_s[model, number] = math.inf
        if self._keeping is None:
            self._keep_all()

    def _keep_all(self) -> None:
        """Call the sequences that have been idle, so that Triton keeps them; again as long as there are any.

        Triton's own idle time can then be short, and a stranger's sequence does not hold a place for long.
        """
        loop = asyncio.get_running_loop()
        for (model, number), since_s in self._idle_since_s.items():
            if loop.time() - since_s > KEEP_EVERY_S / 2:
                self._pool.submit(self._keep, model, number)
        delay_s = KEEP_EVERY_S / 2
        self._keeping = loop.call_later(delay_s, self._keep_all) if self._idle_since_s else None

    def _keep(self, model: str, number: int) -> None:
        tensors = {CONTROL.name: _control(KeepStream(), self._key)[np.newaxis]}
        with contextlib.suppress(TritoneError):  # it ended meanwhile
            _execute(model, tensors, [REPLY.name], {"correlation_id": number, "flags": 0})

    async def _run(
        self, model: str, tensors: Mapping[str, Array], outputs: list[str], **more: Any
    ) -> dict[str, Array]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, _execute, model, tensors, outputs, more)


class Evictions:
    """Ends the sequences that strangers begin on a stage model: Triton would keep their places for minutes.

    For the door of that model, which refuses each of their calls but cannot end a sequence by its answer.
    """

    def __init__(self, model: str, key: str) -> None:
        self._model, self._key = model, key
        self._pool = ThreadPoolExecutor(EVICTION_THREADS, "evictions")
        self._waiting: set[int | str] = set()

    def end(self, number: int | str) -> None:
        """Have sequence `number` ended soon; returns at once."""
        if number not in self._waiting and len(self._waiting) < MAX_EVICTIONS:
            self._waiting.add(number)
            self._pool.submit(self._end, number)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _end(self, number: int | str) -> None:
        tensors = {CONTROL.name: _control(DropStream(""), self._key)[np.newaxis]}
        more = {"correlation_id": number, "flags": pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END}
        self._waiting.discard(number)  # before the call: what begins again during it is ended again
        with contextlib.suppress(TritoneError):  # it has ended by itself
            _execute(self._model, tensors, [REPLY.name], more)


def _control(call: Control, key: str) -> Array:
    return CONTROL.pack(np.frombuffer(control.encode(call, key), np.uint8))


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
    return NotReached(f"stage {model} cannot be called: {text}", "try again; if it lasts, restart the server")
