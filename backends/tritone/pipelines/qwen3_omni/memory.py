"""What the engines of Qwen3-Omni's Thinker and Talker will hold in memory, without torch and without loading.

    sizes ─► weights, KV cache, tables (exact); graphs, activations, media (at most)

Exact terms are the very bytes of the tensors that an engine keeps. What a pass takes for a while, and what
CUDA graphs keep for it, is estimated from the shapes of its largest layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tritone.checkpoint import read_config
from tritone.engines.graph_memory import (
    GRAPHS_SPARE_BYTES,
    MIB,
    PACKED_BYTES,
    SPLITS,
    PromptMemory,
    buckets,
    token_graph_terms,
)
from tritone.engines.memory import ITEM_BYTES, Ground, Term, gpu_share, product
from tritone.networks.decoder_size import DecoderSize
from tritone.pipelines.qwen3_omni.config import OmniConfig
from tritone.pipelines.qwen3_omni.sizes import OmniSizes, patch_values, weights_term

if TYPE_CHECKING:
    from tritone.pipelines.qwen3_omni.talker import TalkerOptions
    from tritone.pipelines.qwen3_omni.thinker import ThinkerOptions
    from tritone.pipelines.qwen3_omni.thinking import ThinkingOptions
    from tritone.pipelines.qwen3_omni.vllm_thinker import VllmThinkerOptions

VLLM_SHARE = 0.9  # of a GPU, which vLLM fills when it is told nothing
VLLM_RESIZES = {  # engine_args after which weights or KV cache are of another size, or lie elsewhere
    *("quantization", "kv_cache_dtype", "kv_cache_memory_bytes"),
    *("cpu_offload_gb", "offload_backend", "hf_overrides"),
}


def thinker_terms(ground: Ground, options: ThinkerOptions) -> list[Term]:
    """What the Thinker in torch holds on one device, in bytes."""
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
        weights_term(ground, options, sizes, ("thinker.",), size.held - size.stored),
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
        weights_term(ground, options, sizes, ("thinker.audio_tower.", "thinker.visual."), 0),
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
    weights = weights_term(ground, options, sizes, ("thinker.model.", "thinker.lm_head."), 0)
    cache, how = product(sizes.thinker.cache(1, options.max_context_tokens), item)
    over = f", over {gpus} GPUs" if gpus > 1 else ""
    return (
        replace(weights, num_bytes=weights.num_bytes // gpus, how=weights.how + over),
        Term("KV cache of one context", cache // spread, f"{how}{over}", lower="max_context_tokens"),
    )


def talker_terms(ground: Ground, options: TalkerOptions) -> list[Term]:
    """What the Talker holds on one device, in bytes."""
    sizes, item = OmniSizes.read(ground.checkpoint), ITEM_BYTES[options.dtype]
    size, predictor = sizes.talker, sizes.predictor
    graphs = ground.on_gpu and options.cuda_graphs
    slots, context = options.max_slots + graphs, options.max_context_tokens
    frames = buckets(1, options.max_slots)[-1]
    more = size.held - size.stored + predictor.held - predictor.stored
    places = sizes.residuals + 2
    own, how = product(predictor.cache(frames, places), item)
    tables = size.turns_bytes(context, item) + predictor.turns_bytes(places, item)
    tables += size.vocab + 2 * size.hidden * item  # which ids are no codes, and rows behind every text
    terms = [
        weights_term(ground, options, sizes, ("talker.", "thinker.model.embed_tokens."), more),
        _cache(size, slots, context, item),
        Term("code predictor's cache", own, how, lower="max_slots"),
        Term("tables", tables, "positions, and rows behind every text"),
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


# -- terms that engines share ------------------------------------------------------------------------------


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
    a_patch = patch_values(vision) + 8 * vision["hidden_size"] + 2 * vision["intermediate_size"]
    seen = patches * a_patch + context_tokens * features * vision["out_hidden_size"]
    seconds = -(-context_tokens // int(config["position_id_per_seconds"]))
    pieces = min(seconds, audio["conv_chunksize"])
    convolved = audio["downsample_hidden_size"] * audio["num_mel_bins"] // 2 * audio["n_window"]
    heard = 5 * pieces * convolved // 2
    heard += context_tokens * (8 * audio["d_model"] + 2 * audio["encoder_ffn_dim"])
    how = f"{patches:,} patches of pictures, or {seconds:,} s of sound, that fill the context"
    return Term("media", max(seen, heard) * item, how, is_exact=False, lower="max_context_tokens")
