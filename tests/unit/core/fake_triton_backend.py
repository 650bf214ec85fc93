"""A stand-in for `triton_python_backend_utils`: doors and orchestrator run inside the test process with it.

    with installed(): import tritone.orchestrator          MODELS[name](request) answers a BLS call
    door.execute([ClientRequest(...)])                     ClientRequest.sender has what came back

It is as strict as the server. What the server refuses or crashes at is raised, and noted in the sender's
`faults`, since the caller may swallow the exception.
"""

import contextlib
import importlib
import importlib.util
import json
import re
import sys
import threading
import weakref
from pathlib import Path

import tritone

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1

BACKENDS = Path(tritone.__file__).parent.parent
# Modules of the library that bind this one.
SPEAKERS = ("triton", "bls", "stage_door", "reception", "orchestrator")

MODELS = {}  # by Triton model name: what answers its BLS calls, InferenceRequest to InferenceResponse


class TritonError(Exception):
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message, code=INTERNAL):
        super().__init__(message)
        self._message, self._code = message, code

    def message(self):
        return self._message

    def code(self):
        return self._code


class Tensor:
    def __init__(self, name, array):
        self._name, self._array = name, array

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array


class InferenceResponse:
    def __init__(self, output_tensors, error=None):
        self._tensors, self._error = list(output_tensors), error

    def output_tensors(self):
        return self._tensors

    def has_error(self):
        return self._error is not None

    def error(self):
        return self._error


class InferenceRequest:
    """A BLS call."""

    def __init__(self, model_name, requested_output_names, inputs, correlation_id=0, flags=0):
        self.model, self.outputs = model_name, list(requested_output_names)
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in inputs}
        self.sequence, self.bits = correlation_id, flags

    def inputs(self):
        return [Tensor(name, array) for name, array in self.tensors.items()]

    def correlation_id(self):
        return self.sequence

    def flags(self):
        return self.bits

    def exec(self):
        try:
            return MODELS[self.model](self)
        except TritonError as error:
            return InferenceResponse([], error)


class Logger:
    lines = []  # noqa: RUF012  (level, text); emptied by `installed`

    @classmethod
    def log_info(cls, text):
        cls.lines.append(("info", text))

    @classmethod
    def log_error(cls, text):
        cls.lines.append(("error", text))


class MetricFamily:
    """Of one process. What ends the server is noted in `faults`, since the caller may swallow it."""

    COUNTER, GAUGE, HISTOGRAM = range(3)
    shown = {}  # noqa: RUF012  what a scrape gives: by name and sorted labels, a number or a list of observations
    faults = []  # noqa: RUF012

    def __init__(self, name, description, kind):
        self.name, self.description, self.kind = name, description, kind

    def Metric(self, labels, buckets=None):
        return Metric(self, labels, buckets)


class Metric:
    def __init__(self, family, labels, buckets):
        self._family = weakref.ref(family)
        self._kind = family.kind
        self._key = family.name, tuple(sorted(labels.items()))
        self._in_use = threading.Lock()
        self._expect((buckets is not None) == (family.kind == MetricFamily.HISTOGRAM), "buckets")
        MetricFamily.shown.setdefault(self._key, [] if buckets else 0.0)

    def increment(self, value):
        with self._call(MetricFamily.COUNTER):
            self._expect(value >= 0, "a counter only grows")
            MetricFamily.shown[self._key] += value

    def set(self, value):
        with self._call(MetricFamily.GAUGE):
            MetricFamily.shown[self._key] = value

    def observe(self, value):
        with self._call(MetricFamily.HISTOGRAM):
            MetricFamily.shown[self._key].append(value)

    @contextlib.contextmanager
    def _call(self, kind):
        self._expect(self._in_use.acquire(blocking=False), "two calls at a time end the server")
        try:
            self._expect(self._family() is not None, "its family is gone")
            self._expect(self._kind == kind, "the call is of another kind of metric")
            yield
        finally:
            self._in_use.release()

    def _expect(self, holds, what):
        if not holds:
            MetricFamily.faults.append(f"{self._key}: {what}")
            raise TritonError(what)


