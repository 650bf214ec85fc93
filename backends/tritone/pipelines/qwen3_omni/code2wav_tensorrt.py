"""Code2Wav in TensorRT: the same streams, by a plan that `build/plans.py --tensorrt` built for this GPU.

    StepWaves ─► codes, valid, starts to the device ─► pool[slots] ─► plan ─► pool[slots]; wave to the host

States of all streams stay on the GPU, in one pool. What the plan reads and writes is allocated once, for the
largest pass.
"""

from __future__ import annotations

import importlib
from typing import Any

from tritone.engines.base import Placement
from tritone.engines.memory import Ground, Term
from tritone.errors import ConfigError
from tritone.networks.waveform_config import WaveformConfig
from tritone.pipelines.qwen3_omni.code2wav_exported import ExportedCode2Wav, ExportedOptions
from tritone.pipelines.qwen3_omni.code2wav_memory import tensorrt_code2wav_terms
from tritone.pipelines.qwen3_omni.plan_files import (
    INPUTS,
    LIBRARIES,
    OUTPUTS,
    architecture_of,
    command,
    library_name,
    require_plan,
)
from tritone.pipelines.qwen3_omni.wave_steps import Buckets, StepWaves
from tritone.ports import Array


class TensorrtCode2Wav(ExportedCode2Wav):
    """In TensorRT."""

    @classmethod
    def memory(cls, ground: Ground, options: ExportedOptions) -> list[Term]:
        return tensorrt_code2wav_terms(ground, options)

    @classmethod
    def _open(cls, placement: Placement, config: WaveformConfig, max_streams: int) -> StepWaves:
        engine = open_engine(placement)
        rows, frames, _ = engine.get_tensor_profile_shape("codes", 0)[2]
        chunks = [min(size, frames) for size in placement.chunk_frames]
        buckets = Buckets.of(min(max_streams, placement.max_batch_size), chunks).up_to(rows)
        return TensorrtWaves(engine, config, buckets, max_streams, placement.device)


class TensorrtWaves(StepWaves):
    """Runs the plan in the stage's stream, or one of its own: TensorRT wants another than the default one."""

    def __init__(
        self, engine: Any, config: WaveformConfig, buckets: Buckets, slots: int, device: str
    ) -> None:
        """engine: an ICudaEngine; device: "cuda:<index>"."""
        super().__init__(config, buckets, slots)
        import torch

        self._torch, self._engine = torch, engine  # the context lives no longer than the engine
        self._context = engine.create_execution_context()
        memory_size = int(engine.get_tensor_shape("memory")[1])
        self._stream = torch.cuda.current_stream(device)
        if self._stream == torch.cuda.default_stream(device):
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        rows = max(rows for rows, _ in buckets.shapes())
        places = max(rows * frames for rows, frames in buckets.shapes())

        def zeros(*shape: int, of: Any = torch.int32) -> Any:
            return torch.zeros(shape, dtype=of, device=device)

        self._pool = {
            "memory": zeros(slots + 1, memory_size, of=torch.float32),
            "frames": zeros(slots + 1, 1),
        }
        self._flat = {  # of the largest shape; a pass uses the beginning of each
            "memory": zeros(rows * memory_size, of=torch.float32),
            "frames": zeros(rows),
            "codes": zeros(places * config.num_quantizers),
            "valid": zeros(rows),
            "start": zeros(rows),
            "wave": zeros(places * config.samples_per_frame, of=torch.float32),
            "memory_out": zeros(rows * memory_size, of=torch.float32),
            "frames_out": zeros(rows),
        }
        self.state_bytes = memory_size * 4
        torch.cuda.synchronize(device)

    def _step(self, slots: Array, starts: Array, codes: Array, valid: Array) -> Array:
        torch, rows = self._torch, len(slots)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            places = torch.from_numpy(slots).long().to(self._pool["memory"].device)
            given = {
                "memory": self._pool["memory"][places],
                "frames": self._pool["frames"][places],
                "codes": torch.from_numpy(codes),
                "valid": torch.from_numpy(valid)[:, None],
                "start": torch.from_numpy(starts)[:, None],
            }
            for name in INPUTS:
                into = self._part(name, given[name].shape)
                into.copy_(given[name])
                self._context.set_input_shape(name, tuple(into.shape))
                self._context.set_tensor_address(name, into.data_ptr())
            shapes = {
                "wave": (rows, codes.shape[1] * self.config.samples_per_frame),
                "memory_out": tuple(given["memory"].shape),
                "frames_out": (rows, 1),
            }
            made = {name: self._part(name, shapes[name]) for name in OUTPUTS}
            for name, tensor in made.items():
                self._context.set_tensor_address(name, tensor.data_ptr())
            if not self._context.execute_async_v3(self._stream.cuda_stream):
                raise RuntimeError("TensorRT refused to run the plan")
            self._pool["memory"][places] = made["memory_out"]
            self._pool["frames"][places] = made["frames_out"]
            wave: Array = made["wave"].to("cpu", copy=True).numpy()  # waits for the stream
        return wave

    def _part(self, name: str, shape: tuple[int, ...]) -> Any:
        size = 1
        for length in shape:
            size *= length
        return self._flat[name][:size].view(shape)


def open_engine(placement: Placement) -> Any:
    """The plan of this GPU, loaded; ConfigError naming what is missing for it."""
    if placement.device == "cpu":
        raise ConfigError(
            "code2wav has engine tensorrt on device cpu, where no plan runs",
            "give it `device: gpu`, or engine torch or onnx",
        )
    library = find_library()
    try:
        import torch
    except ImportError:
        raise ConfigError(
            "engine tensorrt needs torch", "install a CUDA build in the engine's Python"
        ) from None
    if not torch.cuda.is_available():
        raise ConfigError(
            "engine tensorrt needs an NVIDIA GPU, and torch finds none here",
            "give code2wav engine torch or onnx, or look at `nvidia-smi`",
        )
    architecture = architecture_of(torch.cuda.get_device_capability(placement.device))
    file = require_plan(placement.checkpoint, architecture, library_name(library))
    torch.cuda.set_device(placement.device)
    placement.stream.open(torch, placement.device)
    engine = library.Runtime(library.Logger(library.Logger.WARNING)).deserialize_cuda_engine(
        file.read_bytes()
    )
    names = [] if engine is None else [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    if sorted(names) != sorted((*INPUTS, *OUTPUTS)):
        raise ConfigError(
            f"'{file}' is no plan that {library_name(library)} can run here",
            f"run `{command(placement.checkpoint)} --tensorrt` on this machine",
        )
    return engine


def find_library() -> Any:
    """The module `tensorrt`, or `tensorrt_rtx`; ConfigError when neither is installed."""
    for name in LIBRARIES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ConfigError(
        f"neither {' nor '.join(LIBRARIES)} is installed",
        "use a container that has TensorRT, or `pip install tensorrt-rtx`",
    )
