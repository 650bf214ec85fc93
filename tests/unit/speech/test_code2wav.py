"""Code2Wav with random weights: batches, streams, their states and their ends."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from tritone.engines.base import Chunk, Placement  # noqa: E402
from tritone.errors import ConfigError, InvalidRequest, TritoneError, Unavailable  # noqa: E402
from tritone.networks.spectral_decoder import SpectralConfig, SpectralDecoder  # noqa: E402
from tritone.pipelines.smoltalk import code2wav  # noqa: E402
from tritone.pipelines.smoltalk.code2wav import Code2Wav, Code2WavOptions  # noqa: E402

CONFIG = {
    "latent_channels": 6,
    "channels": 8,
    "hidden_channels": 16,
    "num_blocks": 2,
    "kernel_frames": 7,
    "bins": 81,
    "norm_epsilon": 1e-5,
    "sample_rate_hz": 8000,
    "hop_samples": 40,
    "voiced_above_hz": 40.0,
    "harmonics_below_hz": 3600.0,
    "log_magnitude_ceiling": 7.0,
}
HOP = CONFIG["hop_samples"]
SCHEDULES = {
    "single frames": [1] * 400,
    "4 then 25": [4, *[25] * 12],
    "ragged": [3, 1, 40, 2, 17, 5, 60, 1, 1, 150],
    "one chunk": [400],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smoltalk") / "1" / "code2wav"
    folder.mkdir(parents=True)
    torch.manual_seed(4)
    decoder = SpectralDecoder(SpectralConfig.read(CONFIG))
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.normal_(0, 0.15)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(decoder.state_dict(), folder / "model.safetensors")
    return folder


@pytest.fixture
def engine(checkpoint: Path) -> Code2Wav:
    return Code2Wav(Placement(checkpoint), Code2WavOptions(max_streams=8))


def random_frames(num_frames, seed=0):
    rng = np.random.default_rng(seed)
    frames = rng.normal(0, 1, (num_frames, CONFIG["latent_channels"] + 1))
    frames[:, -1] = 150 + 30 * np.sin(np.arange(num_frames) / 8)
    return frames.astype(np.float32)


def chunks_of(session, segments, sizes, seed=7):
    """The chunks of one stream: `segments` cut into `sizes`, none over a segment's end."""
    sizes, pieces = itertools.cycle(sizes), []
    for frames in segments:
        begin = 0
        while begin < len(frames):
            end = begin + next(sizes)
            pieces.append((frames[begin:end], end >= len(frames)))
            begin = end
    return [
        Chunk(
            session,
            {"frames": frames, "segment_end": segment_end},
            start=not number,
            end=number == len(pieces) - 1,
            settings={} if number else {"seed": seed},
        )
        for number, (frames, segment_end) in enumerate(pieces)
    ]


def sound(engine, chunks):
    return np.concatenate([engine.run([chunk])[0]["pcm"] for chunk in chunks])


@pytest.mark.parametrize("sizes", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_chunks_of_any_size_give_the_same_samples(engine, sizes):
    segments = [random_frames(120, 1), random_frames(1, 2), random_frames(64, 3)]
    whole = sound(engine, chunks_of("whole", segments, [400]))
    assert whole.shape == (185 * HOP,) and whole.dtype == np.float32
    np.testing.assert_allclose(sound(engine, chunks_of("cut", segments, sizes)), whole, atol=1e-5)
    assert engine.stats()["active"] == 0


def test_streams_of_any_phase_share_a_batch(engine):
    rng = random.Random(8)
    streams = {
        f"s{n}": chunks_of(f"s{n}", [random_frames(rng.randint(1, 90), n)], [rng.randint(1, 30)], seed=n)
        for n in range(8)
    }
    alone = {name: sound(engine, chunks) for name, chunks in streams.items()}
    waiting = {name: list(chunks) for name, chunks in streams.items()}
    together = {name: [] for name in streams}
    while any(waiting.values()):
        names = [name for name, chunks in waiting.items() if chunks and rng.random() < 0.6]
        rng.shuffle(names)
        for name, answer in zip(names, engine.run([waiting[name].pop(0) for name in names]), strict=True):
            together[name].append(answer["pcm"])
    for name in streams:
        np.testing.assert_allclose(np.concatenate(together[name]), alone[name], atol=1e-5)
    assert engine.stats()["active"] == 0


def test_two_chunks_of_a_stream_in_one_batch_run_in_order(engine):
    chunks = chunks_of("a", [random_frames(60)], [25])
    together = np.concatenate([answer["pcm"] for answer in engine.run(chunks)])
    np.testing.assert_allclose(together, sound(engine, chunks_of("b", [random_frames(60)], [60])), atol=1e-5)


def test_long_chunks_run_in_bounded_passes(engine, monkeypatch):
    whole = sound(engine, chunks_of("a", [random_frames(300)], [300]))
    monkeypatch.setattr(code2wav, "_PASS_FRAMES", 32)
    np.testing.assert_allclose(sound(engine, chunks_of("b", [random_frames(300)], [300])), whole, atol=1e-5)


def test_the_seed_decides_the_noise(engine):
    segments = [random_frames(80)]
    first, again, other = (sound(engine, chunks_of("a", segments, [80], seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-3


@pytest.mark.parametrize("empty", [np.zeros((0,), np.float32), np.zeros((0, 7), np.float32), None])
def test_an_end_without_frames_flushes(engine, empty):
    frames = random_frames(50)
    begun = engine.run([Chunk("a", {"frames": frames, "segment_end": False}, start=True, end=False)])[0][
        "pcm"
    ]
    inputs = {"segment_end": True} if empty is None else {"frames": empty, "segment_end": True}
    rest = engine.run([Chunk("a", inputs, start=False, end=True)])[0]["pcm"]
    assert len(begun) < len(begun) + len(rest) == 50 * HOP
    assert engine.stats()["active"] == 0


def test_a_stream_without_any_frames_is_silent(engine):
    answer = engine.run([Chunk("a", {"frames": np.zeros((0,), np.float32)}, start=True, end=True)])[0]
    assert answer["pcm"].shape == (0,)


def test_samples_stay_within_full_scale(engine):
    frames = random_frames(100)
    frames[:, :-1] *= 50
    pcm = sound(engine, chunks_of("a", [frames], [100]))
    assert np.isfinite(pcm).all() and np.abs(pcm).max() <= 1


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"frames": np.zeros((3, 5), np.float32)}, r"frames has the shape \[3, 5\]; send float32 \[F, 7\]"),
        ({"frames": np.zeros(7, np.float32)}, r"frames has the shape \[7\]"),
        ({"frames": np.full((3, 7), np.nan, np.float32)}, "frames holds NaN"),
    ],
)
def test_a_bad_chunk_ends_its_stream_and_no_other(engine, inputs, words):
    good = Chunk("good", {"frames": random_frames(40), "segment_end": True}, start=True, end=False)
    bad = Chunk("bad", inputs, start=True, end=False)
    error, answer = engine.run([bad, good])
    assert isinstance(error, InvalidRequest)
    with pytest.raises(InvalidRequest, match=words):
        raise error
    assert len(answer["pcm"]) == 40 * HOP
    assert engine.stats()["active"] == 1


