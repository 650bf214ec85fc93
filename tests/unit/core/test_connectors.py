"""Chunks between stages: in order, once, complete; bounded by credit; and nothing left when somebody dies."""

import contextlib
import os
import queue
import random
import subprocess
import sys
import threading
import time
import uuid

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from descriptors import descriptors
from tritone import wire
from tritone.connectors import base
from tritone.connectors.base import Budget, Delivery, Inlet, Key, Outlet, Receiver, size_of
from tritone.connectors.local import LocalConnector
from tritone.deploy import ConnectorLimits
from tritone.errors import EngineLost, TritoneError, Unavailable
from waiting import PATIENCE_S, wait_until

EDGE = ("giver", "taker")
WINDOW = 1 << 20


def delivery(number, last=False, size_bytes=10, session="s", edge=EDGE):
    return Delivery(Key(session, edge, number), {"n": number}, last, size_bytes)


def numbers(deliveries):
    return [item.key.number for item in deliveries]


# -- the receiving half ------------------------------------------------------------------------------------


@st.composite
def arrivals(draw):
    """The count of chunks, and their numbers as they arrive: any order, any of them more than once."""
    count = draw(st.integers(1, 12))
    more = draw(st.lists(st.integers(0, count - 1), max_size=8))
    return count, draw(st.permutations([*range(count), *more]))


@settings(deadline=None)
@given(arrivals())
def test_any_order_with_duplicates_gives_each_chunk_once_and_in_order(case):
    count, order = case
    inlet, got, duplicates = Inlet(ConnectorLimits()), [], 0
    for number in order:
        assert not inlet.is_complete or len(got) == count
        ready = inlet.accept(delivery(number, last=number == count - 1))
        duplicates += ready is None
        got += ready or []
    assert numbers(got) == list(range(count)) and inlet.is_complete and inlet.held_bytes == 0
    assert duplicates == len(order) - count


@settings(deadline=None)
@given(arrivals(), st.data())
def test_without_one_chunk_only_those_before_it_are_given_and_the_edge_is_incomplete(case, data):
    count, order = case
    missing = data.draw(st.integers(0, count - 1))
    inlet, got = Inlet(ConnectorLimits()), []
    for number in order:
        if number != missing:
            got += inlet.accept(delivery(number, last=number == count - 1)) or []
    assert numbers(got) == list(range(missing)) and not inlet.is_complete


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([(0, True)], (1, False)),
        ([(0, False), (1, True)], (2, True)),
        ([(3, True)], (4, False)),
        ([(3, True)], (2, True)),
        ([(3, False)], (1, True)),
    ],
    ids=str,
)
def test_a_chunk_that_contradicts_the_end_is_an_error(before, after):
    inlet = Inlet(ConnectorLimits())
    for number, last in before:
        inlet.accept(delivery(number, last))
    with pytest.raises(TritoneError, match=f"chunk {after[0]} from stage giver to stage taker"):
        inlet.accept(delivery(*after))


def test_what_waits_for_a_missing_chunk_is_bounded_in_bytes_and_in_number(monkeypatch):
    inlet = Inlet(ConnectorLimits(window_bytes=100))
    for number in range(1, 11):
        assert inlet.accept(delivery(number)) == []
    with pytest.raises(Unavailable, match="chunk 0 from stage giver to stage taker is missing"):
        inlet.accept(delivery(11))
    monkeypatch.setattr(base, "MAX_HELD_CHUNKS", 3)
    inlet = Inlet(ConnectorLimits())
    for number in (1, 2, 3):
        inlet.accept(delivery(number))
    with pytest.raises(Unavailable, match="is missing"):
        inlet.accept(delivery(4))


def test_edges_of_a_session_are_counted_apart_and_given_as_they_came():
    receiver, other = Receiver(ConnectorLimits()), ("other", "taker")
    receiver.expect("s")
    for item in (delivery(0), delivery(0, edge=other), delivery(1, edge=other), delivery(1, last=True)):
        assert receiver.accept(item)
    taken = receiver.take("s")
    assert [(item.key.edge[0], item.key.number) for item in taken] == [
        ("giver", 0),
        ("other", 0),
        ("other", 1),
        ("giver", 1),
    ]
    assert receiver.take("s") == [] and receiver.credits("s") == [Key("s", EDGE, 1)]
    assert receiver.forget("s") == [Key("s", other, 1)]


