"""`tritone reload` and `profile` find the one `tritone serve` that is meant, and hear what came of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from tritone import desk, wire
from tritone.desk import Desk, ask_profile, ask_reload
from tritone.errors import ConfigError, NotFound, TritoneError


def reload(pipeline: str) -> str:
    if pipeline == "broken":
        raise NotFound("pipeline 'broken' is not served", "known: echo")
    return f"{pipeline or 'every pipeline'} was loaded"


def profile(order: wire.Profile) -> wire.Profiled:
    if order.pipeline == "broken":
        raise NotFound("pipeline 'broken' is not served", "known: echo")
    return wire.Profiled(bytes(1 << 20), f"{order.seconds} s of {order.stage}")


@pytest.fixture(autouse=True)
def own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other `tritone serve` of this user are not meant."""
    monkeypatch.setattr(desk, "PREFIX", f"tritone-test/{os.getpid()}/serve/")


@pytest.fixture
def served() -> Iterator[Desk]:
    served = Desk(reload, profile)
    yield served
    served.close()


@pytest.mark.parametrize("pid", [None, os.getpid()], ids=["found", "told"])
def test_what_was_done(served: Desk, pid: int | None) -> None:
    assert ask_reload("echo", pid) == "echo was loaded"
    assert ask_reload("", pid) == "every pipeline was loaded"


def test_what_is_refused(served: Desk) -> None:
    with pytest.raises(NotFound, match="'broken' is not served; known: echo") as caught:
        ask_reload("broken")
    assert caught.value.cure == "known: echo"


def test_a_profile(served: Desk) -> None:
    order = wire.Profile("echo", "writer", "torch", "json", 3)
    assert ask_profile(order) == wire.Profiled(bytes(1 << 20), "3 s of writer")
    with pytest.raises(NotFound, match="'broken' is not served; known: echo"):
        ask_profile(wire.Profile("broken", "writer", "torch", "json", 3))


def test_nothing_runs() -> None:
    with pytest.raises(ConfigError, match="no `tritone serve` runs here; start one"):
        ask_reload("echo")


def test_a_connection_that_outlives_its_desk_is_none() -> None:
    served = Desk(reload, profile)
    with contextlib.closing(wire.connect(f"{desk.PREFIX}{os.getpid()}")):
        served.close()
        with pytest.raises(ConfigError, match="no `tritone serve` runs here"):
            ask_reload("echo")


def test_several_run(served: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {f"{desk.PREFIX}{pid}" for pid in (1, 2)}
    monkeypatch.setattr(desk, "listening", lambda prefix: names)
    with pytest.raises(ConfigError, match="2 `tritone serve` run here; give --pid, one of 1, 2"):
        ask_reload("echo")
    with pytest.raises(ConfigError, match="runs as process 3; running are 1, 2"):
        ask_reload("echo", 3)
    with pytest.raises(TritoneError, match="did not answer"):
        ask_reload("echo", 2)


def test_a_closed_desk_is_gone() -> None:
    Desk(reload, profile).close()
    with pytest.raises(ConfigError, match="no `tritone serve`"):
        ask_reload("echo")
