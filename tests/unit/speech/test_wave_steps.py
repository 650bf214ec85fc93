"""Passes of Code2Wav in fixed shapes: buckets, slots, spare rows, equal to the eager way."""

from __future__ import annotations

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tritone.deploy import Chunks  # noqa: E402
from tritone.engines.base import Chunk, Placement  # noqa: E402
from tritone.engines.cuda_graphs import CudaGraphs  # noqa: E402
from tritone.networks.waveform_size import WaveformSize  # noqa: E402
from tritone.pipelines.qwen3_omni.code2wav import Code2Wav, Code2WavOptions  # noqa: E402
from tritone.pipelines.qwen3_omni.wave_graph import GraphWaves  # noqa: E402
from tritone.pipelines.qwen3_omni.wave_steps import Batch, Buckets  # noqa: E402
from tritone.stream import sizes_of  # noqa: E402

from .test_qwen3_omni_code2wav import (  # noqa: E402
    CONFIG,
    MISSING,
    RATE,
    assert_only_the_first_ended,
    checkpoint,
    chunks_of,
    random_frames,
    reference,
    sound,
    whole,
)
from .test_waveform_decoder import one_thread  # noqa: E402

__all__ = ["checkpoint", "one_thread", "reference"]

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no NVIDIA GPU"),
]
CUDA = pytest.param(("cuda:0", False), marks=GPU)
CUDA_KERNELS = pytest.param(("cuda:0", True), marks=GPU)
HERE = "cuda:0" if torch.cuda.is_available() else "cpu"  # where kernels run
CHUNKS = (4, 8, 16, 25)


class Graphs(Code2Wav):
    """With graphs on a CPU too, where a graph is a call."""

    @staticmethod
    def _has_graphs(placement, options):
        return options.cuda_graphs


@pytest.fixture(scope="module", params=[("cpu", False), CUDA, CUDA_KERNELS], ids=str)
def engine(checkpoint, request):
    """In kernels only on a GPU: Triton's interpreter would take minutes for all of these tests."""
    device, kernels = request.param
    placement = Placement(checkpoint, device, max_batch_size=6, chunk_frames=CHUNKS)
    return Graphs(placement, Code2WavOptions(max_streams=8, kernels=kernels))


def test_buckets_come_from_batches_and_chunks():
    buckets = Buckets.of(6, (4, 8, 16, 25))
    assert (buckets.rows, buckets.frames) == ((1, 2, 4, 8), (4, 8, 16, 25))
    assert next(buckets.shapes()) == (8, 25)
    assert Buckets.of(1, (4,)) == Buckets((1,), (4,))
    assert Buckets.of(64, (10, 11, 12, 13, 300)).frames == (10, 100)
    assert Buckets.of(64, (24, 25)).frames == (25,)
    assert max(rows * frames for rows, frames in Buckets.of(64, (100,)).shapes()) <= 1600


@pytest.mark.parametrize(
    ("chunks", "sizes"),
    [
        (Chunks(), (4, 25)),
        (Chunks(codec_chunk_growth=2), (4, 8, 16, 25)),
        (Chunks(25, 25), (25,)),
        (Chunks(300, 25), (300, 25)),
        (Chunks(4, 25, codec_chunk_growth=1), (4,)),
        (Chunks(400, 10**9, codec_chunk_growth=1.5), (400, 600, 900, 1350)),
    ],
)
def test_sizes_of_chunks(chunks, sizes):
    assert sizes_of(chunks) == sizes


def test_parts_are_fitted_to_buckets():
    buckets = Buckets((1, 2, 4), (4, 25))
    assert buckets.fitted([3, 0, 25, 4, 5, 1, 2, 2]) == [
        Batch([0, 3, 5, 6], 4, 4),
        Batch([7], 1, 4),
        Batch([2, 4], 2, 25),
    ]
    assert buckets.fitted([0, 0]) == []
    assert Buckets.exact(3).fitted([7, 7, 9, 7, 7]) == [
        Batch([0, 1, 3], 3, 7),
        Batch([4], 1, 7),
        Batch([2], 1, 9),
    ]


