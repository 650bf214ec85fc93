"""Servers and stubs get the frugal allocator, engines the quick one; freed pages go back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tritone import allocator, deploy_reader
from tritone import server as servers
from tritone.engine_process import EngineSpec

FAKE = Path(__file__).parents[3] / "model_repository" / "fake" / "deploy.yaml"


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
    assert engine[allocator.VARIABLE] == allocator.ENGINE and engine["HOME"] == "/tmp"


def test_a_setting_of_the_user_holds_for_both(environments):
    server, engine = environments({allocator.VARIABLE: "glibc.malloc.arena_max=1"})
    assert server[allocator.VARIABLE] == engine[allocator.VARIABLE] == "glibc.malloc.arena_max=1"


def test_engines_without_tensors_are_as_frugal_as_the_server(monkeypatch, tmp_path):
    deploy = deploy_reader.load(FAKE)
    monkeypatch.setenv(allocator.VARIABLE, allocator.SERVER)
    for stage in deploy.stages.values():
        spec = EngineSpec(tmp_path, ("a",), "x", (), 1, None, 1.0, env=stage.env)
        assert spec.environment()[allocator.VARIABLE] == allocator.SERVER


def said_by(code, *words, env=None):
    """What a Python of its own prints that runs the code to a good end."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def said_by_a_server(code):
    return said_by(code, env={**os.environ, allocator.VARIABLE: allocator.SERVER})


FREED_BELOW_ONE_BLOCK = """
import ctypes, time
from pathlib import Path
from tritone import allocator

def held_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
blocks = [libc.malloc(12_000) for _ in range(5000)]
for block in blocks:
    ctypes.memset(ctypes.c_void_p(block), 1, 12_000)
for block in blocks[:-1]:
    libc.free(block)
freed = held_mib()
allocator.give_back_often(every_s=0.05)
deadline = time.monotonic() + 10
while held_mib() > freed - 50 and time.monotonic() < deadline:
    time.sleep(0.02)
print(freed - held_mib())
"""


def test_freed_pages_are_given_back():
    said = said_by_a_server(FREED_BELOW_ONE_BLOCK)
    assert float(said) > 50, "60 MB were freed below a block that is still in use"


CYCLE = """
import gc, time, weakref
from tritone import allocator

class Node: pass

def cycle():
    node = Node()
    node.self = node
    return weakref.ref(node)

gc.disable()  # what counts objects until it looks
at_start = [Node() for _ in range(1000)]
allocator.give_back_often(every_s=0.05)
looked_at = len(gc.get_objects())
seen = cycle()
deadline = time.monotonic() + 10
while seen() is not None and time.monotonic() < deadline:
    time.sleep(0.02)
print(seen() is None, looked_at)
"""


def test_what_refers_to_itself_alone_is_found_and_the_start_is_not_looked_at_again():
    said = said_by_a_server(CYCLE)
    found, looked_at = said.split()
    assert found == "True"
    assert int(looked_at) < 1000


NAMES = """
import sys, time
from tritone import allocator

class Node: pass

allocator.give_back_often(every_s=0.05)
names = [f"missing_{number}" for number in range(20_000)]
node, before = Node(), sys.getallocatedblocks() - len(names)
for name in names:
    getattr(node, name, None)
del name, names
asked = sys.getallocatedblocks() - before
deadline = time.monotonic() + 10
while allocator.num_blocks() - before > 100 and time.monotonic() < deadline:
    time.sleep(0.02)
print(asked, allocator.num_blocks() - before)
"""


def test_names_that_were_asked_for_once_are_forgotten():
    said = said_by_a_server(NAMES)
    asked, left = map(int, said.split())
    assert left <= 100, f"{asked} blocks were held, of names"


FORMATS = """
import gc, struct, time
from tritone import allocator

def kept():
    return sum(type(thing) is struct.Struct for thing in gc.get_objects())

allocator.give_back_often(every_s=0.05)
room = bytes(200)
for length in range(101, 161):  # fewer than make the cache forget by itself
    struct.unpack_from(f"<{length}s", room)
deadline = time.monotonic() + 10
while kept() and time.monotonic() < deadline:
    time.sleep(0.02)
print(kept())
"""


