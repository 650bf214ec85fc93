from itertools import islice, pairwise

import pytest

from tritone_bench.arrivals import Load, schedule
from tritone_client import InvalidRequest


def test_a_constant_rate_is_evenly_spaced():
    assert list(islice(schedule(4.0, "constant", seed=1), 5)) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_poisson_arrivals_follow_the_seed_and_stretch_with_the_rate():
    once, again, other = (list(islice(schedule(2.0, "poisson", seed), 200)) for seed in (7, 7, 8))
    assert once == again and once != other
    slower = list(islice(schedule(1.0, "poisson", 7), 200))
    assert slower == pytest.approx([2 * at_s for at_s in once])
    assert once[0] == 0.0 and once == sorted(once)


def test_poisson_gaps_are_exponential():
    gaps = [later - earlier for earlier, later in pairwise(islice(schedule(5.0, "poisson", 3), 20_001))]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 5.0, rel=0.03)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.05)  # of an exponential the two are equal
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.02)


def test_a_load_says_what_it_is():
    assert str(Load(concurrency=4)) == "concurrency 4" and Load(concurrency=4).value == 4
    open_loop = Load(request_rate_per_s=0.5, arrival="constant")
    assert str(open_loop) == "0.5 requests/s constant" and open_loop.value == 0.5
    assert "requests/s" in open_loop.unit and "requests at a time" in Load(concurrency=4).unit


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"concurrency": 0},
        {"concurrency": 1, "request_rate_per_s": 1.0},
        {"request_rate_per_s": 0.0, "arrival": "poisson"},
        {"request_rate_per_s": float("inf"), "arrival": "poisson"},
    ],
)
def test_senseless_loads_are_refused(wrong):
    with pytest.raises(InvalidRequest):
        Load(**wrong)
