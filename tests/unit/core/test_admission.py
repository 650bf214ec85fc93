"""Turns: so many at a time, a bounded queue in order of priority, and nobody's turn is ever lost."""

import asyncio
import random

import pytest

from tritone.admission import Admission
from tritone.errors import Unavailable


class Visitor:
    """Takes a turn and holds it until it is told to go."""

    def __init__(self, admission, priority=0):
        self.entered, self._leave = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._visit(admission, priority))

    async def _visit(self, admission, priority):
        async with admission.turn(priority):
            self.entered.set()
            await self._leave.wait()

    async def leave(self):
        self._leave.set()
        await self.task


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def visitors(admission, *priorities):
    made = []
    for priority in priorities:
        made.append(Visitor(admission, priority))
        await settle()
    return made


async def test_above_the_limit_one_is_refused_at_once_and_told_which():
    admission = Admission(2, 0)
    first, second = await visitors(admission, 0, 0)
    with pytest.raises(Unavailable, match="max_in_flight is 2 and as many requests are in flight; try again"):
        async with admission.turn():
            pass
    await first.leave()
    (third,) = await visitors(admission, 0)
    assert third.entered.is_set() and admission.running == 2
    await second.leave()
    await third.leave()
    assert admission.running == 0


async def test_those_who_wait_come_by_priority_and_then_by_arrival():
    admission = Admission(1, 4)
    holder, *waiting = await visitors(admission, 0, 5, 1, 5, 1)
    assert admission.queued == 4 and not any(v.entered.is_set() for v in waiting)
    with pytest.raises(Unavailable, match="max_queued is 4 and as many wait"):
        async with admission.turn():
            pass
    order = []
    running = holder
    for _ in waiting:
        await running.leave()
        await settle()
        (running,) = [v for v in waiting if v.entered.is_set() and v not in order]
        order.append(running)
    await running.leave()
    assert [waiting.index(v) for v in order] == [1, 3, 0, 2]
    assert (admission.running, admission.queued) == (0, 0)


async def test_who_leaves_the_queue_costs_nobody_a_turn():
    admission = Admission(1, 2)
    holder, gone, patient = await visitors(admission, 0, 0, 0)
    gone.task.cancel()
    await settle()
    assert admission.queued == 1
    await holder.leave()
    await settle()
    assert patient.entered.is_set() and not gone.entered.is_set()
    await patient.leave()
    assert admission.running == 0


async def test_a_turn_that_comes_as_its_owner_leaves_goes_to_the_next():
    admission = Admission(1, 2)
    holder, gone, patient = await visitors(admission, 0, 0, 0)
    holder._leave.set()
    while not holder.task.done():  # its turn is now `gone`'s, who has not run yet
        await asyncio.sleep(0)
    gone.task.cancel()
    await settle()
    assert patient.entered.is_set()
    await patient.leave()
    assert admission.running == 0


@pytest.mark.parametrize("seed", range(5))
async def test_no_turn_is_lost_whatever_happens(seed):
    chance = random.Random(seed)
    admission = Admission(3, 6)
    most = 0

    async def visit():
        nonlocal most
        try:
            async with admission.turn(chance.randrange(3)):
                most = max(most, admission.running)
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
                if chance.random() < 0.2:
                    raise ValueError
        except (Unavailable, ValueError):
            pass

    tasks = []
    for _ in range(300):
        tasks.append(asyncio.create_task(visit()))
        if chance.random() < 0.3:
            chance.choice(tasks).cancel()
        if chance.random() < 0.5:
            await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert most == 3 and (admission.running, admission.queued) == (0, 0)