def test_chunks_of_a_session_that_is_over_are_dropped_and_counted():
    receiver = Receiver(ConnectorLimits())
    assert not receiver.accept(delivery(0))
    receiver.expect("s")
    receiver.accept(delivery(0))
    receiver.accept(delivery(0))
    receiver.forget("s")
    assert not receiver.accept(delivery(1)) and receiver.take("s") == []
    assert (receiver.num_chunks, receiver.num_duplicates, receiver.num_late) == (1, 1, 2)


def test_a_lost_producer_leaves_complete_edges_alone():
    receiver = Receiver(ConnectorLimits())
    receiver.expect("s")
    receiver.accept(delivery(0, last=True))
    assert not receiver.end_of(("s", EDGE), EngineLost("gone"))
    assert numbers(receiver.take("s")) == [0]
    receiver.expect("t")
    receiver.accept(delivery(0, session="t"))
    assert receiver.end_of(("t", EDGE), EngineLost("gone"))
    with pytest.raises(EngineLost, match="gone"):
        receiver.take("t")


# -- the sending half --------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 250), min_size=1, max_size=60),
    window=st.integers(1, 200),
    seed=st.integers(0, 1000),
)
def test_credit_holds_what_is_in_flight_at_the_window_and_never_runs_dry(sizes, window, seed):
    """A chunk larger than the window goes, nearly alone; nothing is lost, and nobody waits for ever."""
    limits, rng = ConnectorLimits(window_bytes=window), random.Random(seed)
    outlet, receiver, way = Outlet(limits), Receiver(limits), []
    receiver.expect("s")
    send = lambda packet: way.append(int(packet)) or True  # noqa: E731
    got, put = [], 0
    while len(got) < len(sizes):
        before = len(got), put
        if put < len(sizes) and rng.random() < 0.6:
            if outlet.may_send(sizes[put]):
                send(b"%d" % put)
                outlet.note_sent(put, sizes[put])
            else:
                outlet.queue(put, sizes[put], b"%d" % put)
            put += 1
        assert outlet.in_flight_bytes <= max(window, limits.credit_bytes + max(sizes))
        for number in way[: rng.randint(0, 3) if put < len(sizes) else None]:
            receiver.accept(delivery(way.pop(0), number == len(sizes) - 1, sizes[number]))
        if put == len(sizes) or rng.random() < 0.3:
            got += numbers(receiver.take("s"))
            for key in receiver.credits("s"):
                outlet.credit(key.number)
                outlet.pump(send)
        assert put < len(sizes) or (len(got), put) != before, "everybody waits"
    assert got == list(range(len(sizes))) and outlet.queued_bytes == 0
    outlet.note_last(len(sizes) - 1)
    assert outlet.in_flight_bytes == 0 and outlet.is_done


@pytest.mark.parametrize(
    "value",
    [
        "",
        "聪明 🙂",
        True,
        2**60,
        1.5,
        None,
        np.float32(1.5),
        [b"", b"RIFF"],
        np.array([b"abc", b""], object),
        np.zeros((0, 3), np.float32),
        np.zeros((7, 3), np.int16),
    ],
    ids=repr,
)
def test_both_ends_count_the_same_bytes(value):
    values = {"a": value, "b": 1}
    piece = wire.decode(wire.encode(wire.Piece("s", "m", "n", 0, values, False)))
    assert size_of(piece.values) == size_of(values)


def test_a_budget_is_shared_and_names_its_limit():
    budget = Budget(100)
    budget.reserve(60, "giver")
    with pytest.raises(Unavailable, match=r"connector\.queued_bytes is 100 and 60 wait"):
        budget.reserve(41, "giver")
    budget.release(60)
    budget.reserve(100, "giver")


# -- over sockets ------------------------------------------------------------------------------------------


