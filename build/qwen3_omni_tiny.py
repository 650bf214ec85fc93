"""Build the tiny checkpoint of `qwen3_omni`: random weights, every class and file of a released one, 4 MB.

    words ──► tokenizer ──► config ──► network ◄── weights drawn from one stream of bits, name by name
                  │            │          │
                  ▼            ▼          ▼
    vocab.json merges.txt   config.json  model-0000i-of-0000n.safetensors + index      ──► parity check
    chat template, processor files       float32, the names of a released checkpoint

    python build/qwen3_omni_tiny.py             into the cache, where `tritone serve qwen3_omni` looks
    python build/qwen3_omni_tiny.py --out DIR   somewhere else
    python build/qwen3_omni_tiny.py --wide      one that vLLM runs on a CPU as well, beside the other

The weights are the same bits on every machine. The parity check asks the reference implementation a list of
questions (qwen3_omni_reference.py) and refuses a checkpoint whose choices are too close to call, so that
"the same tokens and codes" is a fair demand. A second run is instant; two at once are safe; one that is
interrupted leaves nothing behind. The wide one is not asked: its tests compare engines with each other.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import qwen3_omni_processor_files
from qwen3_omni_processor_files import write_json, write_processor, write_tokenizer

from tritone.checkpoint import checkpoint_dir
from tritone.errors import ConfigError
from tritone.pipelines.qwen3_omni.processor import import_transformers

PIPELINE = "qwen3_omni"
WIDE = "qwen3_omni_wide"  # its name in the cache
SEED = 7  # chosen with the two gains below and the questions of the parity check, so that it passes
WIDE_SEED = 22  # every choice of the wide one's thinker is clear as well
SHARD_BYTES = 1_500_000
MARK = "README.md"
TITLE = "A tiny Qwen3-Omni with random weights"

CODEBOOK = 64
CODE_GROUPS = 16
TALKER_SPECIALS = 1024  # the last ids of the talker's vocabulary, which it may never speak
THINKER_HIDDEN, TALKER_HIDDEN = 64, 48
CONTEXT_TOKENS = 4096

# A sampled row's logit grows with its factor: what ends an answer must win now and then, and what has no
# text must never win.
END_OF_TEXT_GAIN = 1.8
END_OF_SPEECH_GAIN = 1.6
RESIDUAL_GAIN = 0.3  # of what a unit of the waveform decoder adds
WAVEFORM_GAIN = 0.5  # of its last convolution: keeps the sound clear of the clamp at +-1

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
)
ROLES = ("system", "user", "assistant")  # first, so that each of them is one token
BEGINNINGS = "Hello What How Why Who When Where Which Tell The This It Please You"
INNER_WORDS = """\
the a an and or of to in on at is are was it that this you your me my we they he she what who how why
when where which do does can will would not no yes with for from about see hear say tell speak picture
image sound video voice word world time today day good new one two three red green blue sky sea cat dog
rain music answer question short long
"""
WORDS = (*ROLES, *BEGINNINGS.split(), *(f"Ġ{word}" for word in INNER_WORDS.split()))  # Ġ: a space


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: the cache of this machine")
    parser.add_argument("--wide", action="store_true", help="heads and layers as vLLM wants them on a CPU")
    arguments = parser.parse_args(argv)
    target = arguments.out or checkpoint_dir(WIDE if arguments.wide else PIPELINE)
    if is_complete(target):
        say(f"complete in {target}")
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.parent / f".{target.name}.lock"):
        if is_complete(target):
            say(f"complete in {target}, built by another run")
            return 0
        if target.exists() and not is_ours(target):
            raise SystemExit(f"{target} holds something else; remove it, or give another --out")
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=".building-", dir=target.parent) as scratch:
            folder = Path(scratch) / target.name
            build(folder, arguments.wide)
            if not arguments.wide:
                check_parity(folder)
            if target.exists():
                target.rename(Path(scratch) / "before")
            folder.rename(target)
        say(f"built {target} in {time.monotonic() - began_s:.0f} s")
    return 0


def is_complete(target: Path) -> bool:
    """This script as it is now has written the folder; renamed into place whole, so one file tells."""
    mark = target / MARK
    return mark.is_file() and mark.read_text("utf-8") == readme()


def is_ours(target: Path) -> bool:
    """The folder was written by this script, maybe an older one, and may be replaced."""
    mark = target / MARK
    return mark.is_file() and mark.read_text("utf-8").startswith(TITLE)


def build(folder: Path, wide: bool = False) -> None:
    """Fill the new folder `folder`, which may be anywhere; nothing is checked."""
    try:
        import_transformers()
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    folder.mkdir(parents=True)
    write_tokenizer(folder, *byte_pairs(), SPECIAL_TOKENS, CONTEXT_TOKENS)
    write_processor(folder, max_pixels=128 * 128)
    write_network(folder, wide)
    (folder / MARK).write_text(readme(), "utf-8")
    for path in folder.iterdir():
        path.chmod(0o644)  # whoever serves may be another user


def check_parity(folder: Path) -> None:
    """Raise SystemExit unless the reference's choices are clear and its answers end as their names say."""
    import qwen3_omni_reference

    problems = qwen3_omni_reference.problems(folder)
    if problems:
        raise SystemExit("the checkpoint is not fit for parity tests: " + "; ".join(problems))


