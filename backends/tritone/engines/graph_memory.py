"""In which sizes steps are captured, and what they hold in memory: from sizes alone and without torch.

sizes ─┬─► static buffers: the very bytes of the tensors (token_buffers.py, prompt_*.py)
       └─► graphs, kernels, draws: at most, from the shapes of their largest tensors
"""

from __future__ import annotations

from typing import NamedTuple

from tritone.engines.memory import Term
from tritone.kernels.tiles import TILE_NUMBERS, most_tiles, tile_rows
from tritone.networks.decoder_size import DecoderSize

SHORTEST_GRAPH = 16  # rows of a piece of a prompt in plain torch
FEWEST_PACKED = 128  # rows of pieces of prompts in kernels: fewer read nearly as many weights
PACKED_BYTES = 64  # of a row of a step, what the host says of it
SPLITS = 8  # sums that a kernel may leave to be added up, of a row
SCORES = 6  # tensors of a score for each row and token that draws may have at a time, two steps on their way
MIB = 1 << 20
GRAPHS_SPARE_BYTES = 128 * MIB  # that graphs take beyond what they compute in: nodes, kernels, fragments


def token_graph_terms(
    size: DecoderSize, *, slots: int, context_tokens: int, piece: int, item: int, kernels: bool
) -> list[Term]:
    """Beside weights, cache and tables. piece: rows of prompts in a step. kernels: not in plain torch."""
    kernels = kernels and size.fits_kernels
    rows, prompts = buckets(1, slots)[-1], PromptMemory.of(size, piece, slots, context_tokens, item, kernels)
    a_row = PACKED_BYTES + 4 * size.vocab + 4  # packed, logits, drawn
    a_slot = 8 + size.vocab  # the last token, and which were seen
    buffers = rows * a_row + (slots + 1) * a_slot + prompts.buffers
    copied = 0 if kernels else 4 * rows * size.kv_heads * context_tokens * size.head_dim
    passed = copied + size.pass_elements(rows, context_tokens)
    computed = prompts.computed + passed * item + (_kernel_bytes(size, rows, item) if kernels else 0)
    scores = SCORES * rows * size.vocab * 4
    return [
        Term(
            "static buffers",
            buffers,
            f"{rows} rows with {size.vocab:,} scores, {slots + 1} slots, {prompts.rows:,} rows of prompts",
            lower="max_slots",
        ),
        Term(
            "CUDA graphs",
            computed + scores + GRAPHS_SPARE_BYTES,
            f"a pass of {prompts.rows:,} rows of prompts and {rows} of answers, {SCORES} × {rows} × "
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


class PromptMemory(NamedTuple):
    """Bytes that graphs of pieces of prompts take."""

    rows: int  # of the largest graph
    buffers: int  # exact
    computed: int  # at most

    @classmethod
    def of(
        cls, size: DecoderSize, piece: int, slots: int, context_tokens: int, item: int, kernels: bool
    ) -> PromptMemory:
        """kernels: KernelPrompts; else PlainPrompts."""
        if not kernels:
            rows = buckets(SHORTEST_GRAPH, piece)[-1]
            # Rows, places int64, positions float32 [3]; slot and end.
            buffers = rows * (size.hidden * item + 8 + 3 * 4) + 2 * 8
            return cls(rows, buffers, size.pass_elements(rows, context_tokens) * item)
        rows = buckets(FEWEST_PACKED, piece)[-1]
        tiles = most_tiles(rows, slots, tile_rows(size.heads // size.kv_heads))
        # Rows, slots and places int32, positions float32 [3]; tiles, and how many rows there are.
        buffers = rows * (size.hidden * item + 2 * 4 + 3 * 4) + TILE_NUMBERS * 4 * tiles + 4
        return cls(rows, buffers, rows * _packed_row_bytes(size, item))


def _packed_row_bytes(size: DecoderSize, item: int) -> int:
    """Of what a pass keeps for a row (prompt_kernels.py, kernels/grouped_experts.py, prompt_attention.py)."""
    heads = 3 * size.heads + 2 * size.kv_heads  # qkv, queries, attended
    a_row = (3 * size.hidden + heads * size.head_dim) * item + 6 * size.head_dim * 4
    a_choice = (size.expert_inner + size.hidden) * item + 4 * 16  # chosen, its share, as sorted
    dense = 4 * size.inner * item if size.mixed_layers < size.layers else 0
    return a_row + _choices(size) * a_choice + dense


def _kernel_bytes(size: DecoderSize, rows: int, item: int) -> int:
    """Of what kernels keep between them (kernels/layers.py, kernels/experts.py)."""
    heads = size.heads + 2 * size.kv_heads
    a_row = (SPLITS + _choices(size)) * size.hidden * 4 + (6 * size.hidden + 2 * heads * size.head_dim) * item
    a_row += max(size.inner, size.expert_inner) * item + SPLITS * size.heads * size.head_dim * 4
    experts = size.experts * buckets(16, rows)[-1] * size.expert_inner * item
    return rows * a_row + experts


def _choices(size: DecoderSize) -> int:
    """Experts that a row goes through, the one of all rows in as many pieces as it is stored in."""
    pieces = -(-size.shared_inner // size.expert_inner) if size.shared_inner else 0
    return size.chosen + pieces
