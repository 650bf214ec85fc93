"""`tritone bench` on a real server, whose answers are known to the word and the frame."""

import json
import subprocess
import sys
import urllib.request

import pytest

from tritone_bench.document import read
from tritone_bench.load import READ_AHEAD_S

pytestmark = pytest.mark.server

FRAME_S = 0.02


@pytest.fixture(scope="module")
def server(serve):
    return serve("fake")


@pytest.fixture
def bench(server, tmp_path):
    """bench(requests, *options) asks these, one object each; returns the finished command and its levels."""

    def run(requests, *options):
        asked, out = tmp_path / "requests.jsonl", tmp_path / "run.json"
        asked.write_text("\n".join(map(json.dumps, requests)))
        words = [sys.executable, "-m", "tritone", "bench", "fake", f"--url={server.grpc_url}"]
        words += [f"--input={asked}", f"--json={out}", *options]
        done = subprocess.run(words, capture_output=True, text=True, timeout=200)
        return done, read(out).levels if out.exists() else ()

    return run


def num_served(server):
    """Requests that the server says it has served, pings of the supervisor included."""
    with urllib.request.urlopen(f"{server.http_url}/v2/models/fake/stats") as response:
        [stats] = json.load(response)["model_stats"]
    return stats["inference_stats"]["success"]["count"]


def test_a_sweep_counts_every_request_word_and_frame(server, bench, tmp_path):
    before = num_served(server)
    requests = [{"prompt": f"words={n} frames_per_word=2 pace_ms=2"} for n in (5, 10)]
    files = [f"--report={tmp_path / 'run.html'}", f"--plots={tmp_path / 'plots'}"]
    done, levels = bench(requests, "--concurrency=1,4", "--requests=12", "--goodput=e2el=30", *files)
    assert done.returncode == 0, done.stderr
    assert num_served(server) - before >= 1 + 2 * 12
    for level in levels:
        assert (level.num_requests, level.num_errors, level.goodput.num_good) == (12, 0, 12)
        assert [one.num_tokens for one in level.requests] == [5, 10] * 6
        assert [one.audio_s for one in level.requests] == pytest.approx([10 * FRAME_S, 20 * FRAME_S] * 6)
        made_s = sum(one.audio_s for one in level.requests)
        assert level.throughput.audio_s_per_s == pytest.approx(made_s / level.wall_s)
        assert level.throughput.text_tokens_per_s == pytest.approx(90 / level.wall_s)
        assert set(level.stages) == {"writer", "singer", "wave"}
        assert level.finish_reasons == {"text": {"stop": 12}, "audio": {"stop": 12}}
        assert 0 < level.measure("text", "tpot_s").p50 < level.measure("text", "e2el_s").p50
    page = (tmp_path / "run.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and page.rstrip().endswith("</html>")
    pictures = list((tmp_path / "plots").iterdir())
    assert len(pictures) >= 4 and all(picture.stat().st_size > 5000 for picture in pictures)


def test_an_open_loop_keeps_its_rate(bench):
    requests = [{"prompt": "words=5 pace_ms=20", "modalities": "text"}]
    done, [level] = bench(requests, "--request-rate=25", "--arrival=constant", "--requests=20")
    assert done.returncode == 0, done.stderr
    assert (level.num_requests, level.num_errors) == (20, 0) and level.measure("audio", "ttfp_s") is None
    assert level.wall_s >= 19 / 25
    sent_s = sorted(one.sent_s for one in level.requests)
    assert all(sent >= number / 25 for number, sent in enumerate(sent_s))


def test_sound_that_is_made_too_slowly_runs_out(bench):
    late = {
        "prompt": "words=30 frames_per_word=2 pace_ms=100",
        "initial_codec_chunk_frames": 2,
        "codec_chunk_frames": 2,
    }
    done, [level] = bench([late], "--concurrency=2", "--requests=4", "--goodput=underrun=0.1")
    assert done.returncode == 0, done.stderr
    underruns = level.underruns
    assert (underruns.num_streams, underruns.share_clean, level.goodput.share) == (4, 0.0, 0.0)
    # 40 ms of sound each 100 ms: 29 waits of 60 ms, less what the first sound comes late
    assert 0.2 * 29 * 0.06 < underruns.silence_s / 4 < level.measure("audio", "e2el_s").max


def test_a_listener_at_playback_speed_takes_as_long_as_the_sound(bench):
    spoken = {"prompt": "words=50 frames_per_word=2 pace_ms=0"}
    done, [fast] = bench([spoken], "--concurrency=4", "--requests=4")
    assert done.returncode == 0, done.stderr
    done, [played] = bench([spoken], "--concurrency=4", "--requests=4", "--consume=playback")
    assert done.returncode == 0, done.stderr
    assert all(one.audio_s == pytest.approx(2.0) for level in (fast, played) for one in level.requests)
    assert played.measure("audio", "e2el_s").min > fast.measure("audio", "e2el_s").min
    chunks, heard_s = played.streams["typical"].audio, 0.0
    for at_s, duration_s in chunks:
        assert at_s - chunks[0].at_s >= heard_s - READ_AHEAD_S - 0.02
        heard_s += duration_s
    assert heard_s == pytest.approx(2.0)


def test_failures_are_counted_by_kind(bench):
    requests = [{"prompt": "words=3 pace_ms=0"}, {"prompt": "words=3 pace_ms=0 fail=singer@1"}]
    done, [level] = bench(requests, "--concurrency=2", "--requests=6")
    assert done.returncode == 1
    assert (level.num_requests, level.num_errors) == (6, 3)
    assert sum(error.count for error in level.errors.values()) == 3 and len(level.errors) == 1
    assert done.stderr.splitlines()[-1].startswith("tritone: 3 requests failed, 3 of them with ")
