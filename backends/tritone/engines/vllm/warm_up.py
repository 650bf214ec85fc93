"""What vLLM compiles when it is first needed, needed before the first caller comes.

    steps of prompts, by their number of rows ─┐
    draws, by their settings ──────────────────┴─► LLMEngine.step, until nothing is left

vLLM captures the steps of running answers when it starts. A step with prompts takes its kernels by how many
rows it has, and a draw by what is asked of it; each is compiled in the step that first wants it, and all
sessions would wait for that, a second and more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, product
from typing import Any

DRAWS: Sequence[Mapping[str, Any]] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.05},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
)
SEEDS = (1, None)  # without one vLLM may draw in another way: where all draws of a step are thrown away
TOKEN = 1  # any that every model has


def step_sizes(most: int) -> list[int]:
    """Rows of steps of which each may have kernels of its own, up to `most`.

    Tiles change at powers of two, or half way between; each is compiled for counts that 16 divides, for other
    even ones, and for odd ones.
    """
    steps: set[int] = set()
    power = 1
    while power <= most:
        for size in (power, power + power // 2):
            steps |= {size, size + 1, size + 2}
        power *= 2
    return sorted(size for size in steps if size <= most)


def warm_up(llm: Any, params: type[Any], most_rows: int, most_sessions: int, context: int) -> None:
    """Run an LLMEngine that has no requests.

    params: vLLM's SamplingParams. most_rows: in a step. context: rows of a session, with those of its answer.
    """
    from tritone.engines.vllm.media import prompt_input

    names = count()

    def run(prompts: Sequence[int], draw: Mapping[str, Any], tokens: int) -> None:
        for rows in prompts:
            settings = params(
                **draw,
                max_tokens=min(tokens, context - rows),
                ignore_eos=True,
                detokenize=False,
                skip_reading_prefix_cache=True,  # else the second prompt has fewer rows to read
            )
            llm.add_request(f"warm-up {next(names)}", prompt_input([TOKEN] * rows, [TOKEN] * rows), settings)
        while llm.has_unfinished_requests():
            llm.step()

    for size in step_sizes(most_rows):
        prompts = list(_pieces(size, context - 1))
        if len(prompts) <= most_sessions:
            run(prompts, DRAWS[0], tokens=1)
    # Of many, one number that 16 divides, and one that it does not.
    numbers = {1, most_sessions - 1, most_sessions, most_sessions // 16 * 16} - {0}
    for draw, seed in product(DRAWS, SEEDS):
        for sessions in sorted(numbers):
            run([1] * sessions, {**draw, "seed": seed}, tokens=2)


def _pieces(rows: int, most: int) -> Iterator[int]:
    """Prompts that have so many rows together."""
    while rows > 0:
        yield min(rows, most)
        rows -= most
