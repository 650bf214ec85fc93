"""vLLM's worker with a tap: the hidden states of chosen rows leave with the tokens of the same step.

    RunnerRequest ─► positions of its rows ─► forward pass ─► token ids ────────────┐
       ├─ wanted rows ──────────────────────────┼─ layers' hidden states ─► rows ───┼─► ModelRunnerOutput
       └─ whose logits are not numbers ◄────────┴───────────────────────────────────┘

`worker_cls` is a setting of vLLM's; the runner, version 1, is mixed into. Hidden states come through the
interface for EAGLE-3, so that CUDA graphs and `torch.compile` keep them. contract.py names what is touched.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tritone.engines.vllm.contract import RELEASES
from tritone.engines.vllm.request import POSITION_UNIT, TappedRows, of_sampling
from tritone.errors import ConfigError

CONFIG = (
    "tritone"  # our key in vLLM's `additional_config`: {"model": a module that registers it, "layer": int}
)
ROWS = "tritone_rows"  # attribute of a ModelRunnerOutput
WRONG = "tritone_wrong"  # another: sessions whose logits are not numbers


class TappedRunner:
    """Mixed into a model runner of vLLM's."""

    def tap(self: Any, layer: int) -> None:
        """Before the model is loaded. layer: whose input is wanted; 0 are the embeddings."""
        self._tapped_layer = layer
        self.use_aux_hidden_state_outputs = True

    def _setup_eagle3_aux_hidden_state_outputs(self: Any) -> None:
        self.get_model().set_aux_hidden_state_layers((self._tapped_layer,))

    def _init_mrope_positions(self: Any, req_state: Any) -> None:
        """Every request brings its own: releases before 0.32 miscount them, and none knows fractions."""
        ours = of_sampling(req_state.sampling_params)
        req_state.mrope_position_delta = 0 if ours is None else ours.shift
        if ours is not None and ours.positions is not None:
            req_state.mrope_positions = torch.from_numpy(ours.positions)
        else:
            places = torch.arange(len(req_state.prompt_token_ids)) * POSITION_UNIT
            req_state.mrope_positions = places.expand(3, -1)

    def _calc_mrope_positions(self: Any, scheduler_output: Any) -> None:
        """The rows of this step, in the units of `RunnerRequest`."""
        table, filled = self.mrope_positions.np, 0
        for index, request_id in enumerate(self.input_batch.req_ids):
            request = self.requests[request_id]
            start = int(self.input_batch.num_computed_tokens_cpu[index])
            end = start + scheduler_output.num_scheduled_tokens[request_id]
            known = request.mrope_positions.numpy()[:, start:end]
            later = np.arange(max(start, len(request.prompt_token_ids)), end) * POSITION_UNIT
            middle, filled_now = filled + known.shape[1], filled + end - start
            table[:, filled:middle] = known
            table[:, middle:filled_now] = later + request.mrope_position_delta
            filled = filled_now

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        state, unused = self.execute_model_state, {}
        if state is None:  # there is nothing to draw
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        try:
            rows = self._tapped(state)
            sessions, are_wrong = self._not_numbers(state)
            unused = self._take_unused_seeds()
            output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        finally:
            self.execute_model_state = None  # vLLM refuses every later step while one is there
            self.input_batch.generators.update(unused)
        if rows:
            setattr(output, ROWS, rows)
        if are_wrong is not None:  # read when the tokens are on the host already: nothing waits twice
            flags = zip(sessions, are_wrong.tolist(), strict=False)
            setattr(output, WRONG, [session for session, is_wrong in flags if is_wrong and session])
        return output

    def _not_numbers(self: Any, state: Any) -> tuple[list[str | None], Any]:
        """The session of each row of logits, and bool [rows] on the device; None where this rank has none."""
        ours = [of_sampling(self.requests[name].sampling_params) for name in self.input_batch.req_ids]
        sessions = [None if request is None else request.session for request in ours]
        # Before the draw, which overwrites them.
        return sessions, None if state.logits is None else state.logits.amax(-1).isnan()

    def _take_unused_seeds(self: Any) -> dict[int, Any]:
        """Take out the generators of sessions whose draw is thrown away, since their prompt goes on; by row.

        vLLM would draw with them and set them back, which those of a CPU do not let it.
        """
        generators = self.input_batch.generators
        thrown_away = np.flatnonzero(self.discard_request_mask.np[: len(self.input_batch.req_ids)])
        return {row: generators.pop(row) for row in thrown_away.tolist() if row in generators}

    def _tapped(self: Any, state: Any) -> list[TappedRows]:
        """The wanted rows among those that have just been computed."""
        found, first = [], 0
        for index, request_id in enumerate(self.input_batch.req_ids):
            count = state.scheduler_output.num_scheduled_tokens[request_id]
            ours = of_sampling(self.requests[request_id].sampling_params)
            if ours is not None and len(ours.wanted):
                start = int(self.input_batch.num_computed_tokens_cpu[index])
                low, high = np.searchsorted(ours.wanted, (start, start + count))
                if high > low:
                    hidden = state.aux_hidden_states[0]
                    places = torch.from_numpy(ours.wanted[low:high] - start + first).to(hidden.device)
                    found.append(TappedRows(ours.session, int(low), hidden[places].float().cpu().numpy()))
            first += count
        return found


def tapped(worker: type[Any]) -> type[Any]:
    """A worker class of vLLM's whose runner is tapped as `additional_config` says."""

    class TappedWorker(worker):
        def init_device(self) -> None:
            ours = self.vllm_config.additional_config[CONFIG]
            importlib.import_module(ours["model"]).register()
            super().init_device()
            runner = type(self.model_runner)
            if not issubclass(runner, GPUModelRunner):  # that of a CPU is one, too
                raise ConfigError(
                    f"vLLM runs the model with {runner.__module__}.{runner.__name__}, and hidden states are "
                    f"tapped in {GPUModelRunner.__module__}.{GPUModelRunner.__name__} alone",
                    f"remove engine_args that choose another runner, or install one of {', '.join(RELEASES)}",
                )
            self.model_runner.__class__ = type(f"Tapped{runner.__name__}", (TappedRunner, runner), {})
            self.model_runner.tap(ours["layer"])

    return TappedWorker
