"""The weights of a decoder's layer as tensors, for who computes it in another way."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class MlpWeights:
    """Of a gated MLP."""

    gate_up: Tensor  # [2 · I, H], the gates first
    down: Tensor  # [H, I]


@dataclass(frozen=True)
class ExpertWeights:
    """Of a mixture of experts; pieces of the expert that every row goes through stand behind the others."""

    router: Tensor  # [E, H]
    gate_up: Tensor  # [E + pieces, 2 · I, H]
    down: Tensor  # [E + pieces, H, I]
    shared_gate: Tensor | None  # [1, H]
    num_chosen: int
    renormalise: bool


@dataclass(frozen=True)
class LayerWeights:
    """Of a layer without biases, whose query and key heads are normed."""

    input_norm: Tensor  # [H]
    qkv: Tensor  # [(heads + 2 kv) · D, H]
    query_norm: Tensor  # [D]
    key_norm: Tensor  # [D]
    output: Tensor  # [H, heads · D]
    mlp_norm: Tensor  # [H]
    mlp: MlpWeights | ExpertWeights
