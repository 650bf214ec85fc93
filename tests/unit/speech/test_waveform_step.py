"""The codec decoder's step in fixed shapes: equal to its passes over pieces, whatever fills a shape."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tritone.networks.waveform_decoder import Piece  # noqa: E402

from .test_waveform_decoder import (  # noqa: E402
    FRAMES,
    SCHEDULES,
    assert_close,
    in_double,
    make_decoder,
    make_reference,
    one_thread,
    pieces_of,
    random_codes,
    streamed,
)

__all__ = ["one_thread"]

PADS = (0, 7)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return make_decoder(in_double(make_reference()), tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return make_decoder(make_reference(), tmp_path_factory.mktemp("single"), torch.float32)


def blank(decoder, rows):
    """Memory and frames of `rows` streams that have not begun; nothing in them is a number."""
    memory = torch.full((rows, decoder.memory_size), float("nan"), dtype=decoder.dtype)
    return memory, torch.full((rows,), 12345, dtype=torch.int32)


def padded(parts, frames, seed=0):
    """codes int32 [B, frames, Q] that begin with the parts and go on with noise, and valid int32 [B]."""
    codes = torch.stack([random_codes(frames, seed + row) for row in range(len(parts))]).int()
    for row, part in zip(codes, parts, strict=True):
        row[: len(part)] = part
    return codes, torch.tensor([len(part) for part in parts], dtype=torch.int32)


def stepped(decoder, codes, sizes, pad):
    """The samples of one stream, a step a piece, each padded by `pad` frames."""
    (memory, frames), samples, age = blank(decoder, 1), [], 0
    for part in pieces_of(codes, [size for size in sizes if size]):
        for some in part.split(100 - pad):
            given = padded([some], len(some) + pad, seed=age)
            start = torch.tensor([age == 0])
            with torch.inference_mode():
                wave, memory, frames = decoder.step(memory, frames, *given, start)
            cut = max(0, decoder.missing_samples - age * decoder.samples_per_frame)
            samples.append(wave[0, cut : len(some) * decoder.samples_per_frame])
            age += len(some)
    return torch.cat(samples)


@pytest.mark.parametrize("pad", PADS)
@pytest.mark.parametrize("sizes", [SCHEDULES[name] for name in ("4 then 25", "ragged")], ids=str)
def test_steps_equal_passes(decoder, sizes, pad):
    codes = random_codes(FRAMES)
    assert_close(stepped(decoder, codes, sizes, pad), streamed(decoder, codes, sizes), 1e-12)


@pytest.mark.parametrize("pad", PADS)
def test_steps_equal_passes_in_single_precision(single, pad):
    codes = random_codes(33)
    assert_close(stepped(single, codes, [4, 25], pad), streamed(single, codes, [4, 25]), 1e-6)


@pytest.mark.parametrize(
    ("rates", "ratios"), [([8, 5, 4, 3], []), ([2, 2, 2], []), ([3], [2]), ([5, 4], [3])], ids=str
)
@pytest.mark.parametrize("pad", PADS)
def test_leads_longer_than_a_step(tmp_path, rates, ratios, pad):
    model = in_double(make_reference(upsample_rates=rates, upsampling_ratios=ratios))
    decoder = make_decoder(model, tmp_path)
    codes = random_codes(8)
    for sizes in ([1], [2, 1, 5]):
        assert_close(stepped(decoder, codes, sizes, pad), streamed(decoder, codes, sizes), 1e-12)


def test_streams_of_any_age_and_length_share_steps(decoder):
    rng = random.Random(3)
    codes = [random_codes(length, seed) for seed, length in enumerate((9, 30, 84))]
    states = [decoder.new_state() for _ in codes]
    memory, frames = blank(decoder, len(codes))
    while any(len(mine) for mine in codes):
        parts = [mine[: rng.choice([0, 5, 12])] for mine in codes]
        codes = [mine[len(part) :] for mine, part in zip(codes, parts, strict=True)]
        start = torch.tensor([state.frames == 0 for state in states])
        ages = [state.frames for state in states]
        expected = decoder.forward([Piece(*both) for both in zip(parts, states, strict=True)])
        before = memory, frames
        with torch.inference_mode():
            wave, memory, frames = decoder.step(*before, *padded(parts, 13, seed=ages[0]), start)
        for row, (part, state, age) in enumerate(zip(parts, states, ages, strict=True)):
            cut = max(0, decoder.missing_samples - age * decoder.samples_per_frame)
            assert_close(wave[row, cut : len(part) * decoder.samples_per_frame], expected[row], 1e-12)
            assert_close(memory[row], state.memory, 1e-12)
            assert int(frames[row]) == min(state.frames, 71)


def test_padding_touches_nothing(decoder):
    """What lies behind the valid frames, and rows without any, change no bit."""
    memory, frames = blank(decoder, 3)
    start = torch.tensor([True, True, True])
    parts = [random_codes(9, 1), random_codes(30, 2), random_codes(0)]
    with torch.inference_mode():
        _, memory, frames = decoder.step(memory, frames, *padded(parts, 32), start)
        kept = memory.clone(), frames.clone()
        made = []
        for seed in (10, 20):
            given = padded([random_codes(5, 3), random_codes(0), random_codes(0)], 8, seed)
            made.append(decoder.step(memory, frames, *given, ~start))
    assert torch.equal(made[0][0][0, : 5 * 1920], made[1][0][0, : 5 * 1920])
    assert not torch.equal(made[0][0][0], made[1][0][0])  # the padding itself is heard, by nobody
    assert torch.equal(made[0][1], made[1][1]) and torch.equal(made[0][2], made[1][2])
    assert torch.equal(made[0][1][1:], kept[0][1:]) and made[0][2].tolist() == [14, 30, 0]
    assert torch.equal(memory, kept[0]) and torch.equal(frames, kept[1])  # arguments are not changed


def test_frames_are_counted_no_further_than_they_matter(decoder):
    assert decoder.config.age_limit == 71
    memory, frames = blank(decoder, 1)
    for start in (True, False):
        given = padded([random_codes(50)], 50)
        with torch.inference_mode():
            _, memory, frames = decoder.step(memory, frames, *given, torch.tensor([start]))
    assert frames.tolist() == [71] and frames.dtype == torch.int32
