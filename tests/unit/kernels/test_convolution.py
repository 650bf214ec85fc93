"""Convolutions in rows of channels, against torch's in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tritone.kernels import convolution
from tritone.kernels import tiles as tiles_of_kernels
from tritone.kernels.convolution import Snake, Streams, Taps, carry, convolve, convolve_to_one, depthwise_norm
from tritone.kernels.tiles import Tile

COLUMNS = 3  # a frame
VALID = (4, 0, 2)  # frames of each stream, of 4 that there is room for
AGES = (0, 5, 1)
UNTOUCHED = 7.0


def close(made: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(made.double(), right, atol=2e-5, rtol=2e-5)


@pytest.fixture
def streams(device: torch.device) -> Streams:
    rows = [(5, 0, 2), VALID, AGES, (1, 0, 0)]
    return Streams(*(torch.tensor(row, dtype=torch.int32, device=device) for row in rows))


@pytest.fixture(params=[False, True], ids=["one tile", "tiles"])
def tiles(request, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with tiles that the sizes here go beyond, and end within."""
    if request.param:
        monkeypatch.setattr(convolution, "convolution_tile", lambda *_: Tile(16, 16, 4, 2, rows=16))


def snaked(x: torch.Tensor, snake: Snake) -> torch.Tensor:
    return x + snake.gain.double() * torch.sin(snake.alpha.double() * x) ** 2


def convolved(x: torch.Tensor, taps: Taps) -> torch.Tensor:
    """[B, T · r, C] of [B, tail + T, K]"""
    bias = taps.bias.double().repeat(taps.rate)
    y = F.conv1d(x.double().mT, taps.weight.double().permute(1, 2, 0), bias, dilation=taps.dilation).mT
    return y.reshape(len(x), -1, len(taps.bias))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(
    ("count", "dilation", "rate", "inner", "channels"),
    [(7, 1, 1, 24, 20), (7, 3, 1, 33, 33), (2, 1, 5, 20, 10), (1, 1, 1, 16, 16)],
)
def test_a_convolution_and_what_is_done_with_it(noise, streams, count, dilation, rate, inner, channels):
    weight = noise(count, rate * channels, inner, scale=(count * inner) ** -0.5)
    taps = Taps(weight, noise(channels), dilation, rate)
    snake = Snake(noise(channels), noise(channels))
    length, head, lead = 4 * COLUMNS, 2, 4 * rate
    x, kept = noise(3, taps.tail + length, inner), noise(3, length * rate, channels)
    before = kept.clone()
    right = convolved(x, taps) + before.double()
    for row, age in zip(right, AGES, strict=True):
        row[: max(0, lead - age * COLUMNS * rate)] = 0

    made, plain = noise(3, head + length * rate, channels), noise(3, length * rate, channels)
    untouched = made.clone()
    convolve(x, taps, COLUMNS, streams, made, kept=kept, add=True, keep=True, snake=snake, lead=lead)
    convolve(x, taps, COLUMNS, streams, plain)
    assert torch.equal(made[:, :head], untouched[:, :head])
    for b, frames in enumerate(VALID):
        used = frames * COLUMNS * rate
        close(kept[b, :used], right[b, :used])
        close(made[b, head : head + used], snaked(right[b, :used], snake))
        close(plain[b, :used], convolved(x, taps)[b, :used])
        assert torch.equal(kept[b, used:], before[b, used:])


def test_a_snake_of_any_number(device, streams):
    """Its sine is never above 1, and what is not a number stays none."""
    numbers = [0.0, 1.5, -1.6, 3.14, -1e4, 9999.5, 3e7, -1e8, 1e10, 3e38, float("nan"), float("inf")]
    x = torch.tensor(numbers, device=device).repeat(3, 1)[..., None]
    one = torch.ones(1, device=device)
    y = torch.empty_like(x)
    convolve(x, Taps(one[None, None], 0 * one), COLUMNS, streams, y, snake=Snake(one, one))
    squared = (y - x)[0, :, 0].double()
    right = torch.sin(x[0, :, 0].double()) ** 2
    assert squared[-2:].isnan().all()
    torch.testing.assert_close(squared[:4], right[:4], atol=6e-7, rtol=0)
    torch.testing.assert_close(squared[4:6], right[4:6], atol=1e-3, rtol=0)  # of the sum, in float32
    assert (squared[6:-2] >= 0).all() and (squared[6:-2] <= 16).all(), "but for rounding of the sum"


