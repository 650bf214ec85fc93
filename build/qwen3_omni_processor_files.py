"""The files of a Qwen3-Omni checkpoint that its processor reads, in the released layout.

vocabulary, merges ─► vocab.json  merges.txt  tokenizer_config.json      byte-level BPE
                      chat_template.json
pixel budget ───────► preprocessor_config.json                           pictures and sound
                      video_preprocessor_config.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MEDIA_TOKENS = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.type == 'audio' or 'audio' in part or 'audio_url' in part %}
                {{- '<|audio_start|><|audio_pad|><|audio_end|>' }}
            {%- elif part.type == 'video' or 'video' in part %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def write_tokenizer(
    folder: Path,
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    special_tokens: tuple[str, ...],
    context_tokens: int,
) -> None:
    """vocab.json, merges.txt, tokenizer_config.json and chat_template.json of a byte-level BPE tokeniser.

    The ids of special_tokens follow those of the vocabulary.
    """
    added = {
        str(len(vocabulary) + place): {
            "content": token,
            "special": True,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
        }
        for place, token in enumerate(special_tokens)
    }
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "processor_class": "Qwen3OmniMoeProcessor",
        "added_tokens_decoder": added,
        "additional_special_tokens": list(special_tokens[1:]),
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_tokens,
        "extra_special_tokens": MEDIA_TOKENS,
        **MEDIA_TOKENS,
    }
    write_json(folder / "vocab.json", vocabulary)
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", "utf-8")
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "chat_template.json", {"chat_template": CHAT_TEMPLATE})


def write_processor(folder: Path, max_pixels: int) -> None:
    """What is made of pictures, videos and sound; max_pixels: of a picture as the model sees it."""
    pictures = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 56 * 56,
        "max_pixels": max_pixels,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    sound = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128,
        "sampling_rate": 16000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": 300,
        "n_samples": 4_800_000,
        "nb_max_frames": 30_000,
        "padding_side": "right",
        "padding_value": 0.0,
        "dither": 0.0,
        "return_attention_mask": True,
    }
    write_json(
        folder / "preprocessor_config.json",
        {
            "processor_class": "Qwen3OmniMoeProcessor",
            "image_processor_type": "Qwen2VLImageProcessor",
            **pictures,
            **sound,
        },
    )
    write_json(
        folder / "video_preprocessor_config.json",
        {
            "processor_class": "Qwen3OmniMoeProcessor",
            "video_processor_type": "Qwen2VLVideoProcessor",
            **pictures,
        },
    )


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
