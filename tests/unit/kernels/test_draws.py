from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tritone.engines import sampler
from tritone.kernels.draws import Drawing, DrawRows, Draws
from tritone.kernels.products import Products
from tritone.sampling import Sampling

V, H, CODEBOOKS, SLOTS, END = 150, 24, 3, 6, 149
SETTINGS = [
    Sampling(temperature=0.0, repetition_penalty=1.7),
    Sampling(temperature=0.9, top_k=50, repetition_penalty=1.05, seed=3),
    Sampling(temperature=1.3, top_p=0.7, seed=(1 << 62) + 12345),
    Sampling(temperature=0.7, min_p=0.1, seed=(7 << 32) - 1),
    Sampling(temperature=2.0, seed=1 << 31),
]
DRAWS = [0, 7, 300, 1, 70000]
ROWS = len(SETTINGS)


@pytest.fixture
def drawing(device):
    return Drawing(
        seen=torch.zeros((SLOTS, V), dtype=torch.bool, device=device),
        silenced=torch.arange(V, device=device) % 10 == 3,
        spoken=torch.zeros((SLOTS, H), device=device),
        frames=torch.full((ROWS, CODEBOOKS), -7, dtype=torch.int32, device=device),
        end=END,
        first_codebook=1,
        residual_top_k=20,
        residual_top_p=0.8,
    )


@pytest.fixture
def asked(device):
    columns = {
        "slots": [4, 0, 2, 1, 3],
        "draws": DRAWS,
        "begins": [1, 0, 0, 1, 0],
        "bars_end": [0, 1, 0, 1, 0],
        "seed_low": [word(s.seed or 0) for s in SETTINGS],
        "seed_high": [word((s.seed or 0) >> 32) for s in SETTINGS],
        "top_k": [s.top_k or V for s in SETTINGS],
        "temperature": [s.temperature for s in SETTINGS],
        "residual_temperature": [float(s.temperature > 0) for s in SETTINGS],
        "top_p": [s.top_p for s in SETTINGS],
        "log_min_p": [torch.tensor(s.min_p).log().item() for s in SETTINGS],
        "penalty": [s.repetition_penalty for s in SETTINGS],
    }
    whole = torch.zeros((ROWS, len(columns)), dtype=torch.int32, device=device)
    for i, (name, values) in enumerate(columns.items()):
        column = whole[:, i] if name in list(columns)[:7] else whole.view(torch.float32)[:, i]
        column.copy_(torch.tensor(values))
    floats = whole.view(torch.float32)
    return DrawRows(
        **{name: (whole if i < 7 else floats)[:, i] for i, name in enumerate(columns)},
    )


def word(value: int) -> int:
    low = value & 0xFFFFFFFF
    return low - (1 << 32) if low >= 1 << 31 else low


@pytest.mark.parametrize("top_k, top_p", [(20, 0.8), (V, 0.02), (3, 1.0)])
def test_a_frame_draws_what_the_sampler_draws(noise, device, drawing, asked, top_k, top_p):
    drawing = replace(drawing, residual_top_k=top_k, residual_top_p=top_p)
    draws = Draws(drawing, ROWS, Products(1e-6))
    text, tables = noise(ROWS, H), [noise(V, H) for _ in range(CODEBOOKS)]
    drawing.spoken.copy_(noise(SLOTS, H))
    spoken = drawing.spoken.clone()
    said = {slot: [5 + slot, 60, 61, END] for slot in range(SLOTS)}
    for slot, codes in said.items():
        drawing.seen[slot, codes] = True
    x = torch.empty_like(text)
    draws.begin(asked, text, x)
    slots = asked.slots.long()
    begins = asked.begins.bool().unsqueeze(-1)
    torch.testing.assert_close(x, text + spoken[slots].masked_fill(begins, 0.0))

    scores = [noise(ROWS, V, scale=3.0) for _ in range(CODEBOOKS)]
    following, codes = torch.empty_like(text), []
    for codebook in range(CODEBOOKS):
        draws(asked, scores[codebook], codebook, tables[codebook], following)
        codes.append(drawing.frames[:, codebook].long())
        if codebook < CODEBOOKS - 1:
            assert torch.equal(following, tables[codebook][codes[-1]])
    first = [
        sampler.Row(s, DRAWS[i], said[int(slots[i])], (END,) if asked.bars_end[i] else ())
        for i, s in enumerate(SETTINGS)
    ]
    silent = scores[0].masked_fill(drawing.silenced, float("-inf"))
    assert codes[0].tolist() == sampler.sample(silent, first, 1).tolist()
    for codebook in range(1, CODEBOOKS):
        later = [
            sampler.Row(
                Sampling(temperature=float(s.temperature > 0), top_k=top_k, top_p=top_p, seed=s.seed),
                DRAWS[i] + 1,
            )
            for i, s in enumerate(SETTINGS)
        ]
        assert codes[codebook].tolist() == sampler.sample(scores[codebook], later, codebook + 1).tolist()
    total = torch.stack([table[code] for table, code in zip(tables, codes, strict=True)]).sum(0)
    torch.testing.assert_close(drawing.spoken[slots], total)
    assert torch.equal(drawing.spoken[5], spoken[5]), "a slot that was not asked keeps what it has"
    for i, slot in enumerate(slots.tolist()):
        assert set(drawing.seen[slot].nonzero().flatten().tolist()) == {*said[slot], int(codes[0][i])}


@pytest.mark.parametrize("codebook", [0, 2])
def test_what_is_not_a_number_is_told_in_place_of_the_first_code(noise, drawing, asked, codebook):
    draws = Draws(drawing, ROWS, Products(1e-6))
    text, table = noise(ROWS, H), noise(V, H)
    draws.begin(asked, text, torch.empty_like(text))
    for number in range(CODEBOOKS):
        scores = noise(ROWS, V)
        if number == codebook:
            scores[3, 17] = scores[0, 0] = float("nan")
        draws(asked, scores, number, table, torch.empty_like(text))
    assert (drawing.frames[:, 0] == -1).tolist() == [True, False, False, True, False]
    assert ((drawing.frames >= -1) & (drawing.frames < V)).all()
