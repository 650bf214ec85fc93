"""Time of a talker's frame as one CUDA graph, at the sizes of a config.json, with random weights.

    python client/bench/gpu/talker_frame.py DIR --rows 1,4,16,64

DIR holds the config.json of a full-size model (`build/qwen3_omni_real_size.py DIR` writes one). For each program
and each number of rows: milliseconds a frame by CUDA events (median), whether a replay gives bit by bit what
a call gives, and how far the scores are from those of float32.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tritone.networks.decoder import Decoder, DecoderConfig
from tritone.networks.dummy_weights import DummyWeights
from tritone.pipelines.qwen3_omni.code_predictor import CodePredictor
from tritone.pipelines.qwen3_omni.config import RESERVED_CODEC_IDS, OmniConfig
from tritone.pipelines.qwen3_omni.frame import Codec, FrameRow
from tritone.pipelines.qwen3_omni.frame_buffers import FrameBuffers
from tritone.pipelines.qwen3_omni.frame_graph import GraphFrames, PlainProgram
from tritone.sampling import Sampling

DEVICE = "cuda:0"
SAMPLED = Sampling(temperature=0.9, top_k=50, repetition_penalty=1.05, seed=3)
RESIDUAL = Sampling(temperature=1.0, top_k=50, top_p=0.8)
REPLAYS, WARM_UPS = 40, 5


class Model:
    """The talker's parts in one dtype, and frames made by a program of a given class."""

    def __init__(self, folder: Path, dtype: torch.dtype, rows: int, context: int) -> None:
        config = OmniConfig.read(folder)
        weights: Any = DummyWeights(folder, DEVICE, torch.bfloat16)
        shape = DecoderConfig.from_hf(config.talker["text_config"], family="qwen3_moe")
        self.rows, self.hidden_size, self.dtype = rows, shape.hidden_size, dtype
        self.decoder = Decoder(
            shape,
            weights,
            slots=rows + 1,
            context_tokens=context,
            device=DEVICE,
            dtype=dtype,
            prefix="talker.model.",
            embedding="codec_embedding.weight",
            head="talker.codec_head.weight",
            cleared=True,
        )
        self.predictor = CodePredictor(
            config.talker["code_predictor_config"], weights, rows=rows, device=DEVICE, dtype=dtype
        )
        silenced = torch.zeros(shape.vocab_size, dtype=torch.bool, device=DEVICE)
        silenced[shape.vocab_size - RESERVED_CODEC_IDS :] = True
        self.codec = Codec(silenced, config.codec.eos, RESIDUAL)
        self.buffers = FrameBuffers.of(
            rows,
            rows,
            shape.hidden_size,
            shape.vocab_size,
            1 + self.predictor.num_residuals,
            self.decoder.device,
            dtype,
        )

    def frames(self, program: type[Any]) -> GraphFrames:
        made = program(self.buffers, self.decoder, self.predictor, self.codec)
        return GraphFrames(made, self.buffers, self.codec, slots=self.rows, overlaps=True)


def requests(model: Model, rows: int, place: int, seed: int = 0) -> list[FrameRow]:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    texts = torch.randn((rows, model.hidden_size), generator=generator, device=DEVICE).to(model.dtype)
    return [
        FrameRow(slot, place, None, texts[slot], True, SAMPLED, 9, (), bars_end=True, is_last=False)
        for slot in range(rows)
    ]


def milliseconds(replay: Any) -> float:
    """Median over REPLAYS."""
    for _ in range(WARM_UPS):
        replay()
    spans = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in spans)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--filled", type=int, default=512, help="keys of each slot")
    arguments = parser.parse_args(argv)
    sizes = [int(size) for size in arguments.rows.split(",")]
    began_s = time.monotonic()
    with torch.inference_mode():
        model = Model(arguments.folder, torch.bfloat16, max(sizes), arguments.context)
        model.decoder.cache.normal_()
        frames = model.frames(PlainProgram)
        print(f"loaded and captured in {time.monotonic() - began_s:.0f} s", flush=True)
        for rows in sizes:
            launched = requests(model, rows, arguments.filled)
            before = model.buffers.seen.clone()
            first = frames.launch(launched).frames()
            model.buffers.seen.copy_(before)
            again = frames.launch(launched).frames()
            spent = milliseconds(frames._replays[rows])
            print(f"plain rows {rows:2d}: {spent:.2f} ms, same again {(first == again).all()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
