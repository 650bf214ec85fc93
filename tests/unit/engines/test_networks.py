from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tritone.errors import ConfigError
from tritone.networks.decoder import Decoder, DecoderConfig, Span
from tritone.networks.weights import Weights

from .conftest import CONFIG

ALL = {**CONFIG, "vocab_size": 258}


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'; use one of llama, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'; this decoder computes only silu"),
        ({"use_sliding_window": True}, "use_sliding_window 'True'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type 'yarn'"),
        ({"rope_theta": None}, "no 'rope_theta'"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(changes: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        DecoderConfig.from_hf({**ALL, **changes})


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ConfigError, match="no 'hidden_size'"):
        DecoderConfig.from_hf({name: value for name, value in ALL.items() if name != "hidden_size"})


def test_both_forms_of_rope_settings_mean_the_same() -> None:
    older = DecoderConfig.from_hf({**ALL, "rope_theta": 5000.0, "rope_scaling": None})
    newer = {**ALL, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    del newer["rope_theta"]
    assert DecoderConfig.from_hf(newer).rope == older.rope


def test_weights_in_several_files_are_found_by_the_index(checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = Weights(tmp_path)
    assert all(name in weights and torch.equal(weights[name], tensors[name]) for name in names)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no model\.safetensors"):
        Weights(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"has no weight 'model\.embed_tokens\.weight'"):
        Decoder(DecoderConfig.from_hf(ALL), Weights(tmp_path), slots=1, context_tokens=8)


def test_what_lies_beyond_a_slot_s_tokens_is_never_read(checkpoint: Path) -> None:
    config = DecoderConfig.from_hf(json.loads((checkpoint / "config.json").read_bytes()))
    decoder = Decoder(config, Weights(checkpoint), slots=2, context_tokens=16)
    with torch.inference_mode():
        decoder.cache.fill_(float("nan"))
    decoder.forward(decoder.embed([1, 2, 3]), [Span(0, 0, 3)])
    decoder.copy_prefix(0, 1, 2)
    hidden = decoder.forward(decoder.embed([4, 5, 6]), [Span(0, 3, 1), Span(1, 2, 2)])
    assert hidden.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_lower_precision_stays_close(checkpoint: Path, dtype: torch.dtype) -> None:
    config = DecoderConfig.from_hf(json.loads((checkpoint / "config.json").read_bytes()))
    tokens, spans = [3, 1, 4, 1, 5, 9], [Span(0, 0, 6)]
    exact, rough = (
        one.logits(one.forward(one.embed(tokens), spans)).float()
        for one in (
            Decoder(config, Weights(checkpoint), slots=1, context_tokens=8, dtype=t)
            for t in (torch.float32, dtype)
        )
    )
    assert torch.nn.functional.cosine_similarity(exact, rough).min() > 0.999
