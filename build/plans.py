"""Export Code2Wav's step to ONNX, hold it to torch, and build TensorRT plans of it.

    checkpoint ─► WaveformDecoder.step ─► torch.export ─► as torch computes it? ─► plans/code2wav.onnx
    plans/code2wav.onnx ─► TensorRT ─► plans/code2wav.<gpu>.<library>.plan ─► a model for Triton's backend

    python build/plans.py                                  of the tiny checkpoint of qwen3_omni in the cache
    python build/plans.py --checkpoint DIR                 of a released one
    python build/plans.py --tensorrt                       and a plan for the GPU of this machine
    python build/plans.py --tensorrt --architecture sm89   for another one, if the library can
    python build/plans.py --tensorrt --model DIR           and a model for Triton's tensorrt backend
    … --model DIR --profile one_h200                       with the chunk sizes that this profile serves

Batch and frames of the ONNX file are dynamic. A file that differs from torch by more than LIMIT, in sound or
in states, is not written. Of TensorRT the module `tensorrt` is used, or else `tensorrt_rtx`.
A second run is instant; two at once are safe; one that is interrupted leaves the files as they were.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from qwen3_omni_tiny import locked

from tritone import deploy_reader, networks, repository
from tritone.checkpoint import checkpoint_dir, require_released
from tritone.deploy import Chunks
from tritone.errors import ConfigError, TritoneError
from tritone.networks.waveform_config import MAX_PASS_FRAMES
from tritone.pipelines.qwen3_omni import plan_files
from tritone.pipelines.qwen3_omni.code2wav import codec_config
from tritone.pipelines.qwen3_omni.code2wav_tensorrt import find_library
from tritone.pipelines.qwen3_omni.plan_files import INPUTS, OUTPUTS, VERSION, VERSION_KEY
from tritone.pipelines.qwen3_omni.plan_model import plan_model
from tritone.pipelines.qwen3_omni.wave_steps import Buckets
from tritone.stream import sizes_of

PIPELINE = "qwen3_omni"
OPSET = 18
LIMIT = 1e-4  # between torch and onnxruntime: of samples, and of states by their largest magnitude
SCHEDULES = ([4, 8, 16, 25], [1, 1, 2, 30], [25, 3])  # frames of each stream of a batch, step by step


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="default: the tiny one in the cache")
    parser.add_argument("--tensorrt", action="store_true", help="build a plan too")
    parser.add_argument("--architecture", metavar="smNN", help="default: of this machine's GPU")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="write a model for Triton's tensorrt backend"
    )
    parser.add_argument(
        "--deploy",
        default=PIPELINE,
        metavar="FOLDER",
        help=f"whose deploy.yaml says how streams are cut, for --model; default: {PIPELINE}",
    )
    parser.add_argument("--profile", metavar="NAME", help="over that deploy.yaml: a name, or a file")
    parser.add_argument("--max-batch", type=int, default=16, help="streams in a pass of the plan")
    parser.add_argument("--max-frames", type=int, default=25, help="frames of a pass of the plan")
    arguments = parser.parse_args(argv)
    checkpoint = arguments.checkpoint or checkpoint_dir(PIPELINE)
    try:
        require_released(checkpoint, PIPELINE)
        write_onnx(checkpoint)
        if arguments.tensorrt or arguments.model:
            plan = write_plan(checkpoint, arguments.architecture, arguments.max_batch, arguments.max_frames)
            if arguments.model:
                chunks = chunks_of(arguments.deploy, arguments.profile)
                write_model(
                    checkpoint, plan, arguments.model, arguments.max_batch, arguments.max_frames, chunks
                )
    except TritoneError as error:
        print(f"plans: {error}", file=sys.stderr)
        return 1
    return 0


def say(text: str) -> None:
    print(f"plans: {text}", flush=True)


# -- ONNX ----------------------------------------------------------------------------------------------------


def load_decoder(checkpoint: Path) -> Any:
    """The codec's decoder, float32 on the CPU, with weights as torch.export knows them."""
    import torch

    from tritone.networks.waveform_decoder import WaveformDecoder
    from tritone.networks.weights import Weights

    mkldnn: Any = torch.backends.mkldnn
    was_enabled, mkldnn.enabled = mkldnn.enabled, False
    try:
        return WaveformDecoder(codec_config(checkpoint), Weights(checkpoint), prefix="code2wav.")
    finally:
        mkldnn.enabled = was_enabled


