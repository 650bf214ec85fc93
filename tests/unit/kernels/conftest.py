"""Kernels on the GPU if there is one, else in Triton's interpreter on the CPU (tests/conftest.py)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="kernels need triton, which is not installed")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def noise(device: torch.device):
    """Makes reproducible noise of a shape."""
    generator = torch.Generator().manual_seed(11)

    def make(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device)

    return make
