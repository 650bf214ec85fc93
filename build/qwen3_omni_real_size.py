"""Write the configuration of a full-size Qwen3-Omni (30B-A3B), without weights, for measurements.

    sizes and ids below ─► config.json  generation_config.json
    filler words        ─► vocab.json  merges.txt  tokenizer_config.json  chat template, processor files

    python build/qwen3_omni_real_size.py DIR

Sizes and token ids are the published ones of the released checkpoint. Its vocabulary is not: every ordinary
token is filler at the right id, so a prompt costs about one token a byte, and answers read as nonsense.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import qwen3_omni_tiny as tiny
from qwen3_omni_processor_files import write_json, write_processor, write_tokenizer

ORDINARY_TOKENS = 151643
CONTEXT_TOKENS = 65536
FIXED_IDS = {"Ċ": 198, "user": 872, "system": 8948, "assistant": 77091}  # Ċ: a line feed
SPECIAL_TOKENS = (  # their ids follow the ordinary ones
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
)

ROPE = {"rope_scaling": {"mrope_section": [24, 20, 20]}}
SIZES = {  # laid over the configuration of the tiny checkpoint
    "dtype": "bfloat16",
    "thinker_config": {
        "audio_config": {
            "encoder_layers": 32,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "d_model": 1280,
            "downsample_hidden_size": 480,
            "output_dim": 2048,
        },
        "vision_config": {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "num_position_embeddings": 2304,
            "image_size": 768,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        "text_config": {
            "vocab_size": 152064,
            "hidden_size": 2048,
            "intermediate_size": 768,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "max_position_embeddings": CONTEXT_TOKENS,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            **ROPE,
        },
    },
    "talker_config": {
        "thinker_hidden_size": 2048,
        "accept_hidden_layer": 24,
        "codec_pad_id": 2148,
        "codec_bos_id": 2149,
        "codec_eos_token_id": 2150,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "speaker_id": {"chelsie": 2301, "ethan": 2302, "aiden": 2303},
        "text_config": {
            "vocab_size": 3072,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "moe_intermediate_size": 384,
            "shared_expert_intermediate_size": 768,
            "num_hidden_layers": 20,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 6,
            "max_position_embeddings": CONTEXT_TOKENS,
            **ROPE,
        },
        "code_predictor_config": {
            "vocab_size": 2048,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 5,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 32768,
        },
    },
    "code2wav_config": {
        "codebook_size": 2048,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "decoder_dim": 1536,
    },
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new folder, or an empty one")
    folder = parser.parse_args(argv).folder
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    build(folder)
    return 0


def build(folder: Path) -> None:
    vocabulary, merges = filler()
    write_tokenizer(folder, vocabulary, merges, SPECIAL_TOKENS, CONTEXT_TOKENS)
    write_processor(folder, max_pixels=12_845_056)
    write_config(folder, vocabulary)


def write_config(folder: Path, vocabulary: dict[str, int] | None = None) -> None:
    """config.json and generation_config.json. vocabulary: as `filler` gives it."""
    ordinary = filler()[0] if vocabulary is None else vocabulary
    ids = ordinary | {token: ORDINARY_TOKENS + place for place, token in enumerate(SPECIAL_TOKENS)}
    write_json(folder / "config.json", laid_over(tiny.model_config(ids), SIZES))
    write_json(folder / "generation_config.json", tiny.generation_config(ids))


def filler() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary of ORDINARY_TOKENS in which bytes and roles are tokens, and the merges to the roles."""
    from tokenizers.pre_tokenizers import ByteLevel

    merges = [(role[:end], role[end]) for role in tiny.ROLES for end in range(1, len(role))]
    wanted = [*sorted(ByteLevel.alphabet()), *("".join(merge) for merge in merges)]
    free = (place for place in range(ORDINARY_TOKENS) if place not in FIXED_IDS.values())
    vocabulary = {token: FIXED_IDS[token] if token in FIXED_IDS else next(free) for token in wanted}
    vocabulary |= {f"<{place}>": place for place in free}
    return vocabulary, merges


def laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`below` with the values of `above`, mapping by mapping."""
    merged = dict(below)
    for key, value in above.items():
        inner = below.get(key)
        merged[key] = laid_over(inner, value) if isinstance(inner, dict) else value
    return merged


if __name__ == "__main__":
    sys.exit(main())
