"""What Tritone touches of vLLM is there, and is all that it touches."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import vllm

from tritone.engines.vllm import contract
from tritone.engines.vllm.contract import EVERYTHING, Part
from tritone.errors import ConfigError
from tritone.pipelines.qwen3_omni import vllm_model

LIBRARY = Path(contract.__file__).parents[2]
ALL = EVERYTHING + vllm_model.PARTS


def test_this_release_has_all_of_it():
    assert contract.missing(ALL) == [], vllm.__version__


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (Part("vllm.nowhere", "Thing"), "vllm.nowhere.Thing"),
        (Part("vllm.sampling_params", "Thing"), "vllm.sampling_params.Thing"),
        (Part("vllm.v1.outputs", "ModelRunnerOutput", ("thing",)), "ModelRunnerOutput.thing"),
        (Part("vllm.inputs", "tokens_input", parameters=("thing",)), "tokens_input(thing)"),
        (Part("vllm.v1.core.kv_cache_manager", "KVCacheManager", mentions=("self.thing",)), "KVCacheManager"),
    ],
)
def test_what_an_upgrade_takes_away_is_named(part, name):
    with pytest.raises(ConfigError) as refusal:
        contract.check((part,))
    assert name in refusal.value.what and vllm.__version__ in refusal.value.what
    assert contract.RELEASES[-1] in refusal.value.cure


def test_nothing_else_is_imported():
    listed = {(part.module, part.name) for part in ALL}
    names = {name for _, name in listed}
    for path in [*LIBRARY.glob("engines/vllm/*.py"), *LIBRARY.glob("pipelines/*/vllm_*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for alias in node.names:
                    assert alias.name in names or (node.module, alias.name) in PLAIN, (
                        f"{path.name}: {alias.name}"
                    )


PLAIN = {  # a module, and what stands for a class that is listed
    ("vllm.v1.worker.cpu_worker", "CPUWorker"),
    ("vllm.model_executor.models", "qwen3_omni_moe_thinker"),
    ("vllm.multimodal", "MULTIMODAL_REGISTRY"),
}


def test_this_release_is_one_that_the_readme_names():
    assert vllm.__version__.split("+")[0] in contract.RELEASES
