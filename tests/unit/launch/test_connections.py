"""Hanging up on the clients of a child process, and on nobody else."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tritone import connections

SERVER = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
kept = []
for word in sys.stdin:
    if word == "accept\\n":
        kept.append(server.accept()[0])
    else:
        kept[int(word)].sendall(b"x")
    print("done", flush=True)
"""


class Child:
    """A process that accepts when told, and sends to a client of that number when told."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def client(self) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.port), timeout=5)
        self.tell("accept")
        return client


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.process.kill()
    child.process.communicate()


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True


def test_clients_of_the_port_hear_the_end(child: Child) -> None:
    client = child.client()
    assert connections.hang_up(child.process.pid, [child.port]) == 1
    assert client.recv(1) == b""
    again = child.client()
    child.tell("1")
    assert again.recv(1) == b"x", "the process serves on"


def test_other_ports_are_left_alone(child: Child) -> None:
    client = child.client()
    assert connections.hang_up(child.process.pid, [child.port + 1]) == 0
    assert is_open(client)


def test_what_the_process_speaks_on_is_left_alone(child: Child) -> None:
    silent, spoken = child.client(), child.client()
    time.sleep(2.5)
    child.tell("1")
    assert connections.hang_up(child.process.pid, [child.port], quiet_s=2.0) == 1
    assert silent.recv(1) == b"" and spoken.recv(1) == b"x" and is_open(spoken)


def test_a_process_that_is_gone() -> None:
    assert connections.hang_up(2**22 + 1, [80]) is None
