"""How the C library hands memory out to the processes of a server, told by an environment variable.

In a server and its stubs a buffer is made by one thread and freed by another. With the library's defaults
every thread keeps what it freed, and those caches fill for thousands of requests: it looks like a leak.
Engines keep the caches, with which the many small tensors of a network are made faster; their connections
come and go with threads of their own, so the number of heaps is bounded there too.

Stubs and engines give freed pages back to the system by and by: by itself the library returns only those at
the end of a heap.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import MutableMapping

VARIABLE = "GLIBC_TUNABLES"
SERVER = "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=2"
ENGINE = "glibc.malloc.arena_max=2"
GIVE_BACK_EVERY_S = 10.0


def for_server(env: MutableMapping[str, str]) -> None:
    """A user's own setting stays as it is."""
    env.setdefault(VARIABLE, SERVER)


def for_engine(env: MutableMapping[str, str]) -> None:
    """In place of what `for_server` set: an engine inherits the environment of its server."""
    if env.get(VARIABLE) == SERVER:
        env[VARIABLE] = ENGINE


def give_back_often(every_s: float = GIVE_BACK_EVERY_S) -> None:
    """Return the freed pages of this process to the system now and then, from a thread that ends with it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:  # a C library other than glibc
        return

    def run() -> None:
        while not never.wait(every_s):
            trim(0)

    never = threading.Event()
    threading.Thread(target=run, daemon=True, name="memory").start()
