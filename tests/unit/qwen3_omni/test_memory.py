"""The memory that engines plan is the memory that their tensors take."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "torchvision"):
    pytest.importorskip(package)

import qwen3_omni_oracle as oracle  # noqa: E402
import qwen3_omni_real_size  # noqa: E402
import torch  # noqa: E402

from tritone.engines.base import Placement  # noqa: E402
from tritone.engines.memory import Ground, Term  # noqa: E402
from tritone.pipelines.qwen3_omni.code2wav import Code2Wav, Code2WavOptions  # noqa: E402
from tritone.pipelines.qwen3_omni.processor import import_transformers  # noqa: E402
from tritone.pipelines.qwen3_omni.sizes import OmniSizes  # noqa: E402
from tritone.pipelines.qwen3_omni.talker import Talker, TalkerOptions  # noqa: E402
from tritone.pipelines.qwen3_omni.thinker import Thinker, ThinkerOptions  # noqa: E402

SLOTS = {"max_slots": 3, "max_context_tokens": 200, "prefill_chunk_tokens": 32}
ENGINES = {
    "thinker": (Thinker, ThinkerOptions(**SLOTS)),
    "talker": (Talker, TalkerOptions(**SLOTS)),
    "code2wav": (Code2Wav, Code2WavOptions(max_streams=3)),
}


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    torch.set_num_threads(1)
    return oracle.checkpoint()


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    qwen3_omni_real_size.write_config(folder)
    return folder


def tensor_bytes() -> int:
    """Of all tensors of this process, what they share counted once.

    Those with which an export of another test traced (FakeTensor) are on the CPU by name and hold nothing.
    """
    gc.collect()
    storages = {
        storage.data_ptr(): storage.nbytes()
        for thing in gc.get_objects()
        if type(thing) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        if thing.device.type == "cpu" and not torch._is_functional_tensor(thing)
        for storage in [thing.untyped_storage()]
    }
    return sum(storages.values())


def planned(terms: list[Term]) -> dict[str, int]:
    return {term.name: term.num_bytes for term in terms if term.is_exact}


def held(build: Callable[[], Any]) -> tuple[Any, int]:
    """An engine, and the bytes of its tensors, but for what its warm-up left in a slot."""
    before = tensor_bytes()
    engine = build()
    if isinstance(engine, Talker):
        engine._frames._spoken.clear()
    return engine, tensor_bytes() - before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", ENGINES)
def test_the_plan_is_what_the_tensors_take(checkpoint: Path, stage: str, dtype: str) -> None:
    kind, options = ENGINES[stage]
    options = replace(options, dtype=dtype)
    plan = planned(kind.memory(Ground(stage, checkpoint, is_released=True), options))
    kind(Placement(checkpoint), options)  # what a process makes once does not count
    engine, num_bytes = held(lambda: kind(Placement(checkpoint), options))
    states = plan.pop("stream states", 0)  # a stream's comes when it begins
    assert num_bytes == sum(plan.values())
    if stage == "code2wav":
        assert states == options.max_streams * engine._waves.state_bytes
    else:
        assert plan["KV cache"] == engine._decoder.cache.nbytes


@pytest.mark.parametrize("stage", ENGINES)
def test_made_up_weights_need_config_and_processor_only(checkpoint: Path, tmp_path: Path, stage: str) -> None:
    for file in checkpoint.iterdir():
        if file.is_file() and "safetensors" not in file.name:
            shutil.copy(file, tmp_path)
    kind, options = ENGINES[stage]
    options = replace(options, load_format="dummy")
    plan = planned(kind.memory(Ground(stage, tmp_path, is_released=True), options))
    plan.pop("stream states", 0)
    _, num_bytes = held(lambda: kind(Placement(tmp_path), options))
    assert num_bytes == sum(plan.values())


def test_dummy_weights_take_what_files_take(checkpoint: Path) -> None:
    for stage, (kind, options) in ENGINES.items():
        ground = Ground(stage, checkpoint, is_released=True)
        dummy = kind.memory(ground, replace(options, load_format="dummy"))
        assert planned(dummy) == planned(kind.memory(ground, options))


def test_captured_passes_of_code2wav_are_planned_with_what_they_compute_in(real: Path) -> None:
    ground = Ground("code2wav", real, is_released=True, on_gpu=True)
    options = Code2WavOptions(max_streams=128, dtype="bfloat16", load_format="dummy")
    terms = {term.name: term.num_bytes for term in Code2Wav.memory(ground, options)}
    samples, channels = 1600 * 1920, 96
    assert terms["stream states"] == 129 * 1_297_472 * 2
    told = 4 * (samples + 1600 * 16 + 3 * 128)  # sound, codes, and which rows
    assert terms["static buffers"] == 3 * (128 * 54 + samples) * channels * 2 + told
    fewer = {term.name: term.num_bytes for term in Code2Wav.memory(ground, replace(options, max_streams=64))}
    assert terms["CUDA graphs"] - fewer["CUDA graphs"] == 4 * 64 * 1_297_472 * 2, "copies of states"
    alone = {term.name: term.num_bytes for term in Code2Wav.memory(ground, replace(options, max_streams=1))}
    assert alone["static buffers"] < terms["static buffers"] / 15, "one stream brings 100 frames, not 1,600"
    plain = Code2Wav.memory(ground, replace(options, kernels=False))
    assert [term.name for term in plain][3:] == ["activations", "CUDA graphs"]
    eager = Code2Wav.memory(ground, replace(options, cuda_graphs=False))
    assert [term.name for term in eager][3:] == ["activations"]


def test_elements_are_those_of_the_reference_at_real_size(real: Path) -> None:
    transformers = import_transformers()
    config = transformers.Qwen3OmniMoeConfig.from_pretrained(real)
    with torch.device("meta"):
        model = transformers.Qwen3OmniMoeForConditionalGeneration(config)
    parts = OmniSizes.read(real).elements()
    found = dict.fromkeys(parts, 0)
    for name, tensor in model.state_dict().items():
        found[max((part for part in parts if name.startswith(part)), key=len)] += tensor.numel()
    assert found == parts


def test_a_gpu_takes_graphs_and_one_slot_more(real: Path) -> None:
    options = TalkerOptions(
        max_slots=64, max_context_tokens=4096, prefill_chunk_tokens=256, dtype="bfloat16", load_format="dummy"
    )
    ground = Ground("talker", real, is_released=True, on_gpu=True)
    terms = {term.name: term for term in Talker.memory(ground, options)}
    assert terms["KV cache"].num_bytes == 20 * 2 * 65 * 2 * 4096 * 128 * 2
    assert terms["KV cache"].how == (
        "20 layers × 2 (keys, values) × 65 slots × 2 heads × 4,096 tokens × 128 of a head × 2 B"
    )
    assert not terms["CUDA graphs"].is_exact and terms["CUDA graphs"].num_bytes > 128 << 20
    eager = {term.name for term in Talker.memory(ground, replace(options, cuda_graphs=False))}
    assert "CUDA graphs" not in eager and "activations" in eager
    # What plain torch copies of the cache for a frame is no small part.
    plain = {term.name: term for term in Talker.memory(ground, replace(options, kernels=False))}
    assert plain["CUDA graphs"].num_bytes > terms["CUDA graphs"].num_bytes + (256 << 20)


class _GraphThinker(Thinker):
    @staticmethod
    def _has_graphs(placement: Placement, options: Any) -> bool:
        return bool(options.cuda_graphs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_of_a_thinker_with_graphs_is_what_its_tensors_take(checkpoint: Path, dtype: str) -> None:
    options = ThinkerOptions(**SLOTS, dtype=dtype, kernels=False)
    plan = planned(Thinker.memory(Ground("thinker", checkpoint, is_released=True, on_gpu=True), options))
    _GraphThinker(Placement(checkpoint), options)
    engine, num_bytes = held(lambda: _GraphThinker(Placement(checkpoint), options))
    pinned = [tensor for some in engine._steps._staging for tensor in (some.packed, some.drawn)]
    assert num_bytes - sum(tensor.nbytes for tensor in pinned) == sum(plan.values())
    assert plan["KV cache"] == engine._decoder.cache.nbytes
    buffers = vars(engine._steps._buffers).values()
    assert plan["static buffers"] > sum(tensor.nbytes for tensor in buffers)


def test_a_thinker_on_a_gpu_takes_graphs_and_one_slot_more(real: Path) -> None:
    options = ThinkerOptions(
        max_slots=64,
        max_context_tokens=6144,
        prefill_chunk_tokens=1024,
        dtype="bfloat16",
        load_format="dummy",
    )
    ground = Ground("thinker", real, is_released=True, on_gpu=True)
    terms = {term.name: term for term in Thinker.memory(ground, options)}
    assert "48 layers × 2 (keys, values) × 65 slots" in terms["KV cache"].how
    assert terms["static buffers"].is_exact and not terms["CUDA graphs"].is_exact
    scores = 64 * 152064 * 4
    assert scores < terms["static buffers"].num_bytes < 2 * scores
    eager = {term.name for term in Thinker.memory(ground, replace(options, cuda_graphs=False))}
    assert not eager & {"CUDA graphs", "static buffers"}
    plain = {term.name: term for term in Thinker.memory(ground, replace(options, kernels=False))}
    assert plain["CUDA graphs"].num_bytes > terms["CUDA graphs"].num_bytes


def test_weights_that_are_missing_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    ground = Ground("talker", tmp_path, is_released=True)
    with pytest.raises(Exception, match="no weights"):
        Talker.memory(ground, TalkerOptions(**SLOTS))
    assert Talker.memory(ground, TalkerOptions(**SLOTS, load_format="dummy"))
