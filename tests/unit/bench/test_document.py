import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from made import STAGES, document, failed, level, record

from tritone_bench.arrivals import Load
from tritone_bench.document import SCHEMA, encode, read, write
from tritone_client import InvalidRequest

ROOT = Path(__file__).parents[3]


def run():
    first = level([record(0, timings={"total_s": 1.0, "stages": STAGES}), failed(1)], bounds={"ttfp": 0.5})
    second = level([record(0)], Load(request_rate_per_s=0.5, arrival="poisson"), repeat=1)
    return document([first, second], duration_s=3.0, delivery={"deadline_s": 4.0})


def test_what_is_written_is_read_again(tmp_path):
    path = tmp_path / "run.json"
    write(run(), path)
    assert read(path) == run()
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]
    write(document([]), path)
    assert read(path).levels == (), "a run replaces the one before"


def test_it_is_plain_json_with_a_line_a_level():
    text = encode(run()).decode()
    value = json.loads(text)
    assert value["schema"] == SCHEMA and value["levels"][0]["measures"]["audio"]["ttfp_s"]["p50"] == 0.2
    assert value["levels"][0]["errors"]["UNAVAILABLE"] == {"count": 1, "example": "busy; later"}
    assert value["levels"][0]["streams"]["typical"]["audio"][0] == [0.2, 1.0]
    assert len(text.splitlines()) == 4


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "is not JSON"),
        (b"\xff{}", "is not JSON"),
        (b"[]", "has schema None, this program reads 'tritone-bench/1'"),
        (b'{"schema": "tritone-bench/2"}', "has schema 'tritone-bench/2'"),
        (b'{"schema": "tritone-bench/1"}', "is not a whole report .*environment"),
        (encode(run()).replace(b'"num_errors":1', b'"num_errors":"1"'), r"is not a whole report .*levels"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path, data, sentence):
    path = tmp_path / "run.json"
    path.write_bytes(data)
    with pytest.raises(InvalidRequest, match=sentence):
        read(path)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(OSError) as error:
        write(run(), tmp_path / "none" / "run.json")
    assert error.value.filename == str(tmp_path / "none" / "run.json")


def test_the_committed_schema_is_that_of_the_code():
    done = subprocess.run([sys.executable, "build/bench_schema.py", "--check"], cwd=ROOT)
    assert done.returncode == 0, "run python build/bench_schema.py"


def test_committed_reports_are_read_and_small():
    reports = ROOT / "client" / "bench" / "reports"
    files = list(reports.rglob("*.json"))
    for path in files:
        run = read(path)
        assert run.levels and all(report.num_errors == 0 for report in run.levels), path
        again, before = (msgspec.json.decode(text) for text in (encode(run), path.read_bytes()))
        noted = before.pop("environment")  # a file that is older than a field lacks it
        assert again.pop("environment").items() >= noted.items() and again == before, path
    assert sum(path.stat().st_size for path in reports.rglob("*")) < 2_000_000