def test_lengths_of_texts_that_were_read_once_are_forgotten():
    said = said_by_a_server(FORMATS)
    assert int(said) == 0, "formats by which nothing is read any more are kept"


ARRAYS = """
import ctypes, time
import numpy as np
from tritone import allocator

class MallInfo2(ctypes.Structure):
    _fields_ = [(f"field_{number}", ctypes.c_size_t) for number in range(10)]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = MallInfo2

def in_use():
    return libc.mallinfo2().field_7  # uordblks

def use(sizes):
    for size in sizes:
        arrays = [np.empty(size, np.uint8) for _ in range(8)]

allocator.give_back_often(every_s=0.05)
begin = in_use()
use(range(8, 1024, 8))
by_words = in_use() - begin
use(range(1, 1024))
deadline = time.monotonic() + 10
while in_use() - begin > 100_000 and time.monotonic() < deadline:
    time.sleep(0.02)
print(by_words, in_use() - begin)
"""


def test_small_arrays_find_room_that_was_there_or_give_it_back():
    said = said_by_a_server(ARRAYS)
    by_words, left = map(int, said.split())
    assert by_words < 20_000, "NumPy had no room for arrays of whole words"
    assert left < 100_000, "NumPy keeps what arrays of all other sizes lay in: 3 MB"


def test_a_process_that_runs_can_be_told_to_hand_out_memory_as_a_server_does():
    code = """
import threading
from pathlib import Path
from tritone import allocator

def arenas():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(int(line.partition("-")[0], 16) % (64 << 20) == 0 for line in lines)

{}
begin = arenas()
threads = [threading.Thread(target=lambda: kept.append(bytearray(12_000))) for _ in range(4)]
kept = []
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(arenas() - begin)
"""
    made = []
    for told in ("", "allocator.for_this_process()"):
        made.append(int(said_by(code.format(told))))
    assert made[0] > made[1] == 0


AGAIN = """
import os, sys
from tritone import allocator

print("before", os.getpid(), flush=True)
allocator.start_again()
print("after", os.getpid(), os.environ[allocator.VARIABLE], *sys.argv[1:])
"""


@pytest.mark.parametrize(("own", "times"), [("", 2), ("glibc.malloc.arena_max=2", 1)])
def test_a_command_starts_again_in_its_process_unless_a_user_has_told_it_something(own, times):
    env = {name: value for name, value in os.environ.items() if name != allocator.VARIABLE}
    process = subprocess.Popen(
        [sys.executable, "-c", AGAIN, "two words", "more"],
        env={**env, **({allocator.VARIABLE: own} if own else {})},
        stdout=subprocess.PIPE,
        text=True,
    )
    said, _ = process.communicate(timeout=60)
    begin, end = f"before {process.pid}", f"after {process.pid} {own or allocator.SERVER} two words more"
    assert said.splitlines() == [*times * [begin], end]


def test_a_process_that_cannot_start_again_goes_on(monkeypatch):
    monkeypatch.delenv(allocator.VARIABLE, raising=False)
    for executable in ("", "/nowhere/python"):
        monkeypatch.setattr("sys.executable", executable)
        allocator.start_again()
        assert allocator.VARIABLE not in os.environ


ROOM = """
import sys
from pathlib import Path
from tritone import allocator

def own_kib():
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * 4

allocator.give_back_often(int(sys.argv[1]))
begin = own_kib()
small = [bytes(200) for _ in range(12_000)]
print(own_kib() - begin)
"""


def test_room_for_small_things_is_taken_at_the_start():
    grown = []
    for room_bytes in (0, 3 << 20):
        grown.append(int(said_by(ROOM, str(room_bytes))))
    assert grown[0] > 1500 and grown[1] < 500, "3 MB of small things find room that was there"
