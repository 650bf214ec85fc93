"""The draw of `sampler`, with every setting a tensor: no shape, no launch and no branch depends on a value.

    logits ─► silenced, penalty ─► ÷ temperature ─► min-p ─► top-k ─► top-p ─► + noise ─► argmax

What a CUDA graph can hold. The same noise and the same filters give the same tokens as `sampler` does, up to
logits that tie at the edge of a filter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tritone.engines.sampler import GREEDY_BELOW, keep_top_p


@dataclass(frozen=True)
class DrawSettings:
    """Of B rows; all on the device of the logits."""

    temperature: Tensor  # float32 [B]; below GREEDY_BELOW the likeliest token is taken
    top_k: Tensor  # int [B]; the vocabulary or more: no limit
    top_p: Tensor  # float32 [B]
    log_min_p: Tensor  # float32 [B]; -inf without min-p


def penalise(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Logits float32 [B, V] with the repetition penalty float32 [B] where `seen`, bool [B, V]."""
    penalty = penalty.unsqueeze(-1)
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def draw(logits: Tensor, settings: DrawSettings, noise: Tensor) -> Tensor:
    """Token ids, int64 [B], of logits float32 [B, V]; noise: float64 [B, V], Gumbel, of every token."""
    greedy = (settings.temperature < GREEDY_BELOW).unsqueeze(-1)
    scaled = logits / settings.temperature.unsqueeze(-1).masked_fill(greedy, 1.0)
    least = scaled.amax(-1, keepdim=True) + settings.log_min_p.unsqueeze(-1)
    # Of equal logits the first comes first, so that a greedy row takes the one that argmax takes.
    ranked, tokens = scaled.masked_fill(scaled < least, -math.inf).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ranked = ranked.masked_fill(rank >= settings.top_k.unsqueeze(-1), -math.inf)
    ranked = keep_top_p(ranked, ranked.logsumexp(-1, keepdim=True), settings.top_p.unsqueeze(-1))
    chosen = (noise.gather(-1, tokens).masked_fill(greedy, 0.0) + ranked).argmax(-1, keepdim=True)
    return tokens.gather(-1, chosen).squeeze(-1)
