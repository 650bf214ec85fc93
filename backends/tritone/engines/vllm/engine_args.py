"""From a stage's options to an engine of vLLM's in this process.

options ─► EngineArgs: ours, and the caller's `engine_args` unchanged ─► LLMEngine.from_engine_args
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritone.engines.memory import LoadFormat
from tritone.engines.slot_engine import SlotOptions
from tritone.engines.stage_stream import StageStream
from tritone.engines.vllm.contract import RELEASES
from tritone.errors import ConfigError, suggestion

INSTALL = "install vllm into the interpreter that `python:` of the stage names (README, Other engines)"
CPU_BLOCK_TOKENS = 128  # vLLM's own choice on a CPU
OPTION_OF = {  # what an option of ours says already
    "model": "checkpoint",
    "dtype": "dtype",
    "max_model_len": "max_context_tokens",
    "max_num_seqs": "max_slots",
    "max_num_batched_tokens": "prefill_chunk_tokens",
    "enable_prefix_caching": "prefix_cache",
    "load_format": "load_format",
}
OURS = {  # what this engine stands on
    "tokenizer",
    "skip_tokenizer_init",
    "generation_config",
    "worker_cls",
    "scheduler_cls",
    "additional_config",
    "async_scheduling",
    "limit_mm_per_prompt",
    "mm_processor_cache_gb",
    "skip_mm_profiling",
    "enable_prompt_embeds",
    "enable_mm_embeds",
}
NOT_YET = {  # the tapped layer may be another process's, or tokens come that were not drawn one by one
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "speculative_config": None,
}


@dataclass(frozen=True)
class ModelOnVllm:
    """What a pipeline says of its model."""

    module: str  # whose `register()` makes vLLM know it, here and in vLLM's workers
    layer: int  # whose input is tapped
    kv_heads: int
    layers: int
    head_dim: int


def start(
    folder: Path,
    device: str,
    options: SlotOptions,
    prefix_cache: bool,
    load_format: LoadFormat,
    engine_args: Mapping[str, Any],
    model: ModelOnVllm,
    stream: StageStream,
) -> Any:
    """An LLMEngine that steps in this process, which `prepare` has prepared.

    stream: vLLM takes one of its own in each thread that has none when it first asks, without a wait; in a
    thread that has entered one since vLLM was imported, it stays there.
    Raises ConfigError for a release of vLLM that lacks what is needed, and for engine_args that it refuses.
    """
    arguments = _engine_args(folder, device, options, prefix_cache, load_format, engine_args, model)
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        importlib.import_module(model.module).register()
    except ImportError as fault:
        raise ConfigError(
            f"vLLM has another inside than this engine was made for ({fault})",
            f"install one of {', '.join(RELEASES)}",
        ) from None
    stream.enter()
    try:
        return LLMEngine.from_engine_args(arguments)
    except ValueError as fault:
        raise ConfigError(f"vLLM does not start: {_first_line(fault)}", "change engine_args") from fault


def _engine_args(
    folder: Path,
    device: str,
    options: SlotOptions,
    prefix_cache: bool,
    load_format: LoadFormat,
    engine_args: Mapping[str, Any],
    model: ModelOnVllm,
) -> Any:
    try:
        import vllm
        from vllm.engine.arg_utils import EngineArgs
    except ImportError as fault:
        raise ConfigError(f"vllm cannot be imported ({fault})", INSTALL) from None
    from tritone.engines.vllm import contract

    contract.check(contract.ON_CPU if device == "cpu" else ())
    check_engine_args(engine_args, [field.name for field in dataclasses.fields(EngineArgs)], vllm.__version__)
    place = "cpu" if device == "cpu" else "gpu"
    ours: dict[str, Any] = {
        "model": str(folder),
        "generation_config": "vllm",  # settings come with each request
        "dtype": options.dtype,
        "max_model_len": options.max_context_tokens,
        "max_num_seqs": options.max_slots,
        "max_num_batched_tokens": options.max_slots + options.prefill_chunk_tokens,
        "enable_prefix_caching": prefix_cache,
        "load_format": load_format,
        "worker_cls": f"tritone.engines.vllm.{place}_worker.Worker",
        "scheduler_cls": "tritone.engines.vllm.scheduler.WatchedScheduler",
        "additional_config": {"tritone": {"model": model.module, "layer": model.layer}},
        "async_scheduling": False,  # a step's rows are read before the next begins
        "mm_processor_cache_gb": 0,
        "skip_mm_profiling": True,
        "disable_log_stats": True,
    }
    if device == "cpu":
        ours |= _cpu_cache(options, model)
    try:
        return EngineArgs(**{**ours, **engine_args})
    except (TypeError, ValueError) as fault:
        raise ConfigError(f"vLLM refuses engine_args: {_first_line(fault)}", "mend the value") from None


def gpus_of(engine_args: Mapping[str, Any]) -> int:
    """How many GPUs one engine takes; what is no number is left for vLLM to refuse."""
    given = engine_args.get("tensor_parallel_size", 1)
    return given if isinstance(given, int) else 1


def check_engine_args(engine_args: Mapping[str, Any], known: list[str], release: str) -> None:
    """ConfigError for keys that vLLM does not know, or that are not the caller's to set."""
    for key, value in engine_args.items():
        if key in OPTION_OF:
            raise ConfigError(f"engine_args has '{key}'", f"use {OPTION_OF[key]}, which says the same")
        if key in OURS:
            raise ConfigError(f"engine_args has '{key}', which this engine sets itself", "remove it")
        if key in NOT_YET and value != NOT_YET[key]:
            raise ConfigError(f"engine_args has {key} {value!r}, which this engine does not do", "remove it")
        if key not in known:
            raise ConfigError(f"engine_args: vLLM {release} has no '{key}'", suggestion(key, known))


