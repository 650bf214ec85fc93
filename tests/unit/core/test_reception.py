"""What is left of a request that has ended: nothing, also where nobody asks again."""

import asyncio
import threading
import weakref

import pytest

from waiting import wait_until

from . import fake_triton_backend as fake

with fake.installed():
    from tritone.reception import CANCEL_POLL_S, Reception


class Reply:
    """In place of a client's: one that stays, and counts how often that was asked."""

    def __init__(self):
        self.asked = 0

    def is_cancelled(self):
        self.asked += 1
        return False


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
    loop.close()


def test_a_request_that_has_ended_is_let_go(loop):
    async def work(arrival):
        while not arrival.reply.asked:
            await asyncio.sleep(CANCEL_POLL_S / 5)

    ended = threading.Event()
    reception = Reception("x", loop, work, lambda arrival, error: ended.set())
    try:
        reply = Reply()
        gone = weakref.ref(reply)
        reception.submit({}, {}, reply)
        assert ended.wait(5)
        del reply
        wait_until(lambda: gone() is None)
    finally:
        reception.close()
