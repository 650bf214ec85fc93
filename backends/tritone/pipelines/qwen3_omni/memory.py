"""What the engines of Qwen3-Omni will hold in memory, stage by stage, without torch and without loading.

    config.json ─► sizes ─► elements of weights, as the safetensors headers have them or, for
                     │      `load_format: dummy`, by arithmetic
                     └────► KV cache, tables, states (exact); graphs, activations, media (at most)

Exact terms are the very bytes of the tensors that an engine keeps. What a pass takes for a while, and what
CUDA graphs keep for it, is estimated from the shapes of its largest layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tritone.checkpoint import read_config, released_elements
from tritone.engines.graph_memory import (
    GRAPHS_SPARE_BYTES,
    MIB,
    PACKED_BYTES,
    SPLITS,
    PromptMemory,
    buckets,
    token_graph_terms,
)
from tritone.engines.memory import FILES_FACTOR, ITEM_BYTES, Ground, Term, gpu_share, product
from tritone.networks.decoder_size import DecoderSize
from tritone.networks.waveform_config import MAX_BATCH_FRAMES, MAX_PASS_FRAMES
from tritone.networks.waveform_size import WaveformSize
from tritone.pipelines.qwen3_omni.config import OmniConfig

if TYPE_CHECKING:
    from tritone.pipelines.qwen3_omni.code2wav import Code2WavOptions
    from tritone.pipelines.qwen3_omni.code2wav_exported import ExportedOptions
    from tritone.pipelines.qwen3_omni.talker import TalkerOptions
    from tritone.pipelines.qwen3_omni.thinker import ThinkerOptions
    from tritone.pipelines.qwen3_omni.thinking import ThinkingOptions
    from tritone.pipelines.qwen3_omni.vllm_thinker import VllmThinkerOptions

COPIES = 4  # of what streams remember, while a pass reads it
WIDENED = 12  # tensors as wide as the model, of all columns, that the wideners have at a time
VLLM_SHARE = 0.9  # of a GPU, which vLLM fills when it is told nothing
VLLM_RESIZES = {  # engine_args after which weights or KV cache are of another size, or lie elsewhere
    *("quantization", "kv_cache_dtype", "kv_cache_memory_bytes"),
    *("cpu_offload_gb", "offload_backend", "hf_overrides"),
}


@dataclass(frozen=True)
class OmniSizes:
    """Elements of every part of a checkpoint, named by the beginning of its tensors' names."""

    config: OmniConfig

    @classmethod
    def read(cls, folder: Path) -> OmniSizes:
        return cls(OmniConfig.read(folder))

    @cached_property
    def thinker(self) -> DecoderSize:
        return DecoderSize.from_hf(self.config.thinker["text_config"])

    @cached_property
    def talker(self) -> DecoderSize:
        return DecoderSize.from_hf(self.config.talker["text_config"])

    @cached_property
    def predictor(self) -> DecoderSize:
        return DecoderSize.from_hf(self.config.talker["code_predictor_config"])

    @cached_property
    def code2wav(self) -> WaveformSize:
        return WaveformSize.from_hf(self.config.code2wav)

    @property
    def residuals(self) -> int:
        """Codes of a frame after the first."""
        return int(self.config.talker["code_predictor_config"]["num_code_groups"]) - 1

    def elements(self) -> dict[str, int]:
        """Of the weights in the files, by arithmetic."""
        thinker, talker, predictor = self.thinker, self.talker, self.predictor
        wide = thinker.hidden
        projection = wide * talker.inner + talker.inner + talker.inner * talker.hidden + talker.hidden
        return {
            "thinker.model.embed_tokens.": thinker.table,
            "thinker.model.": thinker.stored,
            "thinker.lm_head.": thinker.table,
            "thinker.audio_tower.": _audio_elements(self.config.thinker["audio_config"]),
            "thinker.visual.": _vision_elements(self.config.thinker["vision_config"]),
            "talker.model.codec_embedding.": talker.table,
            "talker.model.": talker.stored,
            "talker.codec_head.": talker.table,
            "talker.text_projection.": projection,
            "talker.hidden_projection.": projection,
            "talker.code_predictor.": predictor.stored + 2 * self.residuals * predictor.table,
            "code2wav.": self.code2wav.stored,
        }

    def found(self, folder: Path) -> dict[str, int]:
        """The same, as the headers of the files have it."""
        parts = dict.fromkeys(self.elements(), 0)
        by_length = sorted(parts, key=len, reverse=True)
        for name, elements in released_elements(folder).items():
            part = next((part for part in by_length if name.startswith(part)), None)
            if part is not None:
                parts[part] += elements
        return parts


