"""Kernels on the GPU if there is one, else in Triton's interpreter on the CPU (tests/conftest.py)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="kernels need triton, which is not installed")

from tritone.engines import prompt_kernels  # noqa: E402
from tritone.engines.cuda_graphs import CudaGraphs  # noqa: E402
from tritone.kernels.tiles import INTERPRETED  # noqa: E402


@pytest.fixture(autouse=True)
def no_first_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter compiles nothing, and a call of a program there takes seconds."""
    if INTERPRETED:
        monkeypatch.setattr(CudaGraphs, "__call__", lambda _, program: program)


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of prompts of 16 rows and more, of which fewer only fill a graph."""
    monkeypatch.setattr(prompt_kernels, "FEWEST_PACKED", 16)


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
