"""Code2Wav's plan as a model of Triton's own `tensorrt` backend: its config.pbtxt.

    codes [F, codebooks], valid [1] ─┐
    START of the sequence ─► start ──┼─► tensorrt ─► wave [F · samples_per_frame]
    state memory, frames ◄───────────┘ kept by Triton, a pair a sequence

A caller pads a chunk to one of `chunk_frames`, so that chunks of different streams share a batch, and says
in `valid` how many frames are its own. Of the wave it takes the first `valid · samples_per_frame` samples,
and of a new stream drops the first `missing_samples` in all.
"""

from __future__ import annotations

from collections.abc import Sequence

from tritonclient.grpc import model_config_pb2 as pb

from tritone.networks.waveform_config import WaveformConfig
from tritone.pipelines.qwen3_omni.plan_files import OUTPUTS

IDLE_S = 660.0  # a sequence that nobody calls for so long is forgotten
MAX_SEQUENCES = 1000
QUEUE_DELAY_MS = 2.0  # how long a batch waits for company


def plan_model(
    name: str, codec: WaveformConfig, memory_size: int, max_batch_size: int, chunk_frames: Sequence[int]
) -> pb.ModelConfig:
    """The complete config of a model whose version folder holds `model.plan`.

    memory_size: elements of a stream's state; max_batch_size: rows that the plan was built for.
    """
    config = pb.ModelConfig(
        name=name,
        backend="tensorrt",
        platform="tensorrt_plan",
        default_model_filename="model.plan",
        max_batch_size=max_batch_size,
    )
    config.input.add(name="codes", data_type=pb.TYPE_INT32, dims=[-1, codec.num_quantizers])
    config.input.add(name="valid", data_type=pb.TYPE_INT32, dims=[1])
    config.output.add(name=OUTPUTS[0], data_type=pb.TYPE_FP32, dims=[-1])
    batching = config.sequence_batching
    batching.max_sequence_idle_microseconds = int(IDLE_S * 1e6)
    batching.oldest.max_candidate_sequences = MAX_SEQUENCES
    batching.oldest.max_queue_delay_microseconds = int(QUEUE_DELAY_MS * 1e3)
    control = batching.control_input.add(name="start").control.add()
    control.kind = pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_START
    control.int32_false_true.extend([0, 1])
    for state, kind, size in (("memory", pb.TYPE_FP32, memory_size), ("frames", pb.TYPE_INT32, 1)):
        kept = batching.state.add(input_name=state, output_name=f"{state}_out", data_type=kind, dims=[size])
        kept.initial_state.add(name=f"{state}_zero", data_type=kind, dims=[size], zero_data=True)
    config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_GPU, count=1)
    for key, value in {
        "samples_per_frame": str(codec.samples_per_frame),
        "missing_samples": str(codec.missing_samples),
        "codebook_size": str(codec.codebook_size),
        "chunk_frames": ",".join(map(str, chunk_frames)),
    }.items():
        config.parameters[key].string_value = value
    return config
