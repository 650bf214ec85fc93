"""An interpreter that seems to have the peer: a fake one that speaks its protocol."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")

FAKE = Path(__file__).parent / "fake_peer"


@pytest.fixture
def peer_python(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKE), os.environ.get("PYTHONPATH", "")]))
    return sys.executable
