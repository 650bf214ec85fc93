"""Gumbel noise of tokens, made where it is needed.

    seed, position, codebook, token ─► Philox ─► word ─► float64 ─► Gumbel

The noise is that of `engines/sampler.py`, bit for bit but for the last bits of a logarithm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.random import philox_impl

_BLOCKS = 256  # of four words each, a program
_TOKENS = 256  # a program
_NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def words(block, position, codebook, low, high):
    """The four words of blocks of four tokens; position and the rest: int32, numbers or tensors."""
    zero = block * 0
    return philox_impl(
        block.to(tl.uint32),
        (zero + position).to(tl.uint32),
        (zero + codebook).to(tl.uint32),
        zero.to(tl.uint32),
        (zero + low).to(tl.uint32, bitcast=True),
        (zero + high).to(tl.uint32, bitcast=True),
    )


@triton.jit
def as_gumbel(bits):
    """float64: float32 would round the largest uniforms to 1."""
    uniform = (bits.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    return -tl.log(-tl.log(uniform))


@triton.jit
def _of(tokens, seeds, positions, noise, K, BK: tl.constexpr):
    row = tl.program_id(0)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = k < K
    token = tl.load(tokens + row * K + k, mask=inside, other=0).to(tl.int32)
    low, high = tl.load(seeds + 2 * row), tl.load(seeds + 2 * row + 1)
    w0, w1, w2, w3 = words(token >> 2, tl.load(positions + row).to(tl.int32), 0, low, high)
    word = token & 3
    bits = tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))
    tl.store(noise + row * K + k, as_gumbel(bits), mask=inside)


@triton.jit
def _highest(scores, seeds, positions, best, where, V, BLOCKS: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    block = part * BLOCKS + tl.arange(0, BLOCKS)
    low, high = tl.load(seeds + 2 * row), tl.load(seeds + 2 * row + 1)
    w0, w1, w2, w3 = words(block, tl.load(positions + row).to(tl.int32), 0, low, high)
    highest = tl.full([BLOCKS], float("-inf"), tl.float64)
    token = tl.full([BLOCKS], _NO_TOKEN, tl.int32)
    for word in tl.static_range(4):
        if word == 0:
            bits = w0
        elif word == 1:
            bits = w1
        elif word == 2:
            bits = w2
        else:
            bits = w3
        here = 4 * block + word
        score = tl.load(scores + row.to(tl.int64) * V + here, mask=here < V, other=float("-inf"))
        value = score.to(tl.float64) + as_gumbel(bits)
        token = tl.where((value > highest) & (here < V), here, token)
        highest = tl.maximum(highest, value)
    top = tl.max(highest)
    found = tl.min(tl.where(highest == top, token, _NO_TOKEN))
    at = row * tl.num_programs(1) + part
    tl.store(best + at, top)
    tl.store(where + at, tl.minimum(found, V - 1).to(tl.int64))  # without numbers there is no telling


class KernelNoise:
    """As `PlainNoise` in engines/token_draw.py, in one launch each."""

    def of(self, tokens: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        rows, width = tokens.shape
        noise = torch.empty((rows, width), dtype=torch.float64, device=tokens.device)
        tile = min(_TOKENS, triton.next_power_of_2(width))
        _of[(rows, triton.cdiv(width, tile))](
            tokens.contiguous(), seeds.view(torch.int32), positions, noise, width, tile, num_warps=4
        )
        return noise

    def highest(self, scores: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        rows, vocabulary = scores.shape
        parts = triton.cdiv(vocabulary, 4 * _BLOCKS)
        best = torch.empty((rows, parts), dtype=torch.float64, device=scores.device)
        where = torch.empty((rows, parts), dtype=torch.int64, device=scores.device)
        _highest[(rows, parts)](
            scores.contiguous(), seeds.view(torch.int32), positions, best, where, vocabulary, _BLOCKS,
            num_warps=4,
        )  # fmt: skip
        return where.gather(1, best.argmax(1, keepdim=True)).squeeze(1)
