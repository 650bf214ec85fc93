"""The measurement of the host runs, so that it can be taken where it is wanted."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import talker_host


def test_frames_of_all_sessions_are_timed(capsys):
    assert talker_host.main(["--sessions", "1,2", "--frames", "12"]) == 0
    told = re.findall(
        r"^sessions +(\d+): (\d+\.\d\d) ms of processor time a frame", capsys.readouterr().out, re.M
    )
    assert [sessions for sessions, _ in told] == ["1", "2"]
    assert all(float(milliseconds) > 0 for _, milliseconds in told)
