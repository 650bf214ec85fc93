"""The decoder of a Llama-, Qwen2- or Qwen3-shaped language model, with a static cache of slots.

    token ids ─embed─► rows [N, H] ─forward─► hidden states [N, H] ─logits─► scores [N, V]
                        ▲              │
    rows from outside ──┘              ├─ keys and values of every row stay in its slot of the cache
                                       └─ on request: what came out of one of the layers, as well

One forward pass takes *spans*: the next token of many running slots and a piece of a prompt go through the
layers together, so that each weight is read from memory once. Attention alone looks at every slot by itself,
and at no more of it than is filled: a slot's rows never depend on what its neighbours hold. Neighbouring
slots that are equally full attend in one call.

A row has a place in its slot, which says what it may see, and a position, which turns its queries and keys.
They differ for rows of images, video and sound: their positions are times, heights and widths (multimodal
RoPE, from Qwen2-VL, https://arxiv.org/abs/2409.12191). Features of such rows can be added behind the first
layers (DeepStack, https://arxiv.org/abs/2406.04334).

In shapes: N rows, H hidden size, V vocabulary, D size of a head.

Numbers come from the checkpoint's config.json, weights from its safetensors files, both under the names that
`transformers` gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tritone.errors import ConfigError
from tritone.networks.experts import ExpertsConfig, MixtureOfExperts
from tritone.networks.layer_weights import LayerWeights, MlpWeights
from tritone.networks.linear import Linear
from tritone.networks.rotary import Rotary, refuse, rope_parameters
from tritone.networks.transfer import on_device
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


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one slot in a forward pass."""

    slot: int
    start: int  # place of the first row: how many tokens the slot holds already
    count: int = 1

    @property
    def end(self) -> int:
        return self.start + self.count


