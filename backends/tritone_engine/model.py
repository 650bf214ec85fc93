"""Door of a stage whose engine batches: each request is one short control call (open, ping)."""

import json

from tritone.contract import CONTROL, REPLY
from tritone.errors import InvalidRequest, TritoneError
from tritone.stage_door import StageDoor, as_error
from tritone.triton import Reply, read_inputs


class TritonPythonModel:
    def initialize(self, args):
        self._door = StageDoor(args)

    def execute(self, requests):
        for request in requests:
            reply = Reply(request)
            try:
                self._handle(read_inputs(request, (CONTROL, *self._door.stage.inputs)), reply)
            except TritoneError as error:
                reply.fail(error)

    def _handle(self, inputs, reply):
        control = json.loads(inputs.pop(CONTROL.name, "{}"))
        match control.get("op"):
            case "open":
                answer = self._door.open(control, inputs)
            case "ping":
                answer = self._door.ping()
            case op:
                raise InvalidRequest(f"control.op is {op!r}", "call the pipeline model, not its stages")
        answer.add_done_callback(lambda done: self._send(done, reply))

    def _send(self, answer, reply):
        error = answer.exception()
        if error is not None:
            reply.fail(as_error(error))
        else:
            reply.send({REPLY.name: REPLY.pack(json.dumps(answer.result()))}, final=True)

    def finalize(self):
        self._door.close()
