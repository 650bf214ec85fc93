"""How tests wait for what comes by itself.

A machine that is slow, or that does much else, may take many times as long as an idle one, and an idle one
may be done before a test looks. So a test waits with patience, and asserts what came and in which order; how
soon it comes is measured by tests/soak and tests/perf. What a test interrupts must last longer than its
patience.
"""

import asyncio
import time

PATIENCE_S = 20.0  # shorter than what the product itself waits for (30 s) before it asks


def wait_until(condition, timeout_s=PATIENCE_S, what="it did not come true", every_s=0.002):
    """What `condition()` gives once that is true; AssertionError with `what` when it is not in time."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, what
        time.sleep(every_s)
    return value


async def until(condition, timeout_s=PATIENCE_S, what="it did not come true", every_s=0.02):
    """The same beside other tasks; the condition is asked in a thread, and may wait."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := await asyncio.to_thread(condition)):
        assert time.monotonic() < deadline_s, what
        await asyncio.sleep(every_s)
    return value
