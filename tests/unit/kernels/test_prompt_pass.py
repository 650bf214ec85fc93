"""Pieces of several prompts in one pass of kernels leave the keys and values that `forward` leaves."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from tritone.engines.graph_memory import PromptMemory
from tritone.engines.prompt_graph import PlainPrompts, prompt_graphs
from tritone.engines.prompt_kernels import KernelPrompts
from tritone.kernels.grouped_experts import GroupedExperts
from tritone.kernels.prompt_attention import tiles_of
from tritone.networks.decoder_size import DecoderSize
from tritone.networks.layer_weights import ExpertWeights
from tritone.networks.spans import Span

from .test_kernel_experts import CHOSEN, EXPERTS, HIDDEN, INNER, PIECES, output
from .test_token_step import CONFIG, CONTEXT, FILLED, GPU, SLOTS, VOCABULARY, decoder

__all__ = ["decoder"]

SPANS = [Span(1, 0, 33), Span(5, 9, 1), Span(0, 5, 17), Span(3, 38, 1), Span(2, 17, 5)]


def rows_of(decoder, spans):
    count = sum(span.count for span in spans)
    return decoder.embed([(11 * i + 3) % VOCABULARY for i in range(count)])


def positions_of(spans):
    """Times, heights and widths that differ."""
    places = torch.cat([torch.arange(span.start, span.end) for span in spans]).float()
    return torch.stack((places, places + 0.5, 2 * places))


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize(
    ("spans", "given"), [(SPANS, True), (SPANS[2:3], False)], ids=["several, positions", "one, places"]
)
def test_the_cache_is_that_of_a_forward_pass(decoder, spans, given):
    before, positions = decoder.cache.clone(), positions_of(spans) if given else None
    rows = rows_of(decoder, spans)
    caches = []
    for kind in (None, PlainPrompts, KernelPrompts):
        made = kind and (
            PlainPrompts(decoder, 64) if kind is PlainPrompts else KernelPrompts(decoder, 64, slots=SLOTS)
        )
        with torch.inference_mode():
            decoder.cache.copy_(before)
        if made is None:
            decoder.forward(rows.clone(), spans, positions=positions)
        else:
            made.read(rows.clone(), spans, positions)
        caches.append(decoder.cache[:, :, :SLOTS].clone())
    expected, plain, packed = caches
    for found in (plain, packed):
        for span in spans:
            some = (slice(None), slice(None), span.slot, slice(None), slice(0, span.end))
            torch.testing.assert_close(found[some], expected[some], atol=2e-5, rtol=2e-5)
    untouched = before[:, :, :SLOTS].clone()
    for span in spans:
        packed[:, :, span.slot, :, span.start : span.end] = 0
        untouched[:, :, span.slot, :, span.start : span.end] = 0
    assert torch.equal(packed, untouched), "no other row is touched"


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("tap", [0, 1, 2, 3, None])
def test_media_bring_more_and_leave_more(decoder, noise, tap):
    """Features behind the first layers, and hidden states of one."""
    spans = SPANS[1:]
    before, rows = decoder.cache.clone(), rows_of(decoder, spans)
    places = torch.tensor([2, 5, 20], device=decoder.device)
    additions = [(places, noise(3, CONFIG.hidden_size)) for _ in range(2)]
    made = KernelPrompts(decoder, 64, slots=SLOTS)
    results = []
    for run in (PlainPrompts.run, KernelPrompts.run):
        with torch.inference_mode():
            decoder.cache.copy_(before)
        tapped = run(made, rows.clone(), spans, positions_of(spans), additions, tap)
        results.append((decoder.cache[:, :, :SLOTS].clone(), tapped))
    (cache, tapped), (my_cache, my_tapped) = results
    torch.testing.assert_close(my_cache, cache, atol=5e-5, rtol=5e-5)
    if tap is None:
        assert tapped is None and my_tapped is None
    else:
        torch.testing.assert_close(my_tapped, tapped, atol=5e-5, rtol=5e-5)


@pytest.mark.usefixtures("few_rows")
def test_what_a_pass_leaves_behind_reaches_no_later_one(decoder):
    made, spans = KernelPrompts(decoder, 64, slots=SLOTS), [Span(1, 0, 3)]
    rows = rows_of(decoder, spans)
    made.read(rows, spans, None)
    expected = decoder.cache[:, :, 1, :, :3].clone()
    made.read(rows_of(decoder, SPANS[1:]) * float("nan"), SPANS[1:], None)
    made.read(rows, spans, None)
    assert torch.equal(decoder.cache[:, :, 1, :, :3], expected)


def test_its_buffers_take_what_is_planned(decoder):
    made = KernelPrompts(decoder, 200, slots=SLOTS)
    size = DecoderSize.from_hf(
        {
            "model_type": "qwen3_moe",
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
        }
    )
    assert size.fits_kernels
    planned = PromptMemory.of(size, 200, SLOTS, CONTEXT, item=4, kernels=True)
    read = (made._rows, made._count, made._where, made._tiles, made._positions)
    assert (planned.rows, planned.buffers) == (256, sum(tensor.nbytes for tensor in read))
    attention, experts = made._attention, made._experts
    computed = (made._x, made._normed, made._qkv, made._attended, attention._queries)
    chosen = (experts._chosen, experts._shares, experts._inners, experts._parts)
    held = sum(tensor.nbytes for tensor in (*computed, *chosen))
    assert held <= planned.computed <= 2 * held


def test_tiles_are_rows_of_one_slot():
    tiles = tiles_of([Span(4, 2, 5), Span(1, 0, 2)], 3, 4)
    assert tiles.tolist() == [[0, 3, 4, 2], [3, 2, 4, 5], [5, 2, 1, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("shared", [True, False])
def test_experts_of_many_rows_are_sums_over_those_that_were_chosen(noise, device, shared):
    """Some are chosen by no row, and one by more than a tile holds."""
    router = noise(EXPERTS, HIDDEN)
    router[3] *= 4
    weights = ExpertWeights(
        router,
        noise(EXPERTS + PIECES * shared, 2 * INNER, HIDDEN, scale=HIDDEN**-0.5),
        noise(EXPERTS + PIECES * shared, HIDDEN, INNER, scale=INNER**-0.5),
        noise(1, HIDDEN) if shared else None,
        CHOSEN,
        renormalise=shared,
    )
    rows, count = 70, 51
    x, norm = noise(rows, HIDDEN), noise(HIDDEN)
    normed = F.rms_norm(x, (HIDDEN,), norm, 1e-6)
    made = GroupedExperts(weights, 128)(
        normed, weights, torch.tensor([count], dtype=torch.int32, device=device)
    )
    parts = made.values[: made.count * rows * HIDDEN].view(made.count, rows, HIDDEN)
    sums = parts.double().sum(0)
    torch.testing.assert_close(sums[:count], output(x, norm, weights)[:count], atol=2e-5, rtol=2e-5)
    assert (sums[count:] == 0).all(), "what only fills a graph is left alone"


def test_kernels_are_taken_where_they_compute_the_decoder(decoder):
    def kind(config):
        decoder.config = config
        return type(prompt_graphs(decoder, 16, slots=SLOTS, kernels=True, one_bucket=True))

    assert kind(CONFIG) is KernelPrompts
    assert type(prompt_graphs(decoder, 16, slots=SLOTS, kernels=False, one_bucket=False)) is PlainPrompts
    assert kind(dataclasses.replace(CONFIG, output_bias=True)) is PlainPrompts


@pytest.mark.gpu
@GPU
def test_a_replay_is_a_call_bit_by_bit(decoder):
    made = KernelPrompts(decoder, 128, slots=SLOTS)
    before = decoder.cache.clone()
    made.read(rows_of(decoder, SPANS), SPANS, None)
    replayed = decoder.cache.clone()
    with torch.inference_mode():
        decoder.cache.copy_(before)
    made._program(128)
    assert torch.equal(decoder.cache, replayed)
    assert max(FILLED) < CONTEXT
