from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tritone.errors import ConfigError
from tritone.networks.decoder import Decoder
from tritone.networks.decoder_config import DecoderConfig
from tritone.networks.spans import Span
from tritone.networks.weights import Weights

from .conftest import CONFIG

ALL = {**CONFIG, "vocab_size": 258}


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'; use one of llama, qwen2, qwen3, qwen3_moe"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'; this decoder computes only silu"),
        ({"use_sliding_window": True}, "use_sliding_window 'True'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type 'yarn'"),
        ({"rope_theta": None}, "no 'rope_theta'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types 'sliding_attention'"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "factor '0.5'"),
        ({"rope_scaling": {"mrope_interleaved": True}}, "no 'mrope_section'"),
        ({"rope_scaling": {"mrope_section": [2, 1, 1]}}, "mrope_interleaved 'None'; .* only True"),
        (
            {"rope_scaling": {"mrope_section": [3, 1, 1], "mrope_interleaved": True}},
            r"mrope_section \[3, 1, 1\] with head_dim 8; use three numbers that add up to half the head_dim",
        ),
        ({"model_type": "qwen3_moe"}, "no 'num_experts'"),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok 5; use 1 to num_experts, 4",
        ),
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


def test_both_forms_of_multimodal_rope_mean_the_same() -> None:
    sections = {"mrope_section": [2, 1, 1], "rope_type": "default"}
    older = {
        **ALL,
        "rope_theta": 5000.0,
        "rope_scaling": {**sections, "type": "default", "interleaved": True},
    }
    newer = {**ALL, "rope_parameters": {**sections, "rope_theta": 5000.0, "mrope_interleaved": True}}
    for config in (older, newer):
        rope = DecoderConfig.from_hf(config).rope
        assert (rope["mrope_section"], rope["rope_theta"]) == ([2, 1, 1], 5000.0)


def test_a_family_may_be_named_by_the_caller() -> None:
    assert DecoderConfig.from_hf({**ALL, "model_type": "some_talker"}, "qwen3").qk_norm
    assert not DecoderConfig.from_hf({**ALL, "model_type": "qwen3"}, "llama").qk_norm


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({}, set()),
        ({"mlp_only_layers": [1, 3]}, {1, 3}),
        ({"decoder_sparse_step": 2}, {0, 2, 4}),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [5]}, {0, 1, 3, 4, 5}),
    ],
)
def test_layers_without_experts(changes: dict[str, Any], dense: set[int]) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = {**ALL, **experts, "model_type": "qwen3_moe", "num_hidden_layers": 6, **changes}
    assert DecoderConfig.from_hf(config).dense_layers == dense
    assert DecoderConfig.from_hf({**config, "num_experts": 0}).experts is None


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


def test_a_weight_outlives_its_file(tmp_path: Path) -> None:
    stored = {"half": torch.randn(3, 5).to(torch.bfloat16), "one": torch.tensor(7), "none": torch.empty(0, 4)}
    file = tmp_path / "model.safetensors"
    save_file(stored, file, metadata={"format": "pt"})
    weights = Weights(tmp_path)
    assert "__metadata__" not in weights
    read = {name: weights[name] for name in stored}
    with file.open("r+b") as stream:
        stream.write(bytes(file.stat().st_size))
    for name, tensor in stored.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)


def test_broken_weights_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100)}, file)
    whole = file.read_bytes()
    weights = Weights(tmp_path)
    file.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match="ends within 'a'; get the checkpoint again"):
        weights["a"]
    file.write_bytes(whole[:20])
    with pytest.raises(ConfigError, match="cannot be read"):
        Weights(tmp_path)
    file.write_bytes(bytes([255] * 8) + whole[8:])
    with pytest.raises(ConfigError, match="a header of"):
        Weights(tmp_path)
    file.write_bytes(whole.replace(b'"F32"', b'"F99"'))
    with pytest.raises(ConfigError, match="has 'a' as F99"):
        Weights(tmp_path)["a"]
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"b": "gone.safetensors"}}')
    with pytest.raises(ConfigError, match=r"gone\.safetensors' cannot be read"):
        Weights(tmp_path)["b"]


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
    hidden = decoder.forward(decoder.embed([4, 5, 6]), [Span(0, 3, 1), Span(1, 2, 2)]).hidden
    assert hidden.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_lower_precision_stays_close(checkpoint: Path, dtype: torch.dtype) -> None:
    config = DecoderConfig.from_hf(json.loads((checkpoint / "config.json").read_bytes()))
    tokens, spans = [3, 1, 4, 1, 5, 9], [Span(0, 0, 6)]
    exact, rough = (
        one.logits(one.forward(one.embed(tokens), spans).hidden).float()
        for one in (
            Decoder(config, Weights(checkpoint), slots=1, context_tokens=8, dtype=t)
            for t in (torch.float32, dtype)
        )
    )
    assert torch.nn.functional.cosine_similarity(exact, rough).min() > 0.999


@pytest.fixture
def decoder(checkpoint: Path) -> Decoder:
    config = DecoderConfig.from_hf(json.loads((checkpoint / "config.json").read_bytes()))
    return Decoder(config, Weights(checkpoint), slots=4, context_tokens=16)


