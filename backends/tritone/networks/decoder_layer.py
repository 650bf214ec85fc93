"""A layer of a decoder around its attention: norms, projections, rotation, and the MLP or the experts.

    rows [N, H] ─norm─► queries, keys, values ─attention─► output ─► + ─norm─► MLP ─► + ─► rows [N, H]
         └───────────────────────────────────────────────────────────┘ └──────────────┘

In shapes: N rows, H hidden size, D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tritone.networks.decoder_config import DecoderConfig
from tritone.networks.experts import MixtureOfExperts
from tritone.networks.layer_weights import LayerWeights, MlpWeights
from tritone.networks.linear import Linear


class DecoderLayer:
    """One layer around the attention itself, which slot_attention.py does over the decoder's cache."""

    def __init__(
        self,
        config: DecoderConfig,
        load: Callable[[str], Tensor],
        prefix: str,
        mlp: GatedMLP | MixtureOfExperts,
    ) -> None:
        self._config = config
        attention = f"{prefix}self_attn."

        def fused(part: str) -> Tensor:
            return torch.cat([load(f"{attention}{name}_proj.{part}") for name in "qkv"])

        self._input_norm = load(f"{prefix}input_layernorm.weight")
        self._qkv = Linear(fused("weight"), fused("bias") if config.qkv_bias else None)
        self._head_norm: Tensor | None = None  # [query and key heads, D]
        if config.qk_norm:
            query, key = load(f"{attention}q_norm.weight"), load(f"{attention}k_norm.weight")
            self._head_norm = torch.cat(
                (query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1))
            )
        self._output = Linear(
            load(f"{attention}o_proj.weight"), load(f"{attention}o_proj.bias") if config.output_bias else None
        )
        self._mlp_norm = load(f"{prefix}post_attention_layernorm.weight")
        self._mlp = mlp

    @property
    def weights(self) -> LayerWeights:
        assert self._head_norm is not None, "kernels norm the heads"
        return LayerWeights(
            self._input_norm,
            self._qkv.weight,
            self._head_norm[0].contiguous(),
            self._head_norm[-1].contiguous(),
            self._output.weight,
            self._mlp_norm,
            self._mlp.weights,
        )

    def project(self, rows: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [N, H] to rotated queries [N, heads, D] and rotated keys with values [N, 2, kv_heads, D]."""
        config = self._config
        heads = config.num_heads + config.num_kv_heads
        qkv = self._qkv(self._normed(rows, self._input_norm)).view(len(rows), -1, config.head_dim)
        rotated = qkv[:, :heads]
        if self._head_norm is not None:
            rotated.copy_(self._normed(rotated, self._head_norm))
        half_turned = rotated.roll(config.head_dim // 2, dims=-1)
        rotated.mul_(cos).addcmul_(half_turned, sin)
        key_value = qkv[:, config.num_heads :].view(len(rows), 2, config.num_kv_heads, config.head_dim)
        return qkv[:, : config.num_heads], key_value

    def finish(self, rows: Tensor, attended: Tensor) -> Tensor:
        """The layer's output [N, H] from its input [N, H] and the attention's output [N, heads · D]."""
        rows = rows + self._output(attended)
        return rows.add_(self._mlp(self._normed(rows, self._mlp_norm)))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._config.norm_eps)


class GatedMLP:
    """`down(silu(gate(x)) · up(x))`; gate and up are one matrix."""

    def __init__(self, load: Callable[[str], Tensor], prefix: str) -> None:
        self._gate_up = Linear(torch.cat([load(f"{prefix}{name}_proj.weight") for name in ("gate", "up")]))
        self._down = Linear(load(f"{prefix}down_proj.weight"))

    @property
    def weights(self) -> MlpWeights:
        return MlpWeights(self._gate_up.weight, self._down.weight)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(F.silu(gate).mul_(up))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps) · weight` over the last dimension; weight: [D] or [heads, D]."""
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        # The operator of torch takes half as long again for few rows.
        return x * x.square().mean(-1, keepdim=True).add_(eps).rsqrt_() * weight
    if weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x, x.shape[-1:], None, eps) * weight
