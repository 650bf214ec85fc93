import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # makers of records
sys.path.insert(0, str(Path(__file__).parents[1] / "client"))  # the fake server is no installed package

from fake_triton import Audio, Done, FakeTriton, Text


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    """A server whose answer is "Hello", with 1000 samples of speech in two chunks."""
    with FakeTriton([Text("Hel"), Audio(400), Text("lo"), Audio(600), Done()]) as server:
        yield server
