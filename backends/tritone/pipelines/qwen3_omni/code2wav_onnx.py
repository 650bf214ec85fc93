"""Code2Wav in onnxruntime: the same streams, by the step that `build/plans.py` exported.

    StepWaves ─► memory of the slots ─► onnxruntime ─► wave, memory of the slots

Nothing of torch is imported. States stay in the memory of the host, also where the session runs on a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tritone.engines.base import Placement
from tritone.errors import ConfigError
from tritone.networks.waveform_config import WaveformConfig
from tritone.pipelines.qwen3_omni.code2wav_exported import ExportedCode2Wav
from tritone.pipelines.qwen3_omni.plan_files import (
    INPUTS,
    OUTPUTS,
    VERSION,
    VERSION_KEY,
    command,
    require_onnx,
)
from tritone.pipelines.qwen3_omni.wave_steps import Buckets, StepWaves
from tritone.ports import Array

CUDA_PROVIDER, CPU_PROVIDER = "CUDAExecutionProvider", "CPUExecutionProvider"


class OnnxCode2Wav(ExportedCode2Wav):
    """In onnxruntime."""

    @classmethod
    def _open(cls, placement: Placement, config: WaveformConfig, max_streams: int) -> StepWaves:
        session = open_session(placement, config)
        return OnnxWaves(session, config, Buckets.exact(placement.max_batch_size), max_streams)


class OnnxWaves(StepWaves):
    """Shapes are what they are: onnxruntime takes any, so nothing is padded."""

    def __init__(self, session: Any, config: WaveformConfig, buckets: Buckets, slots: int) -> None:
        """session: onnxruntime.InferenceSession"""
        super().__init__(config, buckets, slots)
        self._session = session
        shapes = {tensor.name: tensor.shape for tensor in session.get_inputs()}
        self._memory = np.zeros((slots + 1, shapes["memory"][1]), np.float32)
        self._frames = np.zeros((slots + 1, 1), np.int32)
        self.state_bytes = self._memory[0].nbytes

    def _step(self, slots: Array, starts: Array, codes: Array, valid: Array) -> Array:
        given = {
            "memory": self._memory[slots],
            "frames": self._frames[slots],
            "codes": codes,
            "valid": valid[:, None],
            "start": starts[:, None].astype(np.int32),
        }
        wave: Array
        wave, self._memory[slots], self._frames[slots] = self._session.run(OUTPUTS, given)
        return wave


def open_session(placement: Placement, config: WaveformConfig) -> Any:
    """The exported step; ConfigError when it is missing, of another codec, or cannot run on the device."""
    file = require_onnx(placement.checkpoint)
    try:
        import onnxruntime
    except ImportError:
        raise ConfigError(
            "engine onnx needs onnxruntime", "install it with `pip install 'tritone[plans]'`"
        ) from None
    providers: list[Any] = [CPU_PROVIDER]
    if placement.device != "cpu":
        if CUDA_PROVIDER not in onnxruntime.get_available_providers():
            raise ConfigError(
                f"onnxruntime {onnxruntime.__version__} cannot run on {placement.device}",
                "install onnxruntime-gpu in the engine's Python, or give code2wav `device: cpu`",
            )
        providers.insert(0, (CUDA_PROVIDER, {"device_id": int(placement.device.partition(":")[2] or 0)}))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = placement.threads, 1
    # Threads that wait for the next chunk would take the cores from other stages.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(str(file), options, providers=providers)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"onnxruntime cannot load '{file}' ({reason})", f"run `{command(placement.checkpoint)}`"
        ) from None
    check_step(session, config, file, placement.checkpoint)
    return session


def check_step(session: Any, config: WaveformConfig, file: Path, checkpoint: Path) -> None:
    """ConfigError when the file is not this codec's step as this library calls it."""
    shapes = {tensor.name: tensor.shape for tensor in session.get_inputs()}
    version = session.get_modelmeta().custom_metadata_map.get(VERSION_KEY)
    outputs = tuple(tensor.name for tensor in session.get_outputs())
    if (version, tuple(shapes), outputs) != (VERSION, INPUTS, OUTPUTS) or (
        shapes["codes"][2] != config.num_quantizers
    ):
        raise ConfigError(
            f"'{file}' is not the step of this codec and this version", f"run `{command(checkpoint)}`"
        )