def thinker_terms(ground: Ground, options: ThinkerOptions) -> list[Term]:
    graphs = ground.on_gpu and options.cuda_graphs
    terms = _common_thinker_terms(ground, options, graphs)
    if not graphs:
        return terms
    return terms + token_graph_terms(
        OmniSizes.read(ground.checkpoint).thinker,
        slots=options.max_slots,
        context_tokens=options.max_context_tokens,
        piece=options.prefill_chunk_tokens,
        item=ITEM_BYTES[options.dtype],
        kernels=options.kernels,
    )


def _common_thinker_terms(ground: Ground, options: ThinkingOptions, graphs: bool) -> list[Term]:
    """graphs: but for pieces of a prompt with media, rows run in graphs, which are counted elsewhere."""
    sizes, item = OmniSizes.read(ground.checkpoint), ITEM_BYTES[options.dtype]
    size, config = sizes.thinker, sizes.config.thinker
    rows = options.prefill_chunk_tokens
    how, scores = "with media", 0
    if not graphs:
        rows += options.max_slots
        how = f"and scores of {options.max_slots} × {size.vocab:,} in float32"
        scores = 6 * options.max_slots * size.vocab * 4
    return [
        _weights(ground, options, sizes, ("thinker.",), size.held - size.stored),
        _cache(size, options.max_slots + graphs, options.max_context_tokens, item),
        Term(
            "tables",
            size.turns_bytes(options.max_context_tokens, item) + _tower_tables(config),
            "positions of the decoder and of the media towers",
        ),
        Term(
            "activations",
            size.pass_elements(rows, options.max_context_tokens) * item + scores,
            f"a pass of {rows:,} rows, {how}",
            is_exact=False,
            lower="prefill_chunk_tokens",
        ),
        _media(config, options.max_context_tokens, item),
    ]


def vllm_thinker_terms(ground: Ground, options: VllmThinkerOptions) -> list[Term]:
    """On a GPU vLLM fills a share by itself; the towers, and what they compute in, lie beside it."""
    if not ground.on_gpu:
        return _common_thinker_terms(ground, options, graphs=False)
    sizes, config = OmniSizes.read(ground.checkpoint), OmniConfig.read(ground.checkpoint).thinker
    share = float(options.engine_args.get("gpu_memory_utilization", VLLM_SHARE))
    return [
        gpu_share(ground, share, _vllm_needs(ground, options, sizes)),
        _weights(ground, options, sizes, ("thinker.audio_tower.", "thinker.visual."), 0),
        Term("tables", _tower_tables(config), "positions of the media towers"),
        _media(config, options.max_context_tokens, ITEM_BYTES[options.dtype]),
    ]


