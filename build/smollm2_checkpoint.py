"""A GGUF file of a Llama-shaped model, dequantised to a folder in Hugging Face layout.

    model.gguf ─► config.json  generation_config.json      sizes and special ids, all read from the metadata
                  model.safetensors                        float32, names and row order of LlamaForCausalLM
                  tokenizer.json  tokenizer_config.json    byte-level BPE
                  chat_template.jinja

The same file gives the same bytes on every run.

    python build/smollm2_checkpoint.py model.gguf out/
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, Keys, TokenType, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Array = npt.NDArray[np.float32]

ARCHITECTURE = "llama"

TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# How a `tokenizer.ggml.pre` name cuts text before BPE.
PRE_TOKENIZERS = {
    "smollm": lambda: [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
    ],
}


class Metadata:
    """Key-value part of a GGUF file."""

    def __init__(self, reader: GGUFReader) -> None:
        self._fields = reader.fields
        self.architecture = self[Keys.General.ARCHITECTURE]

    def __getitem__(self, key: str) -> Any:
        """Value of `key`, in which `{arch}` stands for the architecture's name."""
        value = self.get(key)
        if value is None:
            raise ValueError(f"the GGUF file has no metadata key '{key}'")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        name = key.format(arch=self.architecture) if "{arch}" in key else key
        return self._fields[name].contents() if name in self._fields else default


def convert(gguf: Path, out: Path) -> None:
    """Write the checkpoint folder `out` from the file `gguf`.

    Raises ValueError when the file is of another architecture or uses a tokeniser that is not known here.
    """
    reader = GGUFReader(gguf)
    metadata = Metadata(reader)
    if metadata.architecture != ARCHITECTURE:
        raise ValueError(f"{gguf.name} has architecture '{metadata.architecture}', not '{ARCHITECTURE}'")
    tensors = read_tensors(reader, metadata)
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / "config.json", model_config(metadata, tied="lm_head.weight" not in tensors))
    _write_json(out / "generation_config.json", special_ids(metadata))
    _write_json(out / "tokenizer_config.json", tokenizer_config(metadata))
    build_tokenizer(metadata).save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(metadata[Keys.Tokenizer.CHAT_TEMPLATE], encoding="utf-8")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def model_config(metadata: Metadata, tied: bool) -> dict[str, Any]:
    """config.json of LlamaForCausalLM; `tied`: the output head is the embedding table."""
    hidden, heads = metadata[Keys.LLM.EMBEDDING_LENGTH], metadata[Keys.Attention.HEAD_COUNT]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": metadata.architecture,
        "hidden_act": "silu",  # the only one this architecture has, so the metadata does not say it
        "hidden_size": hidden,
        "intermediate_size": metadata[Keys.LLM.FEED_FORWARD_LENGTH],
        "num_hidden_layers": metadata[Keys.LLM.BLOCK_COUNT],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get(Keys.Attention.HEAD_COUNT_KV, heads),
        "head_dim": metadata.get(Keys.Rope.DIMENSION_COUNT, hidden // heads),
        "max_position_embeddings": metadata[Keys.LLM.CONTEXT_LENGTH],
        "rms_norm_eps": _shortest(metadata[Keys.Attention.LAYERNORM_RMS_EPS]),
        "rope_theta": _shortest(metadata[Keys.Rope.FREQ_BASE]),
        "tie_word_embeddings": tied,
        "vocab_size": len(metadata[Keys.Tokenizer.LIST]),
        "dtype": "float32",
        **special_ids(metadata),
    }


def special_ids(metadata: Metadata) -> dict[str, int | list[int]]:
    """Ids that begin, end and pad a sequence; `eos_token_id` lists every id that ends an answer."""
    keys = (Keys.Tokenizer.EOS_ID, Keys.Tokenizer.EOT_ID, Keys.Tokenizer.EOM_ID)
    ends = {metadata.get(key) for key in keys} - {None}
    ids: dict[str, int | list[int]] = {"eos_token_id": sorted(ends)}
    for name, key in (("bos_token_id", Keys.Tokenizer.BOS_ID), ("pad_token_id", Keys.Tokenizer.PAD_ID)):
        token = metadata.get(key)
        if token is not None:
            ids[name] = token
    return ids


def read_tensors(reader: GGUFReader, metadata: Metadata) -> dict[str, Array]:
    """Every weight by its Hugging Face name: float32 [rows, columns] or [size]."""
    heads = {
        "attn_q": metadata[Keys.Attention.HEAD_COUNT],
        "attn_k": metadata.get(Keys.Attention.HEAD_COUNT_KV, metadata[Keys.Attention.HEAD_COUNT]),
    }
    tensors = {}
    for tensor in reader.tensors:
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        layer, kind, suffix = _parse(tensor.name)
        if kind in heads:
            values = _half_split_rotary(values, heads[kind])
        names = TENSOR_NAMES if layer is None else LAYER_TENSOR_NAMES
        if kind not in names:
            raise ValueError(f"tensor '{tensor.name}' has no place in {ARCHITECTURE}")
        prefix = "" if layer is None else f"model.layers.{layer}."
        tensors[f"{prefix}{names[kind]}.{suffix}"] = np.ascontiguousarray(values)
    return tensors


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """The byte-level BPE tokeniser that the metadata describes."""
    if metadata[Keys.Tokenizer.MODEL] != "gpt2":
        raise ValueError(f"tokenizer '{metadata[Keys.Tokenizer.MODEL]}' is not the byte-level BPE 'gpt2'")
    pre = metadata[Keys.Tokenizer.PRE]
    if pre not in PRE_TOKENIZERS:
        raise ValueError(f"pre-tokeniser '{pre}' is not known; known: {', '.join(PRE_TOKENIZERS)}")
    tokens: list[str] = metadata[Keys.Tokenizer.LIST]
    merges = [tuple(merge.split(" ")) for merge in metadata[Keys.Tokenizer.MERGES]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre]())
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, metadata[Keys.Tokenizer.TOKEN_TYPE], strict=True):
        if kind == TokenType.CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    return tokenizer


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """tokenizer_config.json, for programs that load the folder with AutoTokenizer."""
    tokens: list[str] = metadata[Keys.Tokenizer.LIST]
    keys = {
        "bos_token": Keys.Tokenizer.BOS_ID,
        "eos_token": Keys.Tokenizer.EOS_ID,
        "pad_token": Keys.Tokenizer.PAD_ID,
        "unk_token": Keys.Tokenizer.UNK_ID,
    }
    named = {name: tokens[metadata[key]] for name, key in keys.items() if metadata.get(key) is not None}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata[Keys.LLM.CONTEXT_LENGTH],
        **named,
    }


def _parse(name: str) -> tuple[int | None, str, str]:
    """('blk.3.attn_q.weight') -> (3, 'attn_q', 'weight'); the layer is None outside the layers."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None:
        raise ValueError(f"tensor name '{name}' is not understood")
    layer, kind, suffix = match.groups()
    return (None if layer is None else int(layer)), kind, suffix


def _half_split_rotary(values: Array, heads: int) -> Array:
    """Rows of each head from rotary pairs (0, 1), (2, 3) … to pairs (i, i + half), as `transformers` has."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _shortest(value: float) -> float:
    """A number stored as float32, as the shortest decimal that means the same: 1e-05, not 9.9999997e-06."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    convert(arguments.gguf, arguments.out)
