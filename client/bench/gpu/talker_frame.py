"""Time of a talker's frame as one CUDA graph, at the sizes of a config.json, with random weights.

    python client/bench/gpu/talker_frame.py DIR --rows 1,4,16,64

DIR holds the config.json of a full-size model (`build/qwen3_omni_real_size.py DIR` writes one). For each
program and number of rows: milliseconds a frame by CUDA events (median), whether a replay gives bit by bit
what a call gives and, with --exact, how far the scores are from those of float32. Exit status 1 if a replay
differs, or if the kernels are too far off.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from timing import milliseconds
from tritone.engines.static_draw import DrawSettings
from tritone.kernels.products import TWO_ROWS
from tritone.networks.decoder import Decoder
from tritone.networks.decoder_config import DecoderConfig
from tritone.networks.dummy_weights import DummyWeights
from tritone.pipelines.qwen3_omni.code_predictor import CodePredictor
from tritone.pipelines.qwen3_omni.config import RESERVED_CODEC_IDS, OmniConfig
from tritone.pipelines.qwen3_omni.frame import FIRST_CODEBOOK, Codec
from tritone.pipelines.qwen3_omni.frame_buffers import FrameBuffers
from tritone.pipelines.qwen3_omni.frame_graph import GraphFrames, PlainProgram
from tritone.pipelines.qwen3_omni.frame_kernels import KernelProgram
from tritone.pipelines.qwen3_omni.frame_row import FrameRow
from tritone.sampling import Sampling

DEVICE = "cuda:0"
SAMPLED = Sampling(temperature=0.9, top_k=50, repetition_penalty=1.05, seed=3)
RESIDUAL = Sampling(temperature=1.0, top_k=50, top_p=0.8)
FURTHEST = 1.5  # times as far from float32 as plain torch is, kernels fail
OUT_OF_QUESTION = -1e4  # a score that no noise makes up for


class Model:
    """The talker's parts in one dtype, and frames made by a program of a given class."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, rows: int, context: int, device: str = DEVICE
    ) -> None:
        config = OmniConfig.read(folder)
        weights: Any = DummyWeights(folder, device, torch.bfloat16)
        shape = DecoderConfig.from_hf(config.talker["text_config"], family="qwen3_moe")
        self.rows, self.hidden_size, self.dtype = rows, shape.hidden_size, dtype
        self.decoder = Decoder(
            shape,
            weights,
            slots=rows + 1,
            context_tokens=context,
            device=device,
            dtype=dtype,
            prefix="talker.model.",
            embedding="codec_embedding.weight",
            head="talker.codec_head.weight",
            cleared=True,
        )
        self.predictor = CodePredictor(
            config.talker["code_predictor_config"], weights, rows=rows, device=device, dtype=dtype
        )
        silenced = torch.zeros(shape.vocab_size, dtype=torch.bool, device=device)
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


