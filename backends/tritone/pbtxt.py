"""(Pipeline, Deploy) to the config.pbtxt files of a model repository.

Built as protobuf messages and printed by protobuf, so a wrong field cannot be written. Complete: the server
runs with auto-complete off for these models.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from tritone.contract import CONTRACT_VERSION, CONTROL, REPLY
from tritone.control import KEEP_EVERY_S
from tritone.deploy import Deploy
from tritone.pipeline import Batching, Stage
from tritone.ports import Port

SPARE_SEQUENCES = 1000  # for pings, and for strangers, beside the streams of the pipeline model and its twin
HEADER = "# Rendered by `tritone render {pipeline}` from deploy.yaml: edit that, not this.\n"


def render(deploy: Deploy) -> dict[str, pb.ModelConfig]:
    """Triton model name to its complete config: the pipeline model, its non-decoupled twin, every stage."""
    pipeline = deploy.pipeline
    configs = {
        name: _pipeline_config(deploy, name, decoupled)
        for name, decoupled in ((pipeline.name, True), (f"{pipeline.name}_sync", False))
    }
    own = f"{pipeline.name}_"
    for stage in pipeline.stages:
        model = deploy.stage(stage.name).model
        if model.startswith(own):  # a stage of another pipeline's repository is rendered there
            configs[model] = _stage_config(deploy, stage)
    return configs


def write(deploy: Deploy, folder: Path) -> list[Path]:
    """Write a pipeline's repository into `folder`, deploy.yaml if missing; returns the written files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    deploy_file = folder / "deploy.yaml"
    if not deploy_file.exists():
        deploy_file.write_text(yaml.safe_dump(dict(deploy.source), sort_keys=False), encoding="utf-8")
        written.append(deploy_file)
    for name, text in texts(deploy).items():
        version = folder / name / "1"
        version.mkdir(parents=True, exist_ok=True)
        (version / ".gitkeep").touch()
        path = folder / name / "config.pbtxt"
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def texts(deploy: Deploy) -> dict[str, str]:
    """Triton model name to the text of its config.pbtxt."""
    header = HEADER.format(pipeline=deploy.pipeline.name)
    return {name: header + text_format.MessageToString(config) for name, config in render(deploy).items()}


def _pipeline_config(deploy: Deploy, name: str, decoupled: bool) -> pb.ModelConfig:
    pipeline = deploy.pipeline
    facts = pipeline.facts(deploy.checkpoint)
    parameters = {
        "contract_version": str(CONTRACT_VERSION),
        "modalities": ",".join(pipeline.modalities),
        "max_in_flight": str(deploy.max_in_flight),
        "max_text_bytes": str(deploy.limits.text_bytes),
        "max_deadline_s": f"{deploy.limits.deadline_s:g}",
    }
    if facts.sample_rate_hz is not None:
        parameters["sample_rate_hz"] = str(facts.sample_rate_hz)
        parameters["speakers"] = ",".join(facts.speakers)
    accepted = {port.name for port in pipeline.accepts}
    if "audio" in accepted:
        parameters["max_audio_s"] = f"{deploy.limits.audio_s:g}"
        parameters["max_audio_bytes"] = str(deploy.limits.audio_bytes)
    if "image" in accepted:
        parameters["max_image_bytes"] = str(deploy.limits.image_bytes)
        parameters["max_image_pixels"] = str(deploy.limits.image_pixels)
    if "video" in accepted:
        parameters["max_video_s"] = f"{deploy.limits.video_s:g}"
        parameters["max_video_bytes"] = str(deploy.limits.video_bytes)
    if accepted & {"audio", "image", "video"}:
        parameters["max_media_parts"] = str(deploy.limits.media_parts)
    config = _config(name, "tritone_pipeline", deploy, parameters)
    config.model_transaction_policy.decoupled = decoupled
    config.input.extend(_input(port) for port in pipeline.inputs)
    config.output.extend(_output(port) for port in pipeline.outputs)
    config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_CPU, count=1)
    return config


def _stage_config(deploy: Deploy, stage: Stage) -> pb.ModelConfig:
    settings = deploy.stage(stage.name)
    triton_batches = stage.batching is Batching.TRITON
    door = "tritone_batch" if triton_batches else "tritone_engine"
    config = _config(settings.model, door, deploy, {"stage": stage.name})
    config.input.append(_input(CONTROL))
    config.input.extend(_input(port, optional=True) for port in stage.inputs)
    config.output.append(_output(REPLY))
    if triton_batches:
        config.output.extend(_output(port) for port in stage.outputs)
        config.max_batch_size = settings.max_batch_size
        batching = config.sequence_batching
        # Sequences that live are kept by calls; one that a stranger began and cancelled lasts this long.
        batching.max_sequence_idle_microseconds = int((settings.call_timeout_s + 2 * KEEP_EVERY_S) * 1e6)
        batching.oldest.max_candidate_sequences = 2 * deploy.max_in_flight + SPARE_SEQUENCES
        batching.oldest.max_queue_delay_microseconds = int(settings.max_queue_delay_ms * 1e3)
    kind = pb.ModelInstanceGroup.KIND_GPU if settings.device == "gpu" else pb.ModelInstanceGroup.KIND_CPU
    group = config.instance_group.add(kind=kind, count=settings.instances)
    if settings.device == "gpu" and getattr(settings.options, "gpus", 1) > 1:
        group.gpus.append(0)  # one engine, which spreads from there; Triton would start one on every GPU
    return config


def _config(name: str, backend: str, deploy: Deploy, parameters: Mapping[str, str]) -> pb.ModelConfig:
    config = pb.ModelConfig(name=name, backend=backend, max_batch_size=0)
    for key, value in {
        "pipeline": deploy.source["pipeline"],
        "deploy_digest": deploy.digest,
        **parameters,
    }.items():
        config.parameters[key].string_value = value
    return config


def _input(port: Port, optional: bool = False) -> pb.ModelInput:
    return pb.ModelInput(
        name=port.name,
        data_type=pb.DataType.Value(f"TYPE_{port.dtype}"),
        dims=port.dims,
        optional=port.optional or optional,
    )


def _output(port: Port) -> pb.ModelOutput:
    return pb.ModelOutput(name=port.name, data_type=pb.DataType.Value(f"TYPE_{port.dtype}"), dims=port.dims)
