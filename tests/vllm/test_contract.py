"""What Tritone touches of vLLM is there, and is all that it touches."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import vllm

from tritone.engines.vllm import contract
from tritone.engines.vllm.contract import EVERYTHING, ON_CPU, Part, Setting
from tritone.engines.vllm.engine_args import NOT_YET, OPTION_OF
from tritone.engines.vllm.worker import CONFIG, TappedRunner, tapped
from tritone.errors import ConfigError
from tritone.pipelines.qwen3_omni import vllm_model

LIBRARY = Path(contract.__file__).parents[2]
FILES = [*LIBRARY.glob("engines/vllm/*.py"), *LIBRARY.glob("pipelines/*/vllm_*.py")]
ALL = EVERYTHING + ON_CPU + vllm_model.PARTS
PARTS = [part for part in ALL if isinstance(part, Part)]
SETTINGS = {part.name for part in ALL if isinstance(part, Setting)}
LISTED = {
    word
    for part in PARTS
    for text in (part.name, *part.attributes, *part.parameters, *part.mentions)
    for word in re.findall(r"\w+", text)
}
OF_VLLMS_CLASSES = {
    "TappedRunner",
    "TappedWorker",
    "TellingModel",
}  # below classes that are known at run time
ADDED = {  # to vLLM's classes, by us
    *("begun", "tapped", "wrong", "forget", "free_blocks", "blocks"),
    *("tap", "_tapped", "_tapped_layer", "_not_numbers", "_take_unused_seeds"),
}
PLAIN = {  # what source cannot tell from vLLM's: Python's, torch's, the checkpoint's config, its tokenizer
    *("__name__", "__version__", "__module__", "_fields", "args", "move_to_end", "cat"),
    *("text_config", "vision_config", "to_dict", "backend_tokenizer", "tokenizer"),
    *(
        name
        for kind in (dict, list, str, set, np.ndarray, torch.Tensor, torch.nn.Module)
        for name in dir(kind)
    ),
}


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
        (
            Part("vllm.multimodal.inputs", "MultiModalFieldConfig.batched", parameters=("thing",)),
            "MultiModalFieldConfig.batched(thing)",
        ),
        (Part("vllm.multimodal.inputs", "MultiModalFieldConfig.thing"), "MultiModalFieldConfig.thing"),
        (Setting("VLLM_THING"), "setting VLLM_THING"),
    ],
)
def test_what_an_upgrade_takes_away_is_named(part, name):
    with pytest.raises(ConfigError) as refusal:
        contract.check((part,))
    assert name in refusal.value.what and vllm.__version__ in refusal.value.what
    assert contract.RELEASES[-1] in refusal.value.cure


class Source:
    """What one of our files says of names."""

    def __init__(self, text: str) -> None:
        self._tree = ast.parse(text)
        self.origins: dict[str, tuple[str, str]] = {}  # of imported names: module, and name in it
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import):
                self.origins |= {(a.asname or a.name).partition(".")[0]: (a.name, "") for a in node.names}
            elif isinstance(node, ast.ImportFrom):
                self.origins |= {a.asname or a.name: (node.module or "", a.name) for a in node.names}

    def imported(self) -> set[tuple[str, str]]:
        """(module, name) of all that comes from vLLM by name."""
        return {(module, name) for module, name in self.origins.values() if name and _is_vllms(module)}

    def settings(self) -> set[str]:
        texts = (node.value for node in ast.walk(self._tree) if isinstance(node, ast.Constant))
        return {text for text in texts if isinstance(text, str) and re.fullmatch(r"VLLM_\w+", text)}

    def dotted(self) -> set[str]:
        """Names behind a dot, or in `getattr`, but for those of modules that are not vLLM's."""
        found = set()
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Attribute):
                module, _ = self.origins.get(_root(node), ("vllm", ""))
                found |= {node.attr} if _is_vllms(module) else set()
            elif isinstance(node, ast.Call) and _root(node) in ("getattr", "hasattr"):
                name = node.args[1]
                found |= {name.value} if isinstance(name, ast.Constant) else set()
        return found

    def told(self) -> set[str]:
        """Names of keyword arguments in calls of what is imported from vLLM."""
        calls = (node for node in ast.walk(self._tree) if isinstance(node, ast.Call))
        return {
            word.arg
            for call in calls
            if _is_vllms(self.origins.get(_root(call.func), ("", ""))[0])
            for word in call.keywords
            if word.arg
        }

    def defined(self, of_vllms: bool) -> set[str]:
        """Methods and attributes that classes define: those below classes of vLLM's, or the others."""
        return {
            name
            for node in ast.walk(self._tree)
            if isinstance(node, ast.ClassDef) and self._is_below_vllm(node) == of_vllms
            for name in _members(node)
        }

    def _is_below_vllm(self, node: ast.ClassDef) -> bool:
        bases = (self.origins.get(_root(base), ("", ""))[0] for base in node.bases)
        return node.name in OF_VLLMS_CLASSES or any(map(_is_vllms, bases))


