"""Frames of the talker in kernels are those in plain torch, frame by frame; on a GPU, as CUDA graphs too."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tritone.kernels.products import TWO_ROWS
from tritone.networks.decoder import Decoder
from tritone.networks.experts import ExpertsConfig
from tritone.networks.spans import Span
from tritone.pipelines.qwen3_omni.code_predictor import CodePredictor
from tritone.pipelines.qwen3_omni.frame import Codec
from tritone.pipelines.qwen3_omni.frame_buffers import FrameBuffers, pack, pack_spare
from tritone.pipelines.qwen3_omni.frame_graph import GraphFrames, PlainProgram
from tritone.pipelines.qwen3_omni.frame_kernels import KernelProgram
from tritone.pipelines.qwen3_omni.frame_row import FrameRow
from tritone.sampling import Sampling

from .tiny_decoder import CONFIG, RandomWeights

VOCABULARY, END, SLOTS, BUCKET, CONTEXT = 70, 66, 7, 8, 24
HIDDEN, HEAD = CONFIG.hidden_size, CONFIG.head_dim
HEADS, KEY_HEADS = 2, 1
CODES, RESIDUALS = 50, 2  # of the codebooks after the first, and how many there are
FILLED = [5, 1, 17, 3, 9, 2, 12]  # rows of each slot; the next one stands behind them
TALKER = replace(
    CONFIG,
    vocab_size=VOCABULARY,
    num_layers=2,
    num_heads=HEADS,
    num_kv_heads=KEY_HEADS,
    experts=ExpertsConfig(HIDDEN, 8, 2, 24, renormalise=True, shared_intermediate=40),
    dense_layers=frozenset(),
)
PREDICTOR = {
    "num_code_groups": 1 + RESIDUALS,
    "vocab_size": CODES,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": HEAD,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
}
GREEDY = Sampling(temperature=0.0, repetition_penalty=1.3)
SAMPLINGS = [  # of each slot
    GREEDY,
    Sampling(temperature=0.9, top_k=20, repetition_penalty=1.3, seed=(5 << 40) + 1),
    Sampling(temperature=2.0, seed=2),
    Sampling(temperature=0.8, min_p=0.05, seed=3),
    Sampling(temperature=1.2, top_p=0.7, seed=4),
    Sampling(temperature=1.0, top_k=9, top_p=0.9, repetition_penalty=2.0, seed=5),
    GREEDY,
]


def weights():
    """Of the talker, and of its predictor, whose heads and embeddings have the numbers of their codebooks."""
    return RandomWeights(TALKER, {str(number): (CODES, HIDDEN) for number in range(RESIDUALS)})


def talker(device, dtype=torch.float32):
    """What makes frames, with rows in its slots."""
    decoder = Decoder(
        TALKER,
        weights(),
        slots=SLOTS + 1,
        context_tokens=CONTEXT,
        device=str(device),
        dtype=dtype,
        cleared=True,
    )
    spans = [Span(slot, 0, filled) for slot, filled in enumerate(FILLED)]
    decoder.forward(decoder.embed([7 * i % VOCABULARY for i in range(sum(FILLED))]), spans)
    silenced = torch.arange(VOCABULARY, device=device) > END
    return SimpleNamespace(
        decoder=decoder,
        predictor=CodePredictor(PREDICTOR, weights(), rows=BUCKET, device=str(device), dtype=dtype),
        codec=Codec(silenced, END, Sampling(temperature=1.0, top_k=20, top_p=0.8)),
        buffers=FrameBuffers.of(BUCKET, SLOTS, HIDDEN, VOCABULARY, 1 + RESIDUALS, decoder.device, dtype),
    )


def state(parts):
    """What a frame leaves behind, of all slots but the spare one."""
    buffers = parts.buffers
    return parts.decoder.cache[:, :, :SLOTS], buffers.spoken[:SLOTS], buffers.seen[:SLOTS]


def asked(parts, rows, number=0, samplings=SAMPLINGS):
    """The rows of frame `number`, of slots in no order."""
    texts = torch.randn((SLOTS, HIDDEN), generator=torch.Generator().manual_seed(number))
    return [
        FrameRow(
            slot,
            place=FILLED[slot] + number,
            position=FILLED[slot] + number + 0.5 * slot,
            text=texts[slot].to(parts.buffers.text),
            begins=not number,
            sampling=samplings[slot],
            draws=number,
            drawn=(),
            bars_end=slot % 2 == 0,
            is_last=False,
        )
        for slot in [(3 * i + 1) % SLOTS for i in range(rows)]
    ]


@torch.inference_mode()
def call(parts, program, rows):
    """Make a frame of rows, without a graph and without others that fill a bucket; its codes."""
    packed = pack_spare(len(rows), SLOTS)
    pack(rows, parts.codec, VOCABULARY, packed)
    parts.buffers.packed[: len(rows)] = torch.from_numpy(packed)
    parts.buffers.text[: len(rows)] = torch.stack([row.text for row in rows])
    program(len(rows))
    return parts.buffers.frames[: len(rows)].tolist()


@pytest.mark.parametrize(
    ("rows", "frames", "samplings"),
    [(1, 3, [GREEDY] * SLOTS), (1, 3, SAMPLINGS), (3, 3, SAMPLINGS), (7, 2, SAMPLINGS)],
    ids=["1 greedy", "1", "3", "7"],
)
def test_kernels_compute_what_plain_torch_computes(device, rows, frames, samplings):
    assert 1 <= TWO_ROWS < 3, "more rows have other kernels"
    results = []
    for kind in (PlainProgram, KernelProgram):
        parts = talker(device)
        program = kind(parts.buffers, parts.decoder, parts.predictor, parts.codec)
        before = parts.decoder.cache.clone()
        codes = [call(parts, program, asked(parts, rows, number, samplings)) for number in range(frames)]
        results.append((codes, state(parts)))
    (codes, (cache, spoken, seen)), (my_codes, (my_cache, my_spoken, my_seen)) = results
    assert my_codes == codes
    torch.testing.assert_close(my_cache, cache, atol=5e-5, rtol=5e-5)
    torch.testing.assert_close(my_spoken, spoken, atol=5e-5, rtol=5e-5)
    assert torch.equal(my_seen, seen)
    # And in both it is what was to be made, where it was to be.
    heard = torch.zeros_like(seen)
    written = torch.zeros((SLOTS, CONTEXT), dtype=torch.bool, device=device)
    for i, row in enumerate(asked(parts, rows)):
        heard[row.slot, [frame[i][0] for frame in codes]] = True
        written[row.slot, row.place : row.place + frames] = True
        tables = [parts.decoder.embedding, *parts.predictor.embeddings]
        total = sum(table[code] for table, code in zip(tables, codes[-1][i], strict=True))
        torch.testing.assert_close(my_spoken[row.slot], total)
    assert torch.equal(my_seen, heard) and not my_seen[:, parts.codec.silenced].any()
    assert not my_seen[::2, END].any(), "it was barred"
    changed = (my_cache != before[:, :, :SLOTS]).transpose(2, 3).flatten(0, 2)
    assert torch.equal(changed.any(-1).any(0), written)


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no NVIDIA GPU")


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [PlainProgram, KernelProgram])
def test_a_replay_is_a_call_bit_by_bit(device, kind, dtype):
    assert_replays_are_calls(talker(device, dtype), kind, (1, 2, 3, 7))


def assert_replays_are_calls(parts, kind, sizes):
    program = kind(parts.buffers, parts.decoder, parts.predictor, parts.codec)
    frames = GraphFrames(program, parts.buffers, parts.codec, slots=SLOTS, overlaps=True)
    for number, rows in enumerate(sizes):  # always at other places, behind what the frame before has left
        before = [tensor.clone() for tensor in state(parts)]
        launched = asked(parts, rows, number)
        replayed = frames.launch(launched).frames()
        left = [tensor.clone() for tensor in state(parts)]
        assert not all(torch.equal(one, other) for one, other in zip(left, before, strict=True))
        with torch.inference_mode():
            for tensor, values in zip(state(parts), before, strict=True):
                tensor.copy_(values)
        frames._program(next(size for size in frames._buckets if size >= rows))
        assert parts.buffers.frames[:rows].tolist() == replayed.tolist()
        assert all(torch.equal(one, other) for one, other in zip(state(parts), left, strict=True))
