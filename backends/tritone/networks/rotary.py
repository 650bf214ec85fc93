"""Rotary positions of attention heads: how far the position of a row turns each pair of a query or key.

One position a row turns all pairs, or three (time, height, width) turn them in turn: multimodal RoPE in its
interleaved form. Sources: RoFormer, https://arxiv.org/abs/2104.09864; Qwen2-VL, https://arxiv.org/abs/2409.12191;
the rope types of `transformers`. In shapes: N rows, D size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tritone.errors import ConfigError


class Rotary:
    """The turn of a head by its row's position: `x · cos + roll(x, D / 2) · sin`."""

    def __init__(
        self, rope: Mapping[str, Any], head_dim: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """rope: as `rope_parameters` gives it."""
        frequencies = _frequencies(rope, head_dim)
        self._dtype = dtype
        # Angle a position, float32 [D]; the first half turns the other way: there `roll` needs a minus.
        self.frequencies = torch.cat((-frequencies, frequencies)).to(device)
        self._axes: Tensor | None = None  # int64 [D]: which of the three positions turns it
        if "mrope_section" in rope:
            self._axes = _interleaved_axes(rope["mrope_section"]).repeat(2).to(device)

    @property
    def is_plain(self) -> bool:
        """A row has one position, not three."""
        return self._axes is None

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each [N, 1, D], of positions [N] or [3, N]; computed in float32 whatever the dtype."""
        angles = self.angles(positions).unsqueeze(1)
        return angles.cos().to(self._dtype), angles.sin().to(self._dtype)

    def angles(self, positions: Tensor) -> Tensor:
        """float32 [N, D] of positions [N] or [3, N]."""
        if positions.dim() == 1:
            turned_by = positions.float().unsqueeze(1)
        else:
            assert self._axes is not None, "this decoder has positions of one dimension"
            turned_by = positions.float().t().index_select(1, self._axes)
        return turned_by * self.frequencies


def rope_parameters(config: Mapping[str, Any], head_dim: int) -> Mapping[str, Any]:
    """rope_theta, rope_type and the type's own numbers, from the newer or the older form of config.json."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta"))
    if rope["rope_theta"] is None:
        raise KeyError("rope_theta")
    refuse(rope, "rope_type", {"default", "llama3"})
    refuse(rope, "partial_rotary_factor", {None, 1})
    interleaved = rope.get("mrope_interleaved", rope.get("interleaved"))
    if interleaved is None and "mrope_section" not in rope:
        return rope
    sections = rope["mrope_section"]
    refuse({"mrope_interleaved": interleaved}, "mrope_interleaved", {True})
    if len(sections) != 3 or sum(sections) != head_dim // 2:
        raise ConfigError(
            f"config.json has mrope_section {sections} with head_dim {head_dim}",
            "use three numbers that add up to half the head_dim",
        )
    return rope


def refuse(config: Mapping[str, Any], key: str, known: Iterable[Any]) -> None:
    """ConfigError unless config.json has one of the `known` values for `key`."""
    value = config.get(key)
    if value not in known:
        names = ", ".join(str(name) for name in known if name is not None)
        raise ConfigError(f"config.json has {key} '{value}'", f"this decoder computes only {names}")


def _frequencies(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """Angle per position of each pair of a head, float32 [D / 2]."""
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    frequencies: Tensor = 1.0 / rope["rope_theta"] ** exponents
    if rope["rope_type"] == "llama3":
        # Slow pairs are stretched by `factor`, fast ones kept, and those between them blended.
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        frequencies = kept * frequencies + (1.0 - kept) * frequencies / rope["factor"]
    return frequencies


def _interleaved_axes(sections: Sequence[int]) -> Tensor:
    """Which position turns each pair of a head, int64 [D / 2]: time, height, width, time, … in turn.

    Where height or width has had its number of pairs, its turn is time's (`recomposition_frequencies` in
    `transformers`).
    """
    axes = torch.zeros(sum(sections), dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes
