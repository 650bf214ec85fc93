"""How perf_analyzer is run against a pipeline: three ways to ask the same questions.

    grpc   <pipeline>        ModelStreamInfer     what a streaming client sees, response by response
    http   <pipeline>_sync   POST …/infer         whole answers
    sse    <pipeline>        POST …/generate_stream, as server-sent events; the sound as base64

`<pipeline>.json` holds the questions, in the form that perf_analyzer reads itself: tensors by name. The other
two forms are made from it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from perf_analyzer.export import Level, read
from tritone_client.errors import InvalidRequest, ServerFault

RECIPES: Mapping[str, str] = {"grpc": "gRPC stream", "http": "HTTP infer", "sse": "HTTP generate_stream"}
INPUTS = Path(__file__).parent
TIMEOUT_S = 600.0  # of one run; perf_analyzer itself would wait for ever
TRIES = 3
MALLOC = "glibc.malloc.tcache_count=0:glibc.malloc.perturb=1:glibc.malloc.arena_max=1"
"""What lies in memory that was freed is written into exports, as the value of outputs that a response does
not carry. Where that is the pattern of a number that is not finite, the export breaks off. So freed memory is
overwritten with a pattern that is none."""


@dataclass(frozen=True)
class Target:
    """Where the server listens, host:port each."""

    grpc: str
    http: str


@dataclass(frozen=True)
class Load:
    """How hard it is asked."""

    concurrency: int | None = None  # requests at a time; None: `rate_hz` counts
    rate_hz: float = 1.0  # requests in a second, however many are under way
    distribution: Literal["poisson", "constant"] = "constant"  # of the time between two of them
    num_requests: int = 20

    @property
    def name(self) -> str:
        """For a file."""
        return f"concurrency-{self.concurrency}" if self.concurrency else f"rate-{self.rate_hz:g}"

    def words(self) -> list[str]:
        count = f"--request-count={self.num_requests}"
        if self.concurrency:
            return [f"--concurrency-range={self.concurrency}", count]
        return [f"--request-rate-range={self.rate_hz}", f"--request-distribution={self.distribution}", count]


@dataclass(frozen=True)
class Run:
    """What one run gave."""

    said: str  # its own table
    levels: Sequence[Level]  # of its export
    export: Path


def inputs_of(pipeline: str, given: Path | None = None) -> list[dict[str, Any]]:
    """The questions: tensors by name, as in the file. Raises InvalidRequest where there are none, OSError."""
    path = given or INPUTS / f"{pipeline}.json"
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in INPUTS.glob("*.json")))
        raise InvalidRequest(f"there is no {path}; ready inputs are for {known}, give --input for others")
    try:
        questions: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["data"]
    except (ValueError, KeyError, TypeError):
        raise InvalidRequest(f'{path} is not {{"data": [{{"text_input": ["…"], …}}, …]}}; mend it') from None
    return questions


def adapted(questions: Sequence[Mapping[str, Any]], recipe: str) -> dict[str, Any]:
    """The file that perf_analyzer reads for a recipe."""
    match recipe:
        case "http":
            return {"data": [{k: v for k, v in tensors.items() if k != "stream"} for tensors in questions]}
        case "sse":
            return {"data": [{"payload": [_payload(tensors)]} for tensors in questions]}
    return {"data": [{**tensors, "stream": [True]} for tensors in questions]}


def _payload(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a request to generate_stream: a tensor of one element is that element."""
    body: dict[str, Any] = {}
    for name, tensor in tensors.items():
        values = tensor["content"] if isinstance(tensor, dict) else tensor
        body[name] = values[0] if len(values) == 1 else values
    return {**body, "stream": True, "audio_format": "s16_base64"}


@dataclass(frozen=True)
class PerfAnalyzer:
    """The program, and what it is run against."""

    program: Path
    pipeline: str
    target: Target
    questions: Sequence[Mapping[str, Any]]  # tensors by name
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    extra: Sequence[str] = ()  # more options for it

    def run(self, recipe: str, load: Load, export: Path) -> Run:
        """Run it once and read its export, which is left at `export`, with its input beside it.

        Raises ServerFault where a request fails so that it gives up, or it does not end. A request that fails
        within a stream over HTTP does not trouble it, and is only seen in the levels.
        """
        inputs = export.with_suffix(".input.json")
        words = self.command(recipe, load, inputs, export)
        inputs.write_text(json.dumps(adapted(self.questions, recipe)), encoding="utf-8")
        for tries_left in reversed(range(TRIES)):
            export.unlink(missing_ok=True)
            said = _run(words, {**self.environment, "GLIBC_TUNABLES": MALLOC})
            try:
                return Run(said, read(export), export)
            except InvalidRequest:
                if not tries_left:
                    raise
        raise AssertionError("unreachable")

    def command(self, recipe: str, load: Load, inputs: Path, export: Path) -> list[str]:
        """The words that run it."""
        name, target = self.pipeline, self.target
        match recipe:
            case "grpc":
                how = ["-m", name, "-i", "grpc", "-u", target.grpc, "--streaming", "--async"]
            case "http":
                how = ["-m", f"{name}_sync", "-i", "http", "-u", target.http]
            case "sse":
                endpoint = f"--endpoint=v2/models/{name}/generate_stream"
                how = ["-m", name, "-i", "http", "-u", target.http, "--async"]
                how += ["--service-kind=openai", endpoint]
            case _:
                raise InvalidRequest(f"there is no recipe {recipe!r}; there are {', '.join(RECIPES)}")
        files = [f"--input-data={inputs}", f"--profile-export-file={export}"]
        return [str(self.program), *how, *load.words(), *files, *self.extra]


def _run(words: Sequence[str], environment: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise ServerFault(f"perf_analyzer was not done after {TIMEOUT_S:g} s") from None
    if done.returncode:
        raise ServerFault(f"perf_analyzer gave up: {_reason(done.stderr)}")
    return done.stdout


def _reason(said: str) -> str:
    """What it says that went wrong, without its page of options."""
    lines = [line.strip() for line in said.partition("Usage:")[0].splitlines() if line.strip()]
    faults = dict.fromkeys(line.partition("had error: ")[2] for line in lines if "had error: " in line)
    return "; ".join(faults) or " ".join(lines[-1:]) or "it did not say why"
