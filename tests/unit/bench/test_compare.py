import io
from pathlib import Path

import pytest
from made import document, failed, level, record

from tritone_bench.arrivals import Load
from tritone_bench.compare import Ratio, compare, show
from tritone_client import InvalidRequest

NAMES = (Path("A.json"), Path("B.json"))


def sweep(e2el_s, concurrencies=(1, 4), **plan):
    """A document whose repeats have these E2ELs."""
    levels = [
        level([record(0, length_s)], Load(concurrency=number), repeat)
        for repeat, length_s in enumerate(e2el_s)
        for number in concurrencies
    ]
    return document(levels, **plan)


def ratio_of(comparison, name, number=0):
    return next(ratio for ratio in comparison.levels[number].ratios if ratio.name == name)


def test_a_ratio_is_of_medians_and_the_spread_that_of_repeats():
    found = compare(sweep([1.0, 1.2, 1.1]), sweep([2.0, 2.4, 2.2]), NAMES)
    e2el = ratio_of(found, "E2EL (s) p50", 1)
    assert (e2el.a, e2el.b) == ((1.0, 1.2, 1.1), (2.0, 2.4, 2.2))
    assert e2el.ratio == pytest.approx(2.0) and e2el.is_within_spread is False
    assert ratio_of(found, "TTFP (s) p90").ratio == pytest.approx(2.0)
    assert [one.load for one in found.levels] == ["concurrency 1", "concurrency 4"]
    assert ratio_of(compare(sweep([1.0, 1.2]), sweep([1.15, 1.3]), NAMES), "E2EL (s) p50").is_within_spread


def test_without_repeats_the_spread_is_unknown():
    assert ratio_of(compare(sweep([1.0]), sweep([1.1, 1.2]), NAMES), "E2EL (s) p50").is_within_spread is None


def test_percentiles_of_too_few_samples_are_marked():
    many = document([level([record(n, 1.0) for n in range(100)])])
    few = document([level([record(n, 1.0) for n in range(24)])])
    marks = {
        ratio.name: ratio.has_too_few
        for ratio in compare(many, few, NAMES).levels[0].ratios
        if "E2EL" in ratio.name
    }
    assert marks["E2EL (s) p99"] and not marks["E2EL (s) p90"]


def test_a_ratio_to_nothing_is_none():
    assert Ratio("errors", (0.0,), (3.0,)).ratio is None
    assert Ratio("errors", (2.0,), (0.0,)).ratio == 0.0


def test_other_requests_are_refused_in_a_sentence():
    with pytest.raises(InvalidRequest) as error:
        compare(sweep([1.0], digest="d1"), sweep([1.0], digest="d2"), NAMES)
    sentence = str(error.value)
    assert sentence.startswith("A.json and B.json asked different requests") and "\n" not in sentence
    assert "digest d1" in sentence and "digest d2" in sentence


def test_runs_without_a_common_level_are_refused():
    with pytest.raises(InvalidRequest, match=r"no level in common .concurrency 1; concurrency 2"):
        compare(sweep([1.0], (1,)), sweep([1.0], (2,)), NAMES)


def test_what_differs_otherwise_is_told():
    found = compare(sweep([1.0], (1, 4)), sweep([1.0], (4, 8), consume="playback"), NAMES)
    assert found.unmatched == ("concurrency 1", "concurrency 8")
    assert found.differences == ("how answers are read: fast and playback",)


def test_the_table_has_both_sides_and_their_ratio():
    out = io.StringIO()
    show(compare(sweep([1.0, 1.2]), sweep([1.5, 1.7]), NAMES), NAMES, out)
    lines = out.getvalue().splitlines()
    assert lines[0] == "A is A.json, B is B.json"
    row = next(line for line in lines if line.startswith("E2EL (s) p50"))
    assert " ".join(row.split()) == "E2EL (s) p50* 1.000 (1.000 – 1.200) 1.500 (1.500 – 1.700) 1.50"
    same = next(line for line in lines if line.startswith("audio seconds/s"))
    assert same.rstrip().endswith("within the spread")
    out = io.StringIO()
    a, b = document([level([record(), failed(1)])]), document([level([record(), record(1)])])
    show(compare(a, b, NAMES), NAMES, out)
    assert "errors 1.000 0 0.00" in " ".join(out.getvalue().split())
    assert "so how far runs lie apart is unknown" in out.getvalue()
