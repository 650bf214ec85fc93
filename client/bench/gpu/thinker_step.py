"""Time of a thinker's step as one CUDA graph, at the sizes of a config.json, with random weights.

    python client/bench/gpu/thinker_step.py DIR --rows 1,4,16,64
    python client/bench/gpu/thinker_step.py DIR --tiles
    python client/bench/gpu/thinker_step.py --tiny

DIR holds the config.json of a full-size model (`build/qwen3_omni_real_size.py DIR` writes one). First, with
FEW_LAYERS layers, how far logits are from those of float32, of the kernels and of plain torch, and whether a
replay gives bit by bit what a call gives. Then, with all of them, milliseconds a step by CUDA events (median)
of each program: kernels (as the product chooses, and with the experts by pair or each active one with all
rows), a graph in plain torch, and operation by operation; beside them the floor, the bytes that these rows
must read over the bandwidth. --tiles times other tiles than those of kernels/tiles.py, in FEW_LAYERS layers,
and prints what would go into its MEASURED. --tiny runs it at toy size, on a CPU in Triton's interpreter.

Exit status 1 if a replay differs, or if the kernels are too far off.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of a kernel

from timing import milliseconds  # noqa: E402
from tritone.checkpoint import read_config  # noqa: E402
from tritone.engines.token_buffers import TokenBuffers, TokenRow  # noqa: E402
from tritone.engines.token_draw import PlainNoise, TokenDraw  # noqa: E402
from tritone.engines.token_graph import PlainTokens, TokenGraphs  # noqa: E402
from tritone.networks import experts as plain_experts  # noqa: E402
from tritone.networks.decoder import Decoder  # noqa: E402
from tritone.networks.decoder_config import DecoderConfig  # noqa: E402
from tritone.networks.spans import Span  # noqa: E402
from tritone.sampling import Sampling  # noqa: E402

BANDWIDTH = 4.8e12  # bytes a second, of an H200
FEW_LAYERS = 8  # as many as fit in float32 beside bfloat16
FURTHEST = 1.5  # times as far from float32 as plain torch is, over all sizes, kernels fail
TINY = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
    "max_position_embeddings": 4096,
}


class NoiseWeights:
    """Random weights of unit gain, of any name that a decoder asks for; the same name, the same numbers."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        assert config.experts is not None
        hidden, inner, expert = config.hidden_size, config.intermediate_size, config.experts.intermediate
        number, size = config.experts.num_experts, config.head_dim
        self._dtype = dtype
        self._shapes = {
            "embed_tokens": (config.vocab_size, hidden),
            "lm_head": (config.vocab_size, hidden),
            "q_proj": (config.num_heads * size, hidden),
            "k_proj": (config.num_kv_heads * size, hidden),
            "v_proj": (config.num_kv_heads * size, hidden),
            "o_proj": (hidden, config.num_heads * size),
            "q_norm": (size,),
            "k_norm": (size,),
            "gate": (number, hidden),
            "experts.gate_up_proj": (number, 2 * expert, hidden),
            "experts.down_proj": (number, hidden, expert),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }
        self._norm = (hidden,)

    def __contains__(self, name: str) -> bool:
        return True

    def __getitem__(self, name: str) -> Tensor:
        parts = name.removesuffix(".weight").split(".")
        kind = ".".join(parts[-2:]) if parts[-2:-1] == ["experts"] else parts[-1]
        shape = self._shapes.get(kind, self._norm)
        random = torch.Generator(device=DEVICE).manual_seed(zlib.crc32(name.encode()))
        made = torch.randn(shape, generator=random, device=DEVICE, dtype=self._dtype)
        return made.mul_(shape[-1] ** -0.5) if len(shape) > 1 else made.mul_(0.1).add_(1.0)


class Model:
    """A decoder with keys in its slots, and steps through it by a program of a given class."""

    def __init__(
        self, config: DecoderConfig, dtype: torch.dtype, stored: torch.dtype, rows: int, context: int
    ) -> None:
        """stored: dtype that the weights are made in."""
        self.rows, self.filled = rows, context // 2
        weights: Any = NoiseWeights(config, stored)
        self.decoder = Decoder(
            config,
            weights,
            slots=rows + 1,
            context_tokens=context,
            device=DEVICE,
            dtype=dtype,
            cleared=True,
        )
        random = torch.Generator(device=DEVICE).manual_seed(1)
        for layer in self.decoder.cache:
            layer.copy_(torch.randn(layer.shape, generator=random, device=DEVICE, dtype=stored))
        self.buffers = TokenBuffers.of(rows, rows, config.vocab_size, self.decoder.device)

    def steps(self, program: type[Any], rows: int | None = None) -> TokenGraphs:
        """rows: capture the bucket of so many alone."""
        draw = TokenDraw(self.buffers, (), PlainNoise())
        made = program(self.buffers, self.decoder)
        return TokenGraphs(made, self.buffers, draw, slots=rows or self.rows, one_bucket=rows is not None)

    def asked(self, rows: int, seed: int = 0) -> list[TokenRow]:
        tokens = torch.randint(
            0, self.decoder.config.vocab_size, (rows,), generator=torch.Generator().manual_seed(seed)
        )
        return [
            TokenRow(slot, self.filled, None, token, Sampling(), self.filled + 1, bars_end=False)
            for slot, token in enumerate(tokens.tolist())
        ]

    def eagerly(self, rows: int) -> Tensor:
        """Logits [R, V], operation by operation."""
        asked = self.asked(rows)
        given = self.decoder.embed([row.token or 0 for row in asked])
        return self.decoder.logits(
            self.decoder.forward(given, [Span(row.slot, row.place) for row in asked]).hidden
        )


