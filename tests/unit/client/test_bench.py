import json

import grpc
import pytest
from fake_triton import Audio, Done, Fail, Text, Wait

from tritone_client import AsyncTritoneClient, ConnectionFailed, InvalidRequest, Timings, Unavailable
from tritone_client.bench import (
    PROMPTS,
    BenchPlan,
    RequestRecord,
    Underruns,
    playback_underruns,
    run_bench,
    summarize,
    table,
)


async def reports_of(triton, plan: BenchPlan):
    async with AsyncTritoneClient(triton.url) as client:
        return [report async for report in run_bench(client, plan)]


@pytest.mark.asyncio
async def test_levels_prompts_and_seeds(triton):
    triton.script = [Wait(0.02), Text("a"), Audio(2400), Done()]
    plan = BenchPlan((1, 4), num_requests=8, first_seed=100, options={"max_tokens": 16})
    one, four = await reports_of(triton, plan)
    assert (one.concurrency, four.concurrency) == (1, 4)
    assert one.num_requests == four.num_requests == 8 and one.num_errors == 0
    assert triton.max_running == 4
    measured = triton.requests[1:]  # the first is the warm-up
    sampling = [json.loads(request.text("sampling_parameters")) for request in measured]
    assert sorted(values["seed"] for values in sampling) == list(range(100, 116))
    assert all(values["max_tokens"] == 16 for values in sampling)
    assert [request.text("text_input") for request in measured[:8]] == list(PROMPTS[:8])
    assert 0.02 <= one.ttft_p50_s <= one.ttfp_p50_s <= one.e2el_p50_s <= one.e2el_p99_s
    assert one.requests_per_s == pytest.approx(8 / one.wall_s)
    assert one.audio_s_per_s == pytest.approx(8 * 0.1 / one.wall_s)
    assert four.requests_per_s > one.requests_per_s


@pytest.mark.asyncio
async def test_failed_requests_are_counted_by_message(triton):
    def script(request):
        seed = json.loads(request.text("sampling_parameters"))["seed"]
        busy = Fail(grpc.StatusCode.UNAVAILABLE, "TRITONE_UNAVAILABLE: busy; later")
        return [busy] if seed % 2 else [Text("a"), Done(info={})]

    triton.script = script
    [report] = await reports_of(triton, BenchPlan((2,), num_requests=6, num_warmup_requests=0))
    assert (report.num_requests, report.num_errors) == (6, 3)
    assert report.errors == {"UNAVAILABLE: busy; later": 3}
    assert report.ttfp_p50_s is None and report.rtf_max is None


@pytest.mark.asyncio
async def test_without_a_server_the_warm_up_says_so():
    async with AsyncTritoneClient("127.0.0.1:1") as client:
        with pytest.raises(ConnectionFailed):
            async for _ in run_bench(client, BenchPlan()):
                pass


@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [
        ([], Underruns(0, 0.0)),
        ([(5.0, 1.0)], Underruns(0, 0.0)),
        ([(5.0, 1.0), (5.1, 1.0), (6.9, 1.0)], Underruns(0, 0.0)),
        ([(5.0, 1.0), (6.25, 1.0)], Underruns(1, 0.25)),
        # the clock stands still while there is nothing to play: one late chunk is one underrun
        ([(5.0, 1.0), (6.25, 1.0), (7.25, 1.0), (8.5, 1.0)], Underruns(2, 0.5)),
    ],
    ids=["silent", "one chunk", "in time", "late", "late twice"],
)
def test_underruns_are_what_a_listener_hears(arrivals, expected):
    assert playback_underruns(arrivals) == expected


def test_summary_takes_percentiles_of_what_succeeded():
    def record(e2el_s: float) -> RequestRecord:
        timings = Timings(e2el_s / 10, e2el_s / 5, e2el_s, 2.0, e2el_s / 2.0)
        return RequestRecord(timings, Underruns(1, 0.5), None)

    failed = RequestRecord(None, Underruns(0, 0.0), Unavailable("busy"))
    report = summarize(8, [*(record(float(number)) for number in range(1, 101)), failed], wall_s=50.0)
    assert (report.num_requests, report.num_errors) == (101, 1)
    assert (report.e2el_p50_s, report.e2el_p99_s) == (50.0, 99.0)
    assert (report.ttft_p50_s, report.ttfp_p99_s) == (5.0, pytest.approx(19.8))
    assert (report.rtf_p50, report.rtf_max) == (25.0, 50.0)
    assert (report.requests_per_s, report.audio_s_per_s) == (2.0, 4.0)
    assert (report.num_underruns, report.silence_s) == (100, 50.0)


def test_table_has_a_column_per_level():
    record = RequestRecord(Timings(0.1, None, 1.0, 0.0, None), Underruns(0, 0.0), None)
    lines = table([summarize(1, [record], 1.0), summarize(16, [record] * 2, 1.0)]).splitlines()
    assert lines[0].split() == ["concurrency", "1", "16"]
    assert len({len(line) for line in lines}) == 1
    rows = {line[:19].strip(): line[19:].split() for line in lines[2:]}
    assert rows["TTFT p50 / p99 (s)"] == ["0.100", "/", "0.100", "0.100", "/", "0.100"]
    assert rows["TTFP p50 / p99 (s)"] == ["-", "/", "-", "-", "/", "-"]
    assert rows["requests / s"] == ["1.00", "2.00"]
    assert rows["errors"] == ["0", "0"]


@pytest.mark.parametrize(
    "wrong", [{"concurrencies": ()}, {"concurrencies": (0,)}, {"num_requests": 0}, {"prompts": ()}]
)
def test_senseless_plans_are_refused(wrong):
    with pytest.raises(InvalidRequest):
        BenchPlan(**wrong)


def test_built_in_prompts_vary():
    assert len(set(PROMPTS)) == len(PROMPTS) >= 16