@pytest.mark.parametrize("sizes", [[1] * 59, [4, 25, 25], [3, 1, 40, 2], []], ids=str)
def test_chunks_of_any_size_give_the_references_samples(engine, reference, sizes):
    frames = random_frames(60, 1)
    pcm = sound(engine, chunks_of("a", frames, sizes))
    assert pcm.shape == (60 * RATE - MISSING,) and pcm.dtype == np.float32
    np.testing.assert_allclose(pcm, whole(reference, frames), atol=1e-5)
    assert engine.stats()["active"] == 0


def test_streams_of_any_phase_share_a_batch(engine, reference):
    """More than there are slots, one after the other: a slot's next stream hears nothing of the last."""
    rng = random.Random(8)
    frames = {f"s{n}": random_frames(rng.randint(1, 90), n) for n in range(20)}
    waiting = {name: chunks_of(name, mine, [rng.randint(1, 30)] * 90) for name, mine in frames.items()}
    together = {name: [] for name in frames}
    while any(waiting.values()):
        names = [name for name, chunks in waiting.items() if chunks][:8]
        names = [name for name in names if rng.random() < 0.6]
        for name, answer in zip(names, engine.run([waiting[name].pop(0) for name in names]), strict=True):
            together[name].append(answer["pcm"])
    for name, mine in frames.items():
        np.testing.assert_allclose(np.concatenate(together[name]), whole(reference, mine), atol=1e-5)
    assert engine.stats()["active"] == 0


def test_an_aborted_stream_leaves_nothing_to_the_next(engine, reference):
    engine.run([Chunk("a", {"frames": random_frames(33, 9)}, start=True, end=False)])
    engine.abort("a")
    frames = random_frames(40)
    np.testing.assert_allclose(
        sound(engine, chunks_of("b", frames, [7])), whole(reference, frames), atol=1e-5
    )


def test_a_failing_pass_leaves_other_streams_whole(engine, reference, monkeypatch):
    frames = random_frames(30, 2)
    first, rest = chunks_of("idle", frames, [12])
    begun = engine.run([first])[0]["pcm"]
    with monkeypatch.context() as patched:
        patched.setattr(engine._waves, "_step", lambda *_: (_ for _ in ()).throw(RuntimeError("lost")))
        with pytest.raises(RuntimeError):
            engine.run([Chunk("a", {"frames": random_frames(3)}, start=True, end=False)])
    assert engine.stats()["active"] == 1
    pcm = np.concatenate([begun, engine.run([rest])[0]["pcm"]])
    np.testing.assert_allclose(pcm, whole(reference, frames), atol=1e-5)


def test_a_replay_equals_a_call_bit_by_bit(engine):
    """On fresh inputs, in every bucket: a graph holds all of a pass, and no input of its capture."""
    waves = engine._waves
    buffers = waves._buffers
    program = waves._program
    state = (buffers.memory, buffers.frames)
    generator = torch.Generator().manual_seed(3)
    for rows, frames in waves._buckets.shapes():
        codes = torch.randint(0, 16, (rows, frames * 4), generator=generator, dtype=torch.int32)
        lengths = torch.randint(1, frames + 1, (rows,), generator=generator, dtype=torch.int32)
        head = torch.stack([torch.arange(rows, dtype=torch.int32), lengths, torch.arange(rows) % 2], dim=1)
        packed = torch.cat([head.int(), codes], dim=1)
        buffers.packed[: packed.numel()] = packed.flatten().to(buffers.packed.device)
        before, made = [tensor.clone() for tensor in state], []
        for run in (waves._replays[rows, frames], lambda: program(rows, frames)):  # noqa: B023
            for tensor, saved in zip(state, before, strict=True):
                tensor.copy_(saved)
            buffers.wave.zero_()
            run()
            made.append([tensor.clone() for tensor in (*state, buffers.wave)])
        for replayed, called in zip(*made, strict=True):
            assert torch.equal(replayed, called)
        assert not torch.equal(before[0], made[0][0])


