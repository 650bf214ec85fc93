"""The decoder of a Llama-, Qwen2- or Qwen3-shaped language model, with a static cache of slots.

    token ids ─embed─► rows [N, H] ─forward─► hidden states [N, H] ─logits─► scores [N, V]
                                       │
                                       └─ keys and values of every row stay in its slot of the cache

One forward pass takes *spans*: the next token of many running slots and a piece of a prompt go through the
layers together, so that each weight is read from memory once. Attention alone looks at every slot by itself,
and at no more of it than is filled: a slot's rows never depend on what its neighbours hold.

In shapes: N rows, H hidden size, V vocabulary, D size of a head.

Numbers come from the checkpoint's config.json, weights from its safetensors files, both under the names that
`transformers` gives them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tritone.errors import ConfigError
from tritone.networks.weights import Weights


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
    rope: Mapping[str, Any]  # rope_type, rope_theta and what the type needs
    max_positions: int
    tied_head: bool  # the output head is the embedding table
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    qk_norm: bool  # RMSNorm of each query and key head before the rotation

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read config.json; ConfigError for what this decoder does not compute."""
        family = config.get("model_type")
        if family not in _FAMILIES:
            raise ConfigError(f"config.json has model_type '{family}'", f"use one of {', '.join(_FAMILIES)}")
        _refuse(config, "hidden_act", {"silu"})
        _refuse(config, "mlp_bias", {None, False})
        _refuse(config, "use_sliding_window", {None, False})
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            return cls(
                vocab_size=int(config["vocab_size"]),
                hidden_size=hidden,
                intermediate_size=int(config["intermediate_size"]),
                num_layers=int(config["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                norm_eps=float(config["rms_norm_eps"]),
                rope=_rope_parameters(config),
                max_positions=int(config["max_position_embeddings"]),
                tied_head=bool(config.get("tie_word_embeddings", False)),
                **_FAMILIES[family](bool(config.get("attention_bias", False))),
            )
        except KeyError as name:
            raise ConfigError(
                f"config.json has no {name}", "use the one that came with the weights"
            ) from None


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one slot in a forward pass."""

    slot: int
    start: int  # position of the first row: how many tokens the slot holds already
    count: int = 1

    @property
    def end(self) -> int:
        return self.start + self.count


class Decoder:
    """Weights of the layers and the cache of the slots."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        *,
        slots: int,
        context_tokens: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        prefix: str = "model.",
        head: str = "lm_head.weight",
    ) -> None:
        """Load the weights under `prefix` and the output head `head`, and set the cache aside."""
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype

        def load(name: str) -> Tensor:
            tensor = weights[name].to(self.device, dtype)
            return tensor.clone() if tensor.dim() == 1 else tensor  # a small view would keep its file mapped

        with torch.inference_mode():
            self._embedding = load(f"{prefix}embed_tokens.weight")  # [V, H]
            self._layers = [_Layer(config, load, f"{prefix}layers.{i}.") for i in range(config.num_layers)]
            self._norm = load(f"{prefix}norm.weight")  # [H]
            self._head = Linear(self._embedding if config.tied_head else load(head))
            # [context, D] each
            self._cos, self._sin = _rotation_tables(config, context_tokens, self.device, dtype)
            # Not cleared, so that memory is taken only as slots fill; what lies beyond is never read.
            self.cache = torch.empty(
                (config.num_layers, 2, slots, config.num_kv_heads, context_tokens, config.head_dim),
                device=self.device,
                dtype=dtype,
            )  # keys and values [layers, 2, slots, kv_heads, context, D]

    @torch.inference_mode()
    def embed(self, tokens: Sequence[int]) -> Tensor:
        """Input rows [N, H] of token ids."""
        return self._embedding[torch.tensor(tokens, device=self.device)]

    @torch.inference_mode()
    def forward(self, rows: Tensor, spans: Sequence[Span]) -> Tensor:
        """Run rows [N, H], laid out span after span, through the layers; normalised hidden states [N, H].

        A slot's earlier tokens must be in the cache; those of the spans are there afterwards. A slot may have
        one span.
        """
        slots, positions = self._places(spans)
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)  # [N, 1, D]
        masks = [_causal_mask(span, self.device) for span in spans]
        for layer, cache in zip(self._layers, self.cache, strict=True):
            query, key_value = layer.project(rows, cos, sin)
            cache.permute(1, 3, 0, 2, 4)[slots, positions] = key_value
            rows = layer.finish(rows, self._attend(query, cache, spans, masks))
        return F.rms_norm(rows, self._norm.shape, self._norm, self.config.norm_eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [N, V] of the next token from hidden states [N, H]."""
        return self._head(hidden)

    @torch.inference_mode()
    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        """Give slot `target` the first `tokens` tokens of slot `source`."""
        self.cache[:, :, target, :, :tokens] = self.cache[:, :, source, :, :tokens]

    def _places(self, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
        """Slot and position of every row, both int64 [N]."""
        slots = [span.slot for span in spans for _ in range(span.count)]
        positions = [position for span in spans for position in range(span.start, span.end)]
        return torch.tensor(slots, device=self.device), torch.tensor(positions, device=self.device)

    def _attend(
        self, query: Tensor, cache: Tensor, spans: Sequence[Span], masks: Sequence[Tensor | None]
    ) -> Tensor:
        """Attention output [N, heads · D] of query [N, heads, D] over one layer's cache."""
        config = self.config
        keys, values = cache.unbind(0)  # [slots, kv_heads, context, D]
        out = torch.empty_like(query)
        first = 0
        for span, mask in zip(spans, masks, strict=True):
            last = first + span.count
            key, value = keys[span.slot, None, :, : span.end], values[span.slot, None, :, : span.end]
            if span.count == 1:
                # The query heads that share a key head attend as that head's rows: no mask, no repeated keys.
                grouped = query[first].view(1, config.num_kv_heads, -1, config.head_dim)
                out[first] = F.scaled_dot_product_attention(grouped, key, value).view(-1, config.head_dim)
            else:
                piece = query[None, first:last].transpose(1, 2)  # [1, heads, count, D]
                attended = F.scaled_dot_product_attention(piece, key, value, attn_mask=mask, enable_gqa=True)
                out[first:last] = attended[0].transpose(0, 1)
            first = last
        return out.flatten(1)


class Linear:
    """`y = x Wᵀ + b`, with the weight in the layout that the device multiplies fastest."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [out, in]; bias: [out]."""
        self._weight, self._bias = weight, bias
        self._packed = _can_pack(weight)
        if self._packed:
            # Small batches run about a third faster: a plain weight is packed anew in every call.
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return y
        return F.linear(x, self._weight, self._bias)


class GatedMLP:
    """`down(silu(gate(x)) · up(x))`; gate and up are one matrix."""

    def __init__(self, load: Callable[[str], Tensor], prefix: str) -> None:
        self._gate_up = Linear(torch.cat([load(f"{prefix}{name}_proj.weight") for name in ("gate", "up")]))
        self._down = Linear(load(f"{prefix}down_proj.weight"))

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(F.silu(gate).mul_(up))


class _Layer:
    """One layer around the attention itself, which the decoder does, since it owns the cache."""

    def __init__(self, config: DecoderConfig, load: Callable[[str], Tensor], prefix: str) -> None:
        self._config = config
        attention = f"{prefix}self_attn."

        def fused(part: str) -> Tensor:
            return torch.cat([load(f"{attention}{name}_proj.{part}") for name in "qkv"])

        self._input_norm = load(f"{prefix}input_layernorm.weight")
        self._qkv = Linear(fused("weight"), fused("bias") if config.qkv_bias else None)
        self._query_norm = load(f"{attention}q_norm.weight") if config.qk_norm else None
        self._key_norm = load(f"{attention}k_norm.weight") if config.qk_norm else None
        self._output = Linear(
            load(f"{attention}o_proj.weight"), load(f"{attention}o_proj.bias") if config.output_bias else None
        )
        self._mlp_norm = load(f"{prefix}post_attention_layernorm.weight")
        self._mlp = GatedMLP(load, f"{prefix}mlp.")

    def project(self, rows: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [N, H] to rotated queries [N, heads, D] and rotated keys with values [N, 2, kv_heads, D]."""
        config = self._config
        heads = config.num_heads + config.num_kv_heads
        qkv = self._qkv(self._normed(rows, self._input_norm)).view(len(rows), -1, config.head_dim)
        if self._query_norm is not None and self._key_norm is not None:
            query, key = qkv[:, : config.num_heads], qkv[:, config.num_heads : heads]
            query.copy_(self._normed(query, self._query_norm))
            key.copy_(self._normed(key, self._key_norm))
        rotated = qkv[:, :heads]
        half_turned = rotated.roll(config.head_dim // 2, dims=-1)
        rotated.mul_(cos).addcmul_(half_turned, sin)
        key_value = qkv[:, config.num_heads :].view(len(rows), 2, config.num_kv_heads, config.head_dim)
        return qkv[:, : config.num_heads], key_value

    def finish(self, rows: Tensor, attended: Tensor) -> Tensor:
        """The layer's output [N, H] from its input [N, H] and the attention's output [N, heads · D]."""
        rows = rows + self._output(attended)
        return rows.add_(self._mlp(self._normed(rows, self._mlp_norm)))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._config.norm_eps)


_PACKED_FOR_ROWS = 8  # batch size that the packed layout is chosen for; others work as well

_FAMILIES: dict[str, Callable[[bool], dict[str, bool]]] = {
    "llama": lambda bias: {"qkv_bias": bias, "output_bias": bias, "qk_norm": False},
    "qwen2": lambda bias: {"qkv_bias": True, "output_bias": False, "qk_norm": False},
    "qwen3": lambda bias: {"qkv_bias": bias, "output_bias": bias, "qk_norm": True},
}


def _can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def _causal_mask(span: Span, device: torch.device) -> Tensor | None:
    """Which tokens each row of a span may see, bool [count, end]; None for a single row: it sees them all."""
    if span.count == 1:
        return None
    return torch.ones((span.count, span.end), dtype=torch.bool, device=device).tril_(span.start)


def _rotation_tables(
    config: DecoderConfig, positions: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin, each [positions, D], such that `x · cos + roll(x, D / 2) · sin` rotates a head."""
    angles = torch.outer(torch.arange(positions).float(), _rotary_frequencies(config))
    cos, sin = angles.cos(), angles.sin()
    return (
        torch.cat((cos, cos), dim=-1).to(device, dtype),
        torch.cat((-sin, sin), dim=-1).to(device, dtype),
    )


def _rotary_frequencies(config: DecoderConfig) -> Tensor:
    """Angle per position of each pair of a head, float32 [D / 2]."""
    rope = config.rope
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    frequencies: Tensor = 1.0 / rope["rope_theta"] ** exponents
    if rope["rope_type"] == "llama3":
        # Slow pairs are stretched by `factor`, fast ones kept, and those between them blended.
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        frequencies = kept * frequencies + (1.0 - kept) * frequencies / rope["factor"]
    return frequencies


def _rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """rope_theta, rope_type and the type's own numbers, from the newer or the older form of config.json."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta"))
    if rope["rope_theta"] is None:
        raise KeyError("rope_theta")
    _refuse(rope, "rope_type", {"default", "llama3"})
    return rope


def _refuse(config: Mapping[str, Any], key: str, known: Iterable[Any]) -> None:
    """ConfigError unless config.json has one of the `known` values for `key`."""
    value = config.get(key)
    if value not in known:
        names = ", ".join(str(name) for name in known if name is not None)
        raise ConfigError(f"config.json has {key} '{value}'", f"this decoder computes only {names}")
