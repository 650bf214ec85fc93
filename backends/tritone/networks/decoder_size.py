"""How much a decoder (decoder.py) holds, from the numbers of its config.json and without torch.

    config ─► DecoderSize ─► elements: as stored in files, as held, of the cache of slots, of a forward pass

In shapes: H hidden size, D size of a head, E experts, I inner size of an expert or an MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tritone.errors import ConfigError

EXPERT_ROWS = 256  # that go through all experts at a time on a device, see experts.py


@dataclass(frozen=True)
class DecoderSize:
    """The numbers of a Qwen3- or Qwen3-MoE-shaped decoder that its memory depends on."""

    vocab: int
    hidden: int
    inner: int  # of an MLP
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int  # 0: every layer has one MLP
    chosen: int  # experts of a row
    expert_inner: int
    shared_inner: int  # of the expert that every row goes through; 0 if there is none
    dense_layers: int  # that have an MLP among layers with experts
    axes: int  # positions of a row: 1, or 3 of multimodal RoPE
    fits_kernels: bool  # kernels compute it (kernels/layers.py) where triton is installed

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderSize:
        """Read config.json, or the part of it that describes a decoder."""
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            layers = int(config["num_hidden_layers"])
            experts = int(config.get("num_local_experts", config.get("num_experts")) or 0)
            named, step = (
                set(config.get("mlp_only_layers") or ()),
                int(config.get("decoder_sparse_step") or 1),
            )
            rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
            return cls(
                vocab=int(config["vocab_size"]),
                hidden=hidden,
                inner=int(config["intermediate_size"]),
                layers=layers,
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                experts=experts,
                chosen=int(config["num_experts_per_tok"]) if experts else 0,
                expert_inner=int(config["moe_intermediate_size"]) if experts else 0,
                shared_inner=int(config.get("shared_expert_intermediate_size") or 0) if experts else 0,
                dense_layers=sum(i in named or (i + 1) % step != 0 for i in range(layers)) if experts else 0,
                axes=3 if "mrope_section" in rope else 1,
                fits_kernels="qwen3" in str(config.get("model_type"))
                and not config.get("attention_bias")
                and _is_tile(int(config.get("head_dim") or hidden // heads)),
            )
        except (KeyError, TypeError, ValueError) as fault:
            raise ConfigError(
                f"config.json has no usable {fault}", "use the one that came with the weights"
            ) from None

    # -- weights --------------------------------------------------------------------------------------------

    @property
    def table(self) -> int:
        """Elements of the embedding, or of the head."""
        return self.vocab * self.hidden

    @property
    def attention(self) -> int:
        """Of a layer: projections without biases, and its two norms."""
        projected = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return projected * self.hidden + 2 * self.hidden

    @property
    def expert(self) -> int:
        """Of one expert."""
        return 3 * self.hidden * self.expert_inner

    @property
    def mixed_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def shared(self) -> int:
        """Of a layer: the expert that every row goes through, and its gate."""
        return 3 * self.hidden * self.shared_inner + self.hidden if self.shared_inner else 0

    @property
    def every_row(self) -> int:
        """Of all layers: what every row goes through, without the norms of heads."""
        mixed = self.mixed_layers * (self.experts * self.hidden + self.shared)
        mlps = (self.layers - self.mixed_layers) * 3 * self.hidden * self.inner
        return self.layers * self.attention + mixed + mlps + self.hidden

    @property
    def routed(self) -> int:
        """Of all layers: the experts that a row may be sent to."""
        return self.mixed_layers * self.experts * self.expert

    @property
    def stored(self) -> int:
        """Elements of the layers and the last norm in the files: no embedding, no head."""
        return self.every_row + self.routed + self.layers * 2 * self.head_dim

    @property
    def held(self) -> int:
        """The same in memory: heads' norms are laid out by head, and the shared expert stands a second time
        behind the others, in pieces of their size."""
        pieces = -(-self.shared_inner // self.expert_inner) if self.shared_inner else 0
        norms = self.layers * (self.heads + self.kv_heads) * self.head_dim
        return self.every_row + self.routed + norms + self.mixed_layers * pieces * self.expert

    # -- what is not weights --------------------------------------------------------------------------------

    def cache(self, slots: int, context_tokens: int) -> dict[str, int]:
        """Factors of the elements of the cache of slots."""
        return {
            "layers": self.layers,
            "(keys, values)": 2,
            "slots": slots,
            "heads": self.kv_heads,
            "tokens": context_tokens,
            "of a head": self.head_dim,
        }

    def turns_bytes(self, context_tokens: int, item_bytes: int) -> int:
        """Of the tables that turn queries and keys."""
        looked_up = 2 * context_tokens * self.head_dim * item_bytes
        return looked_up + self.head_dim * (4 + (8 if self.axes > 1 else 0))

    def pass_elements(self, rows: int, context_tokens: int) -> int:
        """At most, of a forward pass of so many rows: the widest layer, and attention with a mask."""
        some = min(rows, EXPERT_ROWS)
        mixed = self.experts * some * (4 * self.expert_inner + self.hidden)
        wide = max(mixed, rows * 3 * max(self.inner, self.expert_inner))
        scores = 2 * self.heads * rows * context_tokens
        keys = 2 * (self.heads + self.kv_heads) * context_tokens * self.head_dim
        return wide + scores + keys + rows * (6 * self.hidden + 3 * self.heads * self.head_dim)


def _is_tile(head_dim: int) -> bool:
    return head_dim >= 16 and head_dim & (head_dim - 1) == 0