class End:
    """One process of the chain: its listening socket, and the connector of its stage."""

    def __init__(self, stage, **limits):
        self.address = f"tritone-test/{uuid.uuid4().hex}"
        self.budget = Budget(ConnectorLimits(**limits).queued_bytes)
        self.connector = LocalConnector(self.address, stage, ConnectorLimits(**limits), self.budget)
        self.news, self.lost, self.gone = queue.Queue(), queue.Queue(), queue.Queue()
        self.connector.attach(self.news.put, lambda *what: self.lost.put(what), self.gone.put)
        self.is_reading = threading.Event()
        self.is_reading.set()
        self._server = wire.listen(self.address)
        self._channels, self._threads = [], []
        self._start(self._accept)

    def _start(self, work, *arguments):
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                channel = wire.accept(self._server)
                self._channels.append(channel)
                self._start(self._read, channel)

    def _read(self, channel):
        with contextlib.suppress(wire.Disconnected):
            while True:
                self.is_reading.wait()
                message = channel.receive()
                if isinstance(message, wire.Piece):
                    self.connector.receive(message, channel)
        channel.close()
        self.connector.producer_lost(channel)

    def get(self, session, count):
        """`count` chunks of a session, waited for."""
        got = []
        while len(got) < count:
            assert self.news.get(timeout=PATIENCE_S) is not None
            got += self.connector.get(session)
        return got

    def stat(self, name):
        return self.connector.stats()[f"connector_{name}"]

    def close(self):
        self.connector.close()
        self.is_reading.set()
        self._server.shutdown(2)  # wakes the thread that accepts
        self._server.close()
        for channel in self._channels:
            channel.shutdown()
        for thread in self._threads:
            thread.join(PATIENCE_S)


@pytest.fixture
def make_end():
    ends = []

    def make(stage="taker", **limits):
        ends.append(End(stage, **limits))
        return ends[-1]

    yield make
    for end in ends:
        end.close()


def put(giver, taker, number, value=None, last=False, session="s", edge=EDGE):
    key = Key(session, edge, number)
    giver.connector.put(taker.address, key, {"x": number if value is None else value}, last)


def rows(kibibytes, number=0):
    return np.full(kibibytes * 256, number, np.float32)


def test_chunks_of_every_size_arrive_equal_in_order_and_complete(make_end):
    giver, taker = make_end("giver"), make_end()
    taker.connector.expect("s")
    arrays = [
        np.random.default_rng(n).random(size, np.float32)
        for n, size in enumerate([3, 20_000, 0, 1_000_000, 7, 300_000])
    ]
    for number, array in enumerate(arrays):
        put(giver, taker, number, array, last=number == len(arrays) - 1)
    got = taker.get("s", len(arrays))
    assert numbers(got) == list(range(len(arrays)))
    assert [item.last for item in got] == [False] * 5 + [True]
    assert all(np.array_equal(item.values["x"], array) for item, array in zip(got, arrays, strict=True))
    wait_until(lambda: giver.stat("in_flight_bytes") == 0)
    assert giver.stat("chunks_put") == taker.stat("chunks_received") == len(arrays)
    assert taker.stat("chunks_taken") == len(arrays) and giver.stat("chunks_taken") == 0
    assert taker.stat("bytes_taken") == sum(size_of({"x": array}) for array in arrays)
    assert giver.connector._outlets == {} and giver.budget.used_bytes == 0


def test_the_latency_of_a_chunk_is_from_its_making_until_it_is_taken(make_end):
    giver, taker = make_end("giver"), make_end()
    taker.connector.expect("s")
    began_s = time.monotonic()
    for number in range(3):
        put(giver, taker, number)
    made_s = time.monotonic()
    wait_until(lambda: taker.stat("chunks_received") == 3)
    assert taker.stat("latency_s") == 0, "nothing was taken yet"
    wait_until(lambda: time.monotonic() > made_s + 0.05)
    asked_s = time.monotonic()
    taker.get("s", 3)
    assert 3 * (asked_s - made_s) <= taker.stat("latency_s") <= 3 * (time.monotonic() - began_s)


def test_sessions_and_stages_do_not_mix(make_end):
    giver, takers = make_end("giver"), [make_end(), make_end()]
    for taker in takers:
        taker.connector.expect("s")
        taker.connector.expect("t")
    for number in range(20):
        for session in "st":
            for index, taker in enumerate(takers):
                value = f"{session} {index} {number}"
                put(giver, taker, number, value, session=session, edge=("giver", f"taker {index}"))
    for index, taker in enumerate(takers):
        wait_until(lambda taker=taker: taker.stat("chunks_received") == 40)
        for session in "st":
            got = taker.connector.get(session)
            assert [item.values["x"] for item in got] == [f"{session} {index} {n}" for n in range(20)]


