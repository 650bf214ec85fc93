"""What the ratio of paired rounds says, and how often its interval holds the truth."""

import random

import pytest

from paired import Ratio


def rounds(ratio, count, rng, noise):
    """The machine's speed drifts from round to round, by which neither is favoured."""
    for _ in range(count):
        speed = rng.uniform(0.5, 2.0)
        yield speed * rng.lognormvariate(0, noise), speed * ratio * rng.lognormvariate(0, noise)


def test_rounds_that_agree_leave_no_doubt():
    ratio = Ratio.of([(10.0, 10.3), (20.0, 20.6), (40.0, 41.2), (5.0, 5.15)])
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx((1.03, 1.03, 1.03))
    assert ratio.rounds == 4
    assert str(ratio) == "1.030 (1.030 - 1.030, 95 %, 4 rounds)"


def test_a_few_disturbed_rounds_do_not_move_it():
    calm = [(10.0, 10.2), (10.0, 10.4)] * 8
    disturbed = Ratio.of([*calm, (10.0, 40.0), (10.0, 30.0), (30.0, 10.0)])
    assert disturbed.mean == pytest.approx(Ratio.of(calm).mean, abs=0.005)
    assert disturbed.high < 1.06


def test_which_of_both_is_called_b_turns_the_ratio_over():
    pairs = list(rounds(1.1, 20, random.Random(1), 0.05))
    ratio, turned = Ratio.of(pairs), Ratio.of((b, a) for a, b in pairs)
    assert (turned.mean, turned.low, turned.high) == pytest.approx(
        (1 / ratio.mean, 1 / ratio.high, 1 / ratio.low)
    )


@pytest.mark.parametrize("count", [12, 40])
def test_the_interval_holds_the_truth_some_19_times_in_20(count):
    rng = random.Random(2)
    trials = [Ratio.of(rounds(1.02, count, rng, 0.05)) for _ in range(400)]
    held = sum(trial.low <= 1.02 <= trial.high for trial in trials) / len(trials)
    assert 0.9 < held < 0.98


def test_more_rounds_make_it_narrower():
    rng = random.Random(3)
    few, many = (Ratio.of(rounds(1.0, count, rng, 0.05)) for count in (10, 160))
    assert many.high - many.low < (few.high - few.low) / 2
