import pytest
from made import failed, level, record

from tritone_bench.goodput import MEASURES, goodput, read_bounds
from tritone_bench.playback import Arrival
from tritone_client import InvalidRequest

SMOOTH = (Arrival(0.3, 1.0), Arrival(0.9, 1.0))
LATE = (Arrival(0.3, 1.0), Arrival(1.8, 1.0))


def share(bounds, *records):
    return goodput([one.figures() for one in records], read_bounds(bounds), wall_s=2.0).share


def test_bounds_are_read():
    assert read_bounds("ttfp=0.5, underrun=0") == {"ttfp": 0.5, "underrun": 0.0}
    assert read_bounds(",".join(f"{name}=1" for name in MEASURES)) == dict.fromkeys(MEASURES, 1.0)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("underun=1", "unknown measure 'underun'; did you mean 'underrun'"),
        ("quality=1", "unknown measure 'quality'; use ttft"),
        ("", "unknown measure ''"),
        ("ttfp", "bound of ttfp is ''; give a number, e.g. ttfp=0.5"),
        ("ttfp=soon", "bound of ttfp is 'soon'"),
        ("ttfp=-1", "bound of ttfp is '-1'"),
        ("ttfp=nan", "bound of ttfp is 'nan'"),
        ("ttfp=1,ttfp=2", "bounds ttfp twice"),
    ],
)
def test_bad_bounds_are_refused(text, sentence):
    with pytest.raises(InvalidRequest, match=sentence):
        read_bounds(text)


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ("ttfp=0.3", 1.0),
        ("ttfp=0.29", 0.0),
        ("underrun=0", 0.5),
        ("underrun=0.5", 1.0),
        ("gap=0.61", 0.5),
        ("rtf=0.5", 1.0),
        ("rtf=0.49", 0.0),
        ("ttft=0.1,underrun=0,e2el=1", 0.5),
        ("tpot=0.1", 1.0),
        ("tpot=0.09", 0.0),
        ("itl=0.4", 1.0),
        ("itl=0.39", 0.0),
    ],
)
def test_a_good_request_meets_every_bound(bounds, expected):
    assert share(bounds, record(audio=SMOOTH), record(audio=LATE)) == expected


def test_failed_requests_count_as_bad():
    assert share("ttfp=9", record(), record(), record(), failed()) == 0.75
    assert share("ttfp=9", failed()) == 0.0


def test_a_bound_judges_those_that_asked_for_its_modality():
    text_only = record(audio=(), finish_reasons={"text": "stop"})
    silent = record(audio=(), finish_reasons={"text": "stop", "audio": "stop"})
    assert share("ttfp=9", record(), text_only) == 1.0
    assert share("underrun=0", record(audio=SMOOTH), silent) == 0.5
    assert share("ttfp=9", text_only, text_only) is None, "it judged nothing, and that is not 100 %"


def test_goodput_of_a_level():
    report = level([record(0, audio=SMOOTH), record(1, audio=LATE), failed(2)], bounds={"underrun": 0.0})
    assert (report.goodput.num_good, report.goodput.requests_per_s) == (1, 0.1)
    assert report.goodput.share == pytest.approx(1 / 3)
    assert level([record()]).goodput is None
