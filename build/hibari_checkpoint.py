"""hibari's voice as two stages: one graph in, a talker graph and code2wav weights out.

    ids, speed ─► talker.onnx ─► latent [1, 130, F], f0 [1, F] ─► code2wav: 9 convolutions ─► spectra
                              ▲
                              the only place where the graph is one tensor (and f0) wide

The talker half stays as it is, int8 matrices included. The code2wav half leaves ONNX: its int8 matrices are
dequantised once to float32, since its engine streams, which a fixed graph cannot.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.utils
from onnx import ModelProto, NodeProto, numpy_helper
from safetensors.numpy import save_file

Array = npt.NDArray[Any]

# What turns hibari's spectra into samples is code, not weights (hibari/dsp.py); the graph holds none of it.
SIGNAL = {
    "sample_rate_hz": 24000,
    "hop_samples": 300,
    "voiced_above_hz": 40.0,
    "harmonics_below_hz": 11000.0,
    "log_magnitude_ceiling": 7.0,
}
MAX_PHONEMES = 400  # hibari/tts.py: longer input is out of the voice's training range
ENERGY_CHANNEL = 129  # of the latent: 128 text channels, pitch, log energy (normalised)
SILENT_BELOW = -0.5  # of that channel; about -65 dB of full scale
SPECTRA = ("lh", "theta", "ln", "lr", "phi")


def convert(model: Path, vocabulary: Path, voice: Mapping[str, Any], out: Path) -> None:
    """Split hibari's `model` into `out`/talker and `out`/code2wav.

    vocabulary: hibari's vocab.json, phoneme character → id.
    voice: what hibari's voices.json says of this voice, with its "name".
    """
    graph = onnx.shape_inference.infer_shapes(onnx.load(model))
    seam = _node(graph, "/dec_in/Conv").input[0]
    _write_talker(graph, seam, json.loads(vocabulary.read_text("utf-8")), voice, out / "talker")
    _write_code2wav(graph, out / "code2wav")


def _write_talker(
    graph: ModelProto, seam: str, vocabulary: Mapping[str, int], voice: Mapping[str, Any], out: Path
) -> None:
    out.mkdir(parents=True)
    talker = onnx.utils.Extractor(graph).extract_model(["ids", "speed"], [seam, "f0"])
    for node in talker.graph.node:
        node.output[:] = ["latent" if name == seam else name for name in node.output]
        node.input[:] = ["latent" if name == seam else name for name in node.input]
    for output in talker.graph.output:
        output.name = "latent" if output.name == seam else output.name
    onnx.checker.check_model(talker)
    onnx.save(talker, out / "talker.onnx")
    config = {
        "speakers": [voice["name"]],
        "language": voice["language"],
        "british": voice["british"],
        "latent_channels": _weights(graph)["m.dec_in.weight"].shape[1],
        "energy_channel": ENERGY_CHANNEL,
        "silent_below": SILENT_BELOW,
        "max_phonemes": MAX_PHONEMES,
        "pad_id": 0,
        "phoneme_ids": dict(vocabulary),
        "frame_rate_hz": SIGNAL["sample_rate_hz"] / SIGNAL["hop_samples"],
    }
    _write_json(out / "config.json", config)


def _write_code2wav(graph: ModelProto, out: Path) -> None:
    out.mkdir(parents=True)
    held = _weights(graph)
    num_blocks = 1 + max(int(name.split(".")[2]) for name in held if name.startswith("m.dec."))
    weights = {
        "enter.weight": held["m.dec_in.weight"],  # [channels, latent, kernel]
        "enter.bias": held["m.dec_in.bias"],
        "norm.weight": held["m.dec_norm.weight"],
        "norm.bias": held["m.dec_norm.bias"],
        "head.weight": _dequantised(held, "/head/Transpose_output_0").T,  # [5 * bins, channels]
        "head.bias": held["m.head.bias"],
    }
    for index in range(num_blocks):
        source, block = f"m.dec.{index}", f"blocks.{index}"
        weights |= {
            f"{block}.depthwise.weight": held[f"{source}.dw.weight"][:, 0],  # [channels, kernel]
            f"{block}.depthwise.bias": held[f"{source}.dw.bias"],
            f"{block}.norm.weight": held[f"{source}.norm.weight"],
            f"{block}.norm.bias": held[f"{source}.norm.bias"],
            f"{block}.widen.weight": _dequantised(held, f"/dec.{index}/pw1/Transpose_output_0").T,
            f"{block}.widen.bias": held[f"{source}.pw1.bias"],
            f"{block}.narrow.weight": _dequantised(held, f"/dec.{index}/pw2/Transpose_output_0").T,
            f"{block}.narrow.bias": held[f"{source}.pw2.bias"],
            f"{block}.gain": held[f"{source}.gamma"],
        }
    channels, latent_channels, kernel_frames = held["m.dec_in.weight"].shape
    bins = len(held["m.head.bias"]) // len(SPECTRA)
    config = {
        "latent_channels": latent_channels,
        "channels": channels,
        "hidden_channels": len(held["m.dec.0.pw1.bias"]),
        "num_blocks": num_blocks,
        "kernel_frames": kernel_frames,
        "bins": bins,
        "norm_epsilon": _attribute(_node(graph, "/dec_norm/LayerNormalization"), "epsilon"),
        **SIGNAL,
    }
    contiguous = {name: np.ascontiguousarray(array, np.float32) for name, array in weights.items()}
    save_file(contiguous, out / "model.safetensors")
    _write_json(out / "config.json", config)


def _weights(graph: ModelProto) -> dict[str, Array]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.graph.initializer}


def _dequantised(held: Mapping[str, Array], name: str) -> Array:
    """The float32 matrix [in, out] behind a dynamically quantised product."""
    levels = held[f"{name}_quantized"].astype(np.float32) - np.float32(held[f"{name}_zero_point"])
    matrix: Array = levels * held[f"{name}_scale"]
    return matrix


def _node(graph: ModelProto, name: str) -> NodeProto:
    for node in graph.graph.node:
        if node.name == name:
            return node
    raise SystemExit(f"the voice's graph has no node '{name}': it is not the pinned hibari version")


def _attribute(node: NodeProto, name: str) -> float:
    return next(attribute.f for attribute in node.attribute if attribute.name == name)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", "utf-8")
