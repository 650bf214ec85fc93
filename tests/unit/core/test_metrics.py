"""Values on their way to Triton: all of them arrive, by one thread, in few calls."""

import contextlib
import threading
import time

import pytest

from tritone import metrics as m
from tritone.metrics import FAMILIES, Publisher
from waiting import wait_until

STAGE = {"pipeline": "p", "stage": "s", "instance": "cpu/0"}
MODEL = {"pipeline": "p", "model": "p"}


class Backend:
    """Triton's side: what came, by family and labels, and by which threads."""

    def __init__(self, fault=None):
        self.calls = []  # (kind of call, family, labels, value)
        self.threads = set()
        self.families = []
        self._fault = fault

    def make(self, family):
        if self._fault is not None:
            raise self._fault
        self.families.append(family)
        return Made(self, family)

    def values(self, call, family):
        return [value for its, of, _, value in self.calls if (its, of) == (call, family)]


class Made:
    def __init__(self, backend, family):
        self._backend, self._family = backend, family

    def Metric(self, labels, buckets=None):
        assert (buckets or []) == list(self._family.buckets)
        return Series(self._backend, self._family, labels)


class Series:
    def __init__(self, backend, family, labels):
        for call in ("increment", "observe", "set"):
            setattr(self, call, lambda value, call=call: self._note(backend, call, family, labels, value))

    def _note(self, backend, call, family, labels, value):
        backend.threads.add(threading.get_ident())
        backend.calls.append((call, family, labels, value))


@pytest.fixture
def publish():
    """publish(backend, labels) starts a Publisher that is closed at the end."""
    with contextlib.ExitStack() as stack:

        def start(backend, labels=MODEL, every_s=60.0, sources=()):
            complaints = []
            publisher = Publisher(labels, backend and backend.make, complaints.append, every_s)
            publisher.complaints = complaints
            publisher.start(*sources)
            stack.callback(publisher.close)
            return publisher

        yield start


def test_counts_of_many_threads_arrive_as_one_sum_by_one_other_thread(publish):
    backend = Backend()
    publisher = publish(backend)
    callers = [
        threading.Thread(target=lambda: [publisher.count(m.CODEC_FRAMES, 3) for _ in range(1000)])
        for _ in range(8)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    publisher.close()
    assert backend.calls == [("increment", m.CODEC_FRAMES, MODEL, 24000)]
    assert len(backend.threads) == 1 and threading.get_ident() not in backend.threads


def test_every_observation_arrives_in_order(publish):
    backend = Backend()
    publisher = publish(backend)
    for value in (0.3, 0.1, 0.3):
        publisher.observe(m.TTFT, value, modality="text", streamed="true")
    publisher.close()
    assert backend.values("observe", m.TTFT) == [0.3, 0.1, 0.3]
    assert backend.calls[0][2] == {**MODEL, "modality": "text", "streamed": "true"}


def test_what_comes_between_turns_is_published_by_the_next(publish):
    backend = Backend()
    publisher = publish(backend, every_s=0.005)
    for number in (1, 2):
        publisher.count(m.RESUMES)
        wait_until(lambda number=number: len(backend.calls) >= number)
    assert backend.values("increment", m.RESUMES) == [1, 1]


def test_a_gauge_is_set_only_when_it_has_changed(publish):
    backend, turns = Backend(), []
    levels = iter([5, 5, 7, 7, 5])

    def look():
        with contextlib.suppress(StopIteration):
            publisher.set(m.QUEUED, next(levels))
        turns.append(None)

    publisher = Publisher(MODEL, backend.make, pytest.fail, 0.001)
    publisher.start(look)
    wait_until(lambda: len(turns) >= 6)
    publisher.close()
    assert backend.values("set", m.QUEUED) == [5, 7, 5]


def test_a_counter_of_nothing_is_shown_once(publish):
    backend = Backend()
    publisher = publish(backend, every_s=0.002)
    for _ in range(5):
        publisher.count(m.RESUMES, 0)
        time.sleep(0.004)
    publisher.close()
    assert backend.values("increment", m.RESUMES) == [0]


@pytest.mark.parametrize("fault", [RuntimeError("metrics are not enabled"), AttributeError("HISTOGRAM")])
def test_a_server_that_takes_no_metrics_is_told_of_once_and_costs_nothing(publish, fault):
    publisher = publish(Backend(fault), every_s=0.001)
    publisher.count(m.RESUMES)
    wait_until(lambda: publisher.complaints)
    publisher.count(m.RESUMES)
    publisher.set(m.QUEUED, 1)
    publisher.observe(m.TTFT, 1.0, modality="text", streamed="true")
    assert not (publisher._amounts or publisher._levels or publisher._observed)
    publisher.close()
    assert publisher.complaints == [f"no more metrics are published: {fault}"]


def test_switched_off_it_has_no_thread_and_keeps_nothing(publish):
    before = set(threading.enumerate())
    publisher = publish(None)
    publisher.count(m.RESUMES)
    publisher.observe(m.TTFT, 1.0, modality="text", streamed="true")
    publisher.set(m.QUEUED, 1)
    assert not [t for t in set(threading.enumerate()) - before if t.name == "metrics"]
    assert not (publisher._amounts or publisher._levels or publisher._observed)


def test_labels_that_a_family_does_not_have_are_named(publish):
    publisher = publish(Backend(), STAGE)
    publisher.count(m.REQUESTS, outcome="ok")
    publisher.close()
    assert "tritone_requests_total has the labels" in publisher.complaints[0]


def test_families_are_held_as_long_as_their_series(publish):
    backend = Backend()
    publisher = publish(backend)
    publisher.count(m.RESUMES)
    publisher.set(m.QUEUED, 1)
    publisher.close()
    assert backend.families == [m.RESUMES, m.QUEUED] and not (publisher._families or publisher._metrics)


def test_names_and_units_follow_the_conventions():
    names = [family.name for family in FAMILIES]
    assert len(names) == len(set(names)) >= 30
    for family in FAMILIES:
        assert family.name.startswith("tritone_") and family.doc.endswith("."), family
        assert family.name.endswith("_total") == (family.kind == "COUNTER"), family
        assert family.name.endswith(("_seconds", "_ratio")) or family.kind != "HISTOGRAM", family
        assert (len(family.buckets) > 0) == (family.kind == "HISTOGRAM"), family
        assert list(family.buckets) == sorted(set(family.buckets)), family
    assert m.LATENCY_BUCKETS_S[0] == 0.01 and m.LATENCY_BUCKETS_S[-1] == 60
