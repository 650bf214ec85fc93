"""Speed of the thinker's engine, host and all, at the sizes of a config.json, with random weights.

    python client/bench/gpu/thinker_engine.py DIR --sessions 1,4,16,64
    python client/bench/gpu/thinker_engine.py CHECKPOINT --tiny

DIR: as `build/qwen3_omni_real_size.py DIR` writes it. All sessions at once: a prompt of words, then so many
tokens, of which half the sessions draw theirs and half take the likeliest. Printed are the time to the first
text of the first and of the last session, the median and 99th percentile of a step once all of them answer,
and whether the first session's tokens are those that it draws alone; for each way to step. Then all but one
answer, and that one comes with a prompt of --late bytes: printed are the longest step of the others until its
first text, and how many steps that takes. --tiny: a small checkpoint on a CPU, where a graph is a call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from operator import eq
from pathlib import Path
from typing import Any

import torch

from tritone.engines.base import Placement
from tritone.pipelines.qwen3_omni.thinker import Thinker, ThinkerOptions

WAYS: dict[str, dict[str, Any]] = {
    "kernels, overlap": {},
    "kernels": {"overlap": False},
    "plain, overlap": {"kernels": False},
    "eager": {"cuda_graphs": False},
}
SETTLED_STEPS = 10  # before the late prompt comes
LONGEST = 400  # tokens of those who answer meanwhile


class _Thinker(Thinker):
    """With graphs on a CPU too."""

    @staticmethod
    def _has_graphs(placement: Placement, options: Any) -> bool:
        return bool(options.cuda_graphs)


def ask(thinker: Thinker, number: int, prompt_bytes: int, tokens: int) -> Any:
    """The session of a prompt of so many bytes, whose answer has so many tokens; every second one draws."""
    words = f"{number} " + "a" * prompt_bytes  # at full size about one token a byte
    messages = [{"role": "user", "content": [{"type": "text", "text": words}]}]
    limits = {"max_tokens": tokens, "ignore_eos": True, "seed": number}
    sampling = {"temperature": 0.8 * (number % 2), "top_k": 50, "top_p": 0.9, **limits}
    thinker.add_request(str(number), {"messages": json.dumps(messages)}, {"sampling": sampling})
    return thinker._sessions[str(number)]


def answered(thinker: Thinker, sessions: int, prompt_bytes: int, tokens: int) -> dict[str, Any]:
    """Tokens of the first session, when each session's first came, and how long each step took."""
    known = {str(i): ask(thinker, i, prompt_bytes, tokens) for i in range(sessions)}
    firsts_s: dict[str, float] = {}
    steps_s: list[float] = []
    began_s = time.perf_counter()
    while thinker.has_work:
        all_answer = len(firsts_s) == sessions
        step_s = time.perf_counter()
        thinker.step()
        now_s = time.perf_counter()
        if all_answer and thinker.has_work:
            steps_s.append(now_s - step_s)
        for name, session in known.items():
            if session.completion_tokens:
                firsts_s.setdefault(name, now_s - began_s)
    first = known["0"]
    return {
        "tokens": first.tokens[first.prompt_tokens :],
        "firsts_s": firsts_s,
        "steps_s": steps_s,
        "total_s": time.perf_counter() - began_s,
    }


def beside_a_prompt(thinker: Thinker, sessions: int, prompt_bytes: int, late_bytes: int) -> list[float]:
    """Seconds of each step of running sessions from when one more comes until its first token.

    late_bytes: of its prompt; prompt_bytes: of each of theirs.
    """
    asked = [ask(thinker, i, prompt_bytes, LONGEST) for i in range(sessions)]
    while not all(session.completion_tokens for session in asked):
        thinker.step()
    for _ in range(SETTLED_STEPS):
        thinker.step()
    late = ask(thinker, sessions, late_bytes, 5)
    steps_s: list[float] = []
    while not late.completion_tokens:
        began_s = time.perf_counter()
        thinker.step()
        steps_s.append(time.perf_counter() - began_s)
    for i in range(sessions + 1):
        thinker.abort(str(i))
    return steps_s


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--sessions", default="1,4,16,64")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--prompt", type=int, default=100, help="bytes of each prompt")
    parser.add_argument("--prefill", type=int, default=1024, help="prompt tokens a step")
    parser.add_argument("--ways", default=";".join(WAYS), help="some of these, between semicolons")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--late", type=int, default=1024, help="bytes of a prompt that comes later")
    arguments = parser.parse_args(argv)
    sizes = [int(size) for size in arguments.sessions.split(",")]
    device = "cuda:0" if torch.cuda.is_available() and not arguments.tiny else "cpu"
    for way in arguments.ways.split(";"):
        options = ThinkerOptions(
            max_slots=max(2, *sizes),
            max_context_tokens=1024 + arguments.late,
            prefill_chunk_tokens=arguments.prefill,
            dtype="float32" if arguments.tiny else "bfloat16",
            load_format="auto" if arguments.tiny else "dummy",
            prefix_cache=False,
            **WAYS[way],
        )
        began_s = time.monotonic()
        thinker = (_Thinker if arguments.tiny else Thinker)(Placement(arguments.folder, device), options)
        print(f"{way}: ready in {time.monotonic() - began_s:.0f} s", flush=True)
        alone: list[int] = []
        for size in sizes:
            answered(thinker, size, arguments.prompt, 5)
            result = answered(thinker, size, arguments.prompt, arguments.tokens)
            steps = sorted(1e3 * step for step in result["steps_s"])
            firsts = [1e3 * first for first in result["firsts_s"].values()]
            alone = alone or result["tokens"]
            print(
                f"sessions {size:2d}: first text {min(firsts):.0f} to {max(firsts):.0f} ms, "
                f"step {statistics.median(steps):.2f} ms (99 %: {steps[int(0.99 * len(steps))]:.2f}), "
                f"{size * arguments.tokens / result['total_s']:.0f} tokens a second, "
                f"tokens as alone: {sum(map(eq, result['tokens'], alone))} of {len(alone)}",
                flush=True,
            )
            if arguments.late:
                others = max(1, size - 1)
                beside_a_prompt(thinker, others, arguments.prompt, arguments.late)
                late_s = beside_a_prompt(thinker, others, arguments.prompt, arguments.late)
                print(
                    f"    a prompt of {arguments.late} bytes beside them: {len(late_s)} steps until its "
                    f"first text, the longest {1e3 * max(late_s):.2f} ms",
                    flush=True,
                )
        del thinker
    return 0


if __name__ == "__main__":
    sys.exit(main())