class ResponseSender:
    """Where the responses of one request go; `ended` is set by FINAL."""

    def __init__(self, decoupled=True):
        self.responses = []  # by response: {output name: array}, or its TritonError
        self.flags = []
        self.faults = []
        self.ended = threading.Event()
        self.cancelled = False
        self.cancel_fault = None  # raised when asked about the cancellation
        self._decoupled = decoupled
        self._lock = threading.Lock()

    def send(self, response=None, flags=0):
        with self._lock:
            if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL) or (response is None and not flags):
                self._refuse("the arguments of send are wrong")
            if self.ended.is_set():
                self._refuse("the response sender has been closed")
            if not self._decoupled and self.responses:
                self._refuse("a non-decoupled model cannot send more than one response")
            if response is not None:
                tensors = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
                self.responses.append(response.error() if response.has_error() else tensors)
            self.flags.append(flags)
            if flags:
                self.ended.set()

    def is_cancelled(self):
        if self.ended.is_set():
            self._refuse("the server crashes when it is asked about a request that has ended")
        if self.cancel_fault is not None:
            raise self.cancel_fault
        return self.cancelled

    def _refuse(self, what):
        self.faults.append(what)
        raise RuntimeError(what)

    def outcome(self, timeout_s=20.0):
        """The end, waited for: "done", or the code of the error."""
        assert self.ended.wait(timeout_s), f"no end within {timeout_s} s; so far {self.responses}"
        return outcome_of(self.responses[-1])

    @property
    def message(self):
        """The error line of the last response."""
        return self.responses[-1].message()

    def texts(self, name):
        """What output `name` says in each response that has it."""
        tensors = [answer for answer in self.responses if isinstance(answer, dict)]
        return [answer[name].reshape(-1)[0].decode() for answer in tensors if name in answer]


def outcome_of(answer):
    """ "done" for tensors, the code in an error's message, or "UNMARKED" for one that clients cannot tell."""
    if isinstance(answer, dict):
        return "done"
    marked = re.match(r"TRITONE_([A-Z_]+): .", answer.message())
    return marked[1] if marked else "UNMARKED"


class ClientRequest:
    """What a door's `execute` is given. tensors: packed inputs by name."""

    def __init__(self, tensors, outputs, parameters=None, decoupled=True):
        self.sender = ResponseSender(decoupled)
        self._tensors, self._outputs, self._parameters = dict(tensors), list(outputs), parameters or {}

    def inputs(self):
        return [Tensor(name, array) for name, array in self._tensors.items()]

    def requested_output_names(self):
        return self._outputs

    def parameters(self):
        return json.dumps(self._parameters)

    def get_response_sender(self):
        return self.sender


class SequenceBatcher:
    """Triton in front of a batched stage: knows which sequences live, and refuses one that never began."""

    def __init__(self, model):
        """model: answers a request that is let through."""
        self.live = set()
        self.log = []  # (sequence, flags), as calls begin; (sequence, "returned"), as they end
        self.overlaps = []  # sequences that were called while a call to them was under way
        self.refused = []  # sequences that were called when they had ended, or never begun
        self._model, self._under_way, self._lock = model, set(), threading.Lock()

    def __call__(self, request):
        number = request.sequence
        with self._lock:
            self.log.append((number, request.bits))
            if number in self._under_way:
                self.overlaps.append(number)
            if request.bits & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                self.live.add(number)
            elif number not in self.live:
                self.refused.append(number)
                raise TritonError("the first request of a sequence must have the START flag")
            self._under_way.add(number)
        try:
            return self._model(request)
        finally:
            with self._lock:
                self._under_way.discard(number)
                self.log.append((number, "returned"))
                if request.bits & TRITONSERVER_REQUEST_FLAG_SEQUENCE_END:
                    self.live.discard(number)


@contextlib.contextmanager
def installed():
    """While it lasts, the library finds this module as `triton_python_backend_utils`; no trace is left."""
    names = ("triton_python_backend_utils", *(f"tritone.{module}" for module in SPEAKERS))
    before = {name: sys.modules.pop(name, None) for name in names}
    attributes = {module: tritone.__dict__.pop(module, None) for module in SPEAKERS}
    sys.modules["triton_python_backend_utils"] = sys.modules[__name__]
    Logger.lines.clear()
    MetricFamily.shown.clear()
    MetricFamily.faults.clear()
    MODELS.clear()
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
        for name, module in attributes.items():
            tritone.__dict__.pop(name, None)
            if module is not None:
                setattr(tritone, name, module)


def load_door(name):
    """The class of a door, from a module of its own: Triton calls all of them `model`."""
    spec = importlib.util.spec_from_file_location(f"door_{name}", BACKENDS / name / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TritonPythonModel