@pytest.mark.parametrize("item", [2, 4])
@pytest.mark.parametrize(
    ("inner", "outer"), [(1024, 1536), (1536, 6144), (768, 768), (192, 192), (96, 96), (8, 4)]
)
@pytest.mark.parametrize(("batch", "length"), [(1, 16), (1, 48_000), (64, 100), (64, 48_000)])
def test_tiles_fit_into_a_multiprocessor(monkeypatch, batch, length, inner, outer, item):
    monkeypatch.setattr(tiles_of_kernels, "INTERPRETED", False)
    tile = tiles_of_kernels.convolution_tile(batch, length, inner, outer, item)
    assert min(tile.rows, tile.width, tile.depth) >= 16
    assert (tile.rows + tile.width) * tile.depth * item * tile.stages <= 99 << 10, "what an RTX 3090 has"
    assert tile.rows < 2 * max(16, length) and (inner < 32 or inner % tile.depth == 0)


@pytest.mark.parametrize("tail", [1, 5, 9, 70])
def test_tails_go_from_the_slot_in_front_and_from_the_end_into_the_slot(noise, device, streams, tail):
    """Longer than what a stream brings, and shorter."""
    channels, place = 66, 8
    memory = noise(6, place + tail * channels + 3)
    new = noise(3, 4 * COLUMNS, channels)
    x = torch.full((3, tail + 4 * COLUMNS, channels), UNTOUCHED, device=device)
    x[:, tail:] = new
    before = memory.clone()
    carry(x, tail, COLUMNS, memory, place, streams)
    right = before.clone()
    for b, slot in ((0, 5), (2, 2)):
        old = before[slot, place : place + tail * channels].view(tail, channels)
        if b == 0:
            old = torch.zeros_like(old)  # it starts
        whole = torch.cat([old, new[b, : VALID[b] * COLUMNS]])
        assert torch.equal(x[b, : tail + VALID[b] * COLUMNS], whole)
        right[slot, place : place + tail * channels] = whole[-tail:].flatten()
    assert torch.equal(memory, right), "a slot nobody brought frames to, or beside the tail, is as it was"


def test_what_leaves_is_one_channel_within_bounds(noise, device, streams):
    taps = Taps(noise(7, 1, 20), noise(1))
    x = noise(3, 6 + 4 * COLUMNS, 20, scale=0.1)
    x[2, 8] = float("nan")
    y = torch.full((3, 4 * COLUMNS), UNTOUCHED, device=device)
    convolve_to_one(x, taps, COLUMNS, streams, y)
    right = convolved(x, taps)[..., 0].clamp(-1, 1)
    assert right[0].abs().max() == 1 and right[0].abs().min() < 1
    close(y[0], right[0])
    assert (y[1] == UNTOUCHED).all() and (y[2, 2 * COLUMNS :] == UNTOUCHED).all()
    assert y[2, : 2 * COLUMNS].isnan().tolist() == right[2, : 2 * COLUMNS].isnan().tolist()
    assert y[2].isnan().any() and not y[2].isnan().all()


def test_channels_by_themselves_and_their_norm(noise):
    channels = 33
    taps = Taps(noise(7, channels, 1), noise(channels))
    norm = (noise(channels), noise(channels))
    x = noise(2, 6 + 5, channels)
    y = F.conv1d(x.double().mT, taps.weight.double().permute(1, 2, 0), taps.bias.double(), groups=channels).mT
    right = F.layer_norm(y, (channels,), *(part.double() for part in norm), 1e-6)
    close(depthwise_norm(x, taps, norm, 1e-6), right)
