"""What tests of threads and processes wait with."""

import time


def wait_until(condition, timeout_s=5.0):
    """Until `condition()` is true; AssertionError when it is not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.002)
