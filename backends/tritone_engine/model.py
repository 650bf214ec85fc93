"""Door of a stage whose engine batches: each request is one short control call (open, ping)."""

import json

from tritone import control
from tritone.contract import CONTROL, REPLY
from tritone.errors import InvalidRequest
from tritone.stage_door import StageDoor, as_error
from tritone.triton import Reply, read_inputs


class TritonPythonModel:
    def initialize(self, args):
        self._door = StageDoor(args)

    def execute(self, requests):
        for request in requests:
            reply = Reply(request)
            try:
                answer = self._call(request)
            except Exception as error:
                reply.fail_stage(as_error(error))
            else:
                answer.add_done_callback(lambda done, reply=reply: self._send(done, reply))

    def _call(self, request):
        """The future of what a control call answers."""
        call = control.decode(read_inputs(request, (CONTROL,)).get(CONTROL.name, b""), self._door.key)
        match call:
            case control.OpenSession():
                return self._door.open(call, read_inputs(request, self._door.stage.inputs))
            case control.PingStage():
                return self._door.ping()
        raise InvalidRequest(f"control asks this stage to {type(call).__name__}", "call the pipeline model")

    def _send(self, answer, reply):
        error = answer.exception()
        if error is not None:
            reply.fail_stage(as_error(error))
        else:
            reply.send({REPLY.name: REPLY.pack(json.dumps(answer.result()))}, final=True)

    def is_ready(self):
        """Asked by servers from python_backend r26.03 on."""
        return self._door.is_ready

    def finalize(self):
        self._door.close()