def write_onnx(checkpoint: Path) -> Path:
    """Export, check, and only then put the file in its place; ConfigError when the check fails.

    A file that these sources have made from this checkpoint stays as it is.
    """
    target = plan_files.onnx_file(checkpoint)
    target.parent.mkdir(exist_ok=True)
    mark, digest = target.with_suffix(".source"), source_digest(checkpoint)
    with locked(target.parent / ".lock"):
        if target.is_file() and mark.is_file() and mark.read_text() == digest:
            say(f"{target}: complete")
            return target
        began_s = time.monotonic()
        decoder = load_decoder(checkpoint)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=target.parent) as scratch:
            made = Path(scratch) / target.name
            export(decoder, made)
            difference = check(decoder, made)
            mark.unlink(missing_ok=True)
            os.replace(made, target)
            mark.write_text(digest)
    say(f"{target}: {difference:.1e} from torch at most; {time.monotonic() - began_s:.0f} s")
    return target


def source_digest(checkpoint: Path) -> str:
    """Of what an ONNX file is made of; of weights, which are large, their sizes and times."""
    import torch

    digest = hashlib.sha256(f"{torch.__version__} {OPSET} {VERSION}".encode())
    folder = Path(networks.__path__[0])
    names = ("waveform_decoder", "waveform_pass", "waveform_config", "causal_layers", "linear")
    for file in (Path(__file__), checkpoint / "config.json", *(folder / f"{name}.py" for name in names)):
        digest.update(file.read_bytes())
    for weights in sorted(checkpoint.glob("*.safetensors")):
        state = weights.stat()
        digest.update(f"{weights.name} {state.st_size} {state.st_mtime_ns}".encode())
    return digest.hexdigest()


