"""Servers and stubs get the frugal allocator, engines the quick one, and a user's own setting wins."""

import pytest

from tritone import allocator
from tritone import server as servers
from tritone.engine_process import EngineSpec


@pytest.fixture
def environments(tmp_path, monkeypatch):
    """What a server gets, and an engine that inherits it."""

    def of(user):
        interpreter = servers.Interpreter.current()
        server = servers.Server("test", "", tmp_path, tmp_path, tmp_path, (), tmp_path)
        own = servers.environment(server, interpreter, user)
        for name in (allocator.VARIABLE, *user):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("os.environ", own)
        return own, EngineSpec(tmp_path, ("a",), "x", (), 1, None, 1.0).environment()

    return of


def test_engines_do_not_inherit_what_servers_get(environments):
    server, engine = environments({"HOME": "/tmp"})
    assert server[allocator.VARIABLE] == allocator.SERVER
    assert allocator.VARIABLE not in engine and engine["HOME"] == "/tmp"


def test_a_setting_of_the_user_holds_for_both(environments):
    server, engine = environments({allocator.VARIABLE: "glibc.malloc.arena_max=1"})
    assert server[allocator.VARIABLE] == engine[allocator.VARIABLE] == "glibc.malloc.arena_max=1"
