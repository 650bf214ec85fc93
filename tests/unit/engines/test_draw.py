"""A draw that is prepared once for all codes of a frame gives what single draws give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tritone.engines import sampler
from tritone.engines.sampler import Draw, Row, gumbel_of_all, gumbel_of_frame, sample
from tritone.sampling import Sampling

VOCABULARY = 67  # not a multiple of the four words of a block
CODEBOOKS = range(2, 17)
CPU = torch.device("cpu")


def row(position: int, **settings: Any) -> Row:
    return Row(Sampling(**{"temperature": 1.0, "seed": 1, **settings}), position)


ROWS = [
    row(3),
    row(3, temperature=0.0),
    row(4, top_k=5, top_p=0.8, seed=2),
    row(5, top_k=1, seed=2),
    row(6, top_p=0.6, temperature=0.5),
    row(7, min_p=0.3, seed=(1 << 63) - 1),
    row(8, top_k=500),
    row(9, top_k=40, min_p=0.05, top_p=0.9),
]


def scores(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("prepared", [(), CODEBOOKS, (3, 9)], ids=["nothing", "all", "some"])
@pytest.mark.parametrize("chosen", [range(len(ROWS)), (0, 2, 4), (2, 3), (4,), (1,)], ids=str)
def test_a_frame_is_drawn_like_its_codes_one_by_one(prepared: Any, chosen: Any) -> None:
    rows = [ROWS[i] for i in chosen]
    draw = Draw(rows, VOCABULARY, CPU, prepared)
    for codebook in CODEBOOKS:
        logits = scores(len(rows), codebook)
        expected = [sample(logits[i : i + 1].clone(), [rows[i]], codebook).item() for i in range(len(rows))]
        assert draw(logits, codebook).tolist() == expected
        assert torch.equal(logits, scores(len(rows), codebook)), "the caller's logits are left alone"


def test_which_of_equal_logits_top_k_takes_does_not_depend_on_neighbours() -> None:
    """Equal logits are common in bfloat16; here they are everywhere."""
    for seed in range(100):
        random = torch.Generator().manual_seed(seed)
        logits = (4 * torch.randn(3, 3072, generator=random)).round() / 2
        mine, others = row(5, top_k=20, seed=seed), [row(5, top_k=60), row(6, top_k=61, temperature=0.5)]
        alone = sample(logits[:1].clone(), [mine]).item()
        assert sample(logits.clone(), [mine, *others])[0].item() == alone


def test_a_draw_may_be_repeated() -> None:
    draw = Draw(ROWS, VOCABULARY, CPU, CODEBOOKS)
    logits = scores(len(ROWS))
    assert draw(logits, 5).tolist() == draw(logits, 5).tolist()
    drawn = {tuple(draw(logits, codebook).tolist()) for codebook in CODEBOOKS}
    assert len(drawn) > 10, "each codebook has noise of its own"
    assert len({tokens[1] for tokens in drawn}) == 1, "but the greedy row"


def test_a_penalty_and_a_ban_are_not_its_part() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 5], logits[0, 6] = 2.0, 1.0
    strict = Row(Sampling(temperature=0.0, repetition_penalty=9.0), 0, penalised=(5,), banned=(5,))
    assert Draw([strict], VOCABULARY, CPU)(logits).item() == 5
    assert sample(logits.clone(), [strict]).item() == 6


@pytest.mark.parametrize("vocabulary", [1, 4, 67, 2048])
def test_noise_of_a_frame_is_the_noise_of_its_codebooks(vocabulary: int) -> None:
    seeds, positions = torch.tensor([0, 5, (1 << 63) - 1]), torch.tensor([0, 9, 2000])
    noise = gumbel_of_frame(vocabulary, seeds, positions, CODEBOOKS)
    assert noise.shape == (3, 15, vocabulary) and noise.dtype == torch.float64
    for place, codebook in enumerate(CODEBOOKS):
        assert torch.equal(noise[:, place], gumbel_of_all(vocabulary, seeds, positions, codebook))


def test_greedy_rows_make_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gumbel", "gumbel_of_all", "gumbel_of_frame"):
        monkeypatch.setattr(sampler, name, lambda *_: pytest.fail("noise was made"))
    logits = scores(2)
    draw = Draw([row(0, temperature=0.0), row(1, temperature=1e-7)], VOCABULARY, CPU, CODEBOOKS)
    assert torch.equal(draw(logits, 4), logits.argmax(-1))


def test_draws_of_a_codebook_follow_the_softmax() -> None:
    logits = torch.full((VOCABULARY,), -40.0)
    logits[[3, 30, 66]] = torch.tensor([1.0, 0.0, 0.5])
    rows = [row(position, seed=4) for position in range(4000)]
    drawn = Draw(rows, VOCABULARY, CPU, (2, 3))(logits.expand(4000, -1), 3)
    shares = drawn.bincount(minlength=VOCABULARY) / 4000
    torch.testing.assert_close(shares, logits.softmax(-1), atol=0.025, rtol=0)
