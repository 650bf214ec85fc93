"""Speed of the talker's engine, host and all, at the sizes of a config.json, with random weights.

    python client/bench/gpu/talker_engine.py DIR --sessions 1,16,64

All sessions at once: a prompt, then so many frames. Printed are the time to the first frame of the first and
of the last session, and the median and 99th percentile of a step once all of them speak. Then all but one
speak, and that one comes with a prompt of --late tokens: printed are the longest step of the others until its
first frame, and how many steps that takes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tritone.engines.base import Placement
from tritone.pipelines.qwen3_omni.talker import Talker, TalkerOptions

DEVICE = "cuda:0"
PROMPT_TOKENS, TEXT_TOKENS = 108, 100
SETTLED_STEPS = 10  # before the late prompt comes
LONGEST = 400  # frames of those who speak meanwhile
LATE = "late"


def ask(talker: Talker, name: str, seed: int, prompt_tokens: int, frames: int, chance: Any) -> None:
    """Begin a session that makes so many frames. chance: numpy's RandomState, for the ids of the prompt."""
    ids = talker._config.tokens
    sampling = {"temperature": 0.9, "top_k": 50, "repetition_penalty": 1.05, "seed": seed}
    limits = {"max_tokens": frames + 1, "min_tokens": frames + 1}
    prompt = [ids.im_start, ids.user, *chance.randint(10, 2000, prompt_tokens - 3), ids.im_end]
    head = [ids.im_start, 77, 198]
    inputs = {
        "prompt_ids": np.array(prompt, np.int32),
        "token_ids": np.array([*head, *chance.randint(10, 2000, TEXT_TOKENS)], np.int32),
    }
    talker.add_request(name, {}, {"sampling": {**sampling, **limits}})
    talker.push(name, inputs, last=True)


def spoken(talker: Talker, sessions: int, frames: int) -> dict[str, Any]:
    """Codes of each session, when its first frame came, and how long each step took."""
    chance = np.random.RandomState(0)
    for i in range(sessions):
        ask(talker, str(i), i, PROMPT_TOKENS, frames, chance)
    codes: dict[str, list[Any]] = {str(i): [] for i in range(sessions)}
    first_s: dict[str, float] = {}
    steps_s: list[float] = []
    began_s = time.perf_counter()
    while talker.has_work:
        step_s = time.perf_counter()
        deltas = talker.step()
        now_s = time.perf_counter()
        if len(first_s) == sessions and len(deltas) == sessions:
            steps_s.append(now_s - step_s)
        for delta in deltas:
            assert delta.error is None, delta.error
            if "frames" in delta.outputs:
                codes[delta.session].append(np.asarray(delta.outputs["frames"])[0].tolist())
                first_s.setdefault(delta.session, now_s - began_s)
    return {"codes": codes, "first_s": first_s, "steps_s": steps_s, "total_s": time.perf_counter() - began_s}


def beside_a_prompt(talker: Talker, sessions: int, prompt_tokens: int) -> list[float]:
    """Seconds of each step of running sessions from when one more comes until its first frame.

    prompt_tokens: of the one that comes.
    """
    chance = np.random.RandomState(1)
    for i in range(sessions):
        ask(talker, str(i), i, PROMPT_TOKENS, LONGEST, chance)
    speaking: set[str] = set()
    while len(speaking) < sessions:
        speaking |= {delta.session for delta in talker.step() if "frames" in delta.outputs}
    for _ in range(SETTLED_STEPS):
        talker.step()
    ask(talker, LATE, sessions, prompt_tokens, 10, chance)
    steps_s: list[float] = []
    while LATE not in speaking:
        began_s = time.perf_counter()
        deltas = talker.step()
        steps_s.append(time.perf_counter() - began_s)
        speaking |= {delta.session for delta in deltas if "frames" in delta.outputs}
    for name in (*map(str, range(sessions)), LATE):
        talker.abort(name)
    return steps_s


def same_frames(one: list[Any], other: list[Any]) -> int:
    """How many frames from the first on are the same."""
    for i, (mine, its) in enumerate(zip(one, other, strict=True)):
        if mine != its:
            return i
    return len(one)


def profiled(talker: Talker) -> str:
    """A table of a session's prompt and first frame."""
    spoken(talker, 1, 2)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        spoken(talker, 1, 1)
    averages = profile.key_averages()
    return "\n".join(
        averages.table(sort_by=key, row_limit=14, max_name_column_width=60)
        for key in ("self_cuda_time_total", "self_cpu_time_total")
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--sessions", default="1,16,64")
    parser.add_argument("--frames", type=int, default=100)
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--profile", action="store_true", help="what the device does in one prompt")
    parser.add_argument("--prefill", type=int, default=256, help="prompt tokens a step")
    parser.add_argument("--late", type=int, default=1024, help="tokens of a prompt that comes later")
    arguments = parser.parse_args(argv)
    sizes = [int(size) for size in arguments.sessions.split(",")]
    alone: list[Any] = []
    for overlap in (True, False):
        options = TalkerOptions(
            max_slots=max(2, *sizes),
            max_context_tokens=1024 + arguments.late,
            prefill_chunk_tokens=arguments.prefill,
            dtype="bfloat16",
            load_format="dummy",
            max_looped_frames=0,
            overlap=overlap,
            batch_invariant=arguments.batch_invariant,
        )
        began_s = time.monotonic()
        talker = Talker(Placement(arguments.folder, DEVICE), options)
        print(f"overlap {overlap}: ready in {time.monotonic() - began_s:.0f} s", flush=True)
        if arguments.profile:
            print(profiled(talker))
            return 0
        for size in sizes:
            spoken(talker, size, 5)
            result = spoken(talker, size, arguments.frames)
            steps = sorted(1000 * step for step in result["steps_s"])
            firsts = [1000 * first for first in result["first_s"].values()]
            alone = alone or result["codes"]["0"]
            print(
                f"sessions {size:2d}: first frame {min(firsts):.0f} to {max(firsts):.0f} ms, "
                f"step {statistics.median(steps):.2f} ms (99 %: {steps[int(0.99 * len(steps))]:.2f}), "
                f"{size * arguments.frames * 0.08 / result['total_s']:.0f} s of speech a second, "
                f"frames as alone: {same_frames(alone, result['codes']['0'])} of {len(alone)}",
                flush=True,
            )
            if arguments.late:
                beside_a_prompt(talker, max(1, size - 1), arguments.late)
                late = [1000 * step for step in beside_a_prompt(talker, max(1, size - 1), arguments.late)]
                print(
                    f"    a prompt of {arguments.late} tokens beside them: {len(late)} steps until its first "
                    f"frame, the longest {max(late):.2f} ms",
                    flush=True,
                )
        del talker
    return 0


if __name__ == "__main__":
    sys.exit(main())