def export(decoder: Any, file: Path) -> None:
    """Write the step as ONNX, unchecked."""
    import torch

    class Step(torch.nn.Module):
        def forward(self, memory: Any, frames: Any, codes: Any, valid: Any, start: Any) -> Any:
            wave, memory, frames = decoder.step(
                memory, frames.squeeze(1), codes, valid.squeeze(1), start.squeeze(1) != 0
            )
            return wave, memory, frames.unsqueeze(1)

    rows, length = 2, 5  # of the example; neither is special to a trace, as 0 and 1 are
    # Tensors of their own: a trace takes one that is given twice for one input.
    frames, valid, start = (torch.full((rows, 1), value, dtype=torch.int32) for value in (4, 3, 1))
    codes = torch.zeros((rows, length, decoder.num_codebooks), dtype=torch.int32)
    example = (torch.zeros(rows, decoder.memory_size), frames, codes, valid, start)
    batch = torch.export.Dim("batch", min=1, max=1024)
    length_dim = torch.export.Dim("length", min=1, max=MAX_PASS_FRAMES)
    by_row = {0: batch}
    program = torch.onnx.export(
        Step().eval(),
        example,
        dynamo=True,
        opset_version=OPSET,
        input_names=INPUTS,
        output_names=OUTPUTS,
        dynamic_shapes=(by_row, by_row, {0: batch, 1: length_dim}, by_row, by_row),
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props[VERSION_KEY] = VERSION
    program.save(str(file), external_data=False)


def check(decoder: Any, file: Path) -> float:
    """The largest difference between torch and onnxruntime; ConfigError when it is over LIMIT."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    found = [
        difference
        for rows in (1, len(SCHEDULES))
        for difference in differences(decoder, session, SCHEDULES[:rows])
    ]
    worst = float(np.max(found))  # unlike the built-in one it is NaN if any of them is
    if not worst <= LIMIT:
        raise ConfigError(
            f"what onnxruntime computes differs from torch by {worst:.1e}, more than {LIMIT:.0e}",
            "nothing was written; try other versions of torch and onnxruntime",
        )
    return worst


def differences(decoder: Any, session: Any, schedules: Sequence[list[int]]) -> Iterator[float]:
    """Between the two, of sound and of states after each step of streams that are cut as the schedules say.

    Steps are padded to the longest, and the states that a stream starts with are noise.
    """
    import torch

    config, random = decoder.config, np.random.default_rng(11)
    rows = len(schedules)
    memory = random.standard_normal((rows, decoder.memory_size)).astype(np.float32)
    state = {"memory": memory, "frames": np.full((rows, 1), 9, np.int32)}
    for step in range(max(map(len, schedules))):
        lengths = [sizes[step] if step < len(sizes) else 0 for sizes in schedules]
        shape = (rows, max(lengths) + step % 2, config.num_quantizers)
        codes = random.integers(0, config.codebook_size, shape).astype(np.int32)
        valid = np.array(lengths, np.int32)[:, None]
        start = np.full((rows, 1), int(step == 0), np.int32)
        made = session.run(OUTPUTS, {**state, "codes": codes, "valid": valid, "start": start})
        tensors = [torch.from_numpy(array) for array in (*state.values(), codes, valid, start)]
        with torch.inference_mode():
            wave, moved, frames = decoder.step(
                tensors[0], tensors[1][:, 0], tensors[2], tensors[3][:, 0], tensors[4][:, 0] != 0
            )
        for row, length in enumerate(lengths):
            heard = length * config.samples_per_frame
            yield float(np.abs(made[0][row, :heard] - wave[row, :heard].numpy()).max(initial=0))
        yield float(np.abs(made[1] - moved.numpy()).max() / max(1.0, float(moved.abs().max())))
        yield float(np.abs(made[2][:, 0] - frames.numpy()).max())
        state = {"memory": made[1], "frames": made[2]}


# -- TensorRT ------------------------------------------------------------------------------------------------


def write_plan(checkpoint: Path, architecture: str | None, max_rows: int, max_frames: int) -> Path:
    """Build a plan of the ONNX file; ConfigError where TensorRT cannot."""
    library = find_library()
    architecture = architecture or own_architecture()
    began_s = time.monotonic()
    plan = build_plan(library, plan_files.require_onnx(checkpoint), architecture, max_rows, max_frames)
    name = plan_files.library_name(library)
    target = plan_files.plan_file(checkpoint, architecture, name)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        made.write_bytes(plan)  # as everybody may read it: who serves may be another user
        os.replace(made, target)
    say(f"{target}: {len(plan) / 2**20:.1f} MiB; {time.monotonic() - began_s:.0f} s")
    return target


def own_architecture() -> str:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("this machine has no NVIDIA GPU to build a plan for", "give --architecture smNN")
    return plan_files.architecture_of(torch.cuda.get_device_capability())


def build_plan(library: Any, onnx: Path, architecture: str, max_rows: int, max_frames: int) -> bytes:
    """A serialized plan for passes of 1 to `max_rows` streams and 1 to `max_frames` frames."""
    logger = library.Logger(library.Logger.WARNING)
    builder = library.Builder(logger)
    # The types of the file are kept: what is float32 there is computed as that.
    strongly_typed = 1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(strongly_typed)
    parser = library.OnnxParser(network, logger)
    if not parser.parse_from_file(str(onnx)):
        faults = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
        raise ConfigError(f"TensorRT cannot read '{onnx}' ({faults})", "use another version of it")
    config = builder.create_builder_config()
    config.clear_flag(library.BuilderFlag.TF32)
    aim(library, config, architecture)
    profile = builder.create_optimization_profile()
    for place in range(network.num_inputs):
        tensor = network.get_input(place)
        dynamic = [size for size in tensor.shape]
        shapes = []
        for rows, frames in ((1, 1), (max_rows, max_frames), (max_rows, max_frames)):
            sizes = [rows, frames]  # of the first dynamic dimension and, if there is one, the second
            shapes.append([size if size >= 0 else sizes.pop(0) for size in dynamic])
        profile.set_shape(tensor.name, *shapes)
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise ConfigError(
            f"TensorRT {library.__version__} built no plan for {architecture}", "see what it says above"
        )
    return bytes(plan)


def aim(library: Any, config: Any, architecture: str) -> None:
    """Have the plan built for an architecture; ConfigError where the library does not know it."""
    known = getattr(library, "ComputeCapability", None)
    if known is None:  # it builds for the GPU that it runs on
        own = own_architecture()
        if architecture != own:
            raise ConfigError(
                f"TensorRT {library.__version__} builds plans for the GPU at hand alone, {own}",
                f"run this on a machine with {architecture}",
            )
        return
    if architecture.upper() not in known.__members__:
        names = ", ".join(name.lower() for name in known.__members__ if name.startswith("SM"))
        raise ConfigError(
            f"{library.__name__} {library.__version__} builds no plans for {architecture}",
            f"it knows {names}; for others use TensorRT itself",
        )
    config.num_compute_capabilities = 1
    config.set_compute_capability(known.__members__[architecture.upper()], 0)


def chunks_of(target: str, profile: str | None) -> Chunks:
    """How a deploy file, with a profile over it, has streams cut. target: a pipeline's name or folder."""
    return deploy_reader.load(repository.find(target) / repository.DEPLOY, profile=profile).chunks


def write_model(
    checkpoint: Path, plan: Path, folder: Path, max_rows: int, max_frames: int, chunks: Chunks
) -> None:
    """A model folder for Triton's tensorrt backend: config.pbtxt and the plan.

    chunks: of the streams that callers will cut; their sizes, at most `max_frames`, are what they pad to.
    """
    from google.protobuf import text_format

    frames = Buckets.of(max_rows, [min(size, max_frames) for size in sizes_of(chunks)]).frames
    decoder = load_decoder(checkpoint)
    config = plan_model(folder.name, decoder.config, decoder.memory_size, max_rows, frames)
    version = folder / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.plan").write_bytes(plan.read_bytes())
    (folder / "config.pbtxt").write_text(text_format.MessageToString(config), encoding="utf-8")
    say(f"{folder}: config.pbtxt and 1/model.plan")


if __name__ == "__main__":
    sys.exit(main())
