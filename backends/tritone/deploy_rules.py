"""What the values of a deploy file must be, beyond their types: a rule for each field.

    RULES         of the pipeline: the deploy, and the file that errors name
    STAGE_RULES   of every stage: the same, and the name of the stage

A rule raises ConfigError that names its field, what it is and what to do. They are tried in their order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import attrgetter

from tritone.deploy import HOST, MAX_CHUNK_GROWTH, MODES, Deploy, is_chunk_growth
from tritone.device import Device
from tritone.errors import ConfigError

COLLECTOR = re.compile(r"https?://[^\s/?#]+[^\s?#]*")
OWN_VARIABLES = {  # of an engine's environment, and the keys that they are made from
    "OMP_NUM_THREADS": "threads",
    "MKL_NUM_THREADS": "threads",
    "CUDA_VISIBLE_DEVICES": "device",
    "CUDA_DEVICE_ORDER": "device",
    "CUDA_MPS_CLIENT_PRIORITY": "urgency",
}
OF_A_PROCESS = ("instances", "device", "python", "env")  # what stages that share one have in common

Rule = Callable[[Deploy, str], None]
StageRule = Callable[[Deploy, str, str], None]


def check(deploy: Deploy, where: str) -> None:
    """Raise ConfigError for the first rule that is broken; `where` names the file."""
    for rule in RULES:
        rule(deploy, where)
    for stage in deploy.stages:
        for stage_rule in STAGE_RULES:
            stage_rule(deploy, where, stage)


# -- of the pipeline ----------------------------------------------------------------------------------------


def at_least(field: str, low: float) -> Rule:
    def rule(deploy: Deploy, where: str) -> None:
        _refuse_below(low, attrgetter(field)(deploy), f"{where}: {field}")

    return rule


def not_below(field: str, other: str) -> Rule:
    """At least what the other field is."""

    def rule(deploy: Deploy, where: str) -> None:
        _refuse_below(attrgetter(other)(deploy), attrgetter(field)(deploy), f"{where}: {field}")

    return rule


def at_least_if_given(field: str, low: float) -> Rule:
    """As `at_least`; 0 is the same as nothing."""

    def rule(deploy: Deploy, where: str) -> None:
        _refuse_below(low, attrgetter(field)(deploy) or low, f"{where}: {field}")

    return rule


def mode(deploy: Deploy, where: str) -> None:
    if deploy.mode not in MODES:
        raise ConfigError(f"{where}: mode is '{deploy.mode}'", f"give {' or '.join(MODES)}")


def codec_chunk_growth(deploy: Deploy, where: str) -> None:
    growth = deploy.chunks.codec_chunk_growth
    if not is_chunk_growth(growth):
        raise ConfigError(
            f"{where}: chunks.codec_chunk_growth is {growth}", f"give 0 or 1 to {MAX_CHUNK_GROWTH}"
        )


def allowed_hosts(deploy: Deploy, where: str) -> None:
    for pattern in deploy.urls.allow:
        if not HOST.fullmatch(pattern.removeprefix("*.")):
            raise ConfigError(
                f"{where}: urls.allow has '{pattern}'", "give names of hosts in lower case, or *.domain"
            )


def otlp_endpoint(deploy: Deploy, where: str) -> None:
    endpoint = deploy.tracing.otlp_endpoint
    if endpoint and not COLLECTOR.fullmatch(endpoint):
        raise ConfigError(
            f"{where}: tracing.otlp_endpoint is '{endpoint}'", "give a URL, e.g. http://127.0.0.1:4318"
        )


def sample_ratio(deploy: Deploy, where: str) -> None:
    ratio = deploy.tracing.sample_ratio
    if ratio is not None and not 0 <= ratio <= 1:
        raise ConfigError(f"{where}: tracing.sample_ratio is {ratio:g}", "give 0 to 1")


def mps(deploy: Deploy, where: str) -> None:
    if deploy.mps and not any(stage.placed.is_gpu for stage in deploy.stages.values()):
        raise ConfigError(
            f"{where}: mps is true, and no stage is on a GPU", "give a stage `device: gpu`, or mps: false"
        )


# -- of a stage ---------------------------------------------------------------------------------------------


def stage_at_least(key: str, low: float) -> StageRule:
    def rule(deploy: Deploy, where: str, stage: str) -> None:
        _refuse_below(low, getattr(deploy.stages[stage], key), f"{where}: stages.{stage}.{key}")

    return rule


def device(deploy: Deploy, where: str, stage: str) -> None:
    settings = deploy.stages[stage]
    placed = Device.parse(settings.device, f"{where}: stages.{stage}.device")
    if placed.is_spread and not deploy.engine_class(stage).spans_gpus:
        raise ConfigError(
            f"{where}: stages.{stage}.device is {placed}, and engine '{settings.engine}' runs on one GPU",
            "name one, e.g. gpu:0",
        )


def colocated_first(deploy: Deploy, where: str, stage: str) -> None:
    settings, leads = deploy.stages[stage], deploy.hosted_with(stage)[0]
    if leads != stage and settings.placed.is_gpu and deploy.engine_class(stage).leaves_default_stream:
        raise ConfigError(
            f"{where}: stages {leads} and {stage} share a process, and engine '{settings.engine}' of {stage}"
            " must be the first there: it measures the GPU as it starts",
            f"remove colocate of {stage}",
        )


def env(deploy: Deploy, where: str, stage: str) -> None:
    for variable in deploy.stages[stage].env.keys() & OWN_VARIABLES.keys():
        raise ConfigError(
            f"{where}: stages.{stage}.env has {variable}", f"remove it and give {OWN_VARIABLES[variable]}"
        )


def colocated_alike(deploy: Deploy, where: str, stage: str) -> None:
    for mate in deploy.hosted_with(stage):
        for key in OF_A_PROCESS:
            if getattr(deploy.stages[mate], key) != getattr(deploy.stages[stage], key):
                raise ConfigError(
                    f"{where}: stages {stage} and {mate} share a process but differ in {key}",
                    f"give both the same {key}",
                )


def _refuse_below(low: float, value: float, name: str) -> None:
    if value < low:
        raise ConfigError(f"{name} is {value}", f"give at least {low}")


RULES: tuple[Rule, ...] = (
    at_least("max_in_flight", 1),
    at_least("bls_threads", 1),
    at_least("deadline_s", 0.001),
    at_least("max_queued", 0),
    at_least("resumes", 0),
    at_least("stall_s", 0.1),
    not_below("stall_limit_s", "stall_s"),
    at_least("chunks.max_ahead_s", 0),
    mode,
    at_least("connector.window_bytes", 1),
    at_least("connector.queued_bytes", 1),
    at_least("chunks.initial_codec_chunk_frames", 1),
    at_least("chunks.codec_chunk_frames", 1),
    not_below("limits.deadline_s", "deadline_s"),
    codec_chunk_growth,
    at_least("limits.text_bytes", 1),
    at_least("limits.audio_bytes", 1),
    at_least("limits.image_bytes", 1),
    at_least("limits.image_pixels", 1),
    at_least("limits.video_bytes", 1),
    at_least("limits.media_parts", 1),
    at_least("limits.audio_s", 0.1),
    at_least("limits.video_s", 0.1),
    at_least("urls.max_bytes", 1),
    at_least("urls.per_request", 1),
    at_least("urls.at_once", 1),
    at_least("urls.timeout_s", 0.1),
    allowed_hosts,
    at_least_if_given("memory.gpu_gib", 0.001),
    at_least_if_given("memory.ram_gib", 0.001),
    otlp_endpoint,
    sample_ratio,
    mps,
)

STAGE_RULES: tuple[StageRule, ...] = (
    stage_at_least("lease_s", 0.1),
    stage_at_least("call_timeout_s", 0.1),
    stage_at_least("load_timeout_s", 1),
    stage_at_least("max_queue_delay_ms", 0),
    stage_at_least("instances", 1),
    stage_at_least("threads", 1),
    stage_at_least("max_batch_size", 1),
    stage_at_least("urgency", 0),
    device,
    colocated_first,
    env,
    colocated_alike,
)
