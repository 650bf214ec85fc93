"""The draws of a frame, each with the embedding of the code that it gives.

    seeds, positions ─► Philox ─► Gumbel noise of all codebooks, once a frame
    scores ─► silenced, penalty ─► ÷ temperature ─► min-p ─► top-k ─► top-p ─► + noise ─► argmax
                  ─► code ─► its embedding ─► next input;  Σ embeddings ─► kept by slot

Noise and filters are those of `engines/sampler.py`. The k-th score, and the last one that top-p keeps, are
found by halving the range of floats until no other can lie there: nothing is sorted, and scores that tie
there all stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritone.engines.sampler import GREEDY_BELOW
from tritone.kernels.launch import start_next, wait_for_last
from tritone.kernels.noise import as_gumbel, words
from tritone.kernels.products import Products, cleared

NOT_A_NUMBER = -1  # in place of the first code of a frame for which scores were none
_LOWEST = tl.constexpr(-(2**31))
_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
_NOT_A_NUMBER = tl.constexpr(NOT_A_NUMBER)
_WORDS = 256  # blocks of four random words a program


@triton.jit
def _begin(text, spoken, slots, begins, x, stride, H: tl.constexpr, BH: tl.constexpr, START: tl.constexpr):
    row = tl.program_id(0)
    h = tl.arange(0, BH)
    inside = h < H
    start_next(START)
    wait_for_last(START)
    slot = tl.load(slots + row * stride)
    goes_on = (tl.load(begins + row * stride) == 0) & inside
    value = tl.load(text + row * H + h, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(spoken + slot * H + h, mask=goes_on, other=0.0).to(tl.float32)
    tl.store(x + row * H + h, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _noise(
    seed_low, seed_high, draws, noise, stride, first,
    V: tl.constexpr, CODEBOOKS: tl.constexpr, WORDS: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    row, codebook = tl.program_id(0), tl.program_id(1)
    block = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    start_next(START)
    wait_for_last(START)
    # Code 0 is drawn before its place is counted, the others after.
    position = tl.load(draws + row * stride) + (codebook > 0).to(tl.int32)
    low = tl.load(seed_low + row * stride)
    high = tl.load(seed_high + row * stride)
    w0, w1, w2, w3 = words(block, position, first + codebook, low, high)
    into = noise + (row * CODEBOOKS + codebook) * V
    for word in tl.static_range(4):
        if word == 0:
            bits = w0
        elif word == 1:
            bits = w1
        elif word == 2:
            bits = w2
        else:
            bits = w3
        tl.store(into + 4 * block + word, as_gumbel(bits).to(tl.float32), mask=4 * block + word < V)


@triton.jit
def _order(x):
    """int32 that compare as the floats do."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _number(order):
    """The float of such an int32."""
    return tl.where(order >= 0, order, order ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _likeliest(order, best, wanted):
    """Where to cut so that `wanted` numbers are kept, or as few more as tie there; best: the highest."""
    low, high = tl.cast(_LOWEST, tl.int64), best.to(tl.int64) + 1
    count = wanted + 1
    while (high - low > 1) & (count != wanted):
        middle = (low + high) >> 1
        some = tl.sum((order >= middle.to(tl.int32)).to(tl.int32))
        is_enough = some >= wanted
        low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
        count = tl.where(is_enough, some, count)
    return low.to(tl.int32)


@triton.jit
def _heaviest(order, mass, lowest, best, highest, share):
    """Where to cut so that just as many numbers are kept as it takes for a share of the mass.

    lowest, best: of those that have a mass, which is e to the power of a number less the highest.
    """
    low, high = lowest.to(tl.int64), best.to(tl.int64) + 1
    total = tl.sum(mass)
    wanted = total * share
    spare = total - wanted
    # What is spare is less than the lightest of those kept has: none of them can go.
    while (high - low > 1) & (spare >= tl.exp(_number(low.to(tl.int32)) - highest)):
        middle = (low + high) >> 1
        some = tl.sum(tl.where(order >= middle.to(tl.int32), mass, 0.0))
        is_enough = some >= wanted
        low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
        spare = tl.where(is_enough, some - wanted, spare)
    return low.to(tl.int32)


@triton.jit
def _draw(
    scores, noise, slots, temperatures, top_ks, top_ps, log_min_ps, penalties, bars_end, seen, silenced,
    frames, wrong, table, total, following, spoken, stride, codebook, end, top_k, top_p, noise_size,
    V: tl.constexpr, BV: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, CODEBOOKS: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    v, h = tl.arange(0, BV), tl.arange(0, BH)
    in_v, in_h = v < V, h < H
    start_next(START)
    wait_for_last(START)
    slot = tl.load(slots + row * stride)
    x = tl.load(scores + row * V + v, mask=in_v, other=float("-inf"))
    # Asked for early: it comes while the scores are searched.
    chance = tl.load(noise + (row * CODEBOOKS + codebook) * noise_size + v, mask=in_v, other=0.0)
    bad = tl.max((x != x).to(tl.int32))
    if FIRST:
        said = tl.load(seen + slot * V + v, mask=in_v, other=0)
        penalty = tl.load(penalties + row * stride)
        x = tl.where(said > 0, tl.where(x > 0, x / penalty, x * penalty), x)
        barred = (v == end) & (tl.load(bars_end + row * stride) > 0)
        mute = (tl.load(silenced + v, mask=in_v, other=1) > 0) | barred
        x = tl.where(mute, float("-inf"), x)
        top_k = tl.load(top_ks + row * stride)
        top_p = tl.load(top_ps + row * stride)
    else:
        bad = bad | tl.load(wrong + row)
        before = tl.load(total + row * H + h, mask=in_h, other=0.0)
    temperature = tl.load(temperatures + row * stride)
    greedy = temperature < _GREEDY_BELOW
    x = x / tl.where(greedy, 1.0, temperature)
    best = tl.max(x)
    if FIRST:
        x = tl.where(x < best + tl.load(log_min_ps + row * stride), float("-inf"), x)
    if greedy:
        code = tl.argmax(x, 0)
    else:
        order = _order(x)
        first = _order(best)
        cut = _likeliest(order, first, top_k)
        if top_p < 1.0:
            mass = tl.where(order >= cut, tl.exp(x - best), 0.0)
            cut = _heaviest(order, mass, cut, first, best, top_p)
        kept = (order >= cut) & (x > float("-inf"))
        code = tl.argmax(tl.where(kept, x + chance, float("-inf")), 0)
    code = tl.minimum(tl.maximum(code, 0), V - 1)  # without numbers there is no telling what it is
    tl.store(wrong + row, bad)
    tl.store(frames + row * CODEBOOKS + codebook, code)
    if FIRST:
        tl.store(seen + slot * V + code, 1)
    embedded = tl.load(table + code * H + h, mask=in_h, other=0.0)
    sums = embedded.to(tl.float32)
    if not FIRST:
        sums += before
    if LAST:
        tl.store(spoken + slot * H + h, sums.to(spoken.dtype.element_ty), mask=in_h)
        if bad != 0:
            tl.store(frames + row * CODEBOOKS, _NOT_A_NUMBER)
    else:
        tl.store(total + row * H + h, sums, mask=in_h)
        tl.store(following + row * H + h, embedded, mask=in_h)


@dataclass(frozen=True)
class DrawRows:
    """What rows ask for: columns, int32 or float32 [R], of one stride."""

    slots: Tensor
    draws: Tensor
    begins: Tensor
    bars_end: Tensor
    seed_low: Tensor
    seed_high: Tensor
    temperature: Tensor
    residual_temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    penalty: Tensor

    @property
    def stride(self) -> int:
        return self.slots.stride(0)


@dataclass(frozen=True)
class Drawing:
    """What all draws of a decoder share."""

    seen: Tensor  # bool [slots + 1, V]: code 0 of earlier frames
    silenced: Tensor  # bool [V]: never drawn as code 0
    spoken: Tensor  # [slots + 1, H]
    frames: Tensor  # int32 [R, codebooks]
    end: int  # the sign that `bars_end` bars
    first_codebook: int  # number of code 0 in the noise
    residual_top_k: int
    residual_top_p: float


class Draws:
    """Draws of up to `rows` rows."""

    def __init__(self, shared: Drawing, rows: int, products: Products) -> None:
        self._shared, self._products = shared, products
        codebooks, hidden = shared.frames.shape[1], shared.spoken.shape[1]
        self._codebooks, self._hidden = codebooks, hidden
        self._vocab = shared.seen.shape[1]
        like = shared.spoken
        self._noise = cleared(rows, codebooks, self._vocab, like=like, dtype=torch.float32)
        self._total = cleared(rows, hidden, like=like, dtype=torch.float32)
        self._wrong = cleared(rows, like=like, dtype=torch.int32)
        self._silenced = shared.silenced.to(torch.uint8)

    def begin(self, rows: DrawRows, text: Tensor, x: Tensor) -> None:
        """Make the noise of a frame, and its input x [R, H]: text [R, H] and what was spoken before."""
        launch, count = self._products.launch(), len(x)
        _noise[(count, self._codebooks, triton.cdiv(self._vocab, 4 * _WORDS))](
            rows.seed_low, rows.seed_high, rows.draws, self._noise, rows.stride, self._shared.first_codebook,
            self._vocab, self._codebooks, _WORDS, num_warps=4, **launch,
        )  # fmt: skip
        _begin[(count,)](
            text, self._shared.spoken, rows.slots, rows.begins, x, rows.stride, self._hidden,
            triton.next_power_of_2(self._hidden), num_warps=4, **launch,
        )  # fmt: skip

    def __call__(
        self, rows: DrawRows, scores: Tensor, codebook: int, table: Tensor, following: Tensor
    ) -> None:
        """Draw a codebook of the frame from scores float32 [R, V'].

        table: [V', H], embeddings of its codes. following: [R, H], gets those of the codes; after the last
        codebook the sum of all is in `spoken` instead.
        """
        shared, count, vocab = self._shared, *scores.shape
        is_first, is_last = codebook == 0, codebook == self._codebooks - 1
        _draw[(count,)](
            scores, self._noise, rows.slots, rows.temperature if is_first else rows.residual_temperature,
            rows.top_k, rows.top_p, rows.log_min_p, rows.penalty, rows.bars_end,
            shared.seen.view(torch.uint8), self._silenced, shared.frames, self._wrong, table, self._total,
            following, shared.spoken, rows.stride, codebook, shared.end,
            shared.residual_top_k or vocab, shared.residual_top_p, self._vocab,
            vocab, triton.next_power_of_2(vocab), self._hidden, triton.next_power_of_2(self._hidden),
            self._codebooks, is_first, is_last, num_warps=8, **self._products.launch(),
        )  # fmt: skip
