"""The program comes out of the wheel that is meant, and out of no other."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import perf_analyzer_binary
import pytest

from tritone.errors import ConfigError

Offer = Callable[[bytes], None]


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Offer:
    """Make an index that has the wheel, with these bytes as its program."""
    monkeypatch.setenv("TRITONE_CACHE", str(tmp_path / "cache"))

    def make(program: bytes) -> None:
        wheel = tmp_path / "wheel"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(perf_analyzer_binary.PROGRAM, program)

        def download(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            [folder] = [word.removeprefix("--dest=") for word in words if word.startswith("--dest=")]
            (Path(folder) / perf_analyzer_binary.WHEEL).write_bytes(wheel.read_bytes())
            return subprocess.CompletedProcess(words, 0, "", "")

        monkeypatch.setattr(subprocess, "run", download)
        monkeypatch.setattr(perf_analyzer_binary, "SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())

    return make


def test_it_is_unpacked_once(offer: Offer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(b"#!/bin/sh\n")
    program = perf_analyzer_binary.fetch()
    assert program == tmp_path / "cache" / "perf_analyzer" / perf_analyzer_binary.VERSION / "perf_analyzer"
    assert program.read_bytes() == b"#!/bin/sh\n" and program.stat().st_mode & 0o111
    libraries = program.parent / "lib"
    assert {file.name for file in libraries.iterdir()} == set(perf_analyzer_binary.LIBRARIES)
    assert perf_analyzer_binary.environment(program)["LD_LIBRARY_PATH"].split(":")[0] == str(libraries)
    monkeypatch.setattr(subprocess, "run", None)
    assert perf_analyzer_binary.fetch() == program
    assert [entry.name for entry in (tmp_path / "cache" / "perf_analyzer").iterdir()] == [
        perf_analyzer_binary.VERSION
    ]


def test_another_wheel_is_refused(offer: Offer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    offer(b"changed on its way")
    monkeypatch.setattr(perf_analyzer_binary, "SHA256", "0" * 64)
    with pytest.raises(ConfigError, match="is not the one that is meant"):
        perf_analyzer_binary.fetch()
    assert list((tmp_path / "cache" / "perf_analyzer").iterdir()) == []


def test_an_index_that_has_none(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "ERROR: first\nERROR: No matching distribution found"
    monkeypatch.setattr(subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, 1, "", said))
    with pytest.raises(ConfigError, match=r"cannot download .*: ERROR: No matching distribution found"):
        perf_analyzer_binary.fetch()
