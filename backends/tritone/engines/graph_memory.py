"""In which sizes steps are captured, and what they hold in memory: from sizes alone and without torch.

sizes ─┬─► static buffers: the very bytes of the tensors (token_buffers.py, prompt_graph.py)
       └─► graphs, kernels, draws: at most, from the shapes of their largest tensors
"""

from __future__ import annotations

from tritone.engines.memory import Term
from tritone.networks.decoder_size import DecoderSize

SHORTEST_GRAPH = 16  # rows of a piece of a prompt
PACKED_BYTES = 64  # of a row of a step, what the host says of it
SPLITS = 8  # sums that a kernel may leave to be added up, of a row
SCORES = 6  # tensors of a score for each row and token that draws may have at a time, two steps on their way
MIB = 1 << 20
GRAPHS_SPARE_BYTES = 128 * MIB  # that graphs take beyond what they compute in: nodes, kernels, fragments


def token_graph_terms(
    size: DecoderSize, *, slots: int, context_tokens: int, piece: int, item: int, kernels: bool
) -> list[Term]:
    """Beside weights, cache and tables. piece: rows of a prompt in a step. kernels: not in plain torch."""
    rows, longest = buckets(1, slots)[-1], buckets(SHORTEST_GRAPH, piece)[-1]
    a_row = PACKED_BYTES + 4 * size.vocab + 4  # packed, logits, drawn
    a_slot = 8 + size.vocab  # the last token, and which were seen
    buffers = rows * a_row + (slots + 1) * a_slot + prompt_buffer_bytes(size.hidden, longest, item)
    copied = 0 if kernels else 4 * rows * size.kv_heads * context_tokens * size.head_dim
    passed = max(
        size.pass_elements(longest, context_tokens), copied + size.pass_elements(rows, context_tokens)
    )
    computed = _kernel_bytes(size, rows, item) if kernels else 0
    scores = SCORES * rows * size.vocab * 4
    return [
        Term(
            "static buffers",
            buffers,
            f"{rows} rows with {size.vocab:,} scores, {slots + 1} slots, {longest:,} rows of a prompt",
            lower="max_slots",
        ),
        Term(
            "CUDA graphs",
            passed * item + computed + scores + GRAPHS_SPARE_BYTES,
            f"one pool: a pass of {longest:,} rows of a prompt or {rows} of answers, {SCORES} × {rows} × "
            f"{size.vocab:,} scores, and {GRAPHS_SPARE_BYTES // MIB} MiB",
            is_exact=False,
            lower="prefill_chunk_tokens or max_slots",
        ),
    ]


def buckets(first: int, most: int) -> list[int]:
    """Sizes to capture: first, 2 first, 4 first … up to one that holds `most`."""
    sizes = [first]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return sizes


def prompt_buffer_bytes(hidden: int, rows: int, item: int) -> int:
    """Of PromptGraphs: rows, places int64, positions float32 [3]; slot and end."""
    return rows * (hidden * item + 8 + 3 * 4) + 2 * 8


def _kernel_bytes(size: DecoderSize, rows: int, item: int) -> int:
    """Of what kernels keep between them (kernels/layers.py, kernels/experts.py)."""
    heads = size.heads + 2 * size.kv_heads
    a_row = 2 * SPLITS * size.hidden * 4 + (6 * size.hidden + 2 * heads * size.head_dim) * item
    a_row += max(size.inner, size.expert_inner) * item + SPLITS * size.heads * size.head_dim * 4
    experts = size.experts * buckets(16, rows)[-1] * size.expert_inner * item
    return rows * a_row + experts
