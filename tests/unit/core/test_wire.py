"""What crosses a process border arrives as it was sent, at any size, and a lost peer is noticed."""

import os
import threading
import uuid

import numpy as np
import pytest

from tritone import wire


@pytest.fixture
def pair():
    address = f"tritone-test/{uuid.uuid4().hex}"
    server = wire.listen(address)
    near = wire.connect(address)
    far = wire.accept(server)
    yield near, far
    near.close()
    far.close()
    server.close()


def piece(values, number=0, last=False):
    return wire.Piece("s", "m", "n", number, values, last)


@pytest.mark.parametrize("shape", [(0, 131), (3,), (40, 131), (300, 131), (2000, 131)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.bool_], ids=lambda d: d.__name__)
def test_arrays_of_any_size_arrive_equal(pair, shape, dtype):
    near, far = pair
    array = (np.random.default_rng(0).random(shape) * 100).astype(dtype)
    near.send(piece({"frames": array, "end": True}))
    values = far.receive().values
    assert values["frames"].dtype == array.dtype and np.array_equal(values["frames"], array)
    assert values["end"] is True


def test_plain_values_and_files_keep_their_types(pair):
    near, far = pair
    values = {"text": "聪明 🙂", "rate": 16000, "speed": 1.5, "files": [b"\x00", b"RIFF"], "none": None}
    near.send(piece(values))
    assert far.receive().values == values


def test_large_packets_leave_no_descriptor_open(pair):
    near, far = pair
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        near.send(piece({"x": np.ones(100_000, np.float32)}))
        assert far.receive().values["x"].sum() == 100_000
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_order_holds_across_inline_and_spilled_packets(pair):
    near, far = pair
    sizes = [10, 100_000, 3, 50_000, 1]

    def send():
        for number, size in enumerate(sizes):
            near.send(piece({"x": np.full(size, number, np.int32)}, number))

    sender = threading.Thread(target=send)
    sender.start()
    got = [far.receive() for _ in sizes]
    sender.join()
    assert [message.number for message in got] == list(range(len(sizes)))
    assert [len(message.values["x"]) for message in got] == sizes


def test_a_closed_peer_is_noticed_on_both_sides(pair):
    near, far = pair
    far.close()
    with pytest.raises(wire.Disconnected):
        near.receive()
    with pytest.raises(wire.Disconnected):
        near.send(wire.Cancel("s"))


def test_garbage_ends_the_connection_instead_of_the_process(pair):
    near, far = pair
    near._sock.send(b"\0garbage")
    with pytest.raises(wire.Disconnected, match="not a message"):
        far.receive()


def test_nobody_there_is_disconnected():
    with pytest.raises(wire.Disconnected):
        wire.connect("tritone-test/nobody")


def test_an_address_has_one_server():
    address = f"tritone-test/{uuid.uuid4().hex}"
    first = wire.listen(address)
    with pytest.raises(OSError, match="in use"):
        wire.listen(address)
    first.close()
