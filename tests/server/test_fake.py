"""The fake pipeline on a real server: small versions of the soak run's parts, each frame accounted for."""

import io
import json
import subprocess
import sys

import pytest
import soundfile

import soak_faults
import soak_load
from tritone.pipelines.fake.orders import Orders
from tritone.pipelines.fake.signal import SAMPLE_RATE_HZ, decode, voice_of
from tritone_client import InvalidRequest

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server(serve):
    return serve("fake")


def sound(report):
    assert report.problems == [], report
    return report.figures


def tritone(*words):
    return subprocess.run(
        [sys.executable, "-m", "tritone", *words], capture_output=True, text=True, timeout=60
    )


def test_chat_speaks_what_decode_reads(server, tmp_path):
    out = tmp_path / "reply.wav"
    words = ["--pipeline=fake", "--url", server.grpc_url, "--seed=5", f"--out={out}", "--json"]
    done = tritone("chat", "hello there pace_ms=1 frames_per_word=4", *words)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert "".join(event.get("text", "") for event in events if event["event"] == "text") == "hello there"
    samples, rate_hz = soundfile.read(out, dtype="int16")
    assert rate_hz == SAMPLE_RATE_HZ and decode(samples).faults(voice_of(5), num_frames=8) == {}


@pytest.mark.parametrize("audio_format", ["f32", "s16_base64", "wav"])
async def test_every_lossless_format_keeps_every_frame(server, audio_format):
    async with server.client("fake") as client:
        answer = await client.ask("words=30 pace_ms=0", seed=77, audio_format=audio_format)
    samples = read_file(answer.encoded_audio) if audio_format == "wav" else answer.samples
    assert decode(samples).faults(voice_of(77), 90) == {}
    assert answer.text == Orders.read("words=30").text(voice_of(77))


def read_file(data):
    return soundfile.read(io.BytesIO(data), dtype="int16")[0]


async def test_a_wrong_order_is_refused_with_a_suggestion(server):
    async with server.client("fake") as client:
        with pytest.raises(InvalidRequest, match="did you mean 'pace_ms'"):
            await client.ask("hello pase_ms=3")


async def test_many_at_once_are_all_exact(server):
    assert sound(await soak_load.load(server, requests=128, at_once=64))["exact"] == 128


async def test_requests_left_at_random_points_leave_nothing(server):
    report = await soak_load.memory(
        server, requests=96, aborted=32, warm_up=64, at_once=16, allowed_kib=20, allowed_blocks=20, settle_s=0
    )
    figures = sound(report)
    assert figures["left"] + figures["exact"] == 96 and figures["left"] >= 1
    before, after = map(int, figures["threads"].split(" -> "))
    assert after - before <= 16, "a pool may not be full yet; one for each that left is more"


async def test_leaving_after_the_first_chunk_frees_every_stage(server):
    report = await soak_load.aborts(server, aborted=32, by_http=8, free_within_s=soak_load.QUIET_S)
    figures = sound(report)
    assert figures["left"] == 32 and figures["exact"] == 10


async def test_twice_the_limit_is_refused_at_once(server):
    figures = sound(await soak_load.admission(server, times=2))
    assert figures["left"] == figures["exact"] == figures["refused"] == 64


async def test_listeners_that_pause_lose_nothing(server):
    assert sound(await soak_load.paced(server, listeners=4, chunks=3, pace=0.5))["exact"] == 4


async def test_a_reader_that_is_too_slow_costs_little(server):
    figures = sound(await soak_load.slow(server, seconds=3, readers=2))
    assert figures["growth, MiB a reader"] < 16


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("fail", "singer"),
        ("fail", "wave"),
        ("raise", "writer"),
        ("raise", "wave"),
        ("oom", "singer"),
        ("kill", "wave"),
    ],
)
async def test_a_fault_is_told_and_over(server, kind, stage):
    report = await soak_faults.one_fault(server, kind, stage, repeats=1)
    figures = sound(report)
    assert kind in figures["message"] or "engine" in figures["message"]
    if kind == "fail":
        assert figures["others"] == {"exact": 4}, "one request fails alone"


async def test_mixed_traffic_survives_random_kills(server):
    figures = sound(await soak_faults.kills(server, seconds=8, least_kills=3))
    assert figures["exact"] > 10 and sum(figures["kills"].values()) >= 3
