"""A thread that waits for the next message holds nothing of the last: it may be large, and the wait long."""

import uuid
import weakref

import numpy as np
import pytest

from tritone import wire
from tritone.engine_link import EngineLink
from tritone.engines.host import Host
from waiting import wait_until

SOUND = {"pcm": np.zeros(5000, np.float32)}


@pytest.fixture
def address():
    return f"tritone-test/{uuid.uuid4().hex}"


@pytest.fixture
def seen(monkeypatch):
    """References to the sound in each message that an engine process or a door takes in."""
    found = []

    def take(self, message, *_):
        values = message.values if isinstance(message, wire.Piece) else message.results[0].outputs
        found.append(weakref.ref(values["pcm"]))

    for kind in (Host, EngineLink):
        monkeypatch.setattr(kind, "_take", take)
    return found


def test_an_engine_process_lets_go_of_a_piece(address, seen):
    Host(address, wire.listen(address)).serve()
    channel = wire.connect(address)
    channel.send(wire.Piece("s", "writer", "singer", 0, SOUND, False))
    wait_until(lambda: seen and seen[0]() is None)
    channel.close()


def test_a_door_lets_go_of_an_answer(address, seen):
    server = wire.listen(address)
    link = EngineLink("wave", address, None, 5.0)
    try:
        channel = wire.accept(server)
        channel.send(wire.Ran(1, [wire.StreamResult(SOUND)]))
        wait_until(lambda: seen and seen[0]() is None)
    finally:
        link.close()
        server.close()
