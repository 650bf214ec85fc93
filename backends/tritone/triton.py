"""How the doors speak Triton's request language. With `bls.py` the only module that imports pb_utils."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from tritone.errors import TritoneError, Unavailable
from tritone.metrics import Family
from tritone.ports import Array, Port
from tritone.tracing import HEADERS

SHARED_MEMORY = "/dev/shm"
LARGE_RESPONSE_BYTES = 1 << 20


def read_inputs(request: Any, ports: Iterable[Port]) -> dict[str, Any]:
    """The plain values of the inputs that are present. Raises InvalidRequest (see Port.unpack)."""
    known = {port.name: port for port in ports}
    return {
        tensor.name(): known[tensor.name()].unpack(tensor.as_numpy())
        for tensor in request.inputs()
        if tensor.name() in known
    }


def read_batched_inputs(request: Any, ports: Iterable[Port]) -> dict[str, Any]:
    """As `read_inputs`, for a model with a batch dimension of 1 in front."""
    known = {port.name: port for port in ports}
    return {
        tensor.name(): known[tensor.name()].unpack(tensor.as_numpy()[0])
        for tensor in request.inputs()
        if tensor.name() in known
    }


def open_sequence(request: Any) -> int | str | None:
    """The sequence that Triton keeps a place for after this request; None if the request ends it."""
    ends = request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
    number: int | str = request.correlation_id()
    return None if ends else number


def read_parameters(request: Any) -> dict[str, Any]:
    """The request parameters: int, bool or string values.

    Headers that the server passes on are among them, by names as the caller wrote them, in any case.
    """
    return {
        (key.lower() if key.lower() in HEADERS else key): value
        for key, value in json.loads(request.parameters() or "{}").items()
        if not key.startswith(("sequence_", "triton_", "binary_data_output"))  # Triton's own
    }


def model_parameters(model_config: str) -> dict[str, str]:
    """The custom parameters of a config.pbtxt, given as Triton gives it: JSON."""
    parameters = json.loads(model_config)["parameters"]
    return {key: value["string_value"] for key, value in parameters.items()}


def is_decoupled(model_config: str) -> bool:
    """Whether a model may give more than one response."""
    policy = json.loads(model_config).get("model_transaction_policy", {})
    return bool(policy.get("decoupled", False))


def response(outputs: Mapping[str, Array]) -> Any:
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])


def error_response(error: TritoneError) -> Any:
    """An error of a stage, for its orchestrator."""
    return _error_response(error, error.internal_message)


def _error_response(error: TritoneError, message: str) -> Any:
    code = getattr(pb_utils.TritonError, error.triton_code, pb_utils.TritonError.INTERNAL)
    return pb_utils.InferenceResponse([], pb_utils.TritonError(message, code))


class Reply:
    """The responses of one request. FINAL is sent exactly once, by construction.

    The server crashes when it is asked about cancellation after FINAL; the lock and the flag rule that out.
    """

    def __init__(self, request: Any) -> None:
        self.received_s = time.monotonic()
        self._sender = request.get_response_sender()
        self._requested = frozenset(request.requested_output_names())
        self._lock = threading.Lock()
        self._closed = False

    def send(self, outputs: Mapping[str, Array], final: bool = False) -> None:
        """Send those of `outputs` that the caller asked for as one response; nothing after the final one."""
        wanted = {name: array for name, array in outputs.items() if name in self._requested}
        _check_shared_memory(wanted)
        self._send(response(wanted), final)

    def fail(self, error: TritoneError) -> None:
        """End with an error for a client; nothing if the reply has ended."""
        self._send(_error_response(error, error.message), final=True)

    def fail_stage(self, error: TritoneError) -> None:
        """End with an error of a stage, for its orchestrator; nothing if the reply has ended."""
        self._send(error_response(error), final=True)

    def is_cancelled(self) -> bool:
        if not self._lock.acquire(blocking=False):
            return False  # it is sending; ask again later
        try:
            return not self._closed and bool(self._sender.is_cancelled())
        finally:
            self._lock.release()

    @property
    def wants(self) -> frozenset[str]:
        """Names of the outputs that the caller asked for."""
        return self._requested

    def _send(self, item: Any, final: bool) -> None:
        with self._lock:
            if self._closed:
                return
            self._sender.send(item, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)
            self._closed = final


def _check_shared_memory(outputs: Mapping[str, Array]) -> None:
    """A response that does not fit into shared memory would be lost without an end: refuse it before."""
    size = sum(map(_num_bytes, outputs.values()))
    if size > LARGE_RESPONSE_BYTES and size > shutil.disk_usage(SHARED_MEMORY).free:
        raise Unavailable(
            f"an answer of {size >> 20} MiB does not fit into the server's shared memory",
            "ask for a stream, or give the server more of it",
        )


def _num_bytes(array: Array) -> int:
    """Of a tensor in shared memory; a STRING array itself holds pointers only."""
    return sum(map(len, array.flat)) if array.dtype == object else array.nbytes


def make_metric_family(family: Family) -> Any:
    """Triton's own object of a metric family."""
    kind = getattr(pb_utils.MetricFamily, family.kind)
    return pb_utils.MetricFamily(name=family.name, description=family.doc, kind=kind)


def log_info(text: str) -> None:
    pb_utils.Logger.log_info(text)


def log_error(text: str) -> None:
    pb_utils.Logger.log_error(text)
