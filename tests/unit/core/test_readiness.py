"""What a server is told that asks a pipeline's door whether it is ready, and what that costs."""

import threading

import pytest

from tritone import readiness
from tritone.readiness import Readiness
from waiting import PATIENCE_S, wait_until


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(readiness, "LOOK_EVERY_S", 0.01)


def watching():
    return [thread for thread in threading.enumerate() if thread.name == "readiness"]


@pytest.fixture
def stages():
    return {"writer": {}, "singer": {}}


@pytest.fixture
def asked(stages):
    wait_until(lambda: not watching())  # for doors that other tests have closed
    looked = Readiness(lambda timeout_s: {name: dict(state) for name, state in stages.items()})
    yield looked
    looked.close()
    wait_until(lambda: not watching())


def test_it_follows_the_stages(asked, stages):
    assert asked() is True
    stages["singer"] = {"error": "its engine is restarting"}
    wait_until(lambda: asked() is False)
    stages["singer"] = {}
    wait_until(lambda: asked() is True)


def test_stages_that_do_not_answer_are_not_ready():
    def silent(timeout_s):
        raise TimeoutError

    asked = Readiness(silent)
    wait_until(lambda: asked() is False)
    asked.close()


def test_a_question_never_waits_for_a_look():
    looking, done, looked = threading.Event(), threading.Event(), threading.Event()

    def slow(timeout_s):
        looking.set()
        done.wait(10 * PATIENCE_S)
        looked.set()
        return {}

    asked = Readiness(slow)
    assert asked() is True
    assert looking.wait(PATIENCE_S)
    assert asked() is True and not looked.is_set()
    asked.close()
    done.set()


def test_nobody_looks_while_nobody_asks(asked, stages, monkeypatch):
    assert not watching()
    monkeypatch.setattr(readiness, "ASKED_S", 0.05)
    stages["singer"] = {"error": "gone"}
    asked()
    wait_until(lambda: not watching())
    assert asked() is True, "what was seen long ago says nothing"


def test_many_questions_are_one_watch(asked):
    for _ in range(50):
        asked()
    assert len(watching()) == 1


def test_nobody_looks_at_what_is_closed(monkeypatch):
    monkeypatch.setattr(readiness, "LOOK_EVERY_S", 60)
    looks = []
    asked = Readiness(lambda timeout_s: looks.append(timeout_s) or {})
    asked()
    wait_until(lambda: looks)
    asked.close()
    wait_until(lambda: not watching())
    assert len(looks) == 1