def readme() -> str:
    sources = (Path(__file__), Path(qwen3_omni_processor_files.__file__))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    return f"{TITLE}, for tests. Written by {Path(__file__).name} {digest}.\n"


def byte_pairs() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary without special tokens, and the merges: every byte, then WORDS from left to right."""
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = {symbol: place for place, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    merges: dict[tuple[str, str], None] = {}
    for word in WORDS:
        for end in range(1, len(word)):
            merges[(word[:end], word[end])] = None
            vocabulary.setdefault(word[: end + 1], len(vocabulary))
    return vocabulary, list(merges)


def token_ids() -> dict[str, int]:
    vocabulary, _ = byte_pairs()
    return vocabulary | {token: len(vocabulary) + place for place, token in enumerate(SPECIAL_TOKENS)}


def model_config(ids: dict[str, int], wide: bool = False) -> dict[str, Any]:
    """config.json, as a released checkpoint writes it; ids: of the tokenizer's tokens.

    wide: heads of the least size that vLLM's attention takes on a CPU, and `accept_hidden_layer` past the
    layers to which pictures add (DeepStack), as in a released one.
    """
    marks = {
        "audio_token_id": ids["<|audio_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "audio_start_token_id": ids["<|audio_start|>"],
        "audio_end_token_id": ids["<|audio_end|>"],
        "position_id_per_seconds": 13,
    }
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    return {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "dtype": "float32",
        "enable_audio_output": True,
        "im_start_token_id": ids["<|im_start|>"],
        "im_end_token_id": ids["<|im_end|>"],
        "tts_pad_token_id": ids["<tts_pad>"],
        "tts_bos_token_id": ids["<tts_text_bos>"],
        "tts_eos_token_id": ids["<tts_text_eod>"],
        **{f"{role}_token_id": ids[role] for role in ROLES},
        "thinker_config": {
            "model_type": "qwen3_omni_moe_thinker",
            "user_token_id": ids["user"],
            **marks,
            "audio_config": audio_config(),
            "vision_config": vision_config(),
            "text_config": {
                "model_type": "qwen3_omni_moe_text",
                "vocab_size": -(-len(ids) // 64) * 64,
                "hidden_size": THINKER_HIDDEN,
                "intermediate_size": 96,
                "moe_intermediate_size": 32,
                "num_hidden_layers": 4,
                "max_position_embeddings": CONTEXT_TOKENS,
                "tie_word_embeddings": False,
                **attention,
                **experts,
                **(rope([8, 4, 4]) | {"head_dim": 32} if wide else rope([4, 2, 2])),
            },
        },
        "talker_config": talker_config(attention, experts, rope([4, 2, 2]), marks)
        | {"accept_hidden_layer": 3 if wide else 2},
        "code2wav_config": {
            "model_type": "qwen3_omni_moe_code2wav",
            "codebook_size": CODEBOOK,
            "num_quantizers": CODE_GROUPS,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 72,
            "upsample_rates": [8, 5, 4, 3],
            "upsampling_ratios": [2, 2],
            "decoder_dim": 64,
            "max_position_embeddings": 8000,
            "layer_scale_initial_scale": 0.01,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000,
        },
    }


def rope(mrope_section: list[int]) -> dict[str, Any]:
    """mrope_section: pairs that time, height and width turn; they add up to half of head_dim."""
    return {
        "rope_theta": 1_000_000,
        "rope_scaling": {
            "rope_type": "default",
            "type": "default",
            "mrope_section": mrope_section,
            "mrope_interleaved": True,
            "interleaved": True,
        },
    }


def audio_config() -> dict[str, Any]:
    return {
        "model_type": "qwen3_omni_moe_audio_encoder",
        "num_mel_bins": 128,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "d_model": 32,
        "max_source_positions": 1500,
        "n_window": 50,
        "n_window_infer": 800,
        "conv_chunksize": 500,
        "downsample_hidden_size": 8,
        "output_dim": THINKER_HIDDEN,
    }


def vision_config() -> dict[str, Any]:
    return {
        "model_type": "qwen3_omni_moe_vision_encoder",
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": THINKER_HIDDEN,
        "num_position_embeddings": 256,
        "image_size": 256,  # patch_size times the square root of the number before
        "apply_vit_abs_pos_embed": True,
        "deepstack_visual_indexes": [0, 1],
    }


def talker_config(
    attention: dict[str, Any], experts: dict[str, Any], rope: dict[str, Any], marks: dict[str, int]
) -> dict[str, Any]:
    special = CODEBOOK + 100  # somewhere among the ids that are never spoken
    return {
        "model_type": "qwen3_omni_moe_talker",
        "num_code_groups": CODE_GROUPS,
        "thinker_hidden_size": THINKER_HIDDEN,
        "spatial_merge_size": 2,
        "codec_pad_id": special,
        "codec_bos_id": special + 1,
        "codec_eos_token_id": special + 2,
        "codec_nothink_id": special + 7,
        "codec_think_bos_id": special + 8,
        "codec_think_eos_id": special + 9,
        "speaker_id": {"chelsie": special + 20, "ethan": special + 21, "aiden": special + 22},
        **marks,
        "text_config": {
            "model_type": "qwen3_omni_moe_talker_text",
            "vocab_size": CODEBOOK + TALKER_SPECIALS,
            "hidden_size": TALKER_HIDDEN,
            "intermediate_size": 64,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32,
            "num_hidden_layers": 3,
            "max_position_embeddings": CONTEXT_TOKENS,
            **attention,
            **experts,
            **rope,
        },
        "code_predictor_config": {
            "model_type": "qwen3_omni_moe_talker_code_predictor",
            "vocab_size": CODEBOOK,
            "hidden_size": TALKER_HIDDEN,  # nothing projects between the two
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_code_groups": CODE_GROUPS,
            "max_position_embeddings": 64,
            "rope_theta": 1_000_000,
            **attention,
        },
    }


def write_network(folder: Path, wide: bool) -> None:
    """config.json, generation_config.json and the sharded weights."""
    import torch

    transformers = import_transformers()
    transformers.logging.set_verbosity_error()  # it warns of keys that its own classes need
    transformers.logging.disable_progress_bar()
    ids = token_ids()
    config = model_config(ids, wide)
    reference = transformers.Qwen3OmniMoeForConditionalGeneration
    model = reference(transformers.Qwen3OmniMoeConfig(**config)).float().eval()
    with torch.no_grad():
        draw_weights(model, WIDE_SEED if wide else SEED)
    model.save_pretrained(folder, max_shard_size=SHARD_BYTES)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation_config(ids))


def generation_config(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
        "do_sample": False,
    }


def draw_weights(model: Any, seed: int) -> None:
    """Fill every parameter; to be called without gradients."""
    import torch

    bits = np.random.PCG64(seed)
    for name, parameter in sorted(model.named_parameters()):
        parameter.copy_(torch.from_numpy(drawn(name, tuple(parameter.shape), bits)))
    shape_outputs(model)


def drawn(name: str, shape: tuple[int, ...], bits: np.random.PCG64) -> npt.NDArray[np.float32]:
    """Values of the parameter `name`: wider than a fresh network's, so that no layer is without effect."""
    values = normal(shape, bits)
    if name.endswith(("alpha", "beta")):  # logarithms; a slow sine multiplies rounding noise less
        return values * np.float32(0.2) - np.float32(name.endswith("alpha"))
    if len(shape) == 1:
        if "norm" in name and name.endswith("weight"):
            return 1 + values * np.float32(0.1)
        base = 0.3 if name.endswith(("layer_scale.scale", "gamma")) else 0.0
        return np.float32(base) + values * np.float32(0.05)
    if "embed" in name:
        return values
    fan_in = shape[-1] if len(shape) == 2 or "experts" in name else int(np.prod(shape[1:]))
    gain = RESIDUAL_GAIN if "conv2" in name else 1.0
    return values * np.float32(gain / math.sqrt(fan_in))


