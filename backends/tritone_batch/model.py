"""Door of a stage that Triton batches: the chunks of many streams in one call."""

import json

from tritone import control
from tritone.bls import Evictions
from tritone.contract import CONTROL, REPLY
from tritone.errors import InvalidRequest, from_code
from tritone.ports import by_name
from tritone.stage_door import StageDoor, as_error
from tritone.triton import error_response, open_sequence, read_batched_inputs, response
from tritone.wire import StreamChunk


class TritonPythonModel:
    def initialize(self, args):
        self._door = StageDoor(args)
        self._evictions = Evictions(self._door.model, self._door.key)
        self._outputs = by_name(self._door.stage.outputs)

    def execute(self, requests):
        """One response for each request, in order."""
        responses = [None] * len(requests)
        chunks = {}
        for i, request in enumerate(requests):
            try:
                read = self._read(request)
                if isinstance(read, StreamChunk):
                    chunks[i] = read
                else:
                    responses[i] = response({REPLY.name: REPLY.pack(json.dumps(read))[None]})
            except Exception as error:
                responses[i] = error_response(as_error(error))
        for i, answered in zip(chunks, self._run(list(chunks.values())), strict=True):
            responses[i] = answered
        return responses

    def _read(self, request):
        """The chunk in a request, or the JSON reply to a control call."""
        call = self._control(request)
        match call:
            case control.RunChunk():
                inputs = read_batched_inputs(request, self._door.stage.inputs)
                return StreamChunk(call.session, inputs, call.start, call.end, call.settings, call.trace)
            case control.DropStream():
                self._door.cancel(call.session)
                return {}
            case control.KeepStream():
                return {}
            case control.PingStage():
                return self._door.ping().result()
        raise InvalidRequest(f"control asks this stage to {type(call).__name__}", "call the pipeline model")

    def _control(self, request):
        """What the orchestrator asks. A stranger is refused, and the place of its sequence is freed."""
        try:
            data = read_batched_inputs(request, (CONTROL,)).get(CONTROL.name, b"")
            return control.decode(data, self._door.key)
        except InvalidRequest:
            number = open_sequence(request)
            if number is not None:
                self._evictions.end(number)
            raise

    def _run(self, chunks):
        if not chunks:
            return []
        try:
            results = self._door.run(chunks)
        except Exception as error:
            return [error_response(as_error(error)) for _ in chunks]  # each is sent, and freed, on its own
        return [self._response(result) for result in results]

    def _response(self, result):
        if result.code:
            return error_response(from_code(result.code, result.what, result.cure))
        try:
            tensors = {name: self._outputs[name].pack(value)[None] for name, value in result.outputs.items()}
            tensors[REPLY.name] = REPLY.pack(json.dumps({"busy": result.busy, "batch": result.batch}))[None]
            return response(tensors)
        except Exception as error:
            return error_response(as_error(error))

    def is_ready(self):
        """Asked by servers from python_backend r26.03 on."""
        return self._door.is_ready

    def finalize(self):
        self._evictions.close()
        self._door.close()