def test_samples_that_are_not_numbers_end_their_stream_and_no_other(engine):
    engine.run([Chunk("bad", {"frames": random_frames(40)}, start=True, end=False)])
    with torch.inference_mode():
        engine._streams["bad"].synthesis.segment.overlap.fill_(float("nan"))
    good = Chunk("good", {"frames": random_frames(40), "segment_end": True}, start=True, end=False)
    error, answer = engine.run([Chunk("bad", {"frames": random_frames(40)}, False, False), good])
    assert isinstance(error, TritoneError) and "are not numbers" in str(error)
    assert len(answer["pcm"]) == 40 * HOP
    assert engine.stats()["active"] == 1


@pytest.mark.parametrize("seed", [-1, 1 << 64, 0.5, "7", True, None])
def test_a_bad_seed_is_named(engine, seed):
    error = engine.run([Chunk("a", {"frames": random_frames(3)}, True, False, {"seed": seed})])[0]
    assert isinstance(error, InvalidRequest) and "seed is" in error.what
    assert engine.stats()["active"] == 0


def test_a_chunk_of_no_open_stream_is_refused(engine):
    error = engine.run([Chunk("lost", {"frames": random_frames(3)}, start=False, end=False)])[0]
    assert isinstance(error, InvalidRequest) and "'lost' is not open" in error.what


def test_streams_are_bounded(engine):
    starts = [Chunk(f"s{n}", {"frames": random_frames(3)}, start=True, end=False) for n in range(9)]
    answers = engine.run(starts)
    assert [isinstance(answer, Unavailable) for answer in answers] == [False] * 8 + [True]
    for n in range(8):
        engine.abort(f"s{n}")
    assert engine.stats()["active"] == 0
    engine.abort("unknown")


def test_a_second_start_begins_anew(engine):
    chunks = chunks_of("a", [random_frames(60)], [60])
    expected = sound(engine, chunks)
    engine.run([Chunk("a", {"frames": random_frames(33, 9)}, start=True, end=False)])
    np.testing.assert_allclose(sound(engine, chunks), expected, atol=1e-5)


def test_a_failing_pass_leaves_no_state(engine, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine, "_pass", fail)
    with pytest.raises(RuntimeError):
        engine.run([Chunk("a", {"frames": random_frames(3)}, start=True, end=False)])
    assert engine.stats()["active"] == 0


def test_units_come_from_the_checkpoint(engine):
    assert (engine.sample_rate_hz, engine.frame_rate_hz, engine.samples_per_frame) == (8000, 200.0, 40)
    assert engine.frame_width == 7


@pytest.mark.parametrize(
    "changes", [{"channels": 9}, {"hop_samples": 50}, {"num_blocks": -1}, {"bins": None}]
)
def test_a_checkpoint_that_does_not_fit_is_refused(checkpoint, tmp_path, changes):
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=str(tmp_path)):
        Code2Wav(Placement(tmp_path), Code2WavOptions())


@pytest.mark.parametrize(
    "module",
    ["tritone.pipelines.smoltalk.code2wav", "tritone.pipelines.smoltalk.talker", "tritone.engines.whisper"],
)
def test_options_need_no_heavy_library(module):
    heavy = {
        "torch",
        "onnxruntime",
        "hibari",
        "faster_whisper",
        "ctranslate2",
        "soundfile",
        "soxr",
        "safetensors",
    }
    code = f"import sys, {module}; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.stdout.strip() == "[]", done.stderr
