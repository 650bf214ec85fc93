"""What crosses a process border arrives as it was sent, at any size, and a lost peer is noticed."""

import errno
import socket
import struct
import threading
import time
import uuid

import msgspec
import numpy as np
import pytest

from descriptors import descriptors
from tritone import wire
from waiting import PATIENCE_S, wait_until


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
    before = descriptors()
    for _ in range(20):
        near.send(piece({"x": np.ones(100_000, np.float32)}))
        assert far.receive().values["x"].sum() == 100_000
    wait_until(lambda: len(descriptors() - before) <= 1, what="descriptors stay open")


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


def test_arrays_of_small_spilled_packets_keep_no_descriptor(pair):
    near, far = pair
    before, kept = descriptors(), []
    for _ in range(20):
        near.send(piece({"x": np.ones(100_000, np.float32)}))
        kept.append(far.receive())
    wait_until(lambda: not descriptors() - before, what="descriptors stay open")


@pytest.mark.parametrize("size", [10, 100_000, 1_000_000])
def test_what_does_not_fit_now_is_not_sent_and_may_be_later(pair, size):
    near, far = pair
    packets = [wire.encode(piece({"x": np.full(size, number, np.int32)}, number)) for number in range(3)]
    sent = 0
    while near.try_send(packets[0]):
        sent += 1
        assert sent < 100_000
    assert not near.wait_writable(0.0)
    for _ in range(sent):
        assert far.receive().number == 0
    assert near.wait_writable(PATIENCE_S)
    assert near.try_send(packets[1]) and near.try_send(packets[2])
    assert [far.receive().number for _ in range(2)] == [1, 2]


def test_try_send_does_not_wait_for_a_send_that_waits(pair):
    near, far = pair
    while near.try_send(wire.encode(piece({"x": "y" * 40_000}))):
        pass
    sender = threading.Thread(target=near.send, args=(piece({"x": "z" * 40_000}),), daemon=True)
    sender.start()
    while not near._lock.locked():
        time.sleep(0.001)
    assert not near.try_send(wire.encode(wire.Cancel("s")))
    while far.receive().values["x"][0] != "z":
        pass
    sender.join(PATIENCE_S)
    assert near.try_send(wire.encode(wire.Cancel("s")))
    assert far.receive() == wire.Cancel("s")


def test_a_lost_peer_ends_the_wait_for_room(pair):
    near, far = pair
    while near.try_send(wire.encode(piece({"x": "y" * 40_000}))):
        pass
    far.close()
    assert near.wait_writable(PATIENCE_S)
    with pytest.raises(wire.Disconnected):
        near.try_send(wire.encode(wire.Cancel("s")))
    near.close()
    assert near.wait_writable(PATIENCE_S)


def test_a_closed_peer_is_noticed_on_both_sides(pair):
    near, far = pair
    far.close()
    with pytest.raises(wire.Disconnected):
        near.receive()
    with pytest.raises(wire.Disconnected):
        near.send(wire.Cancel("s"))


@pytest.mark.parametrize("told", [False, True], ids=["nothing is sent", "more is sent"])
def test_the_last_words_of_a_peer_that_read_no_more_arrive(pair, told):
    near, far = pair
    near.send(wire.Cancel("unread"))
    for number in range(3):
        far.send(wire.Credit("s", "m", "n", number))
    far.close()
    if told:
        with pytest.raises(wire.Disconnected):
            near.send(wire.Cancel("in vain"))
    assert [near.receive().number for _ in range(3)] == [0, 1, 2]
    with pytest.raises(wire.Disconnected):
        near.receive()


def none_left(*_):
    raise OSError(errno.EMFILE, "Too many open files")


def test_a_packet_for_which_there_is_no_descriptor_ends_the_connection_and_no_more(pair, monkeypatch):
    near, far = pair
    monkeypatch.setattr("os.memfd_create", none_left)
    with pytest.raises(wire.Disconnected, match="Too many open files"):
        near.try_send(wire.encode(piece({"x": np.ones(100_000, np.float32)})))
    with pytest.raises(wire.Disconnected):
        far.receive()


def test_a_wait_for_room_for_which_there_is_no_thread_ends_the_connection_and_no_more(pair, monkeypatch):
    near, far = pair

    def no_thread(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", no_thread)
    outbox = wire.Outbox(near)
    while not outbox.waiting_bytes:
        outbox.send(piece({"x": "y" * 40_000}))
    with pytest.raises(wire.Disconnected):
        while True:
            far.receive()


def message_with_array(head, body=b""):
    """A message with an array that is described by `head`, as a peer that does not mind could send it."""
    head = msgspec.msgpack.encode(head)
    ext = msgspec.msgpack.Ext(1, struct.pack("<H", len(head)) + head + body)
    return msgspec.msgpack.encode(["Piece", "s", "m", "n", 0, {"x": ext}, False])


@pytest.mark.parametrize(
    "garbage",
    [
        b"garbage",
        message_with_array(("no dtype", [1]), bytes(4)),
        message_with_array(("<f4", ["two"]), bytes(8)),
        message_with_array(("<f4", [2**62, 4]), bytes(8)),
        message_with_array(5),
        message_with_array(("<f4", [2]))[:-9],
    ],
    ids=["no message", "no dtype", "no shape", "too large", "no head", "cut"],
)
def test_garbage_ends_the_connection_instead_of_the_process(pair, garbage):
    near, far = pair
    near._sock.send(b"\0" + garbage)
    with pytest.raises(wire.Disconnected, match="not a message"):
        far.receive()


def test_more_descriptors_than_a_packet_has_end_the_connection_and_none_stays_open(pair):
    near, far = pair
    before = descriptors()
    rights = struct.pack("2i", near.fileno(), near.fileno())
    near._sock.sendmsg([b"\1"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    with pytest.raises(wire.Disconnected, match="cut short"):
        far.receive()
    wait_until(lambda: not descriptors() - before, what="descriptors stay open")


def test_nobody_there_is_disconnected():
    with pytest.raises(wire.Disconnected):
        wire.connect("tritone-test/nobody")


def test_an_address_that_none_can_have_is_disconnected():
    with pytest.raises(wire.Disconnected, match="too long"):
        wire.connect("x" * 200)


def test_an_address_has_one_server():
    address = f"tritone-test/{uuid.uuid4().hex}"
    first = wire.listen(address)
    with pytest.raises(OSError, match="in use"):
        wire.listen(address)
    first.close()
