from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tritone import deploy_reader
from tritone.engines.base import Placement
from tritone.errors import ConfigError, InvalidRequest, Unsupported
from tritone.pipelines.qwen3_omni import PIPELINE, check_speaker
from tritone.pipelines.qwen3_omni.config import OmniConfig
from tritone.pipelines.qwen3_omni.talker import Talker, TalkerOptions
from tritone.pipelines.qwen3_omni.thinker import Thinker, ThinkerOptions
from tritone.request import read_request

from .conftest import picture

DEPLOY = deploy_reader.load(Path(__file__).parents[3] / "model_repository" / "qwen3_omni" / "deploy.yaml")


def plan(modalities: str, parameters: dict[str, Any] | None = None, **values: Any) -> Any:
    given = {"text_input": "Hi", "modalities": modalities, **values}
    return PIPELINE.plan(read_request(given, parameters or {}, DEPLOY, drawn_seed=41))


# -- which stages a request starts --------------------------------------------------------------------------


def test_text_alone_never_starts_the_talker() -> None:
    calls = plan("text")
    assert calls.keys() == {"thinker"} and calls["thinker"].settings["speaks"] is False


@pytest.mark.parametrize("modalities", ["audio", "text,audio"])
def test_speech_starts_every_stage(modalities: str) -> None:
    calls = plan(modalities)
    assert calls.keys() == {"thinker", "talker", "code2wav"}
    assert calls["thinker"].settings["speaks"] is True and "messages" in calls["thinker"].inputs


def test_the_speaker_is_passed_whatever_its_case() -> None:
    calls = plan("audio", speaker="Chelsie")
    assert calls["talker"].settings["speaker"] == "chelsie"
    assert plan("audio")["talker"].settings["speaker"] is None


def test_each_stage_gets_its_own_sampling() -> None:
    calls = plan(
        "audio",
        {"seed": 9},
        sampling_parameters=json.dumps({"thinker": {"max_tokens": 5}, "talker": {"temperature": 0.2}}),
    )
    thinker, talker = (calls[stage].settings["sampling"] for stage in ("thinker", "talker"))
    assert thinker["max_tokens"] == 5 and thinker["temperature"] == 0.0
    assert talker["temperature"] == 0.2 and talker["max_tokens"] != 5 and talker["top_k"] == 50
    assert thinker["seed"] == talker["seed"] == 9


def test_media_and_their_limits_reach_the_thinker() -> None:
    file = picture()
    call = plan("text", image=[file])["thinker"]
    assert call.inputs["image"] == [file] and call.settings["use_audio_in_video"] is False
    assert call.settings["limits"] == {
        "audio_s": DEPLOY.limits.audio_s,
        "image_pixels": DEPLOY.limits.image_pixels,
        "video_s": DEPLOY.limits.video_s,
    }
    parts = json.loads(str(call.inputs["messages"]))[-1]["content"]
    assert [part["type"] for part in parts] == ["image", "text"]


def test_a_conversation_that_ends_with_the_assistant_is_refused() -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I am"}]
    request = read_request({"messages": json.dumps(turns), "modalities": "text"}, {}, DEPLOY, drawn_seed=1)
    with pytest.raises(Unsupported, match=r"ends with the assistant's words.*; end with a user message"):
        PIPELINE.plan(request)


# -- what the checkpoint says -------------------------------------------------------------------------------


def test_facts_are_read_in_the_checkpoint(checkpoint: Path) -> None:
    facts = PIPELINE.facts(checkpoint)
    assert facts.sample_rate_hz == 24000 and facts.speakers == ("aiden", "chelsie", "ethan")
    config = OmniConfig.read(checkpoint)
    assert config.samples_per_frame == 1920 and config.num_code_groups == 16


def test_facts_follow_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_bytes())
    config["code2wav_config"]["upsample_rates"] = [8, 5, 4, 2]
    config["talker_config"]["speaker_id"] = {"Zoe": 3, "Abe": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = PIPELINE.facts(tmp_path)
    assert facts.sample_rate_hz == 16000 and facts.speakers == ("abe", "zoe")


def test_the_default_speaker_is_one_of_the_checkpoint() -> None:
    assert check_speaker(None, ("aiden", "ethan")) == "ethan"
    assert check_speaker(None, ("abe", "zoe")) == "abe"
    with pytest.raises(InvalidRequest, match="speaker is 'ethan'; known: abe, zoe"):
        check_speaker("ethan", ("abe", "zoe"))


@pytest.mark.parametrize(
    "config",
    [
        None,
        "not JSON",
        {},
        {"model_type": "qwen3", "hidden_size": 64},
        {"thinker_config": None, "talker_config": {}},
        "without talker",
        "without speakers",
        "speakers as a list",
    ],
)
def test_another_checkpoint_is_refused_in_one_sentence(checkpoint: Path, tmp_path: Path, config: Any) -> None:
    whole = json.loads((checkpoint / "config.json").read_bytes())
    if config == "without talker":
        config = {name: value for name, value in whole.items() if name != "talker_config"}
    elif config == "without speakers":
        config = {**whole, "talker_config": {**whole["talker_config"], "speaker_id": {}}}
    elif config == "speakers as a list":
        config = {**whole, "talker_config": {**whole["talker_config"], "speaker_id": ["Ethan"]}}
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as refusal:
        PIPELINE.facts(tmp_path)
    assert str(tmp_path) in str(refusal.value) and refusal.value.cure and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "lacking", ["preprocessor_config.json", "model-00002-of-00003.safetensors", "vocab.json"]
)
def test_a_checkpoint_with_a_file_missing_starts_no_thinker(
    checkpoint: Path, tmp_path: Path, lacking: str
) -> None:
    for file in checkpoint.iterdir():
        if file.name != lacking and file.is_file():
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(ConfigError) as refusal:
        Thinker(Placement(tmp_path), ThinkerOptions(max_slots=1, max_context_tokens=128))
    assert str(tmp_path) in str(refusal.value) and refusal.value.cure


def test_the_talker_needs_no_processor_and_no_other_stage(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        if file.suffix == ".safetensors" or file.name in ("config.json", "model.safetensors.index.json"):
            (tmp_path / file.name).symlink_to(file)
    talker = Talker(Placement(tmp_path), TalkerOptions(max_slots=1, max_context_tokens=128))
    assert talker.stats()["active"] == 0
