"""The tiny checkpoint: the same bits on every machine, laid out as a released one, whole or absent."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

import numpy as np
import pytest

for package in ("transformers", "torchvision", "safetensors", "tokenizers"):
    pytest.importorskip(package)

import qwen3_omni_real_size as real_size  # noqa: E402
import qwen3_omni_tiny as script  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

from tritone.checkpoint import checkpoint_dir, released_bytes, require_released  # noqa: E402
from tritone.pipelines.qwen3_omni.processor import import_transformers, load_processor  # noqa: E402

WEIGHTS_SHA256 = "f0bc5d5d5f4f93776ee900a42516e9931207388345598c77e8af90dfa54eb7e6"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("tiny") / "checkpoint"
    script.build(target)
    return target


@pytest.fixture(scope="module")
def processor(folder: Path):
    return load_processor(folder)


def test_the_weights_are_the_same_bits_on_every_machine(folder: Path):
    digest = hashlib.sha256()
    tensors = {
        name: array for file in folder.glob("*.safetensors") for name, array in load_file(file).items()
    }
    for name, array in sorted(tensors.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    assert digest.hexdigest() == WEIGHTS_SHA256


def test_it_is_small_and_laid_out_as_a_released_one(folder: Path):
    assert require_released(folder, "qwen3_omni") == folder
    assert sum(file.stat().st_size for file in folder.iterdir()) < 10_000_000
    assert set(released_bytes(folder)) == {"thinker", "talker", "code2wav"}
    files = {file.name for file in folder.iterdir()}
    assert len([name for name in files if name.endswith(".safetensors")]) > 1
    assert {"vocab.json", "merges.txt", "chat_template.json", "preprocessor_config.json"} <= files
    names = json.loads((folder / "model.safetensors.index.json").read_bytes())["weight_map"]
    assert "thinker.model.layers.0.mlp.experts.7.gate_proj.weight" in names  # expert by expert


def test_ids_agree_between_tokenizer_and_config(folder: Path, processor):
    config = json.loads((folder / "config.json").read_bytes())
    thinker, id_of = config["thinker_config"], processor.tokenizer.convert_tokens_to_ids
    assert config["im_end_token_id"] == id_of("<|im_end|>") == processor.tokenizer.eos_token_id
    assert thinker["audio_token_id"] == config["talker_config"]["audio_token_id"] == id_of("<|audio_pad|>")
    assert config["tts_eos_token_id"] == id_of("<tts_text_eod>")
    for role in ("system", "user", "assistant"):
        assert processor.tokenizer.encode(role) == [config[f"{role}_token_id"]]
    assert thinker["text_config"]["vocab_size"] >= len(processor.tokenizer)


def test_the_codec_ids_agree(folder: Path):
    """The last 1024 ids of the talker are never spoken; codes index the codebook of code2wav directly."""
    config = json.loads((folder / "config.json").read_bytes())
    talker, decoder = config["talker_config"], config["code2wav_config"]
    spoken = talker["text_config"]["vocab_size"] - 1024
    assert decoder["codebook_size"] == talker["code_predictor_config"]["vocab_size"] == spoken
    groups = (talker["num_code_groups"], talker["code_predictor_config"]["num_code_groups"])
    assert groups == (16, 16) and decoder["num_quantizers"] == 16
    special = [talker[name] for name in talker if name.startswith("codec_")] + [
        *talker["speaker_id"].values()
    ]
    assert len(special) == len(set(special)) == 9 and min(special) >= spoken


@pytest.mark.parametrize("text", ["What is in the picture?", "naïve 聪明 \U0001f600\n\ttab", "\x00\x7f"])
def test_every_text_goes_through_the_tokenizer(processor, text: str):
    ids = processor.tokenizer.encode(text)
    assert processor.tokenizer.decode(ids) == text


def test_words_are_tokens(processor):
    assert processor.tokenizer.tokenize("Tell me about the picture") == [
        "Tell",
        "Ġme",
        "Ġabout",
        "Ġthe",
        "Ġpicture",
    ]


def test_the_chat_template(processor):
    conversation = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": kind} for kind in ("image", "audio", "video")]},
        {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
    ]
    text = processor.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|><|audio_start|><|audio_pad|><|audio_end|>"
        "<|vision_start|><|video_pad|><|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_drawn_values_are_nearly_normal():
    values = script.normal((100_000,), np.random.PCG64(3))
    assert abs(values.mean()) < 0.01 and abs(values.std() - 1) < 0.01 and np.abs(values).max() < 3.5


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("real") / "new"
    assert real_size.main([str(target)]) == 0
    return target


class TestRealSize:
    def test_its_ids_are_the_published_ones(self, real: Path):
        id_of = load_processor(real).tokenizer.convert_tokens_to_ids
        config = json.loads((real / "config.json").read_bytes())
        assert [config[f"{role}_token_id"] for role in ("system", "user", "assistant")] == [8948, 872, 77091]
        assert (config["im_start_token_id"], config["im_end_token_id"]) == (151644, 151645)
        assert config["thinker_config"]["audio_token_id"] == id_of("<|audio_pad|>") == 151675
        assert config["thinker_config"]["image_token_id"] == id_of("<|image_pad|>") == 151655
        assert [config[f"tts_{name}_token_id"] for name in ("pad", "bos", "eos")] == [151671, 151672, 151673]

    def test_a_turn_has_the_length_that_it_has_in_the_released_one(self, real: Path):
        ids = load_processor(real).tokenizer.encode(
            "<|im_start|>assistant\n<|im_start|>user\n<|im_start|>system\n"
        )
        assert ids == [151644, 77091, 198, 151644, 872, 198, 151644, 8948, 198]

    def test_the_reference_takes_it_and_it_has_the_published_size(self, real: Path):
        import torch

        transformers = import_transformers()
        config = transformers.Qwen3OmniMoeConfig.from_pretrained(real)
        with torch.device("meta"):
            model = transformers.Qwen3OmniMoeForConditionalGeneration(config)
        millions = {
            part: round(sum(p.numel() for p in getattr(model, part).parameters()) / 1e6)
            for part in ("thinker", "talker", "code2wav")
        }
        assert millions["code2wav"] == 216
        assert 31_500 < millions["thinker"] < 32_000 and 3_000 < millions["talker"] < 3_500

    def test_no_tiny_size_is_left(self, real: Path):
        def numbers(config, path=""):
            for key, value in config.items():
                if isinstance(value, dict):
                    yield from numbers(value, f"{path}{key}.")
                elif (
                    "hidden" in key
                    or "intermediate" in key
                    or "head" in key
                    or "dim" in key
                    or "layers" in key
                ):
                    yield f"{path}{key}", value

        small = dict(numbers(script.model_config(script.token_ids())))
        large = dict(numbers(json.loads((real / "config.json").read_bytes())))
        same = {key for key, value in small.items() if large[key] == value}
        assert same == {"talker_config.text_config.num_key_value_heads"}

    def test_a_full_folder_is_kept(self, tmp_path: Path):
        (tmp_path / "mine").touch()
        with pytest.raises(SystemExit, match="is not empty"):
            real_size.main([str(tmp_path)])


def test_the_wide_thinker_suits_vllm_on_a_cpu():
    config = script.model_config(script.token_ids(), wide=True)
    thinker, talker = config["thinker_config"], config["talker_config"]
    text = thinker["text_config"]
    assert text["head_dim"] == 32 == 2 * sum(text["rope_scaling"]["mrope_section"])
    assert talker["accept_hidden_layer"] > len(thinker["vision_config"]["deepstack_visual_indexes"])
    assert talker["text_config"]["head_dim"] == 16


class TestMain:
    @pytest.fixture
    def builds(self, tmp_path: Path, monkeypatch) -> list[Path]:
        """Folders built by a stand-in, which is quick."""
        seen: list[Path] = []

        def build(folder: Path, wide: bool) -> None:
            folder.mkdir()
            (folder / script.MARK).write_text(script.readme())
            seen.append(folder)

        monkeypatch.setenv("TRITONE_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(script, "build", build)
        monkeypatch.setattr(script, "check_parity", lambda folder: None)
        return seen

    def test_the_wide_one_lies_beside_the_other(self, builds, capsys):
        assert script.main(["--wide"]) == 0
        assert script.is_complete(checkpoint_dir(script.WIDE))
        assert not checkpoint_dir(script.PIPELINE).exists()

    def test_a_second_run_does_nothing(self, builds, capsys):
        assert script.main([]) == 0 and script.main([]) == 0
        assert len(builds) == 1 and script.is_complete(checkpoint_dir("qwen3_omni"))
        assert "complete in" in capsys.readouterr().out

    def test_three_runs_at_once_build_once(self, builds):
        runs = [threading.Thread(target=script.main, args=([],)) for _ in range(3)]
        for run in runs:
            run.start()
        for run in runs:
            run.join()
        assert len(builds) == 1

    def test_what_is_not_fit_leaves_nothing(self, builds, tmp_path: Path, monkeypatch):
        monkeypatch.setattr(script, "check_parity", lambda folder: (_ for _ in ()).throw(SystemExit("unfit")))
        with pytest.raises(SystemExit, match="unfit"):
            script.main(["--out", str(tmp_path / "here")])
        assert not (tmp_path / "here").exists()
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".building")]

    def test_an_older_one_is_replaced_and_anything_else_is_kept(self, builds, tmp_path: Path):
        older, other = tmp_path / "older", tmp_path / "other"
        for folder, text in ((older, script.TITLE + ", before"), (other, "mine")):
            folder.mkdir()
            (folder / script.MARK).write_text(text)
        assert script.main(["--out", str(older)]) == 0 and script.is_complete(older)
        with pytest.raises(SystemExit, match="holds something else"):
            script.main(["--out", str(other)])
        assert (other / script.MARK).read_text() == "mine"
