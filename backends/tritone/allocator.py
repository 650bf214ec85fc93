"""How the processes of a server hand memory out and give it back, so that they stay as large as they are.

In a server and its stubs a buffer is made by one thread and freed by another. With the C library's defaults
every thread keeps what it freed, and those caches fill for thousands of requests: it looks like a leak. Large
buffers are mapped one by one there, so that none of them leaves a hole in the heap. Engines keep the caches,
with which the many small tensors of a network are made faster, and have their large ones in the heap. The
library reads what it is told of the caches when a process starts, so `tritone serve` starts once more.

Stubs and engines give freed pages back to the system by and by: by itself the library returns only those at
the end of a heap. Each time Python's collector runs first, since cycles that lie about keep whole pages, and
left alone it runs the more seldom the more there is. What was there at the start it does not look at again.
Python's cache of attribute look-ups is emptied too. It keeps the names: where C code asks by a string of its
own, as Triton's does for every tensor, each call leaves a name, up to 4,096 of them, among what lives long.
So is that of the formats of `struct`: Triton reads a text by a format that has its length in it, so each
length that is new leaves one, up to 100 of them.

Python's own allocator, of all that is small, keeps nearly every page that it ever used. So its room is taken
at the start, for as many requests at once as there may be, and not by and by as more than ever before meet.
How much of it is in use is a metric, see `num_blocks`. NumPy, too, keeps the buffers of small arrays, seven
of each size. Those of whole words, as nearly all are, are made at the start, side by side, where later each
would hold a page of its own. Those of other sizes are given back, since they would take 3 MB by and by: as
many bytes as a text has, or the JSON of a call, Triton puts into an array.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import struct
import sys
import threading
import time
from collections.abc import MutableMapping

import numpy as np

MMAP_BYTES = 16384  # below most chunks of sound
VARIABLE = "GLIBC_TUNABLES"
SERVER = f"glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1:glibc.malloc.mmap_threshold={MMAP_BYTES}"
ENGINE = "glibc.malloc.arena_max=1"
GIVE_BACK_EVERY_S = 10.0
ARENA_BYTES = 1 << 20  # what Python's allocator maps at a time
ARENA_BLOCKS = 1984  # of BLOCK_BYTES in one, which is its largest kind
BLOCK_BYTES = 512
# In small things, of a request in flight, at the worst moments of mixed load: 55, 15 and 7 KiB, rounded up.
IN_ORCHESTRATOR_BYTES, IN_ENGINE_BYTES, IN_DOOR_BYTES = 64 << 10, 16 << 10, 8 << 10
NUMPY_KEEPS, NUMPY_KEEPS_BELOW_BYTES = 7, 1024  # buffers of each size
WORD_BYTES = 8
MOST_ROOM_BYTES = 16 << 20  # however many requests a deploy file allows
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # of malloc.h

_alive: list[int] = []  # blocks, as last counted


def for_server(env: MutableMapping[str, str]) -> None:
    """A user's own setting stays as it is."""
    env.setdefault(VARIABLE, SERVER)


def for_engine(env: MutableMapping[str, str]) -> None:
    """In place of what `for_server` set: an engine inherits the environment of its server."""
    if env.get(VARIABLE) == SERVER:
        env[VARIABLE] = ENGINE


def start_again() -> None:
    """Run the command of this process anew with what `for_server` sets. Before it did anything.

    Returns where that, or a user's own setting, is there already, and where it cannot be done.
    """
    if VARIABLE in os.environ or not sys.executable:
        return
    for_server(os.environ)
    with contextlib.suppress(OSError):
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    del os.environ[VARIABLE]


def for_this_process() -> None:
    """What `for_server` sets, as far as a process that runs can still be told. Before it has threads."""
    if VARIABLE in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)  # what glibc has
    mallopt(M_ARENA_MAX, 1)
    mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)


def num_blocks() -> int:
    """What was alive in Python's allocator when memory was last given back; before that, what is now.

    What grows of it while no more than before is asked has leaked.
    """
    return _alive[-1] if _alive else sys.getallocatedblocks()


def give_back_often(room_bytes: int = 0, every_s: float = GIVE_BACK_EVERY_S) -> None:
    """Give the freed memory of this process back now and then, from a thread that ends with it.

    To be called once everything is imported and loaded. room_bytes: taken for small things that will come.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)  # what glibc has
    forget_formats = getattr(struct, "_clearcache", lambda: None)  # what CPython has

    def run(_room: list[bytes]) -> None:
        while not never.wait(every_s):
            sys._clear_type_cache()
            forget_formats()
            gc.collect()
            _empty_numpy()
            _alive[:] = [sys.getallocatedblocks()]
            trim(0)

    never = threading.Event()
    _fill_numpy()
    gc.collect()
    gc.freeze()
    trim(0)  # what loading has left takes 50 ms and more, for which nobody can allocate: now and not later
    room = _take_room(-(-min(room_bytes, MOST_ROOM_BYTES) // ARENA_BYTES))
    threading.Thread(target=run, args=(room,), daemon=True, name="memory").start()


def _fill_numpy() -> None:
    """Of sizes that are whole words."""
    for size_bytes in range(WORD_BYTES, NUMPY_KEEPS_BELOW_BYTES, WORD_BYTES):
        _ = [np.empty(size_bytes, np.uint8) for _ in range(NUMPY_KEEPS)]


def _empty_numpy() -> None:
    """Of all other sizes: an array that outgrows them takes what was kept along, and ends for good."""
    for size_bytes in range(1, NUMPY_KEEPS_BELOW_BYTES):
        if size_bytes % WORD_BYTES:
            for array in [np.empty(size_bytes, np.uint8) for _ in range(NUMPY_KEEPS)]:
                array.resize(NUMPY_KEEPS_BELOW_BYTES, refcheck=False)
            time.sleep(0)  # all of it takes 7 ms: threads that wait for Python come between


def _take_room(arenas: int) -> list[bytes]:
    """Touch all that Python's allocator has mapped, and so many arenas more, which the result keeps."""
    blocks = [bytes(BLOCK_BYTES - sys.getsizeof(b"")) for _ in range((arenas + 1) * ARENA_BLOCKS)]
    return blocks[ARENA_BLOCKS::ARENA_BLOCKS]  # what the old arenas had free is less than one