def spread(engine_args: Mapping[str, Any], num_gpus: int) -> dict[str, Any]:
    """engine_args of an engine on so many GPUs; ConfigError when they say another number themselves."""
    given = engine_args.get("tensor_parallel_size", num_gpus)
    if num_gpus > 1 and given != num_gpus:
        raise ConfigError(
            f"tensor_parallel_size is {given}, and `device` of the stage names {num_gpus} GPUs",
            "leave it out",
        )
    return {**engine_args, "tensor_parallel_size": given}


def prepare(device: str, engine_args: Mapping[str, Any]) -> str:
    """Settings that vLLM reads from the environment, before it is imported; the device's name from then on.

    Raises ConfigError when vLLM cannot have its GPUs.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's core lives here; its workers need not
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the tap is for version 1
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if device == "cpu":
        # The threads of a stage are those that its placement gives; spinning on cores that others use as well
        # makes a step many times slower.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        return device
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ConfigError(
            "the stage shares its process with one that is on a GPU already", "remove its colocate"
        )
    first, tensor_parallel = (
        int(device.partition(":")[2] or 0),
        gpus_of(engine_args),
    )
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    wanted = range(first, first + tensor_parallel)
    if seen and wanted[-1] >= len(seen):
        raise ConfigError(
            f"the stage begins at {device} and tensor_parallel_size is {tensor_parallel}, but"
            f" {len(seen)} GPUs are visible",
            "name as many in its `device`, e.g. [gpu:0, gpu:1]",
        )
    # vLLM takes the first GPUs that it sees.
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seen[i] if seen else str(i) for i in wanted)
    return "cuda:0"


def _cpu_cache(options: SlotOptions, model: ModelOnVllm) -> dict[str, Any]:
    """Room for every slot's context, as the torch engine has, and not a share of the machine's memory."""
    blocks = options.max_slots * -(-options.max_context_tokens // CPU_BLOCK_TOKENS) + 1
    size = {"float32": 4}.get(options.dtype, 2)
    row_bytes = 2 * model.layers * model.kv_heads * model.head_dim * size
    gib = -(-blocks * CPU_BLOCK_TOKENS * row_bytes // (1 << 30))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(gib))
    return {"block_size": CPU_BLOCK_TOKENS, "num_gpu_blocks_override": blocks}


def _first_line(fault: Exception) -> str:
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()] or [type(fault).__name__]
    # pydantic's first line only counts its errors.
    return lines[1] if len(lines) > 1 and "validation error" in lines[0] else lines[0]
