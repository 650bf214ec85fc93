"""A torch profile sees what other threads of the process do, is bounded, and leaves them running."""

from __future__ import annotations

import gzip
import json
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tritone import wire
from tritone.engines import torch_trace
from tritone.engines.torch_trace import TorchTrace
from tritone.errors import InvalidRequest, TritoneError, Unavailable, Unsupported


@pytest.fixture(scope="module")
def turns() -> Iterator[list[int]]:
    """A thread that works as a stage's does, and counts its turns."""
    turns, end = [0], threading.Event()

    def work() -> None:
        x = torch.ones(8, 8)
        while not end.wait(0.001):
            x = torch.tanh(x @ x)
            turns[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    yield turns
    end.set()
    thread.join()


def events(profiled: wire.Profiled) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(gzip.decompress(profiled.data))["traceEvents"]
    return found


def test_operations_of_other_threads_with_their_times(turns: list[int]) -> None:
    before = turns[0]
    profiled = TorchTrace(allowed=True).take(0.5)
    products = [event for event in events(profiled) if event.get("name") == "aten::mm"]
    assert 1 < len(products) <= turns[0] - before
    recorded_s = float(profiled.said.removesuffix(" s of torch"))
    times_s = [float(event["ts"]) / 1e6 for event in products]
    assert 0 < max(times_s) - min(times_s) < recorded_s + 0.1 and recorded_s >= 0.5
    assert {event["tid"] for event in products} != {threading.get_native_id()}
    assert not any("Input Dims" in event.get("args", {}) for event in products), "no shapes"
    before = turns[0]
    while turns[0] < before + 10:
        time.sleep(0.01)  # the thread goes on; the test's time limit ends the wait


def test_one_at_a_time(turns: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    trace, refused, go_on = TorchTrace(allowed=True), [], threading.Event()

    def wait(seconds: float) -> bool:
        refused.append(trace.answer(wire.TraceTorch(7, 1)))
        go_on.set()
        return True

    monkeypatch.setattr(torch_trace, "_wait", wait)
    trace.take(1)
    assert go_on.is_set()
    assert refused == [
        wire.Refused(
            7,
            Unavailable.code,
            "this process is being profiled already",
            "try again when that is done",
        )
    ]
    trace.take(1)  # and again one after the other


def test_it_ends_early_when_it_grows(turns: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_trace, "MAX_RECORD_BYTES", 2 << 20)
    held: list[bytes] = []
    grow = threading.Timer(0.3, lambda: held.append(b"x" * (4 << 20)))
    grow.start()
    profiled = TorchTrace(allowed=True).take(60)
    assert held
    assert profiled.said.endswith("s of torch, ended early at 2 MiB of records")
    assert any(event.get("name") == "aten::mm" for event in events(profiled))


def test_a_trace_that_is_too_large_is_refused(turns: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_trace, "MAX_TRACE_BYTES", 10)
    with pytest.raises(TritoneError, match="give fewer --seconds"):
        TorchTrace(allowed=True).take(0.1)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="off for this pipeline; set `profiling: true`"):
        TorchTrace(allowed=False).take(1)
    for seconds in (0, 61, float("nan")):
        with pytest.raises(InvalidRequest, match="give at most 60"):
            TorchTrace(allowed=True).take(seconds)
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(Unsupported, match=r"needs an engine that runs on torch.*py-spy"):
        TorchTrace(allowed=True).take(1)


def test_a_fault_of_the_profiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no such counter\nand more")

    monkeypatch.setattr(torch_trace, "_recording", broken)
    trace = TorchTrace(allowed=True)
    for _ in range(2):  # the first leaves nothing locked
        answer = trace.answer(wire.TraceTorch(3, 1))
        assert isinstance(answer, wire.Refused) and "RuntimeError: no such counter" in answer.what
        assert "\n" not in answer.what and answer.cure == "give --kind py-spy"
