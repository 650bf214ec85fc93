from __future__ import annotations

import pytest
import torch

from tritone.engines.token_draw import PlainNoise
from tritone.kernels.noise import KernelNoise

SEEDS, POSITIONS = [0, 5, (1 << 63) - 1, (7 << 32) - 1, 1 << 31], [0, 9, 2000, 70000, 3]


@pytest.fixture
def where(device):
    return torch.tensor(SEEDS, device=device), torch.tensor(POSITIONS, device=device)


@pytest.mark.parametrize("width", [1, 256, 300])
def test_noise_of_tokens_is_that_of_the_sampler(device, where, width):
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 152064, (len(SEEDS), width), generator=random).to(device)
    torch.testing.assert_close(
        KernelNoise().of(tokens, *where), PlainNoise().of(tokens, *where), atol=1e-13, rtol=0
    )


@pytest.mark.parametrize("vocabulary", [1, 3, 1024, 2503])
def test_the_highest_of_all_is_found(noise, where, vocabulary):
    for scale in (0.0, 3.0):
        scores = noise(len(SEEDS), vocabulary, scale=scale)
        scores[1, : vocabulary // 2] = float("-inf")
        assert torch.equal(KernelNoise().highest(scores, *where), PlainNoise().highest(scores, *where))


def test_without_numbers_a_token_is_found_all_the_same(noise, where):
    scores = noise(len(SEEDS), 1500)
    expected = KernelNoise().highest(scores, *where)
    scores[2], scores[3] = float("nan"), float("-inf")
    found = KernelNoise().highest(scores, *where)
    assert ((found >= 0) & (found < 1500)).all()
    assert found[[0, 1, 4]].tolist() == expected[[0, 1, 4]].tolist()
