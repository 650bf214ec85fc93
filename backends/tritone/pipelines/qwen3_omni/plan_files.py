"""Code2Wav's step as files: how they are called, and the tensors that they take and give.

    <checkpoint>/plans/code2wav.onnx                              any machine, any runtime of ONNX
                       code2wav.<architecture>.<library>.plan     one kind of GPU, one version of TensorRT

`build/plans.py` writes them. A row of a batch is a stream:

    memory float32 [B, M], frames int32 [B, 1]   its state; anything where it starts
    codes int32 [B, F, codebooks], valid int32 [B, 1], start int32 [B, 1]
    ─► wave float32 [B, F · samples_per_frame], memory_out, frames_out
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tritone.errors import ConfigError

FOLDER = "plans"
STAGE = "code2wav"
INPUTS = ("memory", "frames", "codes", "valid", "start")
OUTPUTS = ("wave", "memory_out", "frames_out")
LIBRARIES = ("tensorrt", "tensorrt_rtx")  # modules that build and run plans; the first found is used
# In an ONNX file's metadata: raise it when the tensors change, or what may be in them.
VERSION_KEY, VERSION = "tritone_step", "2"


def onnx_file(checkpoint: Path) -> Path:
    return checkpoint / FOLDER / f"{STAGE}.onnx"


def plan_file(checkpoint: Path, architecture: str, library: str) -> Path:
    """architecture: e.g. "sm90"; library: name and version of what builds and runs it."""
    return checkpoint / FOLDER / f"{STAGE}.{architecture}.{library}.plan"


def require_onnx(checkpoint: Path) -> Path:
    """ConfigError naming the command that writes the file, if there is none."""
    file = onnx_file(checkpoint)
    if not file.is_file():
        raise ConfigError(f"code2wav has no '{file}'", f"run `{command(checkpoint)}`")
    return file


def require_plan(checkpoint: Path, architecture: str, library: str) -> Path:
    """ConfigError naming the plans that are there, if none is of this GPU and this library."""
    file = plan_file(checkpoint, architecture, library)
    if not file.is_file():
        others = sorted(other.name for other in file.parent.glob(f"{STAGE}.*.plan"))
        found = f"only {', '.join(others)}" if others else "no plan at all"
        raise ConfigError(
            f"code2wav has no plan of {architecture} and {library} in '{file.parent}', {found}",
            f"run `{command(checkpoint)} --tensorrt` on this machine",
        )
    return file


def command(checkpoint: Path) -> str:
    return f"python build/plans.py --checkpoint {checkpoint}"


def architecture_of(capability: tuple[int, int]) -> str:
    """E.g. "sm90" of (9, 0), the compute capability of a GPU."""
    major, minor = capability
    return f"sm{major}{minor}"


def library_name(library: Any) -> str:
    """A module's name and version, as plans are called by them."""
    return f"{library.__name__}-{library.__version__}"
