"""The shape of a codec decoder, as a checkpoint gives it; imports no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tritone.errors import ConfigError

MAX_PASS_FRAMES = 100  # of one stream in one pass: bounds the memory that a pass takes
MAX_BATCH_FRAMES = 1600  # of all streams in one pass, e.g. 64 streams with 25 each


@dataclass(frozen=True)
class WaveformConfig:
    """Shape of a decoder, named as in a checkpoint's config.json."""

    codebook_size: int
    num_quantizers: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_bias: bool
    sliding_window: int  # frames that a frame sees, itself included
    rms_norm_eps: float
    rope_theta: float
    upsampling_ratios: tuple[int, ...]
    upsample_rates: tuple[int, ...]
    decoder_dim: int  # channels before the first rate; each rate halves them

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> WaveformConfig:
        """Read the codec's part of config.json; ConfigError for what is missing or not computed here."""
        rope: dict[str, Any] = {**config, **(config.get("rope_parameters") or {})}
        for key, value, known in (
            ("hidden_act", config.get("hidden_act", "silu"), "silu"),
            ("rope_type", rope.get("rope_type", "default"), "default"),
        ):
            if value != known:
                raise ConfigError(
                    f"the codec's config.json has {key} '{value}'", f"this decoder computes only {known}"
                )
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            read = cls(
                codebook_size=int(config["codebook_size"]),
                num_quantizers=int(config["num_quantizers"]),
                hidden_size=hidden,
                intermediate_size=int(config["intermediate_size"]),
                num_hidden_layers=int(config["num_hidden_layers"]),
                num_attention_heads=heads,
                num_key_value_heads=int(config["num_key_value_heads"]),
                head_dim=int(config.get("head_dim") or hidden // heads),
                attention_bias=bool(config.get("attention_bias", False)),
                sliding_window=int(config["sliding_window"]),
                rms_norm_eps=float(config["rms_norm_eps"]),
                rope_theta=float(rope["rope_theta"]),
                upsampling_ratios=tuple(map(int, config["upsampling_ratios"])),
                upsample_rates=tuple(map(int, config["upsample_rates"])),
                decoder_dim=int(config["decoder_dim"]),
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as fault:
            raise ConfigError(
                f"the codec's config.json cannot be used ({type(fault).__name__}: {fault})",
                "use the one that came with the weights",
            ) from None
        if read.sliding_window < 2:
            raise ConfigError(
                f"the codec's config.json has sliding_window {read.sliding_window}", "give at least 2 frames"
            )
        return read

    @property
    def samples_per_frame(self) -> int:
        return math.prod((*self.upsampling_ratios, *self.upsample_rates))

    @property
    def leads(self) -> tuple[int, ...]:
        """After each rate, how many columns of a stream come before its first one."""
        return tuple(
            itertools.accumulate(self.upsample_rates, lambda lead, rate: (lead + 1) * rate, initial=0)
        )[1:]

    @property
    def missing_samples(self) -> int:
        """By how much a stream of T frames is shorter than T · samples_per_frame."""
        return (0, *self.leads)[-1]

    @property
    def age_limit(self) -> int:
        """Frames after which a stream is like any older one: its window is full and its lead is over."""
        return max(self.sliding_window - 1, -(-self.missing_samples // self.samples_per_frame))
