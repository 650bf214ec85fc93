"""What the engines of Qwen3-Omni's Code2Wav will hold in memory, without torch and without loading.

Exact terms are the very bytes of the tensors that an engine keeps. What a pass takes for a while, and what
CUDA graphs keep for it, is estimated from the shapes of its largest layers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tritone.engines.graph_memory import GRAPHS_SPARE_BYTES, MIB, buckets
from tritone.engines.memory import FILES_FACTOR, ITEM_BYTES, Ground, Term, product
from tritone.networks.waveform_config import MAX_BATCH_FRAMES, MAX_PASS_FRAMES
from tritone.networks.waveform_size import WaveformSize
from tritone.pipelines.qwen3_omni.sizes import OmniSizes, weights_term

if TYPE_CHECKING:
    from tritone.pipelines.qwen3_omni.code2wav import Code2WavOptions
    from tritone.pipelines.qwen3_omni.code2wav_exported import ExportedOptions

COPIES = 4  # of what streams remember, while a pass reads it
WIDENED = 12  # tensors as wide as the model, of all columns, that the wideners have at a time


def code2wav_terms(ground: Ground, options: Code2WavOptions) -> list[Term]:
    """What Code2Wav in torch holds on one device, in bytes."""
    sizes, item = OmniSizes.read(ground.checkpoint), ITEM_BYTES[options.dtype]
    size = sizes.code2wav
    graphs = ground.on_gpu and options.cuda_graphs
    states, how = product({"streams": options.max_streams + graphs, "of a state": size.state}, item)
    terms = [
        weights_term(ground, options, sizes, ("code2wav.",), size.held - size.stored),
        Term("stream states", states, how, lower="max_streams"),
        Term("tables", size.tables_bytes + size.turns * item, "positions and masks"),
    ]
    if not graphs:
        return [*terms, _wave_activations(size, item)]
    return [*terms, *_wave_graph_terms(size, item, options)]


def tensorrt_code2wav_terms(ground: Ground, options: ExportedOptions) -> list[Term]:
    """As `exported_code2wav_terms`, and on the GPU what a plan reads and writes.

    That is states of all rows of a pass, twice, beside them copies on their way from the pool and back, codes
    and samples.
    """
    size, item = OmniSizes.read(ground.checkpoint).code2wav, ITEM_BYTES["float32"]
    rows = buckets(1, options.max_streams)[-1]
    frames = min(MAX_BATCH_FRAMES, rows * MAX_PASS_FRAMES)
    passed = frames * (size.samples_per_frame + size.codebooks) + 4 * rows  # with counts, marks and ages
    return [
        *exported_code2wav_terms(ground, options),
        Term(
            "static buffers",
            (COPIES * rows * size.state + passed) * item,
            f"{COPIES} × {rows} states, codes and samples of {frames:,} frames",
            is_exact=False,
            lower="max_streams",
        ),
    ]


def exported_code2wav_terms(ground: Ground, options: ExportedOptions) -> list[Term]:
    """In float32. A file holds its weights as the decoder does, and a runtime may lay some out once more."""
    sizes, item = OmniSizes.read(ground.checkpoint), ITEM_BYTES["float32"]
    size, streams = sizes.code2wav, options.max_streams + 1  # one is of rows that fill a batch
    states, how = product({"streams": streams, "of a state": size.state}, item)
    return [
        Term(
            "weights",
            int(FILES_FACTOR * size.held * item),
            f"{size.held:,} by config.json × {item} B × {FILES_FACTOR}",
            is_exact=False,
        ),
        Term("stream states", states, how, lower="max_streams"),
        _wave_activations(size, item),
    ]


def _wave_activations(size: WaveformSize, item: int) -> Term:
    return Term(
        "activations",
        size.pass_elements * item,
        f"a pass of {MAX_BATCH_FRAMES:,} frames: 4 × {size.samples_per_frame:,} samples × "
        f"{size.last_channels} channels of each",
        is_exact=False,
    )


def _wave_graph_terms(size: WaveformSize, item: int, options: Code2WavOptions) -> list[Term]:
    """Of captured passes; with kernels their weights are laid out anew, beside those that are read."""
    spare = f"{GRAPHS_SPARE_BYTES // MIB} MiB"
    if not options.kernels:
        graphs = Term("CUDA graphs", GRAPHS_SPARE_BYTES, f"{spare} beside the activations", is_exact=False)
        return [_wave_activations(size, item), graphs]
    rows = buckets(1, options.max_streams)[-1]
    frames = min(MAX_BATCH_FRAMES, rows * MAX_PASS_FRAMES)
    between = 3 * size.between(rows, frames) * item
    told = (frames * (size.samples_per_frame + size.codebooks) + 3 * rows) * 4
    widened = WIDENED * frames * math.prod(size.ratios) * size.hidden
    computed = (COPIES * rows * size.state + widened + size.held) * item
    return [
        Term(
            "static buffers",
            between + told,
            f"3 × {frames:,} frames between convolutions, codes and samples",
            is_exact=False,
            lower="max_streams",
        ),
        Term(
            "CUDA graphs",
            computed + GRAPHS_SPARE_BYTES,
            f"{COPIES} × {rows} states, {frames:,} frames widened, weights, and {spare}",
            is_exact=False,
            lower="max_streams",
        ),
    ]
