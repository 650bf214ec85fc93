"""What the stages of Qwen3-Omni read in a checkpoint's config.json; no number of a model is typed elsewhere.

Names follow `transformers`' Qwen3OmniMoeConfig, whose file this is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritone.checkpoint import read_config
from tritone.errors import ConfigError

FRAME_RATE_HZ = 12.5  # of the codec (Qwen3-Omni technical report); the only rate that config.json leaves out
RESERVED_CODEC_IDS = (
    1024  # the last ids of the talker's vocabulary are signs, not codes (reference `generate`)
)


@dataclass(frozen=True)
class TokenIds:
    """Ids of the thinker's vocabulary that have a meaning of their own."""

    im_start: int
    im_end: int
    user: int
    tts_pad: int
    tts_bos: int
    tts_eos: int
    audio: int  # stands for one row of an audio recording
    image: int
    video: int
    vision_start: int
    vision_end: int
    audio_start: int
    audio_end: int

    @property
    def media(self) -> frozenset[int]:
        """Tokens that stand for rows of media."""
        return frozenset((self.audio, self.image, self.video))


@dataclass(frozen=True)
class CodecIds:
    """Ids of the talker's vocabulary that are no codes."""

    pad: int
    bos: int
    eos: int
    nothink: int
    think_bos: int
    think_eos: int


@dataclass(frozen=True)
class OmniConfig:
    """A checkpoint's config.json, as far as more than one file needs it."""

    thinker: Mapping[str, Any]  # thinker_config: text_config, audio_config, vision_config and ids
    talker: Mapping[str, Any]  # talker_config: text_config, code_predictor_config and ids
    code2wav: Mapping[str, Any]  # code2wav_config
    tokens: TokenIds
    codec: CodecIds
    speakers: Mapping[str, int]  # lower-case name to its id in the talker's vocabulary
    accept_hidden_layer: int  # the thinker's hidden state that stands for media in the talker's prompt
    num_code_groups: int  # codes of a frame

    @classmethod
    def read(cls, folder: Path) -> OmniConfig:
        """ConfigError naming what is missing."""
        config = read_config(folder)
        try:
            thinker, talker = config["thinker_config"], config["talker_config"]
            if not talker["speaker_id"]:
                raise KeyError("speaker_id is empty")
            return cls(
                thinker=thinker,
                talker=talker,
                code2wav=config["code2wav_config"],
                tokens=TokenIds(
                    im_start=config["im_start_token_id"],
                    im_end=config["im_end_token_id"],
                    user=config["user_token_id"],
                    tts_pad=config["tts_pad_token_id"],
                    tts_bos=config["tts_bos_token_id"],
                    tts_eos=config["tts_eos_token_id"],
                    audio=thinker["audio_token_id"],
                    image=thinker["image_token_id"],
                    video=thinker["video_token_id"],
                    vision_start=thinker["vision_start_token_id"],
                    vision_end=thinker["vision_end_token_id"],
                    audio_start=thinker["audio_start_token_id"],
                    audio_end=thinker["audio_end_token_id"],
                ),
                codec=CodecIds(
                    pad=talker["codec_pad_id"],
                    bos=talker["codec_bos_id"],
                    eos=talker["codec_eos_token_id"],
                    nothink=talker["codec_nothink_id"],
                    think_bos=talker["codec_think_bos_id"],
                    think_eos=talker["codec_think_eos_id"],
                ),
                speakers={name.lower(): int(code) for name, code in talker["speaker_id"].items()},
                accept_hidden_layer=int(talker["accept_hidden_layer"]),
                num_code_groups=int(talker["num_code_groups"]),
            )
        except (KeyError, TypeError, AttributeError) as fault:
            raise ConfigError(
                f"config.json in '{folder}' is not that of a Qwen3-Omni checkpoint with speech ({fault})",
                "name the folder of one, e.g. of Qwen3-Omni-30B-A3B-Instruct",
            ) from None

    @property
    def samples_per_frame(self) -> int:
        return math.prod((*self.code2wav["upsample_rates"], *self.code2wav["upsampling_ratios"]))

    @property
    def sample_rate_hz(self) -> int:
        return round(FRAME_RATE_HZ * self.samples_per_frame)
