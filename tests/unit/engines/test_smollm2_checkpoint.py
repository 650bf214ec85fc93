from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

from safetensors.numpy import load_file  # noqa: E402
from tokenizers import Tokenizer, pre_tokenizers  # noqa: E402

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 4, 2, 16, 64, 96
CONTROL, NORMAL = 3, 1
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}\n"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[3] / "build" / "smollm2_checkpoint.py"
    spec = importlib.util.spec_from_file_location("smollm2_checkpoint", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows as GGUF stores them: the two of each rotary pair side by side."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(values.shape)


def write_gguf(path: Path, architecture: str = "llama", pre: str = "smollm") -> dict[str, np.ndarray]:
    """A one-layer model; its weights by Hugging Face name, as they are after quantisation."""
    chance = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = ["<|none|>", "<|begin|>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "in"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL] * 3 + [NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["i n"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    shapes = {
        "token_embd.weight": ("model.embed_tokens.weight", (len(tokens), HIDDEN)),
        "output_norm.weight": ("model.norm.weight", (HIDDEN,)),
        "blk.0.attn_norm.weight": ("model.layers.0.input_layernorm.weight", (HIDDEN,)),
        "blk.0.attn_q.weight": ("model.layers.0.self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN)),
        "blk.0.attn_k.weight": ("model.layers.0.self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)),
        "blk.0.attn_v.weight": ("model.layers.0.self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)),
        "blk.0.attn_output.weight": ("model.layers.0.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)),
        "blk.0.ffn_norm.weight": ("model.layers.0.post_attention_layernorm.weight", (HIDDEN,)),
        "blk.0.ffn_gate.weight": ("model.layers.0.mlp.gate_proj.weight", (INNER, HIDDEN)),
        "blk.0.ffn_up.weight": ("model.layers.0.mlp.up_proj.weight", (INNER, HIDDEN)),
        "blk.0.ffn_down.weight": ("model.layers.0.mlp.down_proj.weight", (HIDDEN, INNER)),
    }
    expected = {}
    for name, (ours, shape) in shapes.items():
        values = chance.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
            expected[ours] = values
            continue
        packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1)
        values = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)
        heads = HEADS if "attn_q" in name else KV_HEADS if "attn_k" in name else None
        if heads:  # rows are quantised one by one, so that they can be moved afterwards
            order = interleave(np.arange(shape[0])[:, None], heads)[:, 0]
            packed = packed[order]
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        expected[ours] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def test_weights_are_the_dequantised_ones_in_their_order(script: ModuleType, tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "model.gguf")
    script.convert(tmp_path / "model.gguf", tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, values in expected.items():
        assert written[name].dtype == np.float32
        np.testing.assert_array_equal(written[name], values, err_msg=name)


def test_sizes_and_ids_come_from_the_metadata(script: ModuleType, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    script.convert(tmp_path / "model.gguf", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_bytes())
    assert config["model_type"] == "llama" and config["head_dim"] == HEAD_DIM
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 100000.0)
    assert config["tie_word_embeddings"] is True and config["vocab_size"] == 260
    ids = json.loads((tmp_path / "out" / "generation_config.json").read_bytes())
    assert ids == {"bos_token_id": 1, "eos_token_id": [2]}
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TEMPLATE


def test_tokenizer_goes_there_and_back(script: ModuleType, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    script.convert(tmp_path / "model.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    for text in ("Rain in Spain 2024!", "聪明 🙂\n\t½", "<|begin|>user\nhi<|end|>"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode("in<|end|>12").tokens == ["in", "<|end|>", "1", "2"]


def test_the_same_file_gives_the_same_bytes(script: ModuleType, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    for name in ("one", "two"):
        script.convert(tmp_path / "model.gguf", tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(files) == 6
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [({"architecture": "bert"}, "architecture 'bert'"), ({"pre": "odd"}, "pre-tokeniser 'odd'")],
)
def test_what_is_not_known_is_refused(
    script: ModuleType, tmp_path: Path, changes: dict[str, str], wrong: str
) -> None:
    write_gguf(tmp_path / "model.gguf", **changes)
    with pytest.raises(ValueError, match=wrong):
        script.convert(tmp_path / "model.gguf", tmp_path / "out")
