"""Every part of vLLM that is touched here, by name, so that an upgrade fails at once and says at what.

The first list is documented for users of vLLM; the second is not, and may change with any release. Nothing
else of vLLM is used: a test reads our sources and compares what they import, the settings they name, and
every name behind a dot that is neither ours nor Python's, numpy's or torch's. What source does not tell, as
the type of an object, is held by the tests that run it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from tritone.errors import ConfigError

RELEASES = ("0.24.0", "0.32.0")  # on which the tests of tests/vllm passed


@dataclass(frozen=True)
class Part:
    """An object of vLLM, and what must be in it."""

    module: str
    name: str  # in it, with dots for what is inside something
    attributes: tuple[str, ...] = ()  # of the class; a field of a dataclass or named tuple counts
    parameters: tuple[str, ...] = ()  # of the call
    mentions: tuple[str, ...] = ()  # words of its module: names that exist only while it runs


@dataclass(frozen=True)
class Setting:
    """A variable of the environment that vLLM reads."""

    name: str


Touched: TypeAlias = Part | Setting

PUBLIC: tuple[Touched, ...] = (
    Setting("VLLM_ENABLE_V1_MULTIPROCESSING"),
    Setting("VLLM_NO_USAGE_STATS"),
    Setting("VLLM_LOGGING_LEVEL"),
    Part(
        "vllm.engine.arg_utils",
        "EngineArgs",
        (
            "model",
            "generation_config",
            "dtype",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "enable_prefix_caching",
            "load_format",
            "worker_cls",
            "scheduler_cls",
            "additional_config",
            "async_scheduling",
            "limit_mm_per_prompt",
            "mm_processor_cache_gb",
            "skip_mm_profiling",
            "disable_log_stats",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
            "speculative_config",
        ),
    ),
    Part(
        "vllm.v1.engine.llm_engine",
        "LLMEngine",
        (
            "from_engine_args",
            "add_request",
            "step",
            "abort_request",
            "has_unfinished_requests",
            "reset_prefix_cache",
            "reset_encoder_cache",
        ),
        mentions=("self.engine_core",),
    ),
    Part(
        "vllm.sampling_params",
        "SamplingParams",
        parameters=(
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "max_tokens",
            "min_tokens",
            "seed",
            "ignore_eos",
            "stop_token_ids",
            "detokenize",
            "output_kind",
            "skip_reading_prefix_cache",
            "extra_args",
        ),
    ),
    Part("vllm.exceptions", "VLLMValidationError"),
    Part("vllm.sampling_params", "RequestOutputKind", ("DELTA",)),
    Part("vllm.outputs", "RequestOutput", parameters=("request_id", "outputs", "finished")),
    Part("vllm.outputs", "CompletionOutput", ("token_ids", "finish_reason")),
    Part(
        "vllm.inputs",
        "mm_input",
        parameters=("prompt_token_ids", "mm_kwargs", "mm_hashes", "mm_placeholders"),
    ),
    Part("vllm.inputs", "tokens_input", parameters=("prompt_token_ids",)),
    Part("vllm.multimodal.inputs", "MultiModalFieldConfig", ("batched",)),
    Part("vllm.multimodal.inputs", "MultiModalFieldConfig.batched", parameters=("keep_on_cpu",)),
    Part("vllm.multimodal.inputs", "MultiModalKwargsItems", ("from_hf_inputs",)),
    Part("vllm.multimodal.inputs", "PlaceholderRange", ("offset", "length")),
    Part(
        "vllm.multimodal.processing",
        "BaseProcessingInfo",
        ("get_supported_mm_limits", "get_mm_max_tokens_per_item"),
    ),
    Part("vllm.multimodal.processing", "BaseDummyInputsBuilder", ("get_dummy_text", "get_dummy_mm_data")),
    Part(
        "vllm.multimodal.processing",
        "BaseMultiModalProcessor",
        ("_get_mm_fields_config", "_get_prompt_updates"),
    ),
    Part("vllm.multimodal", "MULTIMODAL_REGISTRY"),
    Part("vllm.multimodal", "MULTIMODAL_REGISTRY.register_processor", parameters=("info", "dummy_inputs")),
    Part("vllm.model_executor.models.registry", "ModelRegistry", ("register_model",)),
)
INTERNAL: tuple[Touched, ...] = (
    Setting("VLLM_USE_V2_MODEL_RUNNER"),
    Part("vllm.config", "VllmConfig", ("additional_config", "scheduler_config", "model_config")),
    Part("vllm.config", "SchedulerConfig", ("max_num_batched_tokens",)),
    Part("vllm.config", "ModelConfig", ("dtype",)),
    Part("vllm.config", "CacheConfig", ("block_size",)),
    Part(
        "vllm.v1.worker.gpu_worker",
        "Worker",
        ("init_device",),
        mentions=("self.model_runner", "self.vllm_config"),
    ),
    Part(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner",
        (
            "sample_tokens",
            "get_model",
            "_setup_eagle3_aux_hidden_state_outputs",
            "_init_mrope_positions",
            "_calc_mrope_positions",
        ),
        mentions=(
            "self.use_aux_hidden_state_outputs",
            "self.execute_model_state",
            "self.input_batch.req_ids",
            "self.input_batch.num_computed_tokens_cpu",
            "self.input_batch.generators",
            "self.discard_request_mask.np",
            "self.mrope_positions.np",
            "self.requests",
        ),
    ),
    Part(
        "vllm.v1.worker.gpu_model_runner",
        "ExecuteModelState",
        ("scheduler_output", "logits", "aux_hidden_states"),
    ),
    Part(
        "vllm.v1.worker.gpu_input_batch",
        "CachedRequestState",
        ("prompt_token_ids", "sampling_params", "mrope_positions", "mrope_position_delta"),
    ),
    Part("vllm.v1.core.sched.output", "SchedulerOutput", ("num_scheduled_tokens", "scheduled_new_reqs")),
    Part("vllm.v1.core.sched.output", "NewRequestData", ("sampling_params", "num_computed_tokens")),
    Part(
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        ("schedule", "update_from_output", "get_request_counts"),
        mentions=("self.kv_cache_manager", "self.cache_config"),
    ),
    Part("vllm.v1.core.kv_cache_manager", "KVCacheManager", mentions=("self.block_pool",)),
    Part("vllm.v1.core.block_pool", "BlockPool", ("get_num_free_blocks",), mentions=("self.num_gpu_blocks",)),
    Part("vllm.v1.outputs", "ModelRunnerOutput", ("sampled_token_ids",)),
    Part("vllm.v1.engine.core_client", "InprocClient", ("shutdown",), mentions=("self.engine_core",)),
    Part("vllm.v1.engine.core", "EngineCore", mentions=("self.scheduler",)),
)
EVERYTHING = PUBLIC + INTERNAL
ON_CPU: tuple[Touched, ...] = (  # by an engine on a CPU alone: a build for GPUs may lack them
    Setting("VLLM_CPU_KVCACHE_SPACE"),
    Setting("VLLM_CPU_OMP_THREADS_BIND"),
    Part("vllm.v1.worker.cpu_worker", "CPUWorker", ("init_device",), mentions=("self.model_runner",)),
    Part("vllm.engine.arg_utils", "EngineArgs", ("block_size", "num_gpu_blocks_override")),
)


def missing(parts: tuple[Touched, ...]) -> list[str]:
    """What of `parts` the installed vLLM has not."""
    return [name for part in parts for name in _missing(part)]


def check(more: tuple[Touched, ...] = ()) -> None:
    """ConfigError naming the release and what it lacks of EVERYTHING and `more`."""
    import vllm

    lacking = missing(EVERYTHING + more)
    if lacking:
        raise ConfigError(
            f"vLLM {vllm.__version__} has no {', '.join(lacking)}",
            f"install one of {', '.join(RELEASES)}, on which this engine was tested",
        )


@functools.cache
def _source(module: str) -> str:
    return inspect.getsource(importlib.import_module(module))


def _missing(part: Touched) -> Iterator[str]:
    if isinstance(part, Setting):
        known_settings = importlib.import_module("vllm.envs").environment_variables
        yield from () if part.name in known_settings else (f"setting {part.name}",)
        return
    try:
        found = operator.attrgetter(part.name)(importlib.import_module(part.module))
    except (ImportError, AttributeError):
        yield f"{part.module}.{part.name}"
        return
    fields = {field.name for field in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
    known = fields | set(getattr(found, "_fields", ()))
    yield from (
        f"{part.name}.{name}" for name in part.attributes if name not in known and not hasattr(found, name)
    )
    called = inspect.signature(found).parameters if part.parameters else {}
    yield from (f"{part.name}({name})" for name in part.parameters if name not in called)
    source = _source(part.module) if part.mentions else ""
    yield from (f"{part.name} with {word}" for word in part.mentions if word not in source)
