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
from tritone_client.bench_stages import StageReport, StageTimes, stage_table
from tritone_client.events import Done as DoneEvent


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
    assert all(request.inputs["return_timings"].tolist() == [True] for request in measured)
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


def told(audio_chunks=4, total_s=2.0, idle_s=None, **stages) -> RequestRecord:
    """A request whose server told this of its stages."""
    timings = {"total_s": total_s, "stages": stages} | ({} if idle_s is None else {"idle_s": idle_s})
    measured = Timings(0.1, 0.2, 2.1, 1.0, 2.1)
    done = DoneEvent({}, {}, stages, 1, {"timings": timings}, measured, 9)
    return RequestRecord(measured, Underruns(0, 0.0), None, StageTimes.of(done, audio_chunks))


def test_shares_are_of_the_time_in_which_a_stage_computes():
    report = summarize(
        1,
        [
            told(idle_s=0.1, thinker={"total_s": 1.5, "busy_s": 0.5}, code2wav={"calls": 4, "calls_s": 0.3}),
            told(idle_s=0.2, thinker={"total_s": 1.6, "busy_s": 0.6, "first_output_s": 0.25}),
            told(idle_s=0.4, thinker={"total_s": 1.7, "busy_s": 1.0}),
            told(idle_s=9.0, audio_chunks=0),
        ],
        wall_s=8.0,
    )
    assert report.stages["thinker"] == StageReport(1.6, 0.25, 0.6, 0.3)
    # What a stage does not say of its work is not guessed from how long it was waited for.
    assert report.stages["code2wav"] == StageReport(0.3, None, None, None)
    assert report.chain_overhead_p50_s == 0.05
    assert report.as_dict()["stages"]["thinker"]["busy_share_p50"] == 0.3


def test_the_stage_table_has_a_row_a_figure_and_none_for_what_nobody_tells():
    one = summarize(1, [told(idle_s=0.02, thinker={"total_s": 1.5, "busy_s": 0.5})], 2.0)
    many = summarize(16, [told(thinker={"total_s": 1.75}, talker={"total_s": 1.0})], 2.0)
    lines = stage_table([one, many]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["concurrency", "1", "16"]
    assert [line.rsplit(None, 2) for line in lines[2:]] == [
        ["thinker: share of time p50", "25%", "-"],
        ["thinker: busy p50 (s)", "0.500", "-"],
        ["thinker: open p50 (s)", "1.500", "1.750"],
        ["talker: open p50 (s)", "-", "1.000"],
        ["chain overhead / audio chunk p50 (s)", "0.005", "-"],
    ]
    assert stage_table([summarize(1, [RequestRecord(None, Underruns(0, 0.0), None)], 1.0)]) == ""


@pytest.mark.asyncio
async def test_answers_of_odd_unicode_are_measured_like_others(triton):
    triton.script = [Text("\ufffd\u202e\x00\U0010ffff"), Audio(100), Text("\u0301\n\x1b[2J"), Done()]
    [report] = await reports_of(triton, BenchPlan((2,), num_requests=4))
    assert report.num_errors == 0 and report.ttft_p50_s > 0
    assert report.stages["thinker"].busy_p50_s == 0.1


@pytest.mark.parametrize(
    "wrong", [{"concurrencies": ()}, {"concurrencies": (0,)}, {"num_requests": 0}, {"prompts": ()}]
)
def test_senseless_plans_are_refused(wrong):
    with pytest.raises(InvalidRequest):
        BenchPlan(**wrong)


def test_built_in_prompts_vary():
    assert len(set(PROMPTS)) == len(PROMPTS) >= 16