def scored_kernels(
    program: KernelProgram, rows: int, codes: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Scores of a frame, of each codebook. codes: int [R, codebooks], to be taken whatever the scores are."""
    machine = program._few if rows <= TWO_ROWS or program._many is None else program._many
    score, scores = machine._score, []

    def noted(hidden: torch.Tensor, codebook: int) -> torch.Tensor:
        made = score(hidden, codebook)
        scores.append(made.clone())
        if codes is not None:
            made.fill_(OUT_OF_QUESTION).scatter_(1, codes[:rows, codebook, None].long(), 0.0)
        return made

    machine._score = noted  # type: ignore[method-assign]
    program(rows)
    machine._score = score  # type: ignore[method-assign]
    return scores


class ForcedProgram(PlainProgram):
    """Takes the codes that it is given, and notes the scores that it would have drawn from."""

    codes: torch.Tensor  # int32 [R, codebooks]

    def __call__(self, rows: int) -> None:
        self.scores: list[torch.Tensor] = []
        logits = self._decoder.logits

        def noted(hidden: torch.Tensor) -> torch.Tensor:
            self.scores.append(logits(hidden).float())
            return logits(hidden)

        self._decoder.logits = noted  # type: ignore[method-assign]
        super().__call__(rows)
        self._decoder.logits = logits  # type: ignore[method-assign]

    def _draw(
        self, logits: torch.Tensor, settings: DrawSettings, noise: torch.Tensor, codebook: int
    ) -> torch.Tensor:
        number = codebook - FIRST_CODEBOOK
        if number:
            self.scores.append(logits)
        return self.codes[: len(logits), number].long()


def state_of(model: Model) -> list[torch.Tensor]:
    return [model.decoder.cache, model.buffers.seen, model.buffers.spoken]


def compare(model: Model, exact: Model, program: KernelProgram, rows: int) -> tuple[str, bool]:
    """How far scores are from those of plain torch in float32, of the kernels and of plain torch; whether
    the kernels are near enough."""
    before = [tensor.clone() for tensor in state_of(model)]

    def reset() -> None:
        for tensor, saved in zip(state_of(model), before, strict=True):
            tensor.copy_(saved)

    made = scored_kernels(program, rows)
    codes = model.buffers.frames.clone()
    reset()
    results = []
    for some in (model, exact):
        if some is exact:
            for tensor, saved in zip(state_of(exact), before, strict=True):
                tensor.copy_(saved)
            exact.buffers.packed.copy_(model.buffers.packed)
            exact.buffers.text.copy_(model.buffers.text)
        forced = ForcedProgram(some.buffers, some.decoder, some.predictor, some.codec)
        forced.codes = codes
        forced(rows)
        results.append(forced.scores)
    reset()
    plain, right = results

    def error(scores: list[torch.Tensor], number: int) -> float:
        return float((scores[number] - right[number]).norm() / right[number].norm())

    def worst(scores: list[torch.Tensor]) -> float:
        return max(error(scores, number) for number in range(1, len(right)))

    near = error(made, 0) <= FURTHEST * error(plain, 0) and worst(made) <= FURTHEST * worst(plain)
    told = (
        f"scores against float32: code 0 {error(made, 0):.4f} (plain {error(plain, 0):.4f}), "
        f"worst residual {worst(made):.4f} (plain {worst(plain):.4f})"
    )
    return told, near


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--filled", type=int, default=512, help="keys of each slot")
    parser.add_argument("--programs", default="kernels,plain")
    parser.add_argument("--exact", action="store_true", help="compare with float32 too")
    arguments = parser.parse_args(argv)
    sizes = [int(size) for size in arguments.rows.split(",")]
    status = False
    programs: dict[str, Any] = {"kernels": KernelProgram, "plain": PlainProgram}
    with torch.inference_mode():
        model = Model(arguments.folder, torch.bfloat16, max(sizes), arguments.context)
        model.decoder.cache.normal_()
        exact = None
        if arguments.exact:
            exact = Model(arguments.folder, torch.float32, max(sizes), arguments.context)
        for name in arguments.programs.split(","):
            began_s = time.monotonic()
            frames = model.frames(programs[name])
            print(f"{name}: captured in {time.monotonic() - began_s:.0f} s", flush=True)
            for rows in sizes:
                launched = requests(model, rows, arguments.filled)
                before = [tensor.clone() for tensor in state_of(model)]
                replayed = frames.launch(launched).frames()
                spoken = model.buffers.spoken.clone()
                for tensor, saved in zip(state_of(model), before, strict=True):
                    tensor.copy_(saved)
                frames._program(rows)
                torch.cuda.synchronize()
                same = bool((model.buffers.frames[:rows].cpu().numpy() == replayed).all())
                same = same and torch.equal(spoken, model.buffers.spoken)
                spent = milliseconds(frames._replays[rows])
                print(f"{name} rows {rows:2d}: {spent:.2f} ms, replay equals call: {same}", flush=True)
                if exact is not None and name == "kernels":
                    frames.launch(launched).frames()
                    told, near = compare(model, exact, frames._program, rows)
                    print("   ", told, flush=True)
                    status |= not near
                status |= not same
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
