from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tritone.kernels.experts import Experts, paired_rows
from tritone.kernels.products import Partials, Products
from tritone.kernels.tiles import MEASURED, Shape, Tile, height
from tritone.networks.layer_weights import ExpertWeights

EPS, EXPERTS, CHOSEN, HIDDEN, INNER, PIECES = 1e-6, 24, 2, 48, 20, 1
PAIRED_ROWS = 3


def output(x: torch.Tensor, norm: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    """The definition, row by row in float64."""
    out = []
    for row in F.rms_norm(x.double(), (HIDDEN,), norm.double(), EPS):
        shares = (weights.router.double() @ row).softmax(-1)
        chosen = shares.argsort(descending=True)[:CHOSEN].tolist()
        whole = shares[chosen].sum() if weights.renormalise else 1.0
        parts = [(i, shares[i] / whole) for i in chosen]
        if weights.shared_gate is not None:
            parts += [(EXPERTS, (weights.shared_gate[0].double() @ row).sigmoid())]
        total = torch.zeros_like(row)
        for i, share in parts:
            gate, up = (weights.gate_up[i].double() @ row).chunk(2)
            total += share * (weights.down[i].double() @ (F.silu(gate) * up))
        out.append(total)
    return torch.stack(out)


@pytest.mark.parametrize("rows", [1, PAIRED_ROWS, PAIRED_ROWS + 1, 19])
@pytest.mark.parametrize("shared", [True, False])
def test_rows_are_sums_over_their_experts(noise, rows, shared):
    count = EXPERTS + PIECES * shared
    weights = ExpertWeights(
        noise(EXPERTS, HIDDEN),
        noise(count, 2 * INNER, HIDDEN, scale=HIDDEN**-0.5),
        noise(count, HIDDEN, INNER, scale=INNER**-0.5),
        noise(1, HIDDEN) if shared else None,
        CHOSEN,
        renormalise=shared,
    )
    x, norm, pending = noise(rows, HIDDEN), noise(HIDDEN), noise(2, rows, HIDDEN)
    expected = x.double() + pending.double().sum(0)
    expected += output(expected, norm, weights)
    left = Experts(weights, rows, Products(EPS))(x, norm, weights, Partials(pending, 2))
    made = x.double() if left is None else x.double() + left.values[: left.count].double().sum(0)
    assert (left is None) == (rows <= PAIRED_ROWS)
    torch.testing.assert_close(made, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("rows", [20, 33])
def test_experts_with_those_rows_alone_that_chose_them_give_the_same(noise, monkeypatch, rows):
    """Some experts are chosen by more rows than go at a time."""
    crowded = noise(EXPERTS, HIDDEN)
    crowded[1:3] += 0.5
    weights = ExpertWeights(
        crowded,
        noise(EXPERTS + PIECES, 2 * INNER, HIDDEN, scale=HIDDEN**-0.5),
        noise(EXPERTS + PIECES, HIDDEN, INNER, scale=INNER**-0.5),
        noise(1, HIDDEN),
        CHOSEN,
        renormalise=True,
    )
    x, norm = noise(rows, HIDDEN), noise(HIDDEN)
    sums = []
    for tile in (Tile(32, 64, 4, 3), Tile(32, 64, 4, 3, rows=16)):
        shape = Shape("experts_up", height("experts_up", rows), HIDDEN, INNER)
        monkeypatch.setitem(MEASURED, shape, tile)
        left = Experts(weights, rows, Products(EPS))(x.clone(), norm, weights, None)
        sums.append(left.values[: left.count].sum(0))
    torch.testing.assert_close(sums[1], sums[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(sums[1].double(), output(x, norm, weights), atol=2e-5, rtol=2e-5)


def test_pairs_go_by_themselves_while_hardly_an_expert_is_read_twice():
    assert paired_rows(CHOSEN, EXPERTS) == PAIRED_ROWS
    assert [paired_rows(8, 128), paired_rows(6, 128), paired_rows(8, 512)] == [4, 5, 16]
    assert paired_rows(2, 8) == 2, "two rows leave no partial sums, whatever the experts"
