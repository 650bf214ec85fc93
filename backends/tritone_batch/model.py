"""Door of a stage that Triton batches: the chunks of many streams in one call."""

import json

from tritone.contract import CONTROL, REPLY
from tritone.errors import InvalidRequest, TritoneError, from_code
from tritone.ports import by_name
from tritone.stage_door import StageDoor, as_error
from tritone.triton import error_response, read_batched_inputs, response
from tritone.wire import StreamChunk


class TritonPythonModel:
    def initialize(self, args):
        self._door = StageDoor(args)
        self._inputs = (CONTROL, *self._door.stage.inputs)
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
            except TritoneError as error:
                responses[i] = error_response(error)
        for i, answered in zip(chunks, self._run(list(chunks.values())), strict=True):
            responses[i] = answered
        return responses

    def _read(self, request):
        """The chunk in a request, or the JSON reply to a control call."""
        inputs = read_batched_inputs(request, self._inputs)
        control = json.loads(inputs.pop(CONTROL.name, "{}"))
        if control.get("op") == "ping":
            return self._door.ping().result()
        if control.get("discard"):
            self._door.cancel(control["session"])
            return {}
        if "session" not in control:
            raise InvalidRequest("control names no session", "call the pipeline model, not its stages")
        return StreamChunk(
            control["session"], inputs, control["start"], control["end"], control.get("settings", {})
        )

    def _run(self, chunks):
        if not chunks:
            return []
        try:
            results = self._door.run(chunks)
        except Exception as error:
            return [error_response(as_error(error))] * len(chunks)
        return [self._response(result) for result in results]

    def _response(self, result):
        if result.code:
            return error_response(from_code(result.code, result.what, result.cure))
        return response(
            {name: self._outputs[name].pack(value)[None] for name, value in result.outputs.items()}
        )

    def finalize(self):
        self._door.close()
