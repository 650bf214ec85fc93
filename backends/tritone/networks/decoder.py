"""The decoder of a Llama-, Qwen2- or Qwen3-shaped language model, with a static cache of slots.

    token ids ─embed─► rows [N, H] ─forward─► hidden states [N, H] ─logits─► scores [N, V]
                        ▲              │
    rows from outside ──┘              ├─ keys and values of every row stay in its slot of the cache
                                       └─ on request: what came out of one of the layers, as well

One forward pass takes *spans*: the next token of many running slots and a piece of a prompt go through the
layers together, so that each weight is read from memory once. Attention alone looks at every slot by itself
(slot_attention.py), and at no more of it than is filled: a slot's rows never depend on what its neighbours
hold. Neighbouring slots that are equally full attend in one call.

A row has a place in its slot, which says what it may see, and a position, which turns its queries and keys.
They differ for rows of images, video and sound: their positions are times, heights and widths (multimodal
RoPE, from Qwen2-VL, https://arxiv.org/abs/2409.12191). Features of such rows can be added behind the first
layers (DeepStack, https://arxiv.org/abs/2406.04334).

In shapes: N rows, H hidden size, V vocabulary, D size of a head.

Numbers come from the checkpoint's config.json (decoder_config.py), weights from its safetensors files, both
under the names that `transformers` gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritone.networks.decoder_config import DecoderConfig
from tritone.networks.decoder_layer import DecoderLayer, GatedMLP, rms_norm
from tritone.networks.experts import MixtureOfExperts
from tritone.networks.layer_weights import LayerWeights
from tritone.networks.linear import Linear
from tritone.networks.rotary import Rotary
from tritone.networks.slot_attention import FilledAttention, WholeAttention
from tritone.networks.spans import Span
from tritone.networks.transfer import on_device
from tritone.networks.weights import Weights


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
                DecoderLayer(config, load, f"{prefix}layers.{i}.", mlp(i)) for i in range(config.num_layers)
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
        attention = FilledAttention(spans, self.device)
        if positions is not None:
            cos, sin = self.rotary(positions.to(self.device, non_blocking=True))
        else:
            cos, sin = (attention.turns(table) for table in self._turns)
        tapped = rows if tap == 0 else None
        for i, (layer, cache) in enumerate(zip(self._layers, self.cache, strict=True)):
            query, key_value = layer.project(rows, cos, sin)
            attention.store(key_value, cache)
            rows = layer.finish(rows, attention.attend(query, cache))
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
        config = self.config
        cos, sin = self.rotary(positions)
        group, context_tokens = config.num_heads // config.num_kv_heads, self.cache.shape[-2]
        attention = WholeAttention(slots, places, ends, group, context_tokens)
        for layer, cache in zip(self._layers, self.cache, strict=True):
            query, key_value = layer.project(rows, cos, sin)
            attention.store(key_value, cache)
            rows = layer.finish(rows, attention.attend(query, cache))
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
