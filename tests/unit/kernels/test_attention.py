from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tritone.kernels.attention import MOST_SHARES, Attention, Where
from tritone.kernels.products import Products

EPS, HEADS, KV, D = 1e-6, 6, 2, 16


def turned(heads, norm, cos, sin):
    normed = F.rms_norm(heads, (D,), norm, EPS)
    return normed * cos + normed.roll(D // 2, dims=-1) * sin


def expected(cache, qkv, norms, turns, slots, places):
    """The definition, row by row in float64: what comes out, and the key and value of each row."""
    query_norm, key_norm = (norm.double() for norm in norms)
    rows, new = [], []
    for i, (slot, place) in enumerate(zip(slots, places, strict=True)):
        cos, sin = (turn.double()[i if len(turn) > 1 else 0] for turn in turns)
        query, key, value = qkv[i].double().view(-1, D).split((HEADS, KV, KV))
        query, key = turned(query, query_norm, cos, sin), turned(key, key_norm, cos, sin)
        keys = torch.cat((cache[0, slot, :, :place].double(), key.unsqueeze(1)), dim=1)
        values = torch.cat((cache[1, slot, :, :place].double(), value.unsqueeze(1)), dim=1)
        weights = (query.view(KV, -1, D) @ keys.transpose(1, 2) * D**-0.5).softmax(-1)
        rows.append((weights @ values).flatten())
        new.append(torch.stack((key, value)))
    return torch.stack(rows), torch.stack(new)


@pytest.mark.parametrize("context", [17, 700])
@pytest.mark.parametrize("by_slot", [True, False])
def test_rows_see_the_keys_of_their_slot_and_no_others(noise, device, context, by_slot):
    places = [0, 5, context - 1] if by_slot else [9, 9, 9]
    slots = [4, 0, 2] if by_slot else [0, 1, 2]
    cache = torch.full((2, 2, 5, KV, context, D), float("nan"), device=device)
    for slot, place in zip(slots, places, strict=True):
        cache[1, :, slot, :, :place] = noise(2, KV, place, D)
    qkv, norms = noise(3, (HEADS + 2 * KV) * D), (noise(D), noise(D))
    turns = (noise(3, D), noise(3, D)) if by_slot else (noise(1, D), noise(1, D))
    right, new = expected(cache[1], qkv, norms, turns, slots, places)
    table = torch.tensor([slots, places], dtype=torch.int32, device=device).t().contiguous()
    where = Where(table[:, 0], table[:, 1]) if by_slot else Where(place=9)
    out = torch.full((3, HEADS * D), float("nan"), device=device)
    Attention(cache, HEADS, 3, Products(EPS))(1, qkv, norms, turns, where, out)
    torch.testing.assert_close(out.double(), right, atol=1e-5, rtol=1e-5)
    for i, (slot, place) in enumerate(zip(slots, places, strict=True)):
        stored = cache[1, :, slot, :, place].double()
        torch.testing.assert_close(stored, new[i], atol=1e-5, rtol=1e-5)
    assert cache[0].isnan().all()


def test_the_keys_of_a_slot_are_shared_out_while_rows_are_few(device):
    attention = Attention(torch.zeros((1, 2, 3, KV, 700, D), device=device), HEADS, 64, Products(EPS))
    assert [attention._parts(rows) for rows in (1, 8, 16, 64)] == [MOST_SHARES, MOST_SHARES, 4, 1]
