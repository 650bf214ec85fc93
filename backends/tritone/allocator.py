"""How the C library hands memory out to the processes of a server, told by an environment variable.

In a server and its stubs a buffer is made by one thread and freed by another. With the library's defaults
every thread keeps what it freed, and those caches fill for thousands of requests: it looks like a leak.
Engines keep the defaults, with which the many small tensors of a network are made faster.
"""

from __future__ import annotations

from collections.abc import MutableMapping

VARIABLE = "GLIBC_TUNABLES"
SERVER = "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=2"


def for_server(env: MutableMapping[str, str]) -> None:
    """A user's own setting stays as it is."""
    env.setdefault(VARIABLE, SERVER)


def for_engine(env: MutableMapping[str, str]) -> None:
    """Take back what `for_server` set: an engine inherits the environment of its server."""
    if env.get(VARIABLE) == SERVER:
        del env[VARIABLE]
