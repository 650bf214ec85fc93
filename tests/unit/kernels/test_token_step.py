"""A step of tokens in kernels is the one in plain torch; on a GPU, as CUDA graphs too."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tritone.engines.token_buffers import TokenBuffers, TokenRow
from tritone.engines.token_draw import TokenDraw
from tritone.engines.token_graph import PlainTokens, TokenGraphs
from tritone.engines.token_kernels import KernelTokens
from tritone.kernels.layers import can_run
from tritone.kernels.noise import KernelNoise
from tritone.networks.decoder import Decoder
from tritone.networks.spans import Span
from tritone.sampling import Sampling

from .tiny_decoder import CONFIG, RandomWeights

VOCABULARY, SLOTS, CONTEXT = CONFIG.vocab_size, 7, 40
FILLED = [5, 0, 17, 38, 1, 9, 30]  # rows of each slot; the next one stands behind them


@pytest.fixture
def decoder(device):
    """With rows in its slots."""
    made = Decoder(
        CONFIG,
        RandomWeights(CONFIG),
        slots=SLOTS + 1,
        context_tokens=CONTEXT,
        device=str(device),
        cleared=True,
    )
    spans = [Span(slot, 0, filled) for slot, filled in enumerate(FILLED) if filled]
    made.forward(made.embed([7 * i % VOCABULARY for i in range(sum(FILLED))]), spans)
    return made


def asked(count, **sampling):
    return [
        TokenRow(
            slot, FILLED[slot], FILLED[slot] + 0.5 * slot, 3 + slot, Sampling(**sampling), 50 + slot, False
        )
        for slot in range(count)
    ]


def graphs(decoder, kind, one_bucket=True, slots=SLOTS):
    buffers = TokenBuffers.of(8, SLOTS, VOCABULARY, decoder.device)
    draw = TokenDraw(buffers, (), KernelNoise())
    made = TokenGraphs(kind(buffers, decoder), buffers, draw, slots=slots, one_bucket=one_bucket)
    return made, buffers


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_kernels_compute_what_plain_torch_computes(decoder, rows):
    before = decoder.cache.clone()
    results = []
    for kind in (PlainTokens, KernelTokens):
        with torch.inference_mode():
            decoder.cache.copy_(before)
        steps, buffers = graphs(decoder, kind, slots=rows)  # the next slot is the spare one
        with torch.inference_mode():
            decoder.cache.copy_(before)
        drawn = steps.launch(asked(rows)).tokens()
        logits, cache = buffers.logits[:rows].clone(), decoder.cache[:, :, :rows].clone()
        # The next row is the token that was drawn: the host says nothing of it.
        again = [dataclasses.replace(row, place=row.place + 1, token=None) for row in asked(rows)]
        steps.launch([row for row in again if row.place < CONTEXT])
        results.append(([token for token, _ in drawn], logits, cache, buffers.logits[:1].clone()))
    (tokens, logits, cache, following), (mine, my_logits, my_cache, my_following) = results
    torch.testing.assert_close(my_logits, logits, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(my_cache, cache, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(my_following, following, atol=5e-5, rtol=5e-5)
    assert mine == tokens == logits.argmax(-1).tolist()


def test_they_draw_the_same_tokens(decoder):
    """Of all tokens, and of the likeliest, in one step."""
    before = decoder.cache.clone()
    rows = asked(7, temperature=1.0, seed=5)
    rows[::2] = asked(7, temperature=0.8, top_p=0.9, seed=5)[::2]
    drawn = []
    for kind in (PlainTokens, KernelTokens):
        steps, _ = graphs(decoder, kind)
        with torch.inference_mode():
            decoder.cache.copy_(before)
        drawn.append(steps.launch(rows).tokens())
    assert drawn[0] == drawn[1]


def test_a_row_that_only_fills_a_bucket_touches_no_slot(decoder):
    steps, _ = graphs(decoder, KernelTokens)
    before = decoder.cache.clone()
    steps.launch(asked(5)).tokens()
    for slot in (5, 6):
        assert torch.equal(decoder.cache[:, :, slot], before[:, :, slot])


def test_kernels_compute_no_decoder_with_biases_or_without_norms_of_heads():
    assert can_run(CONFIG)
    for change in (
        {"qkv_bias": True},
        {"output_bias": True},
        {"qk_norm": False},
        {"head_dim": 24},
        {"head_dim": 8},
    ):
        assert not can_run(dataclasses.replace(CONFIG, **change))


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no NVIDIA GPU")


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("kind", [PlainTokens, KernelTokens])
def test_a_replay_is_a_call_bit_by_bit_on_fresh_inputs(decoder, kind):
    steps, buffers = graphs(decoder, kind, one_bucket=False)
    for rows in (1, 2, 3, 7):
        before = decoder.cache.clone()
        launched = [
            dataclasses.replace(row, token=(31 * rows + row.slot) % VOCABULARY) for row in asked(rows)
        ]
        steps.launch(launched).tokens()
        replayed = (
            buffers.logits[:rows].clone(),
            decoder.cache[:, :, :rows].clone(),
            buffers.ids[:rows].clone(),
        )
        with torch.inference_mode():
            decoder.cache.copy_(before)
        steps._program(next(size for size in steps._buckets if size >= rows))
        called = (buffers.logits[:rows], decoder.cache[:, :, :rows], buffers.ids[:rows])
        assert all(torch.equal(one, other) for one, other in zip(replayed, called, strict=True))
