"""The comparison against a real server with a tiny model of made-up weights, and a stand-in for the peer."""

import contextlib
import sys
from pathlib import Path

import pytest

for package in ("torch", "transformers", "torchvision", "av", "PIL", "aiohttp"):
    pytest.importorskip(package)

import end_to_end  # noqa: E402
from comparison import endurance, levels  # noqa: E402
from comparison.checkpoint_folder import checkpoint_folder  # noqa: E402
from comparison.servers import OURS, PEER, OurStart, our_server  # noqa: E402
from comparison.workload import TINY  # noqa: E402

pytestmark = pytest.mark.server

START_TIMEOUT_S = 400
FAKE_PEER = Path(__file__).parents[1] / "unit" / "comparison" / "fake_peer"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder that holds no weights."""
    folder = checkpoint_folder(tmp_path_factory.mktemp("comparison") / "checkpoint", tiny=True)
    assert not list(folder.glob("*.safetensors*"))
    return folder


@pytest.fixture(scope="module")
def server(checkpoint):
    start = OurStart(checkpoint, None, end_to_end.TINY_OVERRIDES)
    with our_server(start, checkpoint.parent / "servers", START_TIMEOUT_S) as served:
        yield served


@pytest.fixture
def out(tmp_path):
    """Of each test its own: a page of all that is in it is written every time."""
    return tmp_path


@pytest.fixture
def command(server, checkpoint, out, capsys):
    """command("levels", …) runs the script against the running server; what it printed."""

    def run(name, *words):
        given = ["--out", str(out), "--tiny", "--url", server.url, "--pid", str(server.pid)]
        given += ["--checkpoint", str(checkpoint), *words]
        assert end_to_end.main([name, *given]) == 0
        return capsys.readouterr().out

    return run


def test_levels_of_both_and_their_ratio(command, out, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FAKE_PEER))
    printed = command("levels", "--concurrency", "1,2", "--peer-python", sys.executable)
    assert "### ours" in printed and "### peer" in printed and "how many times as good ours is" in printed
    for side in (OURS, PEER):
        report = levels.Levels(out).read(side)[2].levels[0]
        assert (report.num_requests, report.num_errors) == (2, 0)
        assert report.measure("text", "ttft_s") and report.measure("audio", "ttfp_s")
    ours = levels.Levels(out).read(OURS)[2].levels[0].requests[0]
    assert ours.num_tokens == TINY.text_tokens
    assert ours.audio_s == pytest.approx(TINY.frames * 0.08, abs=555 / 24000 + 1e-3)
    assert (out / "comparison.md").read_text() == printed.partition("# Ours")[1] + printed.partition(
        "# Ours"
    )[2].removesuffix("\n")
    assert "<svg" in (out / "ours.html").read_text() or "svg+xml" in (out / "ours.html").read_text()


def test_ways_are_measured_once_and_set_side_by_side(command, server, out, monkeypatch):
    started = []

    @contextlib.contextmanager
    def stand_in(start, folder, timeout_s, keep=False):
        started.append([word for word in start.overrides if "colocate" in word or "stream" in word])
        if len(started) == 2:
            raise RuntimeError("gpu:0 is too small")
        yield server

    monkeypatch.setattr(end_to_end, "our_server", stand_in)
    words = ("--concurrency", "2", "--ways", "apart,mps,speech,speech-one-stream")
    with pytest.raises(AssertionError):  # exit status 1: a way did not start
        command("ways", *words)
    (out / "ways" / "speech" / "refused.txt").unlink()
    printed = command("ways", *words).rpartition("# Ours and the peer")[2]  # the first time printed too
    speech = ["stage.talker.colocate=speech", "stage.code2wav.colocate=speech"]
    single = [*speech, "stage.talker.own_stream=false", "stage.code2wav.own_stream=false"]
    assert started == [[], speech, single, speech]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines()]
    table = [row for row in rows if len(row) == 7 and row[1] in end_to_end.ways.WAYS]
    assert [row[:2] for row in table] == [["2", way] for way in ("apart", "speech", "speech-one-stream")]
    assert all(float(cell) > 0 for row in table for cell in row[2:6]) and {row[6] for row in table} == {"0"}
    assert table[0][5] == "1.00" and "- at 2: most speech" in printed


def test_goodput_goes_on_where_it_stopped(command):
    words = ("--only", "ours", "--rate", "2", "--probe-s", "1", "--samples", "2", "--probes", "1")
    assert "1 errors" not in command("goodput", *words)
    assert command("goodput", *words).count("ours ") >= 2


def test_endurance(command, out, monkeypatch):
    monkeypatch.setattr(endurance, "is_flat", bool)  # seconds after the start memory may still grow
    words = ("--only", "ours", "--concurrency", "3", "--duration-s", "4", "--abort-share", "0.5")
    printed = command("endurance", *words)
    endured = endurance.read(out / "endurance-ours.json")
    assert endured.whole and endured.left and not endured.errors and not endured.wrong_length
    assert "flat" in printed


def test_steps_of_stages_against_their_floors(command, out):
    printed = command("stages", "--concurrency", "2", "--rounds", "1")
    rows = [line.split("|")[1].strip() for line in printed.splitlines() if "in all" in line]
    assert rows == ["thinker", "talker", "code2wav"]
    assert "### steps at concurrency 2" in printed
