"""What keeps an engine from starting is said in one sentence, before weights are loaded."""

from __future__ import annotations

import dataclasses

import pytest

from thinkers import start
from tritone.engines.vllm import contract
from tritone.engines.vllm.contract import Part
from tritone.errors import ConfigError


@pytest.mark.parametrize(
    ("engine_args", "what", "cure"),
    [
        ({"gpu_memory_utilisation": 0.5}, "has no 'gpu_memory_utilisation'", "gpu_memory_utilization"),
        ({"max_model_len": 64}, "engine_args has 'max_model_len'", "max_context_tokens"),
        ({"worker_cls": "x"}, "which this engine sets itself", "remove it"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size 2", "remove it"),
        ({"quantization": "nonsense"}, "nonsense", "engine_args"),
    ],
    ids=str,
)
def test_wrong_engine_args(checkpoint, engine_args, what, cure):
    with pytest.raises(ConfigError) as refusal:
        start(checkpoint, engine_args)
    assert what in refusal.value.what and cure in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_context_that_the_model_was_not_made_for(checkpoint):
    with pytest.raises(ConfigError, match="max_context_tokens is 8192; the model was made for 4096"):
        start(checkpoint, max_context_tokens=8192)


def test_a_release_that_lacks_something(checkpoint, monkeypatch):
    worker = next(part for part in contract.INTERNAL if part.name == "Worker")
    gone = dataclasses.replace(worker, attributes=("init_another_device",))
    monkeypatch.setattr(contract, "EVERYTHING", (Part("vllm.inputs", "tokens_input"), gone))
    with pytest.raises(ConfigError, match=r"vLLM \S+ has no Worker\.init_another_device; install one of"):
        start(checkpoint)
