"""What looks at frames in a streaming codec decoder: from their codes to rows.

    codes [B, n, Q] ─► mean of Q embeddings ─► transformer, each frame sees the last W ─► rows [B, n, H]

Of a stream it remembers keys and values of the last W - 1 frames for each layer. Keys lie there before their
rotation and are rotated by their place in the window: rotary attention depends on distances alone, so there
is neither an absolute position nor a longest stream.

Sliding window: Beltagy et al. 2020 (arXiv 2004.05150); rotary positions: Su et al. 2021 (arXiv 2104.09864).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tritone.networks.causal_layers import Layout, Memory, Source
from tritone.networks.linear import Linear
from tritone.networks.waveform_config import MAX_PASS_FRAMES, WaveformConfig
from tritone.networks.waveform_pass import Pass


class Reader:
    """Weights of the embeddings and the transformer."""

    def __init__(self, config: WaveformConfig, source: Source, layout: Layout) -> None:
        books, size = config.num_quantizers, config.codebook_size
        self._embedding = source("code_embedding.weight", books * size, config.hidden_size)
        self._offsets = torch.arange(books, device=source.device, dtype=torch.int32) * size
        self._transformer = _Transformer(config, source.under("pre_transformer."), layout)

    def __call__(self, codes: Tensor, passed: Pass) -> Tensor:
        """codes [B, n, Q] to rows [B, n, H]; moves what it has of the memory."""
        batch, length, books = codes.shape
        tokens = (codes + self._offsets).view(-1, books)
        if torch.compiler.is_exporting():
            rows = F.embedding(tokens, self._embedding).mean(dim=1)
        else:
            rows = F.embedding_bag(tokens, self._embedding, mode="mean")
        return self._transformer(rows.view(batch, length, -1), passed)


class _Transformer:
    """Pre-norm layers with attention over a sliding window; rows [B, n, H] to rows [B, n, H]."""

    def __init__(self, config: WaveformConfig, source: Source, layout: Layout) -> None:
        self._past = past = config.sliding_window - 1
        self._layers = [
            _Layer(config, source.under(f"layers.{i}."), layout) for i in range(config.num_hidden_layers)
        ]
        self._norm = source("norm.weight", config.hidden_size)
        self._epsilon = config.rms_norm_eps
        keys = torch.arange(past + MAX_PASS_FRAMES, device=source.device)
        behind = keys[past:, None] - keys
        self._seen = (behind >= 0) & (behind <= past)  # bool [frames, keys]: a frame is the key `past` later
        exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        angles = torch.outer(torch.arange(len(keys)).double(), (1.0 / config.rope_theta**exponents).double())
        cos, sin = angles.cos(), angles.sin()
        # [keys, D] each, such that `x · cos + roll(x, D / 2) · sin` rotates a head
        self._cos = torch.cat((cos, cos), dim=-1).to(source.device, source.dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).to(source.device, source.dtype)

    def __call__(self, x: Tensor, passed: Pass) -> Tensor:
        length = x.shape[1]
        keys = self._past + length
        seen, filled = self._seen[:length, :keys], passed.filled(self._past, keys)
        if filled is not None:
            seen = seen & filled
        mask = torch.zeros(seen.shape, device=x.device, dtype=x.dtype).masked_fill_(~seen, -math.inf)
        for layer in self._layers:
            x = layer(x, passed, mask, self._cos[:keys], self._sin[:keys])
        return F.rms_norm(x, self._norm.shape, self._norm, self._epsilon)


class _Layer:
    def __init__(self, config: WaveformConfig, source: Source, layout: Layout) -> None:
        self._config = config
        hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
        attention, mlp = source.under("self_attn."), source.under("mlp.")
        biased = config.attention_bias
        widths = {
            "q_proj": config.num_attention_heads * size,
            "k_proj": config.num_key_value_heads * size,
            "v_proj": config.num_key_value_heads * size,
        }
        weight = torch.cat([attention(f"{name}.weight", width, hidden) for name, width in widths.items()])
        bias = [attention(f"{name}.bias", width) for name, width in widths.items()] if biased else []
        self._qkv = Linear(weight, torch.cat(bias) if biased else None)
        scale = source.wide("self_attn_layer_scale.scale", hidden)
        self._output = attention.linear("o_proj", hidden, widths["q_proj"], bias=biased, gain=scale)
        gate_up = torch.cat([mlp(f"{name}_proj.weight", inner, hidden) for name in ("gate", "up")])
        self._gate_up = Linear(gate_up)
        scale = source.wide("mlp_layer_scale.scale", hidden)
        self._down = mlp.linear("down_proj", hidden, inner, bias=False, gain=scale)
        self._attention_norm = source("input_layernorm.weight", hidden)
        self._mlp_norm = source("post_attention_layernorm.weight", hidden)
        self._window = layout.reserve(2 * config.num_key_value_heads, config.sliding_window - 1, size)

    def __call__(self, x: Tensor, memory: Memory, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, n, H]; mask [B or 1, 1, n, keys] or [n, keys]; cos, sin [keys, D]."""
        heads, past = self._config.num_attention_heads, self._config.sliding_window - 1
        qkv = self._qkv(self._normed(x, self._attention_norm))
        qkv = qkv.view(*x.shape[:2], -1, self._config.head_dim)
        # [B, heads, n, D] and [B, 2 kv_heads, n, D]
        query, new = qkv.transpose(1, 2).tensor_split((heads,), dim=1)
        both = torch.cat((memory.of(self._window), new), dim=2)
        memory.keep(self._window, both, dim=-2)
        key, value = both.chunk(2, dim=1)  # [B, kv_heads, keys, D]
        attended = F.scaled_dot_product_attention(
            _rotated(query, cos[past:], sin[past:]),
            _rotated(key, cos, sin),
            value,
            attn_mask=mask,
            enable_gqa=key.shape[1] != heads,
        )
        x = x + self._output(attended.transpose(1, 2).flatten(2))
        gate, up = self._gate_up(self._normed(x, self._mlp_norm)).chunk(2, dim=-1)
        return x.add_(self._down(F.silu(gate).mul_(up)))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [B, heads, n, D] by the angles of [n, D]; a new tensor."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin)
