"""The shape of a decoder, as the config.json of a checkpoint gives it, under the names of `transformers`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tritone.errors import ConfigError
from tritone.networks.experts import ExpertsConfig
from tritone.networks.rotary import refuse, rope_parameters

_FAMILIES: dict[str, Callable[[bool], dict[str, bool]]] = {
    "llama": lambda bias: {"qkv_bias": bias, "output_bias": bias, "qk_norm": False},
    "qwen2": lambda bias: {"qkv_bias": True, "output_bias": False, "qk_norm": False},
    "qwen3": lambda bias: {"qkv_bias": bias, "output_bias": bias, "qk_norm": True},
    "qwen3_moe": lambda bias: {"qkv_bias": bias, "output_bias": bias, "qk_norm": True},
}
_WITH_EXPERTS = {"qwen3_moe"}


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Mapping[str, Any]  # rope_type, rope_theta and what the type needs; mrope_section if any
    max_positions: int
    tied_head: bool  # the output head is the embedding table
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    qk_norm: bool  # RMSNorm of each query and key head before the rotation
    experts: ExpertsConfig | None = None  # of the layers that have them instead of one MLP
    dense_layers: frozenset[int] = frozenset()  # those that have not

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], family: str | None = None) -> DecoderConfig:
        """Read config.json, or the part of it that describes a decoder; ConfigError for what is not computed.

        `family` says whose names and defaults the numbers follow, when the config's own model_type does not.
        """
        family = family or config.get("model_type")
        if family not in _FAMILIES:
            raise ConfigError(f"config.json has model_type '{family}'", f"use one of {', '.join(_FAMILIES)}")
        refuse(config, "hidden_act", {None, "silu"})
        refuse(config, "mlp_bias", {None, False})
        refuse(config, "use_sliding_window", {None, False})
        for kind in config.get("layer_types") or ():
            refuse({"layer_types": kind}, "layer_types", {"full_attention"})
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            head_dim, layers = (
                int(config.get("head_dim") or hidden // heads),
                int(config["num_hidden_layers"]),
            )
            experts = ExpertsConfig.from_hf(config) if family in _WITH_EXPERTS else None
            return cls(
                vocab_size=int(config["vocab_size"]),
                hidden_size=hidden,
                intermediate_size=int(config["intermediate_size"]),
                num_layers=layers,
                num_heads=heads,
                num_kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=head_dim,
                norm_eps=float(config["rms_norm_eps"]),
                rope=rope_parameters(config, head_dim),
                max_positions=int(config["max_position_embeddings"]),
                tied_head=bool(config.get("tie_word_embeddings", False)),
                experts=experts,
                dense_layers=_dense_layers(config, layers) if experts is not None else frozenset(),
                **_FAMILIES[family](bool(config.get("attention_bias", False))),
            )
        except KeyError as name:
            raise ConfigError(
                f"config.json has no {name}", "use the one that came with the weights"
            ) from None


def _dense_layers(config: Mapping[str, Any], layers: int) -> frozenset[int]:
    """Those with one MLP among layers with experts."""
    named, step = set(config.get("mlp_only_layers") or ()), int(config.get("decoder_sparse_step") or 1)
    return frozenset(i for i in range(layers) if i in named or (i + 1) % step)
