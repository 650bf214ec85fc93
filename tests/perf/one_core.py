"""What a setting costs on the request path, without the noise of a server: processor time per request.

    python tests/perf/one_core.py --b 'tracing.otlp_endpoint={collector}'
    python tests/perf/one_core.py --b 'tracing.otlp_endpoint={collector}' \\
        --c 'tracing.otlp_endpoint={collector}' --c tracing.sample_ratio=0.1

A, B and C differ in nothing but these overrides. Each is the whole chain of the weight-free pipeline in one
process: its doors, its orchestrator and its engines as threads, and a stand-in for Triton that hands calls
over. The processes share one core and take turns with the same requests, so that no two threads ever run at
once and other work of the machine meets all of them; a turn's time includes what its process did since the
turn before, as the sending of spans. overhead.py measures whole servers, tritonserver's own share included.

    A: door ─► orchestrator ─► doors ─► engines    one process
    B: the same                                    another, by turns
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1] / "soak"), str(Path(__file__).parents[2] / "backends")]

from overhead import collector
from paired import Ratio
from soak_listener import Job
from soak_load import PIPELINE, mixed_jobs
from tritone import deploy_reader, server_key, wire
from tritone.deploy import Deploy
from tritone.engines.host import Host, build_loops
from tritone.pipeline import Batching
from tritone.tracing import open_tracer

STAND_IN = Path(__file__).parents[1] / "unit" / "core" / "fake_triton_backend.py"
OUTPUTS = ("text_output", "event", "index", "audio_output", "sample_rate", "finish_reason", "info")
PATIENCE_S = 60.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    override = {"action": "append", "default": [], "metavar": "KEY=VALUE"}
    for name in "abc":
        parser.add_argument(f"--{name}", help=f"overrides of {name.upper()}'s deploy file", **override)
    parser.add_argument("--rounds", type=int, default=40, metavar="N", help="default: 40")
    parser.add_argument("--requests", type=int, default=32, metavar="N", help="a turn; default: 32")
    parser.add_argument("--at-once", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument("--chain", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.chain is not None:
        return serve(json.loads(args.chain))
    names = "abc" if args.c else "ab"
    with ExitStack() as stack:
        url = stack.enter_context(collector())
        chains = {
            name: stack.enter_context(chain([text.replace("{collector}", url) for text in vars(args)[name]]))
            for name in names
        }
        rounds = [
            measured
            for number in range(args.rounds + 1)
            if (measured := one_round(chains, number, args.requests, args.at_once)) and number
        ]
    for name in names[1:]:
        totals = [(sum(measured["a"].values()), sum(measured[name].values())) for measured in rounds]
        print(f"{name.upper()} / A, processor time per request: {Ratio.of(totals)}")
    print_threads(names, rounds)
    return 0


def one_round(
    chains: dict[str, subprocess.Popen[str]], number: int, requests: int, at_once: int
) -> dict[str, dict[str, float]]:
    """By chain and group of threads, milliseconds of processor time per request."""
    order = list(chains) if number % 2 else list(reversed(chains))
    return {name: told(chains[name], [number, requests, at_once]) for name in order}


def told(process: subprocess.Popen[str], order: list[int]) -> dict[str, float]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()
    answer: dict[str, float] = json.loads(process.stdout.readline())
    return answer


def print_threads(names: str, rounds: list[dict[str, dict[str, float]]]) -> None:
    groups = sorted({group for measured in rounds for times in measured.values() for group in times})
    print(f"{'ms per request':30}" + "".join(f"{name.upper():>9}" for name in names))
    for group in groups:
        means = [sum(measured[name].get(group, 0.0) for measured in rounds) / len(rounds) for name in names]
        print(f"{group:30}" + "".join(f"{mean:9.3f}" for mean in means))


@contextmanager
def chain(overrides: list[str]) -> Iterator[subprocess.Popen[str]]:
    """One in a process of its own, on the same core as the others."""
    core = min(os.sched_getaffinity(0))
    words = [sys.executable, __file__, f"--chain={json.dumps(overrides)}"]
    with subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


# -- in the process of a chain -------------------------------------------------------------------------------


def serve(overrides: list[str]) -> int:
    """Do turns of requests as standard input orders them, and tell what each took."""
    fake = load_stand_in()
    with tempfile.TemporaryDirectory() as folder, fake.installed():
        chain = Chain(fake, Path(folder), overrides)
        before = threads_s()
        for line in sys.stdin:
            seed, requests, at_once = json.loads(line)
            chain.answer(seed, requests, at_once)
            now = threads_s()
            taken = {group: 1000 * (now[group] - before[group]) / requests for group in now}
            print(json.dumps(taken), flush=True)
            before = now
        chain.close()
    return 0


def load_stand_in() -> Any:
    spec = importlib.util.spec_from_file_location("fake_triton_backend", STAND_IN)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def threads_s() -> Counter[str]:
    """Seconds of processor time of the threads that live, by name; those of a pool have one."""
    times: Counter[str] = Counter()
    for thread in threading.enumerate():
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        times[re.sub(r"[_-]?\d+$|-\d+ .*| .*", "", thread.name)] += time.clock_gettime(clock)
    return times


class Chain:
    """Doors, orchestrator and engines of the pipeline, behind a stand-in for Triton."""

    def __init__(self, fake: Any, folder: Path, overrides: list[str]) -> None:
        from tritone import stage_door

        stage_door.server_name = lambda: f"{os.getpid()}-chain"  # else the parent's, which all share
        self._fake = fake
        self._folder = folder / PIPELINE
        self._folder.mkdir()
        file = self._folder / "deploy.yaml"
        file.write_text(json.dumps({"pipeline": PIPELINE}))
        file.write_text(json.dumps(dict(deploy_reader.load(file, overrides).source)))
        self._deploy = deploy_reader.load(file)
        self._ports = {port.name: port for port in self._deploy.pipeline.inputs}
        self._doors = []
        for stage in self._deploy.pipeline.stages:
            self._start_engine(stage.name, stage_door.engine_address)
            by_engine = stage.batching is Batching.ENGINE
            model = self._deploy.stage(stage.name).model
            door = self._door("tritone_engine" if by_engine else "tritone_batch", model, stage=stage.name)
            fake.MODELS[model] = self._called(door) if by_engine else self._batched(door)
        self._pipeline = self._door("tritone_pipeline", PIPELINE)

    def answer(self, seed: int, requests: int, at_once: int) -> None:
        """Raises AssertionError when an answer is an error, or does not come."""
        jobs = mixed_jobs(random.Random(seed), requests)
        for begin in range(0, requests, at_once):
            asked = [self._request(job) for job in jobs[begin : begin + at_once]]
            self._pipeline.execute(asked)
            for request in asked:
                assert request.sender.outcome(PATIENCE_S) == "done", request.sender.responses[-1]

    def close(self) -> None:
        for door in reversed(self._doors):
            door.finalize()
        server_key.forget(os.getpid())

    def _request(self, job: Job) -> Any:
        values = {"text_input": job.prompt, "stream": True, "audio_format": job.audio_format}
        tensors = {name: self._ports[name].pack(value) for name, value in values.items()}
        return self._fake.ClientRequest(tensors, OUTPUTS, {"seed": job.seed})

    def _start_engine(self, stage: str, engine_address: Callable[[Deploy, str, str, int], str]) -> None:
        address = engine_address(self._deploy, stage, "cpu", 0)
        host = Host(address, wire.listen(address))
        tracer = open_tracer(self._deploy.tracing, f"{stage}.engine", {"tritone.stage": stage})
        host.serve()
        host.become(wire.Ready(0.0), build_loops(self._deploy, (stage,), "cpu", host.peers, tracer))

    def _door(self, kind: str, model: str, **parameters: str) -> Any:
        parameters["deploy_digest"] = self._deploy.digest
        config = {
            "parameters": {key: {"string_value": value} for key, value in parameters.items()},
            "model_transaction_policy": {"decoupled": kind == "tritone_pipeline"},
        }
        door = self._fake.load_door(kind)()
        door.initialize(
            {
                "model_name": model,
                "model_repository": str(self._folder / model),
                "model_config": json.dumps(config),
                "model_instance_name": f"{model}_0_0",
                "model_instance_kind": "CPU",
                "model_instance_device_id": "0",
            }
        )
        self._doors.append(door)
        return door

    def _called(self, door: Any) -> Callable[[Any], Any]:
        """How Triton answers a BLS call to a door that answers later."""

        def call(request: Any) -> Any:
            asked = self._fake.ClientRequest(request.tensors, request.outputs, decoupled=False)
            door.execute([asked])
            asked.sender.outcome(PATIENCE_S)
            (answer,) = asked.sender.responses
            tensors = [self._fake.Tensor(name, array) for name, array in answer.items()]
            return self._fake.InferenceResponse(tensors)

        return call

    def _batched(self, door: Any) -> Any:
        turn = threading.Lock()  # an instance is called by one thread at a time

        def call(request: Any) -> Any:
            with turn:
                return door.execute([request])[0]

        return self._fake.SequenceBatcher(call)


if __name__ == "__main__":
    sys.exit(main())
