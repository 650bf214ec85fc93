import io

import pytest
from made import failed, level, record

from tritone_bench.arrivals import Load
from tritone_bench.bench import BenchPlan
from tritone_bench.progress import RunProgress
from tritone_bench.request_set import Ask, RequestSet

LOADS = (Load(concurrency=2), Load(concurrency=4))


class Screen(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self):
        return True


def plan(num_requests, **settings):
    return BenchPlan(LOADS, RequestSet("a test", (Ask("a", {}),), num_requests), **settings)


def run(out, planned):
    with RunProgress(out, planned) as progress:
        progress.warming_up(planned)
        progress.level_begins(LOADS[1], 0)
        for one in (record(0), failed(1), record(2)):
            progress.request_ends(one)
        progress.level_ends(level([record(0), failed(1), record(2)], LOADS[1], wall_s=3.0))
    return out.getvalue()


def test_a_pipe_gets_a_sentence_a_level():
    assert run(io.StringIO(), plan(3)) == "concurrency 4: 3 requests in 3.0 s, 1 failed\n"
    assert run(io.StringIO(), plan(3, num_repeats=2)).startswith("concurrency 4 (1 of 2): 3 requests")


@pytest.mark.parametrize(("num_requests", "count"), [(8, "3/8"), (None, "3/?")])
def test_a_terminal_counts_requests_even_where_their_number_is_open(num_requests, count):
    shown = run(Screen(), plan(num_requests, duration_s=9.0))
    assert count in shown and "1 failed" in shown and "warm-up" in shown
