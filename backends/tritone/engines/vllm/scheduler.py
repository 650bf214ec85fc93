"""vLLM's scheduler, watched: which requests have begun, and what came with a step beside its tokens.

It runs in the engine's process also where the workers do not (tensor parallelism), so that what they tap and
find gets here with the output that vLLM carries anyway.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from tritone.engines.vllm.request import TappedRows, of_sampling
from tritone.engines.vllm.worker import ROWS, WRONG


class WatchedScheduler(Scheduler):
    """`begun`, `tapped` and `wrong` grow until the engine empties them."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.begun: list[tuple[str, int]] = []  # session, and how many rows of its prompt came from the cache
        self.tapped: list[TappedRows] = []
        self.wrong: list[str] = []  # sessions whose logits are not numbers

    def forget(self) -> None:
        """Drop what came with a step that failed."""
        self.begun, self.tapped, self.wrong = [], [], []

    def schedule(self, *arguments: Any, **named: Any) -> Any:
        output = super().schedule(*arguments, **named)
        for request in output.scheduled_new_reqs:
            ours = of_sampling(request.sampling_params)
            if ours is not None:
                self.begun.append((ours.session, request.num_computed_tokens))
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.tapped += getattr(model_runner_output, ROWS, ())
        self.wrong += getattr(model_runner_output, WRONG, ())
        return super().update_from_output(scheduler_output, model_runner_output)

    @property
    def free_blocks(self) -> int:
        """Blocks of the KV cache that nobody holds."""
        return int(self.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def blocks(self) -> int:
        """Blocks of the KV cache that can be held: the first is vLLM's own."""
        return int(self.kv_cache_manager.block_pool.num_gpu_blocks) - 1