class Forward(NamedTuple):
    """What a forward pass gives."""

    hidden: Tensor  # [N, H], normalised
    tapped: Tensor | None  # [N, H], `hidden_states[tap]` of `transformers`; None if nobody asked


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
        embedding: str | None = "embed_tokens.weight",
        head: str | None = "lm_head.weight",
        cleared: bool = False,
    ) -> None:
        """Load the weights and set the cache aside; ConfigError if a weight is missing.

        cleared: the cache holds zeros: `step` reads what is not filled, though it counts for nothing.
        prefix: of the names of all weights but the head.
        embedding: name under `prefix`; None if rows come from outside, and `embed` is never called.
        head: full name; None if scores are computed outside, and `logits` is never called.
        """
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype

        def load(name: str) -> Tensor:
            return weights[name].to(self.device, dtype)

        def mlp(layer: int) -> GatedMLP | MixtureOfExperts:
            name = f"{prefix}layers.{layer}.mlp."
            if config.experts is None or layer in config.dense_layers:
                return GatedMLP(load, name)
            shared = GatedMLP(load, f"{name}shared_expert.") if config.experts.shared_intermediate else None
            return MixtureOfExperts(config.experts, weights, name, self.device, dtype, shared)

        with torch.inference_mode():
            self.embedding = load(f"{prefix}{embedding}") if embedding is not None else None  # [V, H]
            self._layers = [
                _Layer(config, load, f"{prefix}layers.{i}.", mlp(i)) for i in range(config.num_layers)
            ]
            self._norm = load(f"{prefix}norm.weight")  # [H]
            self.head = self._load_head(load, head)
            self.rotary = Rotary(config.rope, config.head_dim, self.device, dtype)
            # For the rows whose position is their place: looked up faster than computed.
            self._turns = self.rotary(torch.arange(context_tokens, device=self.device))
            # Mostly not cleared, so that memory is taken only as slots fill; what lies beyond is never read.
            self.cache = (torch.zeros if cleared else torch.empty)(
                (config.num_layers, 2, slots, config.num_kv_heads, context_tokens, config.head_dim),
                device=self.device,
                dtype=dtype,
            )  # keys and values [layers, 2, slots, kv_heads, context, D]

    @torch.inference_mode()
    def embed(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Input rows [N, H] of token ids, integers or int64 [N]."""
        assert self.embedding is not None, "the rows of this decoder come from outside"
        if not isinstance(tokens, Tensor):
            tokens = on_device(tokens, torch.int64, self.device)
        return self.embedding[tokens.to(self.device, torch.int64, non_blocking=True)]

    @torch.inference_mode()
    def forward(
        self,
        rows: Tensor,
        spans: Sequence[Span],
        *,
        positions: Tensor | None = None,
        additions: Sequence[tuple[Tensor, Tensor]] = (),
        tap: int | None = None,
    ) -> Forward:
        """Run rows [N, H], laid out span after span, through the layers.

        positions: [N], or float32 [3, N] of time, height and width for a decoder with multimodal RoPE; a
            row's place in its slot if None.
        additions: for each of the first layers, rows int64 [K] and what is added to them behind it [K, H].
        tap: how many layers the rows have been through when they are set aside, 0 for the input. Additions
            behind the last of these are not in them; after all layers they are normalised.

        A slot's earlier tokens must be in the cache; those of the spans are there afterwards. A slot may have
        one span.
        """
        assert len(additions) <= len(self._layers)
        blocks = _blocks(spans)
        # Rows of one block lie in a slice of the cache; others are put there one by one.
        block = blocks[0] if len(blocks) == 1 else None
        slots, places = self._places(spans) if block is None else (None, None)
        if positions is not None:
            cos, sin = self.rotary(positions.to(self.device, non_blocking=True))
        elif block is None:
            cos, sin = (table[places] for table in self._turns)
        else:
            cos, sin = (block.turns(table) for table in self._turns)
        masks = [_causal_mask(block, self.device) for block in blocks]
        tapped = rows if tap == 0 else None
        for i, (layer, cache) in enumerate(zip(self._layers, self.cache, strict=True)):
            query, key_value = layer.project(rows, cos, sin)
            if block is None:
                cache.permute(1, 3, 0, 2, 4)[slots, places] = key_value
            else:
                block.store(key_value, cache)
            rows = layer.finish(rows, self._attend(query, cache, blocks, masks))
            if tap == i + 1:
                tapped = rows
            if i < len(additions):
                chosen, values = additions[i]
                rows = rows.index_add(0, chosen.to(self.device), values.to(self.device, self.dtype))
        hidden = rms_norm(rows, self._norm, self.config.norm_eps)
        return Forward(hidden, hidden if tap == len(self._layers) else tapped)

    @torch.inference_mode()
    def step(self, rows: Tensor, slots: Tensor, places: Tensor, ends: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [N, H] of rows [N, H], like `forward`, but no shape and no launch depends on where
        the rows are: what a CUDA graph can hold. Attention reads the whole context of a slot.

        On the device, int64: slots [P]; places [P, N / P], of their rows; ends [P], how many rows a slot has
        then. positions: float32 [N], or [3, N] for a decoder with multimodal RoPE.
        """
        config, of_slot = self.config, places.shape[1]
        cos, sin = self.rotary(positions)
        context = torch.arange(self.cache.shape[-2], device=self.device)
        unknown = (context >= ends.unsqueeze(1))[:, None, :, None]  # [P, 1, context, 1]
        group = config.num_heads // config.num_kv_heads
        # The query heads that share a key head attend as that head's rows.
        mask = (context <= places.unsqueeze(2)).repeat_interleave(group, dim=1).unsqueeze(1)
        flat_slots, flat_places = slots.unsqueeze(1).expand_as(places).flatten(), places.flatten()
        for layer, cache in zip(self._layers, self.cache, strict=True):
            query, key_value = layer.project(rows, cos, sin)
            cache.permute(1, 3, 0, 2, 4)[flat_slots, flat_places] = key_value
            # A weight of 0 does not silence what is not a number.
            key, value = cache[:, slots].masked_fill_(unknown, 0.0).unbind(0)
            shape = (len(slots), of_slot, config.num_kv_heads, group, config.head_dim)
            piece = query.reshape(shape).transpose(1, 2).flatten(2, 3)  # [P, kv_heads, rows · group, D]
            attended = F.scaled_dot_product_attention(piece, key, value, attn_mask=mask)
            by_row = (len(slots), config.num_kv_heads, of_slot, -1)
            attended = attended.reshape(by_row).transpose(1, 2)
            rows = layer.finish(rows, attended.reshape(len(rows), -1))
        return rms_norm(rows, self._norm, config.norm_eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [N, V] of the next token from hidden states [N, H]."""
        assert self.head is not None, "this decoder has no head"
        return self.head(hidden)

    @torch.inference_mode()
    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        """Give slot `target` the first `tokens` tokens of slot `source`."""
        self.cache[:, :, target, :, :tokens] = self.cache[:, :, source, :, :tokens]

    @property
    def parts(self) -> tuple[list[LayerWeights], Tensor]:
        """Weights of the layers, and of the last norm [H]."""
        return [layer.weights for layer in self._layers], self._norm

    def _load_head(self, load: Callable[[str], Tensor], name: str | None) -> Linear | None:
        if name is None:
            return None
        if self.config.tied_head and self.embedding is not None:
            return Linear(self.embedding)
        return Linear(load(name))

    def _places(self, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
        """Slot of every row and its place there, both int64 [N]."""
        slots = [span.slot for span in spans for _ in range(span.count)]
        places = [place for span in spans for place in range(span.start, span.end)]
        return on_device(slots, torch.int64, self.device), on_device(places, torch.int64, self.device)

    def _attend(
        self, query: Tensor, cache: Tensor, blocks: Sequence[_Block], masks: Sequence[Tensor | None]
    ) -> Tensor:
        """Attention output [N, heads · D] of query [N, heads, D] over one layer's cache."""
        config = self.config
        keys, values = cache.unbind(0)  # [slots, kv_heads, context, D]
        out = torch.empty_like(query)
        first = 0
        for block, mask in zip(blocks, masks, strict=True):
            last = first + block.slots * block.rows
            filled = slice(block.slot, block.slot + block.slots), slice(None), slice(block.end)
            key, value = keys[filled], values[filled]
            if block.rows == 1:
                # The query heads that share a key head attend as that head's rows: no mask, no repeated keys.
                piece = query[first:last].view(block.slots, config.num_kv_heads, -1, config.head_dim)
                attended = F.scaled_dot_product_attention(piece, key, value)
                out[first:last] = attended.flatten(1, 2)
            else:
                piece = query[first:last].view(block.slots, block.rows, -1, config.head_dim)
                attended = F.scaled_dot_product_attention(
                    piece.transpose(1, 2), key, value, attn_mask=mask, enable_gqa=True
                )  # [slots, heads, rows, D]
                out[first:last] = attended.transpose(1, 2).flatten(0, 1)
            first = last
        return out.flatten(1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps) · weight` over the last dimension; weight: [D] or [heads, D]."""
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        # The operator of torch takes half as long again for few rows.
        return x * x.square().mean(-1, keepdim=True).add_(eps).rsqrt_() * weight
    if weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x, x.shape[-1:], None, eps) * weight


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


class _Layer:
    """One layer around the attention itself, which the decoder does, since it owns the cache."""

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


class _Block(NamedTuple):
    """Spans of equal start and length in neighbouring slots, which attend in one call."""

    slot: int  # the first
    slots: int
    start: int
    rows: int  # of each slot

    @property
    def end(self) -> int:
        return self.start + self.rows

    def turns(self, table: Tensor) -> Tensor:
        """What a table [context, 1, D] has for the places of the rows: [N, 1, D], or one row for all."""
        mine = table[self.start : self.end]
        return mine if self.rows == 1 or self.slots == 1 else mine.repeat(self.slots, 1, 1)

    def store(self, key_value: Tensor, cache: Tensor) -> None:
        """Put keys with values [N, 2, kv_heads, D] into a layer's cache [2, slots, kv_heads, context, D]."""
        into = cache[:, self.slot : self.slot + self.slots, :, self.start : self.end]
        into.copy_(key_value.view(self.slots, self.rows, *key_value.shape[1:]).permute(2, 0, 3, 1, 4))


_FAMILIES: dict[str, Callable[[bool], dict[str, bool]]] = {
    "llama": lambda bias: {"qkv_bias": bias, "output_bias": bias, "qk_norm": False},
    "qwen2": lambda bias: {"qkv_bias": True, "output_bias": False, "qk_norm": False},
    "qwen3": lambda bias: {"qkv_bias": bias, "output_bias": bias, "qk_norm": True},
    "qwen3_moe": lambda bias: {"qkv_bias": bias, "output_bias": bias, "qk_norm": True},
}
_WITH_EXPERTS = {"qwen3_moe"}


def _blocks(spans: Sequence[Span]) -> list[_Block]:
    """The spans in their order, those taken together that can be."""
    blocks: list[_Block] = []
    for span in spans:
        last = blocks[-1] if blocks else _Block(-1, 0, 0, 0)
        if (last.slot + last.slots, last.start, last.rows) == (span.slot, span.start, span.count):
            blocks[-1] = last._replace(slots=last.slots + 1)
        else:
            blocks.append(_Block(span.slot, 1, span.start, span.count))
    return blocks


def _causal_mask(block: _Block, device: torch.device) -> Tensor | None:
    """Which tokens each row of a slot may see, bool [rows, end]; None for a single row: it sees them all."""
    if block.rows == 1:
        return None
    return torch.ones((block.rows, block.end), dtype=torch.bool, device=device).tril_(block.start)


def _dense_layers(config: Mapping[str, Any], layers: int) -> frozenset[int]:
    """Those with one MLP among layers with experts."""
    named, step = set(config.get("mlp_only_layers") or ()), int(config.get("decoder_sparse_step") or 1)
    return frozenset(i for i in range(layers) if i in named or (i + 1) % step)
