from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tritone.kernels.products import Products, cleared
from tritone.kernels.tiles import MOST_SPLITS

EPS = 1e-6
PRODUCTS = Products(EPS)
WIDTHS = [(48, 40), (130, 33)]  # of x and y: tiles end within them


def close(made: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(made.double(), right, atol=2e-5, rtol=2e-5)


def rms(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x.double(), x.shape[-1:], norm.double(), EPS)


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("rows", [1, 2])
def test_gemv(noise, rows, widths):
    inner, outer = widths
    x, norm, residual = noise(rows, inner), noise(inner), noise(rows, outer)
    weight = noise(2 * outer, inner, scale=inner**-0.5)
    gate, up = weight.double().chunk(2)
    y = torch.full_like(residual, float("nan"))
    PRODUCTS.gemv(x, weight[:outer], y)
    close(y, x.double() @ gate.T)
    PRODUCTS.gemv(x, weight, y, norm=norm, glu=True)
    close(y, F.silu(rms(x, norm) @ gate.T) * (rms(x, norm) @ up.T))
    expected = residual.double() + rms(x, norm) @ gate.T
    PRODUCTS.gemv(x, weight[:outer], residual, norm=norm, residual=residual)
    close(residual, expected)


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("rows", [3, 70])
def test_gemm(noise, rows, widths):
    inner, outer = widths
    x, weight = noise(rows, inner), noise(2 * outer, inner, scale=inner**-0.5)
    gate, up = weight.double().chunk(2)
    y = torch.full((rows, outer), float("nan"), device=x.device)
    PRODUCTS.gemm(x, weight[:outer], y)
    close(y, x.double() @ gate.T)
    PRODUCTS.gemm(x, weight, y, glu=True)
    close(y, F.silu(x.double() @ gate.T) * (x.double() @ up.T))


@pytest.mark.parametrize("inner", [48, 515, 2048])
def test_partial_sums_are_added_up_by_the_norm(noise, inner):
    rows, hidden = 5, 24
    x, norm, given = noise(rows, hidden), noise(hidden), noise(rows, inner)
    weight = noise(hidden, inner, scale=inner**-0.5)
    into = torch.full((MOST_SPLITS, rows, hidden), float("nan"), device=x.device)
    partials = PRODUCTS.gemm_parts(given, weight, into)
    assert 1 <= partials.count <= MOST_SPLITS
    expected = x.double() + given.double() @ weight.double().T
    y = torch.empty_like(x)
    PRODUCTS.norm_add(x, norm, y, partials)
    close(x, expected)
    close(y, rms(expected, norm))
    PRODUCTS.norm_add(x, norm, y)
    close(y, rms(expected, norm))


def test_what_is_not_a_number_stays_in_its_row(noise):
    x, weight = noise(3, 48), noise(40, 48)
    x[1, 5] = float("nan")
    y = cleared(3, 40, like=x)
    PRODUCTS.gemm(x, weight, y)
    assert y.isnan().any(-1).tolist() == [False, True, False]