def normal(shape: tuple[int, ...], bits: np.random.PCG64) -> npt.NDArray[np.float32]:
    """Nearly normal values of mean 0 and deviation 1, the same bits on every machine.

    Each is a sum of four 16-bit numbers out of 64 raw bits: additions and one product, all exactly rounded,
    where library routines for the normal distribution differ in the last place between machines.
    """
    quarters = bits.random_raw(int(np.prod(shape))).astype("<u8").view("<u2").reshape(-1, 4)
    centred = quarters.sum(1, dtype=np.int64) - 2 * 65535
    return (centred * (math.sqrt(3) / 65536)).astype(np.float32).reshape(shape)


def shape_outputs(model: Any) -> None:
    """Make answers end, keep tokens without text out of them, and keep the sound in range."""
    ids = token_ids()
    head = model.thinker.lm_head.weight
    head[len(ids) :] = 0
    for token in SPECIAL_TOKENS:
        head[ids[token]] *= END_OF_TEXT_GAIN if token == "<|im_end|>" else 0
    model.talker.codec_head.weight[model.config.talker_config.codec_eos_token_id] *= END_OF_SPEECH_GAIN
    last = model.code2wav.decoder[-1].conv
    last.bias.zero_()
    last.weight.mul_(WAVEFORM_GAIN)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Only one holder at a time on this machine; a holder that dies lets go."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another build is running; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(line: str) -> None:
    print(f"{PIPELINE}: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