def _is_vllms(module: str) -> bool:
    return module.partition(".")[0] == "vllm"


def _root(node: ast.expr) -> str:
    """The name with which a chain of dots, calls and indices begins."""
    while not isinstance(node, ast.Name):
        if not isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
            return ""
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id


def _members(node: ast.ClassDef) -> set[str]:
    """What a class has, but for what Python itself looks for."""
    own = {part.name for part in ast.walk(node) if isinstance(part, ast.FunctionDef)}
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and _root(part) == "self":
            own.add(part.attr)
    statements = [*node.body, *(part for some in node.body if isinstance(some, ast.If) for part in some.body)]
    for part in statements:
        targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
        own |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in own if not name.startswith("__")}


def not_listed(text: str, ours: set[str]) -> set[str]:
    """What a source takes from vLLM beyond the lists. ours: names of the rest of the library."""
    source = Source(text)
    modules = {part.module for part in PARTS}
    listed = {(part.module, part.name) for part in PARTS}
    imported = {
        f"{module}.{name}"
        for module, name in source.imported()
        if (module, name) not in listed and f"{module}.{name}" not in modules
    }
    names = source.dotted() | source.told() | source.defined(of_vllms=True)
    names -= LISTED | ADDED | PLAIN | (ours - source.defined(of_vllms=True))
    return imported | names | (source.settings() - SETTINGS)


@pytest.fixture(scope="module")
def ours() -> set[str]:
    return {
        name for path in LIBRARY.rglob("*.py") for name in Source(path.read_text()).defined(of_vllms=False)
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_else_is_touched(path, ours):
    assert not_listed(path.read_text(), ours) == set()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from vllm.inputs import tokens_prompt", "vllm.inputs.tokens_prompt"),
        ("from vllm.sampling_params import EngineArgs", "vllm.sampling_params.EngineArgs"),
        ("from vllm.v1 import engine", "vllm.v1.engine"),
        ("import os; os.environ['VLLM_USE_V3'] = '1'", "VLLM_USE_V3"),
        ("self.model_runner.kv_caches.clear()", "kv_caches"),
        ("hasattr(runner, 'is_pooling_model')", "is_pooling_model"),
        ("from vllm.inputs import tokens_input; tokens_input([], cache_salt='a')", "cache_salt"),
        (
            "from vllm.v1 import x\nclass Ours(x.Scheduler):\n def finish_requests(self): pass",
            "finish_requests",
        ),
        ("from vllm.v1 import x\nclass Ours(x.Model):\n supports_pp = False", "supports_pp"),
        ("from vllm.v1 import x\nclass Ours(x.Model):\n if x.OLD:\n  supports_pp = False", "supports_pp"),
    ],
)
def test_what_is_touched_beyond_it_is_seen(text, found, ours):
    assert found in not_listed(text, ours)


def test_every_engine_arg_of_ours_is_listed():
    named = {name for part in PARTS if part.name == "EngineArgs" for name in part.attributes}
    source = ast.parse((LIBRARY / "engines" / "vllm" / "engine_args.py").read_text())
    given = {
        key.value
        for node in ast.walk(source)
        if isinstance(node, ast.FunctionDef) and node.name in ("_engine_args", "_cpu_cache")
        for part in ast.walk(node)
        if isinstance(part, ast.Dict)
        for key in part.keys
        if isinstance(key, ast.Constant)
    }
    elsewhere = {"tritone", "layer", "float32"}  # keys of dictionaries that vLLM does not read
    assert "load_format" in given and given - elsewhere | set(OPTION_OF) | set(NOT_YET) <= named


class _SomeWorker:
    """Makes the runner that it is told to."""

    def __init__(self, runner: object) -> None:
        module = vllm_model.__name__
        self.vllm_config = SimpleNamespace(additional_config={CONFIG: {"model": module, "layer": 2}})
        self._made = runner

    def init_device(self) -> None:
        self.model_runner = self._made


def test_the_runner_is_one_that_can_be_tapped():
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    class SomeRunner(GPUModelRunner):
        def __init__(self) -> None:
            """Without a model."""

    worker = tapped(_SomeWorker)(SomeRunner())
    worker.init_device()
    assert isinstance(worker.model_runner, TappedRunner) and worker.model_runner.use_aux_hidden_state_outputs
    with pytest.raises(
        ConfigError, match=r"OtherRunner, and hidden states are tapped in .*GPUModelRunner alone"
    ):
        tapped(_SomeWorker)(OtherRunner()).init_device()


class OtherRunner:
    """Of version 2, say."""


def test_this_release_is_one_that_the_readme_names():
    assert vllm.__version__.split("+")[0] in contract.RELEASES