def test_kernels_give_the_references_samples(checkpoint, reference, monkeypatch):
    """Of streams that share passes: one begins while others go on, one in a slot that another has left."""
    pytest.importorskip("triton", reason="kernels need triton, which is not installed")
    if HERE == "cpu":  # the interpreter compiles nothing, and a call of a program there takes seconds
        monkeypatch.setattr(CudaGraphs, "__call__", lambda _, program: program)
    placement = Placement(checkpoint, HERE, max_batch_size=3, chunk_frames=(8,))
    engine = Graphs(placement, Code2WavOptions(max_streams=3))
    memory = engine._waves._program._kernels._rooms.kept(1).untyped_storage()
    assert memory.nbytes() == 3 * 4 * WaveformSize.from_hf(CONFIG.to_dict()).between(4, 4 * 8)
    for unused in (engine._waves._program._kernels._rooms._rooms, engine._waves._buffers.wave):
        unused.fill_(float("nan"))  # it reaches nothing
    sizes = {"a": [1, 8, 4], "b": [6], "c": [], "d": []}
    frames = {
        name: random_frames(length, length) for name, length in zip("abcd", (15, 10, 3, 2), strict=True)
    }
    waiting = {name: chunks_of(name, frames[name], sizes[name]) for name in frames}
    together = {name: [] for name in frames}
    for names in ("a", "ab", "bac", "ad"):
        for name, answer in zip(names, engine.run([waiting[name].pop(0) for name in names]), strict=True):
            together[name].append(answer["pcm"])
    assert not any(waiting.values())
    for name, mine in frames.items():
        np.testing.assert_allclose(np.concatenate(together[name]), whole(reference, mine), atol=1e-5)


def test_a_state_that_is_not_a_number_ends_its_stream_and_no_other(engine, reference):
    frames = random_frames(40, 2)
    parts = np.split(frames, [15])
    heard = engine.run([Chunk(name, {"frames": parts[0]}, start=True, end=False) for name in "ab"])[1]["pcm"]
    with torch.inference_mode():
        engine._waves._buffers.memory[engine._slots["a"]] = float("nan")
    later = [Chunk(name, {"frames": parts[1]}, start=False, end=False) for name in "ab"]
    assert_only_the_first_ended(engine, later, whole(reference, frames)[len(heard) :])
    # The next stream in that slot heeds nothing that is in it.
    pcm = sound(engine, chunks_of("next", frames, [25]))
    np.testing.assert_allclose(pcm, whole(reference, frames), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton's interpreter does not know bfloat16")
def test_in_bfloat16_kernels_are_as_near_the_reference_as_torch(checkpoint, reference):
    frames = random_frames(16, 4)
    right = whole(reference, frames)
    apart = []
    for kernels in (False, True):
        options = Code2WavOptions(max_streams=1, dtype="bfloat16", kernels=kernels)
        engine = Graphs(Placement(checkpoint, "cuda:0", max_batch_size=1, chunk_frames=(8,)), options)
        apart.append(np.sqrt(np.mean((sound(engine, chunks_of("a", frames, [8])) - right) ** 2)))
    assert 0 < apart[1] <= 1.2 * apart[0] < 0.1 * right.std(), apart


def test_graphs_are_for_gpus(checkpoint):
    assert not isinstance(Code2Wav(Placement(checkpoint), Code2WavOptions())._waves, GraphWaves)
    assert Code2Wav._has_graphs(Placement(checkpoint, "cuda:0"), Code2WavOptions())
    assert not Code2Wav._has_graphs(Placement(checkpoint, "cuda:0"), Code2WavOptions(cuda_graphs=False))