def test_tokens_are_integers_or_a_tensor(decoder: Decoder) -> None:
    assert torch.equal(decoder.embed([3, 200, 3]), decoder.embed(torch.tensor([3, 200, 3])))


def test_a_row_s_position_is_its_place_unless_given(decoder: Decoder) -> None:
    rows, spans = decoder.embed([5, 6, 7, 8]), [Span(0, 0, 4)]
    plain = decoder.forward(rows, spans).hidden
    torch.testing.assert_close(decoder.forward(rows, spans, positions=torch.arange(4)).hidden, plain)
    apart = decoder.forward(rows, spans, positions=torch.tensor([0.0, 1.5, 4.0, 9.0])).hidden
    assert not torch.allclose(apart, plain, atol=1e-3)
    # Attention sees only how far positions are from each other.
    later = decoder.forward(rows, spans, positions=torch.tensor([0.0, 1.5, 4.0, 9.0]) + 5).hidden
    torch.testing.assert_close(later, apart, atol=1e-4, rtol=1e-4)


def test_neighbours_that_attend_in_one_call_do_not_mix(decoder: Decoder) -> None:
    """Whatever equally full slots are put together, and however their cache ends."""
    prompts = [[slot + 1, 40 + slot, 7 * slot] for slot in range(4)]
    alone = [decoder.forward(decoder.embed(p), [Span(slot, 0, 3)]).hidden for slot, p in enumerate(prompts)]
    with torch.inference_mode():
        decoder.cache.fill_(float("nan"))
    first = [Span(slot, 0, 2) for slot in range(4)]
    second = [Span(slot, 2) for slot in range(4)]
    begun = decoder.forward(decoder.embed([t for p in prompts for t in p[:2]]), first).hidden.view(4, 2, -1)
    ended = decoder.forward(decoder.embed([p[2] for p in prompts]), second).hidden
    for slot, expected in enumerate(alone):
        torch.testing.assert_close(torch.cat((begun[slot], ended[slot, None])), expected)


@pytest.mark.parametrize(
    ("slots", "starts", "counts", "calls"),
    [
        ((0, 1, 2, 3), (5, 5, 5, 5), (1, 1, 1, 1), 1),
        ((0, 1, 2, 3), (5, 5, 5, 5), (3, 3, 3, 3), 1),
        ((0, 1, 2, 3), (5, 5, 6, 6), (1, 1, 1, 1), 2),
        ((0, 1, 2, 3), (5, 5, 5, 5), (2, 2, 1, 1), 2),
        ((0, 2, 3, 1), (5, 5, 5, 5), (1, 1, 1, 1), 3),
    ],
)
def test_attention_is_called_once_for_equal_neighbours(
    decoder: Decoder,
    monkeypatch: pytest.MonkeyPatch,
    slots: tuple[int, ...],
    starts: tuple[int, ...],
    counts: tuple[int, ...],
    calls: int,
) -> None:
    made: list[torch.Tensor] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def counted(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        made.append(attend(*tensors, **options))
        return made[-1]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    with torch.inference_mode():
        decoder.cache.zero_()
    decoder.forward(decoder.embed([1] * sum(counts)), list(map(Span, slots, starts, counts)))
    assert len(made) == calls * decoder.config.num_layers


def test_additions_and_tap(decoder: Decoder) -> None:
    """What is added behind a layer is not in what is tapped there, but in all that follows."""
    rows, spans = decoder.embed([1, 2, 3]), [Span(0, 0, 3)]
    added = (torch.tensor([1]), torch.ones(1, rows.shape[1]))
    plain = [decoder.forward(rows, spans, tap=tap) for tap in range(3)]
    changed = [decoder.forward(rows, spans, additions=[added], tap=tap) for tap in range(3)]
    assert torch.equal(plain[0].tapped, rows) and torch.equal(plain[2].tapped, plain[2].hidden)
    assert torch.equal(changed[0].tapped, rows) and torch.equal(changed[1].tapped, plain[1].tapped)
    assert torch.equal(changed[2].hidden[0], plain[2].hidden[0])
    assert (changed[2].hidden[1:] - plain[2].hidden[1:]).abs().amax(-1).min() > 1e-3
    none = (torch.empty(0, dtype=torch.int64), torch.empty(0, rows.shape[1]))
    assert torch.equal(decoder.forward(rows, spans, additions=[none]).hidden, plain[0].hidden)
    assert decoder.forward(rows, spans).tapped is None


def test_rows_and_scores_may_be_left_to_others(checkpoint: Path, decoder: Decoder, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    table = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    config = DecoderConfig.from_hf(json.loads((checkpoint / "config.json").read_bytes()))
    bare = Decoder(config, Weights(tmp_path), slots=1, context_tokens=8, embedding=None, head=None)
    hidden = bare.forward(table[[1, 2, 3]], [Span(0, 0, 3)]).hidden
    assert torch.equal(hidden, decoder.forward(decoder.embed([1, 2, 3]), [Span(0, 0, 3)]).hidden)
    with pytest.raises(AssertionError, match="come from outside"):
        bare.embed([1])
    with pytest.raises(AssertionError, match="no head"):
        bare.logits(hidden)
