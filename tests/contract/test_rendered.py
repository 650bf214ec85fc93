"""Committed config.pbtxt files are what rendering gives, and declare the contract."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tritone import deploy_reader, pbtxt, pipelines
from tritone.control import KEEP_EVERY_S

REPOSITORY = Path(__file__).parents[2] / "model_repository"


@pytest.mark.parametrize("name", pipelines.names())
def test_committed_files_are_rendered_ones(name):
    texts = pbtxt.texts(deploy_reader.load(REPOSITORY / name / "deploy.yaml"))
    committed = {path.parent.name: path.read_text() for path in (REPOSITORY / name).glob("*/config.pbtxt")}
    assert committed == texts, f"run `tritone render {name}`"
    for model in texts:
        assert (REPOSITORY / name / model / "1" / ".gitkeep").exists(), "Triton wants a version folder"


def config(name, model):
    text = (REPOSITORY / name / model / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_the_pipeline_model_is_decoupled_and_its_twin_is_not():
    whole, twin = config("smoltalk", "smoltalk"), config("smoltalk", "smoltalk_sync")
    assert whole.model_transaction_policy.decoupled and not twin.model_transaction_policy.decoupled
    assert list(whole.input) == list(twin.input) and list(whole.output) == list(twin.output)
    assert whole.max_batch_size == 0 and all(port.optional for port in whole.input)


def test_a_client_reads_the_facts_from_the_model_config():
    parameters = {key: value.string_value for key, value in config("smoltalk", "smoltalk").parameters.items()}
    assert parameters["contract_version"] == "1"
    assert parameters["sample_rate_hz"] == "24000" and parameters["speakers"] == "heart"
    assert int(parameters["max_in_flight"]) >= 1


def test_code2wav_goes_through_the_sequence_batcher_and_outlives_a_paced_stream():
    stage = config("smoltalk", "smoltalk_code2wav")
    deploy = deploy_reader.load(REPOSITORY / "smoltalk" / "deploy.yaml")
    batching = stage.sequence_batching
    longest_silence_s = deploy.stage("code2wav").call_timeout_s + KEEP_EVERY_S
    assert batching.max_sequence_idle_microseconds > longest_silence_s * 1e6
    assert batching.oldest.max_candidate_sequences >= deploy.max_in_flight
    assert not stage.HasField("dynamic_batching")


def test_no_stage_is_decoupled():
    for stage in ("ears", "thinker", "talker", "code2wav"):
        assert not config("smoltalk", f"smoltalk_{stage}").model_transaction_policy.decoupled


@pytest.mark.parametrize("name", ["contract_page.py", "deploy_page.py"])
def test_a_written_page_is_what_its_sources_say(name):
    done = subprocess.run([sys.executable, str(REPOSITORY.parent / "build" / name), "--check"])
    assert done.returncode == 0, f"run `python build/{name}`"


def test_the_deploy_page_has_a_meaning_for_every_key():
    rows = re.findall(r"^\| `.*", (REPOSITORY / "DEPLOY.md").read_text(), re.MULTILINE)
    assert len(rows) > 100
    assert [row for row in rows if row.rstrip().endswith("|  |")] == []