def floor(model: Model, rows: int) -> tuple[float, float]:
    """Milliseconds to read once what a step of these rows needs, and active experts a layer."""
    config, item = model.decoder.config, model.decoder.cache.element_size()
    active: list[int] = []
    route = plain_experts.MixtureOfExperts.route

    def noted(mixture: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen, shares = route(mixture, x)
        active.append(len(chosen.unique()))
        return chosen, shares

    plain_experts.MixtureOfExperts.route = noted  # type: ignore[method-assign]
    model.eagerly(rows)
    plain_experts.MixtureOfExperts.route = route  # type: ignore[method-assign]
    assert config.experts is not None
    heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    every_row = config.num_layers * (heads + config.experts.num_experts) * config.hidden_size
    head = config.vocab_size * config.hidden_size
    experts = sum(active) * 3 * config.hidden_size * config.experts.intermediate
    keys = 2 * config.num_layers * rows * config.num_kv_heads * config.head_dim * model.filled
    return 1e3 * (every_row + head + experts + keys) * item / BANDWIDTH, statistics.mean(active)


# -- correctness -------------------------------------------------------------------------------------------


def bucket_of(steps: TokenGraphs, rows: int) -> int:
    return next(size for size in steps._buckets if size >= rows)


def is_same(model: Model, steps: TokenGraphs, rows: int) -> bool:
    """Whether a replay gives bit by bit what a call gives, the cache too."""
    cache, buffers = model.decoder.cache, model.buffers
    place = (slice(None), slice(None), slice(0, rows), slice(None), model.filled)
    steps.launch(model.asked(rows, seed=7)).tokens()
    replayed = [buffers.logits[:rows].clone(), buffers.ids[:rows].clone(), cache[place].clone()]
    cache[place] = 0.0
    steps._program(bucket_of(steps, rows))
    called = [buffers.logits[:rows], buffers.ids[:rows], cache[place]]
    return all(torch.equal(one, other) for one, other in zip(replayed, called, strict=True))


def check(config: DecoderConfig, programs: Mapping[str, type[Any]], sizes: list[int], context: int) -> bool:
    """Whether all replays are calls and the kernels near enough, with a line for each."""
    dtype = torch.bfloat16 if DEVICE != "cpu" else torch.float32
    model, exact = (Model(config, kind, dtype, max(sizes), context) for kind in (dtype, torch.float32))
    good, worst = True, dict.fromkeys(programs, 0.0)
    made = {name: model.steps(program) for name, program in programs.items()}
    for rows in sizes:
        right, off = exact.eagerly(rows), {}
        for name, steps in made.items():
            same = is_same(model, steps, rows)
            steps.launch(model.asked(rows)).tokens()
            off[name] = float((model.buffers.logits[:rows] - right).norm() / right.norm())
            good &= same
            worst[name] = max(worst[name], off[name])
            print(f"{name:10} rows {rows:2d}: off by {off[name]:.2e}, replay equals call: {same}", flush=True)
    # A rounding may send a row to other experts: the worst of all sizes is held to the worst.
    return good and worst.get("kernels", 0.0) <= FURTHEST * max(worst.get("plain", 1.0), 1e-5)


# -- time --------------------------------------------------------------------------------------------------


def forced(pairs_an_expert: float, make: Callable[[], TokenGraphs]) -> TokenGraphs:
    """Steps whose experts go one way whatever the rows; two rows go by pair in any case."""
    from tritone.kernels import experts

    before, experts.PAIRS_AN_EXPERT = experts.PAIRS_AN_EXPERT, pairs_an_expert
    try:
        return make()
    finally:
        experts.PAIRS_AN_EXPERT = before


def table(model: Model, programs: Mapping[str, type[Any]], sizes: list[int]) -> None:
    """A row a number of rows: milliseconds of each program, and the floor."""
    times: dict[str, dict[int, float]] = {}
    made: dict[str, Callable[[], TokenGraphs]] = {}
    if "kernels" in programs:
        made["kernels"] = partial(model.steps, programs["kernels"])
        made["by pair"] = partial(forced, 1e9, made["kernels"])
        made["by expert"] = partial(forced, 0.0, made["kernels"])
    if "plain" in programs:
        made["plain"] = partial(model.steps, PlainTokens)
    for name, make in made.items():
        steps = make()
        times[name] = {rows: _replayed(model, steps, rows) for rows in sizes}
        del steps
    times["eager"] = {rows: milliseconds(lambda rows=rows: model.eagerly(rows), DEVICE) for rows in sizes}  # type: ignore[misc]
    print("rows  " + "".join(f"{name:>11}" for name in (*times, "floor", "times")) + "  experts a layer")
    for rows in sizes:
        least, active = floor(model, rows)
        best = min(times[name][rows] for name in times)
        cells = [*(times[name][rows] for name in times), least, best / least]
        print(f"{rows:4d}  " + "".join(f"{cell:11.2f}" for cell in cells) + f"  {active:.0f}", flush=True)


def _replayed(model: Model, steps: TokenGraphs, rows: int) -> float:
    steps.launch(model.asked(rows)).tokens()
    return milliseconds(steps._replays[bucket_of(steps, rows)], DEVICE)


# -- tiles -------------------------------------------------------------------------------------------------


def tiles(model: Model, program: type[Any], sizes: list[int]) -> None:
    """Lines for MEASURED: where another tile makes a whole step faster by a hundredth."""
    from tritone.kernels.tiles import MEASURED, Shape, Tile, height, tile_of

    config = model.decoder.config
    assert config.experts is not None
    hidden, expert = config.hidden_size, config.experts.intermediate
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    products = [
        ("gemm", hidden, qkv),
        ("gemm_parts", config.num_heads * config.head_dim, hidden),
        ("gemm", hidden, config.vocab_size),
        ("experts_up", hidden, expert),
        ("experts_down", expert, hidden),
    ]
    kind: Any
    for rows in (size for size in sizes if size > 2):
        for kind, inner, outer in products:
            shape, rule = Shape(kind, height(kind, rows), inner, outer), tile_of(kind, rows, inner, outer)
            found: list[tuple[float, Tile]] = []
            for width, depth, warps, stages in itertools.product((32, 64, 128), (64, 128), (4, 8), (3, 4)):
                splits = (1, 2, 4) if kind == "gemm_parts" else (1,)
                for split in splits:
                    tile = Tile(width, min(depth, rule.depth), warps, stages, split)
                    MEASURED[shape] = tile
                    try:
                        steps = model.steps(program, rows)
                        found.append((_replayed(model, steps, rows), tile))
                    except Exception as error:  # more shared memory than there is
                        print(f"# {shape} {tile}: {type(error).__name__}", flush=True)
            del MEASURED[shape]
            ruled = _replayed(model, model.steps(program, rows), rows)
            best, tile = min(found, key=lambda pair: pair[0])
            if best < 0.99 * ruled:
                MEASURED[shape] = tile
                print(f"    {shape!r}: {tile!r},  # {best:.3f} ms, the rule's {ruled:.3f}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR", nargs="?")
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--context", type=int, default=456, help="of each slot, half of it keys")
    parser.add_argument("--programs", default="kernels,plain")
    parser.add_argument("--tiles", action="store_true", help="look for faster tiles, for minutes")
    parser.add_argument("--tiny", action="store_true", help="at toy size, also on a CPU")
    arguments = parser.parse_args(argv)
    if not arguments.tiny and arguments.folder is None:
        parser.error("give DIR, or --tiny")
    given = TINY if arguments.tiny else read_config(arguments.folder)["thinker_config"]["text_config"]
    config = DecoderConfig.from_hf(given, family="qwen3_moe")
    few = replace(config, num_layers=min(FEW_LAYERS, config.num_layers))
    sizes = [int(size) for size in arguments.rows.split(",")]
    programs: dict[str, type[Any]] = {}
    if "kernels" in arguments.programs.split(","):
        from tritone.engines.token_kernels import KernelTokens

        programs["kernels"] = KernelTokens
    if "plain" in arguments.programs.split(","):
        programs["plain"] = PlainTokens
    dtype = torch.bfloat16 if DEVICE != "cpu" else torch.float32
    with torch.inference_mode():
        good = check(few, programs, sizes, arguments.context)
        if arguments.tiles:
            tiles(Model(few, dtype, dtype, max(sizes), arguments.context), programs["kernels"], sizes)
        else:
            table(Model(config, dtype, dtype, max(sizes), arguments.context), programs, sizes)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
