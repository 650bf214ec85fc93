"""A decoder with a mixture of experts, small enough for Triton's interpreter."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tritone.networks.decoder_config import DecoderConfig
from tritone.networks.experts import ExpertsConfig

CONFIG = DecoderConfig(
    vocab_size=150,
    hidden_size=32,
    intermediate_size=40,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    norm_eps=1e-6,
    rope={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    max_positions=512,
    tied_head=False,
    qkv_bias=False,
    output_bias=False,
    qk_norm=True,
    experts=ExpertsConfig(32, 16, 2, 24, renormalise=True, shared_intermediate=0),
    dense_layers=frozenset({1}),
)


class RandomWeights:
    """Of any name that a decoder asks for; the same name, the same numbers."""

    def __init__(self, config: DecoderConfig, more: Mapping[str, tuple[int, ...]] = {}) -> None:
        """more: shapes of other weights, by the last word of their names without `.weight`."""
        hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
        assert config.experts is not None
        number, expert, self._shared = (
            config.experts.num_experts,
            config.experts.intermediate,
            config.experts.shared_intermediate,
        )
        self._hidden = hidden
        self._shapes = {
            "q_proj": (config.num_heads * head, hidden),
            "k_proj": (config.num_kv_heads * head, hidden),
            "v_proj": (config.num_kv_heads * head, hidden),
            "o_proj": (hidden, config.num_heads * head),
            "q_norm": (head,),
            "k_norm": (head,),
            "gate": (number, hidden),
            "experts.gate_up_proj": (number, 2 * expert, hidden),
            "experts.down_proj": (number, hidden, expert),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
            "shared_expert_gate": (1, hidden),
            "shared_expert.gate_proj": (self._shared, hidden),
            "shared_expert.up_proj": (self._shared, hidden),
            "shared_expert.down_proj": (hidden, self._shared),
            "embed_tokens": (config.vocab_size, hidden),
            "lm_head": (config.vocab_size, hidden),
            **more,
        }

    def __contains__(self, name: str) -> bool:
        return self._shared > 0 or "shared" not in name

    def __getitem__(self, name: str) -> torch.Tensor:
        words = name.removesuffix(".weight").split(".")
        shape = self._shapes.get(".".join(words[-2:])) or self._shapes.get(words[-1], (self._hidden,))
        random = torch.Generator().manual_seed(sum(name.encode()) + 7 * len(name))
        made = torch.randn(shape, generator=random)
        if len(shape) == 1:
            return 1 + 0.1 * made
        # Scores that are far apart leave no doubt about what is drawn.
        return made if "embed" in name else made * (3 if "head" in name else 1) * shape[-1] ** -0.5
