"""Time of reading prompts as one CUDA graph, at the sizes of a config.json, with random weights.

    python client/bench/gpu/prompt_pass.py DIR --rows 107,428,1712
    python client/bench/gpu/prompt_pass.py DIR --stage talker --tiles
    python client/bench/gpu/prompt_pass.py --tiny

DIR holds the config.json of a full-size model (`build/qwen3_omni_real_size.py DIR` writes one). The rows are
those of prompts of --prompt rows each. First, with FEW_LAYERS layers, how far keys and values are from those
of float32, of the kernels and of plain torch. Then, with all of them, milliseconds by CUDA events (median) of
both ways; beside them the floor, the longer of what must be read over the bandwidth and what must be computed
over the rate, and what the kernels' time goes to. Plain torch reads one prompt after the other: its time is
that of two, times what there are. --tiles looks for faster tiles of experts, and prints what would go into
MEASURED of kernels/tiles.py. --tiny runs it at toy size, on a CPU in Triton's interpreter.

Exit status 1 if the kernels are too far off.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinker_step import BANDWIDTH, DEVICE, FEW_LAYERS, FURTHEST, TINY, NoiseWeights
from timing import milliseconds
from tritone.checkpoint import read_config
from tritone.engines.prompt_graph import PlainPrompts, PromptGraphs
from tritone.engines.prompt_kernels import KernelPrompts
from tritone.networks.decoder import Decoder
from tritone.networks.decoder_config import DecoderConfig
from tritone.networks.spans import Span

RATE = 989e12  # operations a second of dense products in bfloat16, of an H200
KINDS = {"experts up": "_up", "experts down": "_down", "attention": "_attend", "norms": "_norm_add"}


def decoder_of(config: DecoderConfig, dtype: torch.dtype, slots: int, context: int) -> Decoder:
    weights: Any = NoiseWeights(config, torch.bfloat16 if DEVICE != "cpu" else dtype)
    return Decoder(
        config, weights, slots=slots + 1, context_tokens=context, device=DEVICE, dtype=dtype, cleared=True
    )


def prompts_of(rows: int, prompt: int) -> list[Span]:
    """As many as make so many rows, the last one shorter."""
    return [Span(slot, 0, min(prompt, rows - first)) for slot, first in enumerate(range(0, rows, prompt))]


def rows_of(decoder: Decoder, rows: int) -> Tensor:
    random = torch.Generator().manual_seed(rows)
    return decoder.embed(torch.randint(0, decoder.config.vocab_size, (rows,), generator=random))


def floor(config: DecoderConfig, rows: int, item: int) -> float:
    """Milliseconds: every weight of the layers read once, or every product computed."""
    assert config.experts is not None
    heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    every = (heads + config.experts.num_experts) * config.hidden_size
    expert = 3 * config.hidden_size * config.experts.intermediate
    read = config.num_layers * (every + config.experts.num_experts * expert) * item / BANDWIDTH
    computed = 2 * rows * config.num_layers * (every + config.experts.num_chosen * expert) / RATE
    return 1e3 * max(read, computed)


def check(config: DecoderConfig, sizes: list[int], prompt: int, slots: int) -> bool:
    dtype = torch.bfloat16 if DEVICE != "cpu" else torch.float32
    caches: dict[str, dict[int, Tensor]] = {}
    for name, kind in (("exact", torch.float32), ("plain", dtype), ("kernels", dtype)):
        decoder = decoder_of(config, kind, slots, 2 * prompt)
        made = KernelPrompts(decoder, max(sizes), slots=slots) if name == "kernels" else None
        caches[name] = {}
        for rows in sizes:
            decoder.cache.zero_()
            spans = prompts_of(rows, prompt)
            if made is None:
                decoder.forward(rows_of(decoder, rows), spans)
            else:
                made.read(rows_of(decoder, rows), spans, None)
            caches[name][rows] = decoder.cache.float().cpu()
    worst = {"plain": 0.0, "kernels": 0.0}
    for rows in sizes:
        exact = caches["exact"][rows]
        off = {name: float((caches[name][rows] - exact).norm() / exact.norm()) for name in worst}
        worst = {name: max(far, off[name]) for name, far in worst.items()}
        print(
            f"rows {rows:5d}: off by {off['kernels']:.2e} in kernels, {off['plain']:.2e} in plain torch",
            flush=True,
        )
    return worst["kernels"] <= FURTHEST * max(worst["plain"], 1e-5)


def time_of(prompts: PromptGraphs, decoder: Decoder, spans: list[Span]) -> float:
    rows = rows_of(decoder, sum(span.count for span in spans))
    return milliseconds(lambda: prompts.read(rows, spans, None), DEVICE)


def shares(prompts: PromptGraphs, decoder: Decoder, spans: list[Span]) -> str:
    """What a pass spends its time on."""
    from torch.profiler import ProfilerActivity, profile

    rows = rows_of(decoder, sum(span.count for span in spans))
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        prompts.read(rows, spans, None)
        torch.cuda.synchronize()
    spent = dict.fromkeys((*KINDS, "the rest"), 0.0)
    for event in trace.key_averages():
        kind = next((kind for kind, name in KINDS.items() if event.key == name), "the rest")
        spent[kind] += event.self_device_time_total / 1e3
    named = ", ".join(f"{kind} {ms:.2f}" for kind, ms in spent.items())
    return f"{named} ms"


def table(config: DecoderConfig, sizes: list[int], prompt: int, slots: int) -> None:
    dtype = torch.bfloat16 if DEVICE != "cpu" else torch.float32
    decoder = decoder_of(config, dtype, slots, 2 * prompt)
    packed, plain = KernelPrompts(decoder, max(sizes), slots=slots), PlainPrompts(decoder, prompt)
    print(" rows    kernels      plain      floor      times")
    for rows in sizes:
        spans = prompts_of(rows, prompt)
        found = time_of(packed, decoder, spans)
        slow = time_of(plain, decoder, spans[:2]) * len(spans) / len(spans[:2])
        least = floor(config, rows, decoder.cache.element_size())
        print(f"{rows:5d}{found:11.2f}{slow:11.2f}{least:11.2f}{found / least:11.2f}", flush=True)
        if DEVICE != "cpu":
            print(f"      {shares(packed, decoder, spans)}", flush=True)


def tiles(config: DecoderConfig, sizes: list[int], prompt: int, slots: int) -> None:
    """Lines for MEASURED: where another tile makes a whole pass faster by a hundredth."""
    from tritone.kernels.tiles import MEASURED, Shape, Tile, height, tile_of

    assert config.experts is not None
    decoder = decoder_of(config, torch.bfloat16, slots, 2 * prompt)
    hidden, inner = config.hidden_size, config.experts.intermediate
    kinds: Any = (("grouped_up", hidden, inner), ("grouped_down", inner, hidden))
    for rows in sizes:
        an_expert = rows * config.experts.num_chosen // config.experts.num_experts
        for kind, k, n in kinds:
            shape, rule = Shape(kind, height(kind, an_expert), k, n), tile_of(kind, an_expert, k, n)
            spans, found = prompts_of(rows, prompt), []
            for width, depth, warps, stages in itertools.product(
                (32, 64, 128, 256), (32, 64, 128), (4, 8), (3, 4)
            ):
                MEASURED[shape] = tile = Tile(width, depth, warps, stages)
                try:
                    made = KernelPrompts(decoder, rows, slots=slots, one_bucket=True)
                    found.append((time_of(made, decoder, spans), tile))
                except Exception as error:  # more shared memory than there is
                    print(f"# {shape} {tile}: {type(error).__name__}", flush=True)
            if not found:
                continue
            MEASURED[shape] = rule
            ruled = time_of(KernelPrompts(decoder, rows, slots=slots, one_bucket=True), decoder, spans)
            best, tile = min(found, key=lambda pair: pair[0])
            if best < 0.99 * ruled:
                MEASURED[shape] = tile
                print(f"    {shape!r}: {tile!r},  # {best:.3f} ms, the rule's {ruled:.3f}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR", nargs="?")
    parser.add_argument("--rows", default="107,428,1712")
    parser.add_argument("--prompt", type=int, default=107, help="rows of each")
    parser.add_argument("--stage", choices=("thinker", "talker"), default="thinker")
    parser.add_argument("--tiles", action="store_true", help="look for faster tiles, for minutes")
    parser.add_argument("--tiny", action="store_true", help="at toy size, also on a CPU")
    arguments = parser.parse_args(argv)
    if not arguments.tiny and arguments.folder is None:
        parser.error("give DIR, or --tiny")
    given = (
        TINY if arguments.tiny else read_config(arguments.folder)[f"{arguments.stage}_config"]["text_config"]
    )
    config = DecoderConfig.from_hf(given, family="qwen3_moe")
    assert config.experts is not None
    # What all rows go through has its own weights in a file, and none here.
    config = replace(config, experts=replace(config.experts, shared_intermediate=0))
    few = replace(config, num_layers=min(FEW_LAYERS, config.num_layers))
    sizes = [int(size) for size in arguments.rows.split(",")]
    slots = -(-max(sizes) // arguments.prompt)
    with torch.inference_mode():
        good = check(few, sizes, arguments.prompt, slots)
        if arguments.tiles:
            tiles(few, sizes, arguments.prompt, slots)
        else:
            table(config, sizes, arguments.prompt, slots)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
