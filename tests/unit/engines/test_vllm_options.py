"""What is known of a Thinker on vLLM where no vLLM is: its options, and what may not be among them."""

from __future__ import annotations

import os
import sys

import pytest

pytest.importorskip("torch")

from tritone import deploy_reader, pbtxt
from tritone.engines.vllm.engine_args import check_engine_args, prepare, spread
from tritone.errors import ConfigError

KNOWN = ["model", "max_num_seqs", "gpu_memory_utilization", "quantization", "pipeline_parallel_size"]


def loaded(**engine):
    stages = {"thinker": {"python": "/opt/vllm/bin/python", "engine": {"kind": "vllm", **engine}}}
    return deploy_reader.from_mapping({"pipeline": "qwen3_omni", "stages": stages}, "deploy.yaml").stage(
        "thinker"
    )


def test_a_deploy_file_is_read_without_vllm():
    stage = loaded(max_slots=4, engine_args={"quantization": "fp8", "compilation_config": {"level": 3}})
    assert stage.engine == "vllm" and stage.python == "/opt/vllm/bin/python"
    assert stage.options.max_slots == 4 and stage.options.prefill_chunk_tokens == 2048
    assert stage.options.engine_args == {"quantization": "fp8", "compilation_config": {"level": 3}}
    assert "vllm" not in sys.modules


def test_a_stage_of_many_gpus_is_one_instance():
    stage = {"device": ["gpu:0", "gpu:1"], "engine": {"kind": "vllm"}}
    read = deploy_reader.from_mapping({"pipeline": "qwen3_omni", "stages": {"thinker": stage}}, "deploy.yaml")
    [group] = pbtxt._stage_config(read, read.pipeline.stage("thinker")).instance_group
    assert group.kind == group.KIND_MODEL and group.count == 1


@pytest.mark.parametrize(
    ("given", "num_gpus", "size"), [({}, 1, 1), ({}, 4, 4), ({"tensor_parallel_size": 2}, 1, 2)]
)
def test_one_engine_is_spread_over_the_gpus_of_its_stage(given, num_gpus, size):
    assert spread({"quantization": "fp8", **given}, num_gpus) == {
        "quantization": "fp8",
        "tensor_parallel_size": size,
    }


def test_another_number_of_gpus_than_the_stage_has():
    with pytest.raises(
        ConfigError, match="tensor_parallel_size is 2, and `device` of the stage names 4 GPUs"
    ):
        spread({"tensor_parallel_size": 2}, 4)


def test_an_option_beside_them_is_refused_when_the_file_is_read():
    with pytest.raises(ConfigError, match=r"unknown key 'engine_arg'.*engine_args"):
        loaded(engine_arg={})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_num_seqs": 4}, "engine_args has 'max_num_seqs'; use max_slots, which says the same"),
        ({"worker_cls": "mine"}, "engine_args has 'worker_cls', which this engine sets itself; remove it"),
        (
            {"pipeline_parallel_size": 2},
            "engine_args has pipeline_parallel_size 2, which this engine does not",
        ),
        ({"quantisation": "fp8"}, r"vLLM 0\.32\.0 has no 'quantisation'; .*quantization"),
    ],
)
def test_what_engine_args_may_not_hold(given, words):
    with pytest.raises(ConfigError, match=words):
        check_engine_args(given, KNOWN, "0.32.0")


def test_what_engine_args_may_hold():
    check_engine_args({"quantization": "fp8", "pipeline_parallel_size": 1}, KNOWN, "0.32.0")


@pytest.mark.parametrize(
    ("seen", "device", "tensor_parallel", "told"),
    [
        ("", "cuda:0", 1, "0"),
        ("", "cuda:2", 2, "2,3"),
        ("4,5,6", "cuda:1", 2, "5,6"),
        ("GPU-a,GPU-b", "cuda:1", 1, "GPU-b"),
    ],
)
def test_vllm_sees_the_gpus_of_its_stage_alone(monkeypatch, seen, device, tensor_parallel, told):
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": seen})
    assert prepare(device, {"tensor_parallel_size": tensor_parallel}) == "cuda:0"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == told


def test_more_gpus_than_there_are(monkeypatch):
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": "0,1"})
    with pytest.raises(ConfigError, match="begins at cuda:1 and tensor_parallel_size is 2, but 2 GPUs"):
        prepare("cuda:1", {"tensor_parallel_size": 2})
