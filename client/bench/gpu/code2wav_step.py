"""Time of a Code2Wav pass as one CUDA graph, at the sizes of a config.json, with random weights.

    python client/bench/gpu/code2wav_step.py DIR --rows 1,4,16 --frames 4,8,16,25

DIR holds the config.json of a full-size model (`build/qwen3_omni_real_size.py DIR` writes one). For each
bucket: milliseconds a pass by CUDA events (median), operation by operation and replayed, the seconds of
speech made in a second, and the floor: the time of the products and convolutions alone at the rate that a
large product reaches here, or of reading the weights once, whichever is more. Then how far the sound is from
that of torch in float32. `--torch` takes torch's convolutions. Exit status 1 if a replay differs bit by bit
from a call.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from timing import milliseconds
from tritone.networks.dummy_weights import DummyWeights
from tritone.networks.waveform_decoder import Piece, WaveformDecoder
from tritone.networks.waveform_size import WaveformSize
from tritone.pipelines.qwen3_omni.code2wav import codec_config
from tritone.pipelines.qwen3_omni.wave_graph import CODES, START, VALID, GraphWaves, row_columns
from tritone.pipelines.qwen3_omni.wave_steps import Buckets
from tritone.pipelines.qwen3_omni.waves import Share

DEVICE = "cuda:0"
SAMPLES_HZ = 24000
PRODUCT = 8192  # rows and columns of the large product
COPIED = 1 << 30  # bytes


def rates(dtype: torch.dtype) -> tuple[float, float]:
    """FLOP and bytes a second that this device reaches."""
    x = torch.randn((PRODUCT, PRODUCT), device=DEVICE, dtype=dtype)
    product_s = milliseconds(lambda: x @ x) / 1e3
    a = torch.zeros(COPIED, dtype=torch.uint8, device=DEVICE)
    b = torch.empty_like(a)
    copy_s = milliseconds(lambda: b.copy_(a)) / 1e3
    return 2 * PRODUCT**3 / product_s, 2 * COPIED / copy_s


def fill(waves: GraphWaves, rows: int, frames: int) -> None:
    """Fresh codes and full rows, of streams that are under way, in the slots 0, 1, …"""
    config = waves.config
    columns = row_columns(frames, config.num_quantizers)
    packed = torch.randint(0, config.codebook_size, (rows, columns), dtype=torch.int32, device=DEVICE)
    packed[:, 0] = torch.arange(rows, device=DEVICE)
    packed[:, VALID], packed[:, START] = frames, 0
    assert CODES == 3
    waves._buffers.packed[: packed.numel()] = packed.flatten()


def is_same(waves: GraphWaves, rows: int, frames: int) -> bool:
    """Whether a replay gives bit by bit what a call gives, states too."""
    buffers = waves._buffers
    state = (buffers.memory, buffers.frames)
    before, made = [tensor.clone() for tensor in state], []
    for run in (waves._replays[rows, frames], lambda: waves._program(rows, frames)):
        for tensor, saved in zip(state, before, strict=True):
            tensor.copy_(saved)
        run()
        made.append([tensor.clone() for tensor in (*state, buffers.wave)])
    return all(torch.equal(*both) for both in zip(*made, strict=True))


def quiet(decoder: WaveformDecoder) -> WaveformDecoder:
    """Random weights make sound far beyond its bounds, which would hide how far it is from the right one."""
    with torch.inference_mode():
        decoder.leave.weight.mul_(1e-3)
    return decoder


def distance(waves: GraphWaves, weights: Any) -> float:
    """Of the sound of three chunks from that of torch in float32, by its root mean square."""
    decoder = quiet(WaveformDecoder(waves.config, weights, prefix="code2wav.", device=DEVICE))
    state, largest = decoder.new_state(), waves._buckets.max_frames
    frames = np.random.default_rng(5).integers(
        0, waves.config.codebook_size, (3 * largest, waves.config.num_quantizers)
    )
    waves.begin(0)
    made, right = [], []
    for chunk in np.split(frames.astype(np.int32), 3):
        made.append(waves.decode([Share(0, chunk)])[0])
        right.append(decoder.forward([Piece(torch.from_numpy(chunk), state)])[0].cpu().numpy())
    expected = np.concatenate(right)
    apart = np.concatenate(made) - expected
    return float(np.sqrt(np.mean(apart**2) / np.mean(expected**2)))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--rows", default="1,4,16")
    parser.add_argument("--frames", default="4,8,16,25")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--torch", action="store_true", help="its convolutions, not our kernels")
    arguments = parser.parse_args(argv)
    rows, frames = (tuple(map(int, text.split(","))) for text in (arguments.rows, arguments.frames))
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    dtype = getattr(torch, arguments.dtype)
    weights: Any = DummyWeights(arguments.folder, DEVICE, dtype)
    decoder = WaveformDecoder(
        codec_config(arguments.folder), weights, prefix="code2wav.", device=DEVICE, dtype=dtype
    )
    quiet(decoder)
    before = torch.cuda.memory_allocated()
    waves = GraphWaves(decoder, Buckets(rows, frames), max(rows), kernels=not arguments.torch)
    held = (torch.cuda.memory_reserved() - before) / 2**30
    print(f"captured {len(waves._replays)} graphs, {held:.2f} GiB for them, states and buffers", flush=True)
    flop_s, bytes_s = rates(dtype)
    weight_bytes = before
    config = json.loads((arguments.folder / "config.json").read_text())["code2wav_config"]
    frame_flop = WaveformSize.from_hf(config).flops
    print(f"products {flop_s / 1e12:.0f} TFLOP/s, copies {bytes_s / 1e12:.2f} TB/s", flush=True)
    status = False
    for some, length in waves._replays:
        fill(waves, some, length)
        same = is_same(waves, some, length)
        floor = 1e3 * max(frame_flop * some * length / flop_s, weight_bytes / bytes_s)
        called = milliseconds(lambda some=some, length=length: waves._program(some, length))
        replayed = milliseconds(waves._replays[some, length])
        speech = some * length * decoder.samples_per_frame / SAMPLES_HZ / (replayed / 1e3)
        print(
            f"rows {some:2d} frames {length:3d}: {replayed:7.2f} ms "
            f"(called {called:7.2f}, floor {floor:6.2f}), "
            f"{speech:5.0f} s of speech a second, replay equals call: {same}",
            flush=True,
        )
        status |= not same
    print(f"from float32: {distance(waves, weights):.1e} of its root mean square", flush=True)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
