"""The script that measures a thinker's step runs at toy size where there is no GPU."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch")

import thinker_step


def test_it_checks_first_and_then_measures(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tiny", "--programs", "plain", "--rows", "1,4", "--context", "24"]
    assert thinker_step.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [
        re.findall(r"^plain +rows +(\d+): off by \S+, replay equals call: True", line) for line in lines[:2]
    ] == [
        ["1"],
        ["4"],
    ]
    assert lines[2].split() == ["rows", "plain", "eager", "floor", "times", "experts", "a", "layer"]
    rows = [[float(cell) for cell in line.split()] for line in lines[3:]]
    assert [row[0] for row in rows] == [1, 4]
    assert rows[0][-1] == 4 < rows[1][-1] <= 16, "experts that are read"


def test_it_wants_a_folder_or_toy_size(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        thinker_step.main([])
    assert "give DIR, or --tiny" in capsys.readouterr().err
