import io

from made import STAGES, failed, level, record

from tritone_bench.arrivals import Load
from tritone_bench.client_cost import ClientCost
from tritone_bench.level import summarize
from tritone_bench.load import LevelRun
from tritone_bench.percentiles import spread
from tritone_bench.table import notes, number, sections, show, titles, triple


def rows_of(reports):
    return {row.name: row.cells for section in sections(reports) for row in section.rows}


def test_a_row_a_measure_and_a_column_a_level():
    one = level([record(n, 1.0) for n in range(100)])
    four = level([record(n, 2.0, audio=()) for n in range(10)], Load(concurrency=4))
    assert titles([one, four]) == ["concurrency 1", "concurrency 4"]
    rows = rows_of([one, four])
    assert rows["TTFT (s)"] == ("0.100 / 0.100 / 0.100", "0.200 / 0.200 / 0.200*")
    assert rows["TTFP (s)"] == ("0.200 / 0.200 / 0.200", "-")
    assert rows["streams without underrun"] == ("100%", "-")
    assert rows["requests/s"] == ("10.000", "1.000")
    assert "image E2EL (s)" not in rows and "goodput" not in rows


def test_stages_have_rows_of_their_own():
    rows = rows_of([level([record(timings={"total_s": 1.0, "idle_s": 0.2, "stages": STAGES})])])
    assert rows["writer: share of time"] == ("30%",) and rows["wave: open (s)"] == ("0.400",)
    assert rows["chain overhead a chunk (s)"] == ("0.100",)


def test_notes_say_what_must_be_known():
    few = level([record(), failed(1)], bounds={"ttfp": 0.5})
    assert notes([few])[0].startswith("* fewer samples than the percentile needs")
    assert "concurrency 1: 1 failed with UNAVAILABLE, e.g. busy; later" in notes([few])
    busy = LevelRun((record(),), 1.0, ClientCost(0.95, 0.1, 3.0))
    assert any("may be what limits" in note for note in notes([summarize(Load(concurrency=9), 0, busy)]))
    text_only = level([record(audio=(), finish_reasons={"text": "stop"})], bounds={"ttfp": 0.5})
    assert any(note.startswith("goodput: ") for note in notes([text_only]))
    smooth = level([record(n, text=tuple(i / 1000 for i in range(120))) for n in range(200)])
    assert notes([smooth]) == []
    burst = level([record(n) for n in range(7)], Load(concurrency=4))
    assert notes([burst])[-1] == "concurrency 4: 7 requests are fewer than 2 a caller: a burst, not a load"


def test_repeats_are_numbered():
    assert titles([level([record()]), level([record()], repeat=1)]) == [
        "concurrency 1 #1",
        "concurrency 1 #2",
    ]


def test_numbers():
    assert [number(value) for value in (None, 0.0, 0.00123, 0.5, 12.3456, 123.456)] == [
        "-",
        "0",
        "0.0012",
        "0.500",
        "12.346",
        "123.5",
    ]
    assert triple(None) == "-" and triple(spread([1.0])) == "1.000* / 1.000* / 1.000*"


def test_a_pipe_gets_whole_lines():
    out = io.StringIO()
    reports = [level([record()], Load(concurrency=number)) for number in range(1, 13)]
    show(reports, out)
    lines = [line for line in out.getvalue().splitlines() if line.startswith("TTFT")]
    assert len(lines) == 1 and lines[0].count("/") == 24
    assert "\x1b" not in out.getvalue()
