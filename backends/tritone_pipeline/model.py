"""Door of a pipeline model, decoupled or its whole-answer twin: requests go to the orchestrator."""

import os

from tritone import allocator, inbox
from tritone.orchestrator import Orchestrator
from tritone.private_memory import keep_private
from tritone.readiness import Readiness
from tritone.server_key import server_key
from tritone.stage_door import as_error, load_deploy, server_name
from tritone.tracing import open_tracer
from tritone.triton import Reply, is_decoupled, read_inputs, read_parameters


class TritonPythonModel:
    def initialize(self, args):
        keep_private()
        deploy, _, _ = load_deploy(args)
        self._inputs = deploy.pipeline.inputs
        name = f"{args['model_name']}/{os.getpid()}"
        address = inbox.address(server_name(), args["model_name"], os.getpid())
        facts = deploy.pipeline.facts(deploy.checkpoint)
        may_stream, key = is_decoupled(args["model_config"]), server_key(server_name())
        tracer = open_tracer(deploy.tracing, args["model_name"], {"tritone.pipeline": deploy.pipeline.name})
        self._orchestrator = Orchestrator(deploy, facts, name, address, may_stream, key, tracer)
        self._readiness = Readiness(self._orchestrator.states)
        allocator.give_back_often(deploy.max_in_flight * allocator.IN_ORCHESTRATOR_BYTES)

    def execute(self, requests):
        for request in requests:
            reply = Reply(request)
            try:
                values = read_inputs(request, self._inputs)
                self._orchestrator.submit(values, read_parameters(request), reply)
            except Exception as error:
                self._orchestrator.refuse(reply, as_error(error))

    def is_ready(self):
        """Asked by servers from python_backend r26.03 on."""
        return self._readiness()

    def finalize(self):
        self._readiness.close()
        self._orchestrator.close()
