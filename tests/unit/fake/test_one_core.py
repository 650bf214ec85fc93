"""The chain of the weight-free pipeline in one process, as the tool that measures it runs it."""

import re

import one_core


def test_two_chains_take_turns_and_are_compared(capsys):
    assert one_core.main(["--b", "metrics=false", "--rounds", "3", "--requests", "2", "--at-once", "2"]) == 0
    ratio, head, *rows = capsys.readouterr().out.splitlines()
    assert re.match(r"B / A, processor time per request: \d+\.\d{3} \(.* 3 rounds\)$", ratio)
    assert head.split() == ["ms", "per", "request", "A", "B"]
    times = {name: (float(a), float(b)) for name, a, b in map(str.split, rows)}
    assert min(times["orchestrator"]) > 0 and min(times["fake_writer"]) > 0
    assert "metrics" in times and times["metrics"][1] <= times["metrics"][0]
