"""The log tells where a fault is, and nothing of what a client sent."""

import linecache
import logging

import pytest

from tritone.errors import EngineLost, InvalidRequest, TritoneError
from tritone.fault_log import FaultFormatter, described

SECRET = "my-secret-words"


def raised(make):
    try:
        make()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def fail(error):
    raise error


def fail_while_handling():
    try:
        int(SECRET)
    except ValueError as error:
        raise RuntimeError("the step failed") from error


QUIET = {
    "a number that is none": lambda: int(SECRET),
    "a key": lambda: {}[SECRET],
    "half a surrogate pair": lambda: f"{SECRET}\ud83d".encode(),
    "a refusal": lambda: fail(InvalidRequest(f"speaker is '{SECRET}'")),
    "a fault that says another's words": lambda: fail(TritoneError(f"the stage failed: {SECRET}")),
    "of a library": lambda: fail(Exception(SECRET)),
    "one after another": fail_while_handling,
}


def formatted(error):
    record = logging.LogRecord("x", logging.ERROR, "x.py", 1, "step failed", (), None)
    record.exc_info = (type(error), error, error.__traceback__)
    return FaultFormatter("%(message)s").format(record)


@pytest.mark.parametrize("make", QUIET.values(), ids=QUIET)
def test_what_may_repeat_a_request_is_not_logged(make):
    error = raised(make)
    line, trace = described(error), formatted(error)
    assert SECRET not in line and SECRET not in trace
    assert line.startswith(type(error).__name__) and " at test_fault_log.py:" in line
    assert type(error).__name__ in trace and "test_fault_log.py" in trace and "line" in trace


@pytest.mark.parametrize(
    "error", [RuntimeError("out of memory"), OSError(28, "No space left"), EngineLost("stage wave died")]
)
def test_what_the_machine_says_is_logged(error):
    assert str(error) in described(raised(lambda: fail(error))) and str(error) in formatted(error)


def test_causes_come_before_what_they_caused():
    trace = formatted(raised(fail_while_handling))
    assert trace.index("ValueError") < trace.index("RuntimeError: the step failed")


def test_a_fault_that_was_told_leaves_no_lines_of_files_behind():
    linecache.clearcache()
    error = raised(fail_while_handling)
    described(error)
    assert "fail_while_handling" in formatted(error)
    assert linecache.cache == {}
