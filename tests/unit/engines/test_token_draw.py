"""What is drawn on the device is what the sampler draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tritone.engines import sampler, token_draw
from tritone.engines.token_buffers import NOT_A_NUMBER, OUT_OF_REACH, TokenBuffers, TokenRow, pack
from tritone.engines.token_draw import ALL, NONE, PlainNoise, TokenDraw
from tritone.sampling import Sampling

VOCABULARY, ENDS = 603, (3, 77)
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "min_p": 0.1, "seed": (7 << 32) - 1},
    {"temperature": 0.8, "top_k": 300, "seed": 5},
    {"temperature": 1.3, "top_k": 300, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 50, "repetition_penalty": 1.3, "seed": (1 << 62) + 12345},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.5, "top_p": 0.6, "min_p": 0.02},
    {"temperature": 1.0, "top_k": 5000, "top_p": 0.9},
    {"temperature": 1.0, "repetition_penalty": 0.7},
    {"repetition_penalty": 1.7},
    {"temperature": 0.0},
]
ROWS = [
    TokenRow(slot, 9, None, 5, Sampling(**settings), draw=10 + 1000 * slot, bars_end=slot in (1, 4, 9))
    for slot, settings in enumerate(SETTINGS)
]
SEEN = {slot: [(7 * slot + 31 * i) % VOCABULARY for i in range(200)] for slot in range(len(ROWS))}


def scores(seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return scale * torch.randn(len(ROWS), VOCABULARY, generator=random)


class Device:
    """Buffers and a draw over them, as behind a captured step."""

    def __init__(self, noise: Any = None) -> None:
        self.buffers = TokenBuffers.of(len(ROWS), len(ROWS), VOCABULARY, torch.device("cpu"))
        self.draw = TokenDraw(self.buffers, ENDS, noise or PlainNoise())
        self.redrawn = 0

    def tokens(self, rows: Sequence[TokenRow], logits: torch.Tensor) -> list[int]:
        """logits: of each row."""
        order = sorted(range(len(rows)), key=lambda i: self.draw.width(rows[i]))
        self.buffers.seen.zero_()
        for place, i in enumerate(order):
            pack([rows[i]], VOCABULARY, self.buffers.packed.numpy()[place:])
            self.buffers.logits[place] = logits[i]
            self.buffers.seen[rows[i].slot, SEEN[rows[i].slot]] = True
        self.buffers.settle_likeliest(slice(0, len(rows)))
        kept = self.draw([rows[i] for i in order])
        tokens = [0] * len(rows)
        for place, i in enumerate(order):
            tokens[i] = int(self.buffers.ids[place])
            if tokens[i] == OUT_OF_REACH:
                assert kept is not None
                self.redrawn += 1
                [tokens[i]] = self.draw.redraw([rows[i]], kept[place : place + 1])
            elif tokens[i] >= 0:
                assert self.buffers.last[rows[i].slot] == tokens[i]
        return tokens


def drawn_by_sampler(rows: Sequence[TokenRow], logits: torch.Tensor) -> list[int]:
    known = [
        sampler.Row(row.sampling, row.draw, SEEN[row.slot], ENDS if row.bars_end else ()) for row in rows
    ]
    return sampler.sample(logits.clone(), known).tolist()


@pytest.mark.parametrize("scale", [0.3, 3.0, 30.0])
def test_rows_draw_what_the_sampler_draws(scale: float) -> None:
    device = Device()
    for seed in range(6):
        logits = scores(seed, scale)
        assert device.tokens(ROWS, logits) == drawn_by_sampler(ROWS, logits)
    assert (device.redrawn > 0) == (scale < 1), "flat scores reach beyond the likeliest"


def test_a_row_draws_alone_what_it_draws_among_others() -> None:
    logits = scores()
    together = Device().tokens(ROWS, logits)
    for i, row in enumerate(ROWS):
        assert Device().tokens([row], logits[i : i + 1]) == together[i : i + 1]


def test_rows_beyond_the_likeliest_are_drawn_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_draw, "NUCLEUS_WIDTH", 4)
    device = Device()
    for seed in range(3):
        logits = scores(seed)
        assert device.tokens(ROWS, logits) == drawn_by_sampler(ROWS, logits)
    assert device.redrawn >= 3


def test_of_equal_scores_the_first_are_taken() -> None:
    logits = torch.full((1, VOCABULARY), -1.0)
    logits[0, 400:500] = 0.0
    row = TokenRow(0, 1, None, 0, Sampling(temperature=1.0, top_k=8), 0, bars_end=False)
    device = Device()
    for draw in range(30):
        [token] = device.tokens([replace(row, draw=draw)], logits)
        assert 400 <= token < 408


def test_noise_is_made_for_what_is_drawn_and_no_more() -> None:
    class Counted(PlainNoise):
        sizes: list[tuple[int, ...]] = []  # noqa: RUF012

        def of(self, tokens: torch.Tensor, *where: torch.Tensor) -> torch.Tensor:
            self.sizes.append(tuple(tokens.shape))
            return super().of(tokens, *where)

        def highest(self, scores: torch.Tensor, *where: torch.Tensor) -> torch.Tensor:
            self.sizes.append(tuple(scores.shape))
            return super().highest(scores, *where)

    device = Device(Counted())
    rows = [ROWS[0], ROWS[4], ROWS[10]]
    assert [device.draw.width(row) for row in rows] == [ALL, 256, NONE]
    device.tokens(rows, scores())
    assert Counted.sizes == [(1, VOCABULARY), (1, 256)]
    device.tokens([ROWS[10]], scores())
    assert len(Counted.sizes) == 2, "the likeliest token needs none"


def test_what_is_not_a_number_is_told_in_place_of_a_token() -> None:
    logits = scores()
    logits[[0, 4, 10], 17] = float("nan")
    tokens = Device().tokens(ROWS, logits)
    assert [i for i, token in enumerate(tokens) if token == NOT_A_NUMBER] == [0, 4, 10]
    right = [i for i in range(len(ROWS)) if i not in (0, 4, 10)]
    expected = drawn_by_sampler(ROWS, scores())
    assert [tokens[i] for i in right] == [expected[i] for i in right]
