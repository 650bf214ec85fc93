"""Qwen3-Omni's Code2Wav with random weights: batches, streams, their states and their ends."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import save_file  # noqa: E402
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (  # noqa: E402
    Qwen3OmniMoeCode2WavConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav  # noqa: E402

from tritone.engines.base import Chunk, Placement  # noqa: E402
from tritone.errors import ConfigError, InvalidRequest, TritoneError, Unavailable  # noqa: E402
from tritone.pipelines.qwen3_omni.code2wav import Code2Wav, Code2WavOptions  # noqa: E402

BOOKS, BOOK_SIZE = 4, 16
CONFIG = Qwen3OmniMoeCode2WavConfig(
    codebook_size=BOOK_SIZE,
    num_quantizers=BOOKS,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    decoder_dim=16,
    upsample_rates=[4, 3],
    upsampling_ratios=[2],
    sliding_window=10,
)
RATE, MISSING = 24, 15  # samples a frame; by how many the whole decode is shorter: (4 + 1) · 3


@pytest.fixture(scope="module")
def reference():
    torch.manual_seed(4)
    model = Qwen3OmniMoeCode2Wav(CONFIG).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1 if "embedding" in name else 0.7 * weight[0].numel() ** -0.5)
            elif "scale" in name or "gamma" in name:
                weight.fill_(0.5)
        codes = torch.from_numpy(random_frames(50)).long()
        model.decoder[-1].conv.weight *= 1e-3
        model.decoder[-1].conv.weight *= 0.1 / model(codes[None].mT).std()
    return model


@pytest.fixture(scope="module")
def checkpoint(reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "config.json").write_text(json.dumps({"code2wav_config": CONFIG.to_dict()}))
    weights = {f"code2wav.{name}": weight for name, weight in reference.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def engine(checkpoint: Path) -> Code2Wav:
    return Code2Wav(Placement(checkpoint), Code2WavOptions(max_streams=8))


def random_frames(num_frames, seed=0):
    return np.random.default_rng(seed).integers(0, BOOK_SIZE, (num_frames, BOOKS)).astype(np.int32)


def whole(reference, frames):
    with torch.no_grad():
        samples = reference(torch.from_numpy(frames).long()[None].mT)[0, 0].numpy()
    assert np.abs(samples).max() < 1
    return samples


def chunks_of(session, frames, sizes):
    parts = np.split(frames, np.cumsum(sizes))
    parts = [part for part in parts if len(part)]
    return [
        Chunk(session, {"frames": part}, start=not number, end=number == len(parts) - 1)
        for number, part in enumerate(parts)
    ]


def sound(engine, chunks):
    return np.concatenate([engine.run([chunk])[0]["pcm"] for chunk in chunks])


@pytest.mark.parametrize("sizes", [[1] * 59, [4, 25, 25], [3, 1, 40, 2], []], ids=str)
def test_chunks_of_any_size_give_the_references_samples(engine, reference, sizes):
    frames = random_frames(60, 1)
    pcm = sound(engine, chunks_of("a", frames, sizes))
    assert pcm.shape == (60 * RATE - MISSING,) and pcm.dtype == np.float32
    np.testing.assert_allclose(pcm, whole(reference, frames), atol=1e-5)
    assert engine.stats() == {"active": 0, "codec_frames": 60, "state_bytes": 0}


def test_streams_of_any_phase_share_a_batch(engine, reference):
    rng = random.Random(8)
    frames = {f"s{n}": random_frames(rng.randint(1, 90), n) for n in range(8)}
    waiting = {name: chunks_of(name, mine, [rng.randint(1, 30)] * 90) for name, mine in frames.items()}
    together = {name: [] for name in frames}
    while any(waiting.values()):
        names = [name for name, chunks in waiting.items() if chunks and rng.random() < 0.6]
        rng.shuffle(names)
        for name, answer in zip(names, engine.run([waiting[name].pop(0) for name in names]), strict=True):
            together[name].append(answer["pcm"])
    for name, mine in frames.items():
        np.testing.assert_allclose(np.concatenate(together[name]), whole(reference, mine), atol=1e-5)
    assert engine.stats()["active"] == 0


def test_chunks_of_a_stream_in_one_batch_run_in_order(engine, reference):
    frames, other = random_frames(60), random_frames(20, 5)
    chunks = chunks_of("a", frames, [4, 25])
    chunks.insert(1, Chunk("b", {"frames": other}, start=True, end=True))
    first, alone, *rest = (answer["pcm"] for answer in engine.run(chunks))
    np.testing.assert_allclose(np.concatenate([first, *rest]), whole(reference, frames), atol=1e-5)
    np.testing.assert_allclose(alone, whole(reference, other), atol=1e-5)


@pytest.mark.parametrize("empty", [np.zeros((0,), np.int32), np.zeros((0, BOOKS), np.int32), None])
def test_an_end_without_frames_gives_nothing_and_frees_the_stream(engine, reference, empty):
    frames = random_frames(30)
    begun = engine.run([Chunk("a", {"frames": frames}, start=True, end=False)])[0]["pcm"]
    assert engine.stats()["active"] == 1 and engine.stats()["state_bytes"] > 0
    rest = engine.run([Chunk("a", {} if empty is None else {"frames": empty}, start=False, end=True)])[0]
    assert rest["pcm"].shape == (0,) and rest["pcm"].dtype == np.float32
    np.testing.assert_allclose(begun, whole(reference, frames), atol=1e-5)
    assert engine.stats()["active"] == 0


def test_a_stream_may_start_without_frames(engine, reference):
    frames = random_frames(12)
    assert engine.run([Chunk("a", {}, start=True, end=False)])[0]["pcm"].shape == (0,)
    pcm = engine.run([Chunk("a", {"frames": frames}, start=False, end=True)])[0]["pcm"]
    np.testing.assert_allclose(pcm, whole(reference, frames), atol=1e-5)


def test_a_state_is_as_large_at_the_end_as_at_the_start(engine):
    engine.run([Chunk("a", {"frames": random_frames(1)}, start=True, end=False)])
    before = engine.stats()["state_bytes"]
    for seed in range(12):
        engine.run([Chunk("a", {"frames": random_frames(25, seed)}, start=False, end=False)])
    assert engine.stats()["state_bytes"] == before > 0


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        (np.zeros((3, 5), np.int32), r"frames is int32 of shape \[3, 5\]; send int32 \[F, 4\]"),
        (np.zeros(4, np.int32), r"frames is int32 of shape \[4\]"),
        (np.zeros((3, 4), np.float32), r"frames is float32 of shape \[3, 4\]"),
        (
            np.array([[0, 1, 2, 3], [0, 1, 16, 3]]),
            "the code 16 in frame 1, codebook 2; send codes from 0 to 15",
        ),
        (np.array([[-1, 1, 2, 3]]), "the code -1 in frame 0, codebook 0"),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
def test_a_bad_chunk_ends_its_stream_and_no_other(engine, reference, frames, words, begun):
    if begun:
        engine.run([Chunk("bad", {"frames": random_frames(5)}, start=True, end=False)])
    good = Chunk("good", {"frames": random_frames(40)}, start=True, end=False)
    error, answer = engine.run([Chunk("bad", {"frames": frames}, start=not begun, end=False), good])
    assert isinstance(error, InvalidRequest)
    with pytest.raises(InvalidRequest, match=words):
        raise error
    np.testing.assert_allclose(answer["pcm"], whole(reference, random_frames(40)), atol=1e-5)
    assert engine.stats()["active"] == 1


def test_a_state_that_is_not_a_number_ends_its_stream_and_no_other(engine, reference):
    frames = random_frames(40, 2)
    first, second = (np.split(frames, [15])[part] for part in (0, 1))
    begun = [Chunk(name, {"frames": first}, start=True, end=False) for name in ("bad", "good")]
    heard = engine.run(begun)[1]["pcm"]
    with torch.inference_mode():
        engine._waves._states[engine._slots["bad"]].memory.fill_(float("nan"))
    later = [Chunk(name, {"frames": second}, start=False, end=False) for name in ("bad", "good")]
    assert_only_the_first_ended(engine, later, whole(reference, frames)[len(heard) :])


def assert_only_the_first_ended(engine, chunks, expected):
    """By what is not a number, and without a sample; of the second these samples are expected."""
    error, answer = engine.run(chunks)
    assert isinstance(error, TritoneError) and error.code == "INTERNAL"
    assert "code2wav's samples for 25 frames are not numbers; use dtype float32" in str(error)
    np.testing.assert_allclose(answer["pcm"], expected, atol=1e-5)
    assert engine.stats()["active"] == 1
    engine.abort(chunks[1].session)


def test_weights_that_are_not_numbers_give_no_sound(reference, checkpoint, tmp_path):
    weights = {f"code2wav.{name}": weight.clone() for name, weight in reference.state_dict().items()}
    weights["code2wav.decoder.4.conv.weight"][0, 0, 0] = float("nan")  # of the last layer: no state has it
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    engine = Code2Wav(Placement(tmp_path), Code2WavOptions())
    [error] = engine.run([Chunk("a", {"frames": random_frames(5)}, start=True, end=True)])
    assert isinstance(error, TritoneError) and "are not numbers" in str(error)
    assert engine.stats()["active"] == 0


def test_a_chunk_of_no_open_stream_is_refused(engine):
    error = engine.run([Chunk("lost", {"frames": random_frames(3)}, start=False, end=False)])[0]
    assert isinstance(error, InvalidRequest) and "'lost' is not open" in error.what
    assert engine.stats()["active"] == 0


def test_streams_are_bounded(engine):
    starts = [Chunk(f"s{n}", {"frames": random_frames(3)}, start=True, end=False) for n in range(9)]
    answers = engine.run(starts)
    assert [isinstance(answer, Unavailable) for answer in answers] == [False] * 8 + [True]
    for n in range(8):
        engine.abort(f"s{n}")
    assert engine.stats()["active"] == 0
    engine.abort("unknown")


def test_an_aborted_stream_is_closed(engine):
    engine.run([Chunk("a", {"frames": random_frames(3)}, start=True, end=False)])
    engine.abort("a")
    error = engine.run([Chunk("a", {"frames": random_frames(3)}, start=False, end=False)])[0]
    assert isinstance(error, InvalidRequest)


def test_a_second_start_begins_anew(engine, reference):
    engine.run([Chunk("a", {"frames": random_frames(33, 9)}, start=True, end=False)])
    pcm = sound(engine, chunks_of("a", random_frames(60), [20]))
    np.testing.assert_allclose(pcm, whole(reference, random_frames(60)), atol=1e-5)


def test_a_failing_pass_leaves_no_state(engine, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of memory")

    engine.run([Chunk("idle", {"frames": random_frames(3)}, start=True, end=False)])
    monkeypatch.setattr(engine, "_decode", fail)
    with pytest.raises(RuntimeError):
        engine.run([Chunk("a", {"frames": random_frames(3)}, start=True, end=False)])
    assert engine.stats()["active"] == 1  # the idle one, whose state is whole


def test_samples_stay_within_full_scale(reference, checkpoint, tmp_path):
    weights = {f"code2wav.{name}": weight.clone() for name, weight in reference.state_dict().items()}
    weights["code2wav.decoder.4.conv.weight"] *= 50
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    pcm = sound(Code2Wav(Placement(tmp_path), Code2WavOptions()), chunks_of("a", random_frames(40), [9]))
    assert np.abs(pcm).max() == 1


def test_half_precision_answers_in_float32(checkpoint, reference):
    engine = Code2Wav(Placement(checkpoint), Code2WavOptions(dtype="bfloat16"))
    frames = random_frames(30)
    pcm = sound(engine, chunks_of("a", frames, [4]))
    assert pcm.dtype == np.float32
    expected = whole(reference, frames)
    assert 0 < np.std(pcm - expected) < 0.1 * np.std(expected)


def test_units_come_from_the_checkpoint(engine):
    assert (engine.samples_per_frame, engine.missing_samples) == (RATE, MISSING)
    assert (engine.num_codebooks, engine.codebook_size) == (BOOKS, BOOK_SIZE)


def test_a_checkpoint_without_a_codec_is_refused(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no code2wav_config"):
        Code2Wav(Placement(tmp_path), Code2WavOptions())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 17}, "has the shape"),
        ({"num_hidden_layers": 3}, "has no weight 'code2wav.pre_transformer.layers.2"),
        ({"codebook_size": None}, "codebook_size"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(checkpoint, tmp_path, changes, words):
    config = {key: value for key, value in {**CONFIG.to_dict(), **changes}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps({"code2wav_config": config}))
    (tmp_path / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=words):
        Code2Wav(Placement(tmp_path), Code2WavOptions())


def test_options_need_no_heavy_library():
    code = (
        "import sys, tritone.pipelines.qwen3_omni.code2wav;"
        "print(sorted({'torch', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.stdout.strip() == "[]", done.stderr
