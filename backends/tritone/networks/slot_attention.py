"""Attention of a pass's rows over the cache of their slots, in two ways; each layer has its own cache.

    FilledAttention   of any spans, and over no more than is filled: a call for each block of equal neighbours
    WholeAttention    over the whole context: no shape and no launch depends on where the rows are

Both have `store`, keys and values of the rows into the cache, and then `attend`.

In shapes: N rows, D size of a head; a cache is [2, slots, kv_heads, context, D], the keys first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tritone.networks.spans import Block, Span, in_blocks
from tritone.networks.transfer import on_device


class FilledAttention:
    """Rows that lie span after span."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self._blocks = in_blocks(spans)
        # Rows of one block lie in a slice of the cache; others are put there one by one.
        self._places = _places(spans, device) if len(self._blocks) != 1 else None
        self._masks = [_causal_mask(block, device) for block in self._blocks]

    def turns(self, table: Tensor) -> Tensor:
        """What a table [context, 1, D] has for the places of the rows: [N, 1, D], or one row for all."""
        if self._places is not None:
            return table[self._places[1]]
        [block] = self._blocks
        mine = table[block.start : block.end]
        return mine if block.rows == 1 or block.slots == 1 else mine.repeat(block.slots, 1, 1)

    def store(self, key_value: Tensor, cache: Tensor) -> None:
        """Put keys with values [N, 2, kv_heads, D] into a layer's cache."""
        if self._places is not None:
            cache.permute(1, 3, 0, 2, 4)[self._places] = key_value
            return
        [block] = self._blocks
        into = cache[:, block.slot : block.slot + block.slots, :, block.start : block.end]
        into.copy_(key_value.view(block.slots, block.rows, *key_value.shape[1:]).permute(2, 0, 3, 1, 4))

    def attend(self, query: Tensor, cache: Tensor) -> Tensor:
        """Output [N, heads · D] of query [N, heads, D] over a layer's cache."""
        keys, values = cache.unbind(0)  # [slots, kv_heads, context, D]
        num_kv_heads, head_dim = keys.shape[1], keys.shape[3]
        out = torch.empty_like(query)
        first = 0
        for block, mask in zip(self._blocks, self._masks, strict=True):
            last = first + block.slots * block.rows
            filled = slice(block.slot, block.slot + block.slots), slice(None), slice(block.end)
            key, value = keys[filled], values[filled]
            if block.rows == 1:
                # The query heads that share a key head attend as that head's rows: no mask, no repeated keys.
                piece = query[first:last].view(block.slots, num_kv_heads, -1, head_dim)
                attended = F.scaled_dot_product_attention(piece, key, value)
                out[first:last] = attended.flatten(1, 2)
            else:
                piece = query[first:last].view(block.slots, block.rows, -1, head_dim)
                attended = F.scaled_dot_product_attention(
                    piece.transpose(1, 2), key, value, attn_mask=mask, enable_gqa=True
                )  # [slots, heads, rows, D]
                out[first:last] = attended.transpose(1, 2).flatten(0, 1)
            first = last
        return out.flatten(1)


class WholeAttention:
    """As many rows of each of P slots."""

    def __init__(self, slots: Tensor, places: Tensor, ends: Tensor, group: int, context_tokens: int) -> None:
        """On the device, int64: slots [P]; places [P, N / P], of their rows; ends [P], how many rows a slot
        has then. group: how many query heads share a key head.
        """
        self._slots, self._of_slot, self._group = slots, places.shape[1], group
        context = torch.arange(context_tokens, device=slots.device)
        self._unknown = (context >= ends.unsqueeze(1))[:, None, :, None]  # [P, 1, context, 1]
        # The query heads that share a key head attend as that head's rows.
        self._mask = (context <= places.unsqueeze(2)).repeat_interleave(group, dim=1).unsqueeze(1)
        self._places = slots.unsqueeze(1).expand_as(places).flatten(), places.flatten()

    def store(self, key_value: Tensor, cache: Tensor) -> None:
        """Put keys with values [N, 2, kv_heads, D] into a layer's cache."""
        cache.permute(1, 3, 0, 2, 4)[self._places] = key_value

    def attend(self, query: Tensor, cache: Tensor) -> Tensor:
        """Output [N, heads · D] of query [N, heads, D] over a layer's cache."""
        num_kv_heads, head_dim = cache.shape[2], cache.shape[4]
        # A weight of 0 does not silence what is not a number.
        key, value = cache[:, self._slots].masked_fill_(self._unknown, 0.0).unbind(0)
        shape = (len(self._slots), self._of_slot, num_kv_heads, self._group, head_dim)
        piece = query.reshape(shape).transpose(1, 2).flatten(2, 3)  # [P, kv_heads, rows · group, D]
        attended = F.scaled_dot_product_attention(piece, key, value, attn_mask=self._mask)
        attended = attended.reshape(len(self._slots), num_kv_heads, self._of_slot, -1).transpose(1, 2)
        return attended.reshape(len(query), -1)


def _places(spans: Sequence[Span], device: torch.device) -> tuple[Tensor, Tensor]:
    """Slot of every row and its place there, both int64 [N]."""
    slots = [span.slot for span in spans for _ in range(span.count)]
    places = [place for span in spans for place in range(span.start, span.end)]
    return on_device(slots, torch.int64, device), on_device(places, torch.int64, device)


def _causal_mask(block: Block, device: torch.device) -> Tensor | None:
    """Which tokens each row of a slot may see, bool [rows, end]; None for a single row: it sees them all."""
    if block.rows == 1:
        return None
    return torch.ones((block.rows, block.end), dtype=torch.bool, device=device).tril_(block.start)