def test_duplicates_are_dropped_and_counted(make_end):
    taker = make_end()
    taker.connector.expect("s")
    channel = wire.connect(taker.address)
    for number in (0, 0, 2, 1, 2, 1, 3):
        channel.send(wire.Piece("s", *EDGE, number, {"x": number}, number == 3))
    assert numbers(taker.get("s", 4)) == [0, 1, 2, 3]
    wait_until(lambda: taker.stat("duplicates") == 3)
    channel.close()


def test_a_slow_consumer_holds_its_producer_at_the_window(make_end):
    giver, taker = make_end("giver", window_bytes=WINDOW), make_end(window_bytes=WINDOW)
    taker.connector.expect("s")
    count, size = 64, size_of({"x": rows(100)})
    for number in range(count):
        put(giver, taker, number, rows(100, number), last=number == count - 1)
    wait_until(lambda: taker.stat("chunks_received") == WINDOW // size)
    assert giver.stat("in_flight_bytes") == WINDOW // size * size
    assert giver.stat("queued_bytes") == giver.budget.used_bytes == (count - WINDOW // size) * size
    got = []
    while len(got) < count:
        wait_until(lambda: giver.stat("in_flight_bytes") > WINDOW - size or giver.stat("queued_bytes") == 0)
        assert giver.stat("in_flight_bytes") <= WINDOW
        got += taker.connector.get("s")
    assert [item.values["x"][0] for item in got] == list(range(count))
    wait_until(lambda: giver.stat("in_flight_bytes") == 0)
    assert giver.stat("queued_bytes") == giver.budget.used_bytes == 0


def test_a_chunk_larger_than_the_window_passes(make_end):
    giver, taker = make_end("giver", window_bytes=1000), make_end(window_bytes=1000)
    taker.connector.expect("s")
    for number in range(5):
        put(giver, taker, number, rows(500, number), last=number == 4)
    assert numbers(taker.get("s", 5)) == [0, 1, 2, 3, 4]


def test_beyond_the_limit_one_session_fails_and_the_others_do_not(make_end):
    limits = {"window_bytes": WINDOW, "queued_bytes": WINDOW}
    giver, taker = make_end("giver", **limits), make_end(**limits)
    taker.connector.expect("s")
    taker.connector.expect("t")
    put(giver, taker, 0, session="t")
    taker.get("t", 1)
    with pytest.raises(Unavailable, match=rf"connector\.queued_bytes is {WINDOW}") as failure:
        for number in range(30):
            put(giver, taker, number, rows(100))
    assert "deploy.yaml" in failure.value.cure
    assert 0 < giver.budget.used_bytes <= WINDOW
    giver.connector.cleanup("s")
    assert giver.budget.used_bytes == 0
    for number in range(1, 9):
        put(giver, taker, number, rows(100, number), last=number == 8, session="t")
    assert numbers(taker.get("t", 8)) == list(range(1, 9))


def test_a_peer_that_does_not_read_holds_up_neither_its_producer_nor_other_peers(make_end):
    giver, deaf, taker = make_end("giver"), make_end(), make_end()
    deaf.is_reading.clear()
    deaf.connector.expect("s")
    taker.connector.expect("s")
    put(giver, deaf, 0, rows(40, 0))
    wait_until(lambda: giver.stat("queued_bytes") == 0)
    before = set(threading.enumerate())
    for number in range(1, 40):  # far more than a socket holds
        put(giver, deaf, number, rows(40, number), last=number == 39)
    assert giver.stat("queued_bytes") > 0
    fresh = set(threading.enumerate()) - before
    assert len(fresh) <= 2, "a thread a put?"  # the lane's, and the deaf one's reader, which may start late
    put(giver, taker, 0, "hello", last=True, edge=("giver", "other"))
    assert [item.values for item in taker.get("s", 1)] == [{"x": "hello"}]
    assert giver.stat("queued_bytes") > 0
    deaf.is_reading.set()
    assert [item.values["x"][0] for item in deaf.get("s", 40)] == list(range(40))
    wait_until(lambda: giver.stat("in_flight_bytes") == 0)
    assert giver.budget.used_bytes == 0


def test_a_peer_that_never_reads_again_is_lost(make_end, monkeypatch):
    monkeypatch.setattr("tritone.wire.lane.SEND_TIMEOUT_S", 0.05)
    giver, deaf = make_end("giver"), make_end()
    deaf.is_reading.clear()
    for number in range(40):
        put(giver, deaf, number, rows(40))
    put(giver, make_end(), 0, session="to another", edge=("giver", "other"))
    assert giver.lost.get(timeout=PATIENCE_S) == (deaf.address, {"s"})
    wait_until(lambda: giver.budget.used_bytes == 0 and giver.stat("in_flight_bytes") == 0)


def test_a_consumer_that_has_enough_frees_what_is_queued_for_it(make_end):
    limits = {"window_bytes": WINDOW}
    giver, taker = make_end("giver", **limits), make_end(**limits)
    taker.connector.expect("s")
    for number in range(30):
        put(giver, taker, number, rows(100))
    taker.get("s", 1)
    taker.connector.ignore("s")
    wait_until(lambda: giver.budget.used_bytes == 0)
    put(giver, taker, 30, rows(100))
    assert giver.budget.used_bytes == 0 and giver.stat("in_flight_bytes") == 0
    put(giver, taker, 31, last=True)
    assert giver.connector._outlets == {} and taker.connector._origins == {}


def test_a_session_that_is_dropped_before_its_chunks_were_taken_frees_its_producer(make_end):
    giver, taker = make_end("giver"), make_end()
    taker.connector.expect("s")
    put(giver, taker, 0, last=True)
    wait_until(lambda: taker.stat("chunks_received") == 1)
    assert giver.stat("in_flight_bytes") > 0
    taker.connector.cleanup("s")
    wait_until(lambda: giver.connector._outlets == {})


def test_late_chunks_are_counted_and_stop_their_producer(make_end):
    giver, taker = make_end("giver", window_bytes=1000), make_end(window_bytes=1000)
    for number in range(10):
        put(giver, taker, number, rows(1))
    wait_until(lambda: giver.budget.used_bytes == 0)
    assert taker.stat("late") == 1 and taker.stat("chunks_received") == 0
    giver.connector.cleanup("s")
    assert giver.connector._outlets == {}


def test_a_stage_that_ended_still_sends_what_is_queued(make_end):
    giver, taker = make_end("giver", window_bytes=1000), make_end(window_bytes=1000)
    taker.connector.expect("s")
    for number in range(10):
        put(giver, taker, number, rows(1), last=number == 9)
    giver.connector.ignore("s")
    assert numbers(taker.get("s", 10)) == list(range(10))


def test_a_session_is_delivered_when_all_its_consumers_have_taken_all(make_end):
    giver, takers = make_end("giver"), [make_end(), make_end()]
    assert giver.connector.is_delivered("s"), "it gave nothing"
    for number, taker in enumerate(takers):
        taker.connector.expect("s")
        put(giver, taker, 0, edge=("giver", f"taker {number}"), last=True)
    assert not giver.connector.is_delivered("s")
    takers[0].get("s", 1)
    wait_until(lambda: len(giver.connector._outlets) == 1)
    assert not giver.connector.is_delivered("s") and giver.gone.empty()
    takers[1].get("s", 1)
    assert giver.gone.get(timeout=PATIENCE_S) == "s" and giver.connector.is_delivered("s")


def test_what_was_lost_is_not_delivered_before_its_session_is_forgotten(make_end):
    giver, taker = make_end("giver"), make_end()
    taker.connector.expect("s")
    giver.connector.put("tritone-test/nobody", Key("s", ("giver", "n"), 0), {}, True)
    assert giver.lost.get(timeout=PATIENCE_S) == ("tritone-test/nobody", {"s"})
    put(giver, taker, 0, last=True)
    taker.get("s", 1)
    wait_until(lambda: giver.connector._outlets == {})
    assert giver.gone.empty() and not giver.connector.is_delivered("s")
    giver.connector.cleanup("s")
    assert giver.connector.is_delivered("s")


def test_a_consumer_that_wants_no_more_loses_nothing(make_end):
    giver, taker = make_end("giver"), make_end()
    for session in ("s", "t"):
        taker.connector.expect(session)
        put(giver, taker, 0, session=session)
    taker.get("s", 1)
    taker.connector.ignore("s")
    wait_until(lambda: giver.connector._outlets["s", EDGE][0].is_closed)
    for channel in taker._channels:
        channel.shutdown()
    assert giver.lost.get(timeout=PATIENCE_S) == (taker.address, {"t"})


def test_what_nobody_wants_is_delivered(make_end):
    giver, taker = make_end("giver"), make_end()
    taker.connector.expect("s")
    put(giver, taker, 0, last=True)
    wait_until(lambda: taker.stat("chunks_received") == 1)
    assert not giver.connector.is_delivered("s")
    taker.connector.ignore("s")
    assert giver.gone.get(timeout=PATIENCE_S) == "s" and giver.connector.is_delivered("s")


def test_nobody_at_the_address_is_a_lost_consumer(make_end):
    giver = make_end("giver")
    giver.connector.put("tritone-test/nobody", Key("s", EDGE, 0), {"x": 1}, False)
    assert giver.lost.get(timeout=PATIENCE_S) == ("tritone-test/nobody", {"s"})
    wait_until(lambda: giver.budget.used_bytes == 0)


def test_cleanup_and_close_leave_no_bytes_and_no_descriptor():
    before = descriptors()
    giver, taker = End("giver", window_bytes=4 << 20), End("taker", window_bytes=4 << 20)
    taker.connector.expect("s")
    for number in range(12):
        put(giver, taker, number, rows(1500))
    taker.get("s", 1)
    put(giver, taker, 12)
    assert giver.stat("streams") == taker.stat("streams") == 1
    giver.connector.cleanup("s")
    taker.connector.cleanup("s")
    assert giver.stat("streams") == taker.stat("streams") == 0
    assert giver.budget.used_bytes == 0 and giver.stat("in_flight_bytes") == 0
    assert giver.connector._outlets == {} and taker.connector._receiver._sessions == {}
    assert taker.connector._origins == {}
    open_ends = descriptors()
    put(giver, taker, 0, rows(1500), session="t")  # late; the channels of the first session serve it
    wait_until(lambda: taker.stat("late") >= 1)
    assert not [leads_to for _, leads_to in descriptors() - open_ends if leads_to.startswith("socket:")]
    giver.close()
    taker.close()
    wait_until(lambda: not descriptors() - before, what="descriptors stay open")
    assert giver.lost.empty(), "who closes has lost nobody"


# -- death -------------------------------------------------------------------------------------------------

CHILD = """
import sys, threading
from tritone import wire
me, peer = sys.argv[1:]
server = wire.listen(me)
if peer:
    channel = wire.connect(peer)
    for number in range(3):
        channel.send(wire.Piece("cut", "giver", "taker", number, {"x": number}, False))
        channel.send(wire.Piece("whole", "giver", "taker", number, {"x": number}, number == 2))
    print("sent", flush=True)
    channel.receive()
    threading.Event().wait()
print("listening", flush=True)
channel = wire.accept(server)
while True:
    print(type(channel.receive()).__name__, flush=True)
"""


@contextlib.contextmanager
def child(peer=""):
    """A process that sends to `peer`, or reads what it is sent and gives no credit. Its address too."""
    address = f"tritone-test/{uuid.uuid4().hex}"
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, address, peer],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout.readline().strip() in (b"sent", b"listening")
        yield process, address
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_consumer_that_is_killed_is_noticed_and_frees_what_waits_for_it(make_end):
    giver = make_end("giver", window_bytes=WINDOW)
    with child() as (process, address):
        for number in range(40):
            giver.connector.put(address, Key("s", EDGE, number), {"x": rows(100)}, False)
        heard = [process.stdout.readline().strip() for _ in range(3)]
        assert heard == [b"Hello", b"Piece", b"Piece"]
        assert giver.stat("in_flight_bytes") > 0 and giver.budget.used_bytes > 0
        process.kill()
        assert giver.lost.get(timeout=PATIENCE_S) == (address, {"s"})
    wait_until(lambda: giver.budget.used_bytes == 0 and giver.stat("in_flight_bytes") == 0)


def test_a_producer_that_is_killed_fails_its_unfinished_sessions_only(make_end):
    taker = make_end()
    taker.connector.expect("cut")
    taker.connector.expect("whole")
    with child(taker.address) as (process, _):
        assert [taker.news.get(timeout=PATIENCE_S) for _ in range(6)] == ["cut", "whole"] * 3
        process.kill()
        assert taker.news.get(timeout=PATIENCE_S) == "cut"
    with pytest.raises(EngineLost, match="engine of stage giver died before its output ended"):
        taker.connector.get("cut")
    assert numbers(taker.connector.get("whole")) == [0, 1, 2] and taker.news.empty()
