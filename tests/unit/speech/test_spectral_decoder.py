"""The streaming decoder against the plain convolutions it is made of."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from tritone.networks.spectral_decoder import Piece, SpectralConfig, SpectralDecoder  # noqa: E402

CONFIG = SpectralConfig(
    latent_channels=5,
    channels=8,
    hidden_channels=12,
    num_blocks=3,
    kernel_frames=7,
    bins=9,
    norm_epsilon=1e-5,
)
SCHEDULES = {
    "single frames": [1] * 200,
    "4 then 25": [4, *[25] * 8],
    "ragged": [3, 1, 40, 2, 17, 5, 60, 1, 1, 80],
    "one chunk": [200],
    "empty calls": [0, 30, 0, 0, 70, 0, 100],
}


@pytest.fixture(scope="module")
def decoder():
    torch.manual_seed(3)
    decoder = SpectralDecoder(CONFIG).double().requires_grad_(False)
    for weight in decoder.parameters():
        weight.normal_(0, 0.4)
    return decoder


def whole(decoder, latent):
    """All spectra of one segment, from torch's own padded convolutions."""
    pad = CONFIG.kernel_frames // 2
    x = functional.conv1d(latent.T[None], decoder.enter.weight, decoder.enter.bias, padding=pad)
    for block in decoder.blocks:
        filters = block.depthwise.weight[:, None]
        y = functional.conv1d(x, filters, block.depthwise.bias, padding=pad, groups=len(filters)).mT
        y = block.narrow(functional.gelu(block.widen(block.norm(y)))) * block.gain
        x = x + y.mT
    return decoder.head(decoder.norm(x.mT))[0].view(len(latent), 5, CONFIG.bins)


def streamed(decoder, latent, sizes):
    state, parts, begin = decoder.new_state(), [], 0
    for size in sizes:
        end = begin + size
        spectra, counts = decoder([Piece(latent[begin:end], state, segment_end=end >= len(latent))])
        assert counts == [len(spectra)]
        parts.append(spectra)
        begin = end
        if begin >= len(latent):
            break
    return torch.cat(parts)


def random_latent(num_frames, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_frames, CONFIG.latent_channels, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("sizes", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize("num_frames", [1, 2, 6, 7, 13, 150])
def test_streamed_equals_whole(decoder, sizes, num_frames):
    latent = random_latent(num_frames)
    torch.testing.assert_close(streamed(decoder, latent, sizes), whole(decoder, latent), rtol=0, atol=1e-10)


def test_spectra_come_as_early_as_they_can(decoder):
    state = decoder.new_state()
    _, counts = decoder([Piece(random_latent(50), state, segment_end=False)])
    assert counts == [50 - CONFIG.lookahead_frames]


def test_streams_in_different_phases_share_a_call(decoder):
    rng = random.Random(5)
    latents = [random_latent(rng.randint(1, 90), seed) for seed in range(9)]
    states = [decoder.new_state() for _ in latents]
    done, parts = [0] * len(latents), [[] for _ in latents]
    while any(begin < len(latent) for begin, latent in zip(done, latents, strict=True)):
        live = [i for i, latent in enumerate(latents) if done[i] < len(latent) and rng.random() < 0.7]
        sizes = {i: rng.randint(0, 20) for i in live}
        pieces = [
            Piece(latents[i][done[i] : done[i] + sizes[i]], states[i], done[i] + sizes[i] >= len(latents[i]))
            for i in live
        ]
        if not pieces:
            continue
        spectra, counts = decoder(pieces)
        for i, mine in zip(live, spectra.split(counts), strict=True):
            parts[i].append(mine)
            done[i] += sizes[i]
    for latent, mine in zip(latents, parts, strict=True):
        torch.testing.assert_close(torch.cat(mine), whole(decoder, latent), rtol=0, atol=1e-10)


def test_a_segment_knows_nothing_of_the_one_before(decoder):
    state, latents = decoder.new_state(), [random_latent(40, 1), random_latent(33, 2)]
    for latent in latents:
        spectra, _ = decoder([Piece(latent, state, segment_end=True)])
        torch.testing.assert_close(spectra, whole(decoder, latent), rtol=0, atol=1e-10)


def test_an_empty_segment_gives_nothing(decoder):
    spectra, counts = decoder([Piece(random_latent(0), decoder.new_state(), segment_end=True)])
    assert spectra.shape == (0, 5, CONFIG.bins) and counts == [0]


def test_state_does_not_grow(decoder):
    state = decoder.new_state()
    for seed in range(20):
        decoder([Piece(random_latent(30, seed), state, segment_end=False)])
    assert [len(tail) for tail in state.tails] == [CONFIG.kernel_frames - 1] * (1 + CONFIG.num_blocks)
    assert all(tail.untyped_storage().nbytes() == tail.nbytes for tail in state.tails)
