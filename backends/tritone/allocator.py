"""How the processes of a server hand memory out and give it back, so that they stay as large as they are.

In a server and its stubs a buffer is made by one thread and freed by another. With the C library's defaults
every thread keeps what it freed, and those caches fill for thousands of requests: it looks like a leak. Large
buffers are mapped one by one there, so that none of them leaves a hole in the heap. Engines keep the caches,
with which the many small tensors of a network are made faster, and have their large ones in the heap.

Stubs and engines give freed pages back to the system by and by: by itself the library returns only those at
the end of a heap. Each time Python's collector runs first, since cycles that lie about keep whole pages, and
left alone it runs the more seldom the more there is. What was there at the start it does not look at again.
Python's cache of attribute look-ups is emptied too. It keeps the names: where C code asks by a string of its
own, as Triton's does for every tensor, each call leaves a name, up to 4,096 of them, among what lives long.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import MutableMapping

VARIABLE = "GLIBC_TUNABLES"
SERVER = "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1:glibc.malloc.mmap_threshold=65536"
ENGINE = "glibc.malloc.arena_max=1"
GIVE_BACK_EVERY_S = 10.0
MMAP_BYTES = 65536
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # of malloc.h


def for_server(env: MutableMapping[str, str]) -> None:
    """A user's own setting stays as it is."""
    env.setdefault(VARIABLE, SERVER)


def for_engine(env: MutableMapping[str, str]) -> None:
    """In place of what `for_server` set: an engine inherits the environment of its server."""
    if env.get(VARIABLE) == SERVER:
        env[VARIABLE] = ENGINE


def for_this_process() -> None:
    """What `for_server` sets, as far as a process that runs can still be told. Before it has threads."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)  # what glibc has
    mallopt(M_ARENA_MAX, 1)
    mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)


def give_back_often(every_s: float = GIVE_BACK_EVERY_S) -> None:
    """Give the freed memory of this process back now and then, from a thread that ends with it.

    To be called once everything is imported and loaded.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)  # what glibc has

    def run() -> None:
        while not never.wait(every_s):
            sys._clear_type_cache()
            gc.collect()
            trim(0)

    never = threading.Event()
    gc.collect()
    gc.freeze()
    threading.Thread(target=run, daemon=True, name="memory").start()
