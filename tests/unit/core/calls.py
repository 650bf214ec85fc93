"""What a piece of work costs on however busy a machine."""

import sys


def calls_of(work):
    """How many functions `work` calls."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls
