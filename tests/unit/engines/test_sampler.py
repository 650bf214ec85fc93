from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tritone.engines import sampler
from tritone.engines.sampler import Row, gumbel, gumbel_of_all, philox, sample
from tritone.sampling import Sampling

VOCABULARY = 1500


def row(
    position: int = 0, penalised: tuple[int, ...] = (), banned: tuple[int, ...] = (), **settings: Any
) -> Row:
    return Row(Sampling(**{"temperature": 1.0, "seed": 1, **settings}), position, penalised, banned)


def draw(logits: torch.Tensor, count: int, **settings: Any) -> torch.Tensor:
    """`count` draws, at different positions, from one row of logits."""
    return sample(logits.expand(count, -1).clone(), [row(position, **settings) for position in range(count)])


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_answers(counter: str, key: str, words: str) -> None:
    def tensors(text: str) -> list[torch.Tensor]:
        return [torch.tensor([int(word, 16)]) for word in text.split()]

    assert philox(tensors(counter), tensors(key)) == tuple(tensors(words))


def test_noise_of_all_tokens_is_the_noise_of_each() -> None:
    seeds, positions = torch.tensor([0, 5, (1 << 63) - 1]), torch.tensor([0, 9, 2000])
    tokens = torch.arange(VOCABULARY + 3).expand(3, -1)
    assert torch.equal(
        gumbel_of_all(VOCABULARY + 3, seeds, positions, 2), gumbel(tokens, seeds, positions, 2)
    )


def test_noise_differs_by_seed_position_codebook_and_token() -> None:
    def noise(token: int = 1, seed: int = 1, position: int = 1, codebook: int = 1) -> float:
        return float(
            gumbel(torch.tensor([[token]]), torch.tensor([seed]), torch.tensor([position]), codebook)
        )

    values = [
        noise(),
        noise(token=2),
        noise(token=5),
        noise(seed=2),
        noise(seed=1 + (1 << 32)),
        noise(position=2),
    ]
    assert len({*values, noise(codebook=2)}) == len(values) + 1


def test_noise_is_gumbel() -> None:
    noise = gumbel_of_all(200_000, torch.tensor([4]), torch.tensor([8]))
    assert math.isclose(noise.mean(), 0.5772, abs_tol=0.01)
    assert math.isclose(noise.var(), math.pi**2 / 6, abs_tol=0.03)


@pytest.mark.parametrize("filters", [{}, {"top_k": 6}, {"top_p": 0.9999}, {"min_p": 1e-6}], ids=str)
def test_draws_follow_the_softmax(filters: dict[str, float]) -> None:
    logits = torch.full((VOCABULARY,), -40.0)
    logits[torch.tensor([3, 700, 1499, 8, 9, 10])] = torch.tensor([2.0, 1.0, 1.5, 0.0, 0.5, -1.0])
    counts = draw(logits, 4000, temperature=0.8, **filters).bincount(minlength=VOCABULARY)
    torch.testing.assert_close(counts / 4000, (logits / 0.8).softmax(-1), atol=0.025, rtol=0)


def test_filters_keep_the_tokens_they_should() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04]).log()

    def kept(**settings: Any) -> set[int]:
        return set(draw(logits, 2000, **settings).tolist())

    assert kept() == {0, 1, 2, 3, 4}
    assert kept(top_k=2) == {0, 1}
    assert kept(top_p=0.5) == {0, 1}
    assert kept(top_p=0.05) == {0}
    assert kept(min_p=0.4) == {0, 1, 2}
    assert kept(min_p=1.0) == {0}
    assert kept(top_k=3, top_p=0.75) == {0, 1}  # of the mass that top-k left: 0.44, 0.78
    assert kept(top_k=4, min_p=0.4) == {0, 1, 2}
    assert kept(top_k=100) == {0, 1, 2, 3, 4}


def test_every_width_of_the_ranking_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0))
    draws = []
    for width in (7, 256, VOCABULARY - 1):
        monkeypatch.setattr(sampler, "NUCLEUS_WIDTH", width)
        draws.append([draw(logits, 200, top_p=top_p).tolist() for top_p in (0.95, 0.5, 0.01)])
    assert draws[0] == draws[1] == draws[2]
    assert torch.equal(draw(logits, 200, top_k=VOCABULARY - 1), draw(logits, 200))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(9, VOCABULARY, generator=torch.Generator().manual_seed(1))
    rows = [
        row(5),
        row(5, temperature=0.0),
        row(6, top_k=5),
        row(7, top_k=900, top_p=0.8),
        row(8, top_p=0.7),
        row(9, top_p=0.999),
        row(10, min_p=0.2, seed=99),
        row(11, temperature=0.0, penalised=(1, 2, 3), repetition_penalty=1.3),
        row(12, banned=(0, 4)),
    ]
    together = sample(logits.clone(), rows)
    for order in (range(9), reversed(range(9))):
        alone = {i: sample(logits[i : i + 1].clone(), [rows[i]]).item() for i in order}
        assert [alone[i] for i in range(9)] == together.tolist()


def test_temperature_zero_is_greedy_and_takes_the_penalty() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.9, -1.0]])
    assert sample(logits.clone(), [row(temperature=0.0, top_k=1, min_p=0.5)]).item() == 1
    assert sample(logits.clone(), [row(temperature=1e-7)]).item() == 1
    assert (
        sample(logits.clone(), [row(temperature=0.0, repetition_penalty=1.2, penalised=(1, 1))]).item() == 2
    )
    assert sample(logits.clone(), [row(temperature=0.0, banned=(1, 2))]).item() == 0
    below = torch.tensor([[-1.0, -1.1]])
    assert sample(below, [row(temperature=0.0, repetition_penalty=1.2, penalised=(0,))]).item() == 1


def test_logits_of_half_precision_are_read() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]], dtype=torch.bfloat16)
    assert sample(logits, [row(temperature=0.0)]).item() == 1