def _vllm_needs(ground: Ground, options: VllmThinkerOptions, sizes: OmniSizes) -> tuple[Term, ...]:
    """Without which vLLM does not start on a GPU; nothing where its settings, or a quantised checkpoint, make
    weights or cache of another size than ours."""
    is_quantised = "quantization_config" in read_config(ground.checkpoint)
    if is_quantised or VLLM_RESIZES & options.engine_args.keys():
        return ()
    item, gpus = ITEM_BYTES[options.dtype], ground.num_gpus
    spread = min(gpus, sizes.thinker.kv_heads)  # a head of the cache is not divided
    weights = _weights(ground, options, sizes, ("thinker.model.", "thinker.lm_head."), 0)
    cache, how = product(sizes.thinker.cache(1, options.max_context_tokens), item)
    over = f", over {gpus} GPUs" if gpus > 1 else ""
    return (
        replace(weights, num_bytes=weights.num_bytes // gpus, how=weights.how + over),
        Term("KV cache of one context", cache // spread, f"{how}{over}", lower="max_context_tokens"),
    )


def talker_terms(ground: Ground, options: TalkerOptions) -> list[Term]:
    sizes, item = OmniSizes.read(ground.checkpoint), ITEM_BYTES[options.dtype]
    size, predictor = sizes.talker, sizes.predictor
    graphs = ground.on_gpu and options.cuda_graphs
    slots, context = options.max_slots + graphs, options.max_context_tokens
    frames = buckets(1, options.max_slots)[-1]
    more = size.held - size.stored + predictor.held - predictor.stored
    places = sizes.residuals + 2
    own, how = product(predictor.cache(frames, places), item)
    tables = size.turns_bytes(context, item) + predictor.turns_bytes(places, item)
    tables += size.vocab + 3 * size.hidden * item  # which ids are no codes, and rows that every prompt has
    terms = [
        _weights(ground, options, sizes, ("talker.", "thinker.model.embed_tokens."), more),
        _cache(size, slots, context, item),
        Term("code predictor's cache", own, how, lower="max_slots"),
        Term("tables", tables, "positions, and rows of every prompt"),
    ]
    if not graphs:
        rows = options.prefill_chunk_tokens + options.max_slots
        held = size.pass_elements(rows, context) * item
        return [*terms, Term("activations", held, f"a pass of {rows:,} rows", False, "prefill_chunk_tokens")]
    kernels = options.kernels and size.fits_kernels and predictor.fits_kernels
    prompts = PromptMemory.of(
        size,
        options.prefill_chunk_tokens,
        options.max_slots,
        context,
        item,
        options.kernels and size.fits_kernels,
    )
    buffers = _frame_buffers(sizes, frames, options.max_slots, item) + prompts.buffers
    copied = 0 if kernels else 4 * frames * size.kv_heads * context * size.head_dim
    held = prompts.computed + (copied + size.pass_elements(frames, context)) * item
    return [
        *terms,
        Term(
            "static buffers",
            buffers,
            f"of {frames} frames and {prompts.rows} rows of prompts",
            False,
            "max_slots",
        ),
        Term(
            "CUDA graphs",
            held + GRAPHS_SPARE_BYTES,
            f"a pass of {prompts.rows} rows and {frames} frames, and {GRAPHS_SPARE_BYTES // MIB} MiB",
            False,
            "prefill_chunk_tokens",
        ),
    ]


def code2wav_terms(ground: Ground, options: Code2WavOptions) -> list[Term]:
    sizes, item = OmniSizes.read(ground.checkpoint), ITEM_BYTES[options.dtype]
    size = sizes.code2wav
    graphs = ground.on_gpu and options.cuda_graphs
    states, how = product({"streams": options.max_streams + graphs, "of a state": size.state}, item)
    terms = [
        _weights(ground, options, sizes, ("code2wav.",), size.held - size.stored),
        Term("stream states", states, how, lower="max_streams"),
        Term("tables", size.tables_bytes + size.turns * item, "positions and masks"),
    ]
    if not graphs:
        return [*terms, _wave_activations(size, item)]
    return [*terms, *_wave_graph_terms(size, item, options)]


def tensorrt_code2wav_terms(ground: Ground, options: ExportedOptions) -> list[Term]:
    """The same, and on the GPU what a plan reads and writes: states of all rows of a pass, twice, beside them
    copies on their way from the pool and back, codes and samples."""
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


# -- terms that engines share ------------------------------------------------------------------------------


def _weights(ground: Ground, options: Any, sizes: OmniSizes, beginnings: tuple[str, ...], more: int) -> Term:
    """Of the parts with such names, each read in full; more: elements that are held beyond the files."""
    is_dummy = options.load_format == "dummy"
    parts = sizes.elements() if is_dummy else sizes.found(ground.checkpoint)
    stored = sum(count for part, count in parts.items() if part.startswith(beginnings))
    item = ITEM_BYTES[options.dtype]
    source = "config.json" if is_dummy else "the files"
    how = f"({stored:,} by {source} {more:+,} as laid out) × {item} B, {options.dtype}"
    return Term("weights", (stored + more) * item, how, lower="" if item == 2 else "dtype")


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


def _cache(size: DecoderSize, slots: int, context_tokens: int, item: int) -> Term:
    num_bytes, how = product(size.cache(slots, context_tokens), item)
    return Term("KV cache", num_bytes, how, lower="max_slots or max_context_tokens")


def _frame_buffers(sizes: OmniSizes, frames: int, slots: int, item: int) -> int:
    """Bytes of what a captured frame reads, writes and computes in (frame_buffers.py, frame_kernels.py)."""
    hidden, codes = sizes.talker.hidden, max(sizes.talker.vocab, sizes.predictor.vocab)
    a_frame = PACKED_BYTES + hidden * item + 4 * (1 + sizes.residuals)
    a_slot = hidden * item + sizes.talker.vocab
    scores = frames * codes * 4
    computed = 3 * frames * (SPLITS * hidden * 4 + (6 * hidden + 4 * sizes.talker.inner) * item)
    return frames * a_frame + (slots + 1) * a_slot + scores + computed


# -- what sees and hears -----------------------------------------------------------------------------------


def _audio_elements(config: Mapping[str, Any]) -> int:
    d, inner, channels = config["d_model"], config["encoder_ffn_dim"], config["downsample_hidden_size"]
    convolutions = 10 * channels + 2 * (9 * channels * channels + channels)
    widened = d * channels * (config["num_mel_bins"] // 8)
    layer = 4 * (d * d + d) + 2 * d * inner + inner + d + 4 * d
    ends = 2 * d + d * d + d + config["output_dim"] * (d + 1)
    return int(convolutions + widened + config["encoder_layers"] * layer + ends)


def _vision_elements(config: Mapping[str, Any]) -> int:
    h, inner, out = config["hidden_size"], config["intermediate_size"], config["out_hidden_size"]
    wide = h * config["spatial_merge_size"] ** 2
    block = 4 * h * h + 4 * h + 2 * h * inner + inner + h + 4 * h
    merger = wide * wide + wide + out * wide + out
    mergers = merger + 2 * h + len(config["deepstack_visual_indexes"]) * (merger + 2 * wide)
    begin = h * _patch_values(config) + h + config["num_position_embeddings"] * h
    return int(begin + config["depth"] * block + mergers)


def _patch_values(config: Mapping[str, Any]) -> int:
    return int(config["in_channels"] * config["temporal_patch_size"] * config["patch_size"] ** 2)


def _tower_tables(config: Mapping[str, Any]) -> int:
    """Bytes: places of the audio tower, and twice the frequencies of the vision tower, in float32."""
    audio, vision = config["audio_config"], config["vision_config"]
    frequencies = vision["hidden_size"] // vision["num_heads"] // 4
    return int(audio["max_source_positions"] * audio["d_model"] * 4 + 2 * frequencies * 4)


def _media(config: Mapping[str, Any], context_tokens: int, item: int) -> Term:
    """What a tower computes in for a request whose media fill the context; one request at a time."""
    audio, vision = config["audio_config"], config["vision_config"]
    patches = context_tokens * vision["spatial_merge_size"] ** 2
    features = len(vision["deepstack_visual_indexes"]) + 1
    a_patch = _patch_values(vision) + 8 * vision["hidden_size"] + 2 * vision["intermediate_size"]
    seen = patches * a_patch + context_tokens * features * vision["out_hidden_size"]
    seconds = -(-context_tokens // int(config["position_id_per_seconds"]))
    pieces = min(seconds, audio["conv_chunksize"])
    convolved = audio["downsample_hidden_size"] * audio["num_mel_bins"] // 2 * audio["n_window"]
    heard = 5 * pieces * convolved // 2
    heard += context_tokens * (8 * audio["d_model"] + 2 * audio["encoder_ffn_dim"])
    how = f"{patches:,} patches of pictures, or {seconds:,} s of sound, that fill the context"
    return Term("media", max(seen, heard) * item, how, is_exact=False, lower="max_context_tokens")
