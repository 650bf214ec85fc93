import pytest

from tritone_bench.percentiles import median, percentile, samples_needed, spread


def test_a_percentile_is_a_value_that_was_seen():
    hundred = spread(float(number) for number in range(1, 101))
    assert (hundred.p50, hundred.p90, hundred.p99) == (50.0, 90.0, 99.0)
    assert (hundred.count, hundred.min, hundred.max, hundred.mean) == (100, 1.0, 100.0, 50.5)
    assert hundred.too_few == ()
    assert [hundred.percentile(percent) for percent in (50, 90, 99)] == [50.0, 90.0, 99.0]


@pytest.mark.parametrize(
    ("count", "too_few"),
    [(1, (50, 90, 99)), (2, (90, 99)), (9, (90, 99)), (10, (99,)), (24, (99,)), (99, (99,)), (100, ())],
)
def test_too_few_samples_are_marked_and_give_the_largest(count, too_few):
    seen = spread(float(number) for number in range(count))
    assert seen.too_few == too_few
    assert all(seen.percentile(percent) == seen.max for percent in too_few)


def test_samples_that_a_percentile_needs():
    assert [samples_needed(percent) for percent in (50, 90, 99, 99.9)] == [2, 10, 100, 1000]


def test_nothing_gives_nothing():
    assert spread([]) is None and spread([None, None]) is None
    assert percentile([], 50) is None and median([None]) is None
    assert spread([None, 3.0]).count == 1 and median([5.0, None, 1.0, 3.0]) == 3.0
