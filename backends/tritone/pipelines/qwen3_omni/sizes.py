"""How many elements every part of a Qwen3-Omni checkpoint has, without torch and without loading.

config.json ─► sizes ─► elements of weights, by arithmetic, or as the safetensors headers have them
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tritone.checkpoint import released_elements
from tritone.engines.memory import ITEM_BYTES, Ground, Term
from tritone.networks.decoder_size import DecoderSize
from tritone.networks.waveform_size import WaveformSize
from tritone.pipelines.qwen3_omni.config import OmniConfig


@dataclass(frozen=True)
class OmniSizes:
    """Elements of every part of a checkpoint, named by the beginning of its tensors' names."""

    config: OmniConfig

    @classmethod
    def read(cls, folder: Path) -> OmniSizes:
        return cls(OmniConfig.read(folder))

    @cached_property
    def thinker(self) -> DecoderSize:
        return DecoderSize.from_hf(self.config.thinker["text_config"])

    @cached_property
    def talker(self) -> DecoderSize:
        return DecoderSize.from_hf(self.config.talker["text_config"])

    @cached_property
    def predictor(self) -> DecoderSize:
        return DecoderSize.from_hf(self.config.talker["code_predictor_config"])

    @cached_property
    def code2wav(self) -> WaveformSize:
        return WaveformSize.from_hf(self.config.code2wav)

    @property
    def residuals(self) -> int:
        """Codes of a frame after the first."""
        return int(self.config.talker["code_predictor_config"]["num_code_groups"]) - 1

    def elements(self) -> dict[str, int]:
        """Of the weights in the files, by arithmetic."""
        thinker, talker, predictor = self.thinker, self.talker, self.predictor
        wide = thinker.hidden
        projection = wide * talker.inner + talker.inner + talker.inner * talker.hidden + talker.hidden
        return {
            "thinker.model.embed_tokens.": thinker.table,
            "thinker.model.": thinker.stored,
            "thinker.lm_head.": thinker.table,
            "thinker.audio_tower.": _audio_elements(self.config.thinker["audio_config"]),
            "thinker.visual.": _vision_elements(self.config.thinker["vision_config"]),
            "talker.model.codec_embedding.": talker.table,
            "talker.model.": talker.stored,
            "talker.codec_head.": talker.table,
            "talker.text_projection.": projection,
            "talker.hidden_projection.": projection,
            "talker.code_predictor.": predictor.stored + 2 * self.residuals * predictor.table,
            "code2wav.": self.code2wav.stored,
        }

    def found(self, folder: Path) -> dict[str, int]:
        """The same, as the headers of the files have it."""
        parts = dict.fromkeys(self.elements(), 0)
        by_length = sorted(parts, key=len, reverse=True)
        for name, elements in released_elements(folder).items():
            part = next((part for part in by_length if name.startswith(part)), None)
            if part is not None:
                parts[part] += elements
        return parts


def weights_term(
    ground: Ground, options: Any, sizes: OmniSizes, beginnings: tuple[str, ...], more: int
) -> Term:
    """Of the parts with such names, each read in full; more: elements that are held beyond the files."""
    is_dummy = options.load_format == "dummy"
    parts = sizes.elements() if is_dummy else sizes.found(ground.checkpoint)
    stored = sum(count for part, count in parts.items() if part.startswith(beginnings))
    item = ITEM_BYTES[options.dtype]
    source = "config.json" if is_dummy else "the files"
    how = f"({stored:,} by {source} {more:+,} as laid out) × {item} B, {options.dtype}"
    return Term("weights", (stored + more) * item, how, lower="" if item == 2 else "dtype")


def _audio_elements(config: Mapping[str, Any]) -> int:
    d, inner, channels = config["d_model"], config["encoder_ffn_dim"], config["downsample_hidden_size"]
    convolutions = 10 * channels + 2 * (9 * channels * channels + channels)
    widened = d * channels * (config["num_mel_bins"] // 8)
    layer = 4 * (d * d + d) + 2 * d * inner + inner + d + 4 * d
    ends = 2 * d + d * d + d + config["output_dim"] * (d + 1)
    return int(convolutions + widened + config["encoder_layers"] * layer + ends)


def _vision_elements(config: Mapping[str, Any]) -> int:
    h, inner, out = config["hidden_size"], config["intermediate_size"], config["out_hidden_size"]
    wide = h * config["spatial_merge_size"] ** 2
    block = 4 * h * h + 4 * h + 2 * h * inner + inner + h + 4 * h
    merger = wide * wide + wide + out * wide + out
    mergers = merger + 2 * h + len(config["deepstack_visual_indexes"]) * (merger + 2 * wide)
    begin = h * patch_values(config) + h + config["num_position_embeddings"] * h
    return int(begin + config["depth"] * block + mergers)


def patch_values(config: Mapping[str, Any]) -> int:
    """How many values a patch of a picture has, before it is embedded."""
    return int(config["in_channels"] * config["temporal_patch_size"] * config["patch_size"] ** 2)
