"""A mixture of experts in place of a layer's MLP: every row goes through the few experts chosen for it.

    x [N, H] ─► router ─softmax, top k─► chosen, shares [N, k]
        │                                     │
        ├───────────────► expert i  ◄─────────┤   the rows that chose it, for each i
        │                                     ▼
        │                          Σ share · output [N, H] ──► + ──► [N, H]
        └─► shared expert · sigmoid(its gate) ─────────────────┘     (where the model has one)

In shapes: N rows, H hidden size, E experts, k of them chosen per row, I inner size of an expert.

The computation is the one of the `SparseMoeBlock` classes of `transformers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tritone.errors import ConfigError
from tritone.networks.layer_weights import ExpertWeights
from tritone.networks.weights import Weights


@dataclass(frozen=True)
class ExpertsConfig:
    """Shape of a layer's experts."""

    hidden_size: int
    num_experts: int
    num_chosen: int  # per row
    intermediate: int  # inner size of an expert
    renormalise: bool  # the shares of the chosen experts add up to 1
    shared_intermediate: int  # inner size of the expert that every row goes through; 0 if there is none

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ExpertsConfig | None:
        """Read config.json; None if it has no experts, KeyError for a missing number."""
        # `transformers` calls it num_local_experts when it writes the file itself.
        num_experts = int(config["num_local_experts" if "num_local_experts" in config else "num_experts"])
        if num_experts == 0:
            return None
        num_chosen = int(config["num_experts_per_tok"])
        if not 0 < num_chosen <= num_experts:
            raise ConfigError(
                f"config.json has num_experts_per_tok {num_chosen}", f"use 1 to num_experts, {num_experts}"
            )
        return cls(
            hidden_size=int(config["hidden_size"]),
            num_experts=num_experts,
            num_chosen=num_chosen,
            intermediate=int(config["moe_intermediate_size"]),
            renormalise=bool(config.get("norm_topk_prob", False)),
            shared_intermediate=int(config.get("shared_expert_intermediate_size") or 0),
        )


class MixtureOfExperts:
    """The router, the experts with their weights stacked, and the shared expert with its gate."""

    def __init__(
        self,
        config: ExpertsConfig,
        weights: Weights,
        prefix: str,
        device: torch.device,
        dtype: torch.dtype,
        shared: Callable[[Tensor], Tensor] | None,
    ) -> None:
        """Load the weights under `prefix`; ConfigError if one is missing. shared: [N, H] to [N, H]."""
        self._config = config
        self._router = weights[f"{prefix}gate.weight"].to(device, dtype)  # [E, H]
        self._stored = _load_experts(config, weights, prefix, device, dtype, shared is not None)
        self._gate_up, self._down = (stack[: config.num_experts] for stack in self._stored)
        self._shared, self._shared_gate = shared, None
        if shared is not None:
            self._shared_gate = weights[f"{prefix}shared_expert_gate.weight"].to(device, dtype)  # [1, H]

    @property
    def weights(self) -> ExpertWeights:
        config = self._config
        return ExpertWeights(
            self._router, *self._stored, self._shared_gate, config.num_chosen, config.renormalise
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Output [N, H] of rows [N, H]."""
        chosen, shares = self.route(x)
        if x.device.type != "cpu" and chosen.numel() * _COPY_COST > self._config.num_experts:
            out = by_all(x, chosen, shares, self._gate_up, self._down)
        else:
            each = by_expert if x.device.type == "cpu" else by_pair
            out = each(x, chosen, self._gate_up, self._down).mul_(shares.unsqueeze(-1)).sum(dim=1)
        if self._shared is not None and self._shared_gate is not None:
            out += torch.sigmoid(F.linear(x, self._shared_gate)) * self._shared(x)
        return out

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts of each row, int64 [N, k], the best first, and their shares [N, k]."""
        # In float32 whatever the dtype: near ties decide which experts a row gets.
        scores = F.softmax(F.linear(x, self._router), dim=-1, dtype=torch.float32)
        shares, chosen = scores.topk(self._config.num_chosen, dim=-1)
        if self._config.renormalise:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return chosen, shares.to(x.dtype)


def by_expert(x: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Outputs [N, k, H] of the experts chosen for each row, one expert after the other over all its rows.

    x: [N, H]; chosen: int64 [N, k]; gate_up: [E, 2 · I, H]; down: [E, H, I]. Each weight is read once, and
    the device is waited for before the loop, not in it.
    """
    num_chosen = chosen.shape[1]
    pairs = chosen.flatten().argsort(stable=True)  # (row, expert), by expert
    counts = torch.bincount(chosen.flatten(), minlength=len(down)).tolist()
    inputs = x[pairs // num_chosen]
    outputs = torch.empty_like(inputs)
    first = 0
    for expert, count in enumerate(counts):
        if count:
            last = first + count
            gate, up = F.linear(inputs[first:last], gate_up[expert]).chunk(2, dim=-1)
            outputs[first:last] = F.linear(F.silu(gate).mul_(up), down[expert])
            first = last
    placed = torch.empty_like(outputs)
    placed[pairs] = outputs
    return placed.view(*chosen.shape, -1)


def by_pair(x: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """As `by_expert`, but every (row, expert) pair for itself, with a copy of the expert's weights.

    For few pairs: no shape depends on what was chosen, and the device is never waited for.
    """
    rows, num_chosen = chosen.shape
    inputs = x.unsqueeze(1).expand(-1, num_chosen, -1).reshape(rows * num_chosen, -1, 1)
    outputs = []
    parts = (torch.split(pairs, _COPIED_PAIRS) for pairs in (chosen.flatten(), inputs))
    for experts, some in zip(*parts, strict=True):
        gate, up = torch.bmm(gate_up[experts], some).chunk(2, dim=1)
        outputs.append(torch.bmm(down[experts], F.silu(gate).mul_(up)))
    return torch.cat(outputs).view(rows, num_chosen, -1)


_COPY_COST = 3  # reckoned, not measured: a pair's weights are read, written, read; all experts' read once
_COPIED_PAIRS = 64  # at a time, which bounds the memory that the copies take
_ROWS_FOR_ALL = 256  # at a time, for the same reason


def by_all(x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Sum [N, H] over the experts chosen for each row, weighted by their shares [N, k]: all rows go through
    all experts, and what was not chosen is weighted with 0.

    For many rows on a device: products that were not asked for cost it less than a launch for each expert,
    no shape depends on what was chosen, and the device is never waited for.
    """
    weights = x.new_zeros((len(x), len(down))).scatter_(1, chosen, shares)  # [N, E]
    sums = []
    parts = (torch.split(rows, _ROWS_FOR_ALL) for rows in (x, weights))
    for some, weight in zip(*parts, strict=True):
        both = F.linear(some, gate_up.flatten(0, 1)).view(len(some), len(down), 2, -1)
        inner = F.silu(both[:, :, 0]).mul_(both[:, :, 1]).mul_(weight.unsqueeze(-1))  # [n, E, I]
        sums.append(torch.bmm(inner.transpose(0, 1), down.transpose(1, 2)).sum(dim=0))
    return torch.cat(sums)


def _load_experts(
    config: ExpertsConfig,
    weights: Weights,
    prefix: str,
    device: torch.device,
    dtype: torch.dtype,
    shared: bool,
) -> tuple[Tensor, Tensor]:
    """gate_up [E + pieces, 2 · I, H] and down [E + pieces, H, I], from files with all experts or each.

    shared: behind the experts stands the one that every row goes through, for kernels that take it for some
    more of them: cut to pieces of their size, the last one filled up with zeros.
    """
    inner, hidden, experts = config.intermediate, config.hidden_size, config.num_experts
    names = [f"{prefix}shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")]
    pieces = -(-config.shared_intermediate // inner) if shared and names[0] in weights else 0
    if f"{prefix}experts.gate_up_proj" in weights and not pieces:
        whole = (weights[f"{prefix}experts.{name}_proj"].to(device, dtype) for name in ("gate_up", "down"))
        return next(whole), next(whole)
    gate_up = torch.zeros((experts + pieces, 2 * inner, hidden), device=device, dtype=dtype)
    down = torch.zeros((experts + pieces, hidden, inner), device=device, dtype=dtype)
    if f"{prefix}experts.gate_up_proj" in weights:
        gate_up[:experts].copy_(weights[f"{prefix}experts.gate_up_proj"])
        down[:experts].copy_(weights[f"{prefix}experts.down_proj"])
    else:
        for i in range(experts):
            gate_up[i, :inner].copy_(weights[f"{prefix}experts.{i}.gate_proj.weight"])
            gate_up[i, inner:].copy_(weights[f"{prefix}experts.{i}.up_proj.weight"])
            down[i].copy_(weights[f"{prefix}experts.{i}.down_proj.weight"])
    if pieces:
        gate, up, out = (weights[name] for name in names)
        for i in range(pieces):
            part = slice(i * inner, min((i + 1) * inner, config.shared_intermediate))
            width = part.stop - part.start
            gate_up[experts + i, :width].copy_(gate[part])
            gate_up[experts + i, inner : inner + width].copy_(up[part])
            down[experts + i, :, :width].copy_(out[:, part])
    return gate_up, down
