"""Levels against a scripted server."""

import json

import grpc
import pytest
from fake_triton import Audio, Done, Fail, Text, Until, Wait

from tritone_bench.arrivals import Load
from tritone_bench.bench import BenchPlan, run_bench
from tritone_bench.load import READ_AHEAD_S, run_level, warm_up
from tritone_bench.prompts import PROMPTS
from tritone_bench.request_set import Ask, RequestSet
from tritone_client import AsyncTritoneClient, ConnectionFailed, InvalidRequest, Unavailable

SECOND = 24_000


def requests(num_requests=8, first_seed=0, **options):
    return RequestSet("a test", tuple(Ask(prompt, options) for prompt in PROMPTS), num_requests, first_seed)


def seeds_of(seen):
    return [json.loads(request.text("sampling_parameters"))["seed"] for request in seen]


async def run(triton, load, asked, **settings):
    async with AsyncTritoneClient(triton.url) as client:
        return await run_level(client, load, asked, **settings)


async def reports_of(triton, plan):
    async with AsyncTritoneClient(triton.url) as client:
        return [report async for report in run_bench(client, plan)]


async def test_every_level_asks_the_same_after_the_warm_up(triton):
    triton.script = [Wait(0.02), Text("a"), Audio(2400), Done()]
    loads = (Load(concurrency=1), Load(concurrency=4))
    plan = BenchPlan(loads, requests(8, first_seed=100, max_tokens=16), num_warmup_requests=2)
    one, four = await reports_of(triton, plan)
    assert (one.load, four.load) == loads and (one.repeat, four.repeat) == (0, 0)
    assert one.num_requests == four.num_requests == 8 and one.num_errors == four.num_errors == 0
    assert triton.max_running == 4 and len(triton.requests) == 2 + 8 + 8
    for measured in (triton.requests[2:10], triton.requests[10:]):
        assert sorted(seeds_of(measured)) == list(range(100, 108))
        assert {request.text("text_input") for request in measured} == set(PROMPTS[:8])
        assert all(request.inputs["return_timings"].tolist() == [True] for request in measured)
    assert seeds_of(triton.requests[2:10]) == list(range(100, 108))
    assert all(json.loads(r.text("sampling_parameters"))["max_tokens"] == 16 for r in triton.requests)
    ttft, ttfp = one.measure("text", "ttft_s"), one.measure("audio", "ttfp_s")
    assert 0.02 <= ttft.p50 <= ttfp.p50 <= one.measure("request", "e2el_s").p50
    assert one.throughput.requests_per_s == pytest.approx(8 / one.wall_s)
    assert one.throughput.audio_s_per_s == pytest.approx(8 * 0.1 / one.wall_s)
    assert one.stages["thinker"].busy_p50_s == 0.1


async def test_repeats_take_turns_with_the_levels(triton):
    loads = (Load(concurrency=1), Load(concurrency=2))
    reports = await reports_of(triton, BenchPlan(loads, requests(2), num_warmup_requests=0, num_repeats=2))
    assert [(report.load.concurrency, report.repeat) for report in reports] == [
        (1, 0),
        (2, 0),
        (1, 1),
        (2, 1),
    ]


async def test_an_open_loop_does_not_wait_for_answers(triton):
    triton.script = [Until(lambda: triton.max_running == 8), Text("a"), Done()]
    load = Load(request_rate_per_s=40.0, arrival="constant")
    level = await run(triton, load, requests(8))
    assert triton.max_running == 8
    assert [record.due_s for record in sorted(level.records, key=lambda r: r.number)] == pytest.approx(
        [number / 40 for number in range(8)]
    )
    assert all(record.sent_s >= record.due_s for record in level.records)


async def test_a_duration_bounds_both_loops(triton):
    triton.script = [Wait(0.05), Text("a"), Done()]
    closed = await run(triton, Load(concurrency=2), requests(None), duration_s=0.3)
    assert 2 <= len(closed.records) <= 14 and all(record.failure is None for record in closed.records)
    open_loop = Load(request_rate_per_s=20.0, arrival="constant")
    assert len((await run(triton, open_loop, requests(None), duration_s=0.3)).records) == 6
    assert len((await run(triton, open_loop, requests(3), duration_s=9.0)).records) == 3
    with pytest.raises(ValueError, match="has an end"):
        await run(triton, open_loop, requests(None))


async def test_failures_are_recorded_by_code(triton):
    def script(request):
        busy = Fail(grpc.StatusCode.UNAVAILABLE, "TRITONE_UNAVAILABLE: busy; later")
        return [busy] if seeds_of([request])[0] % 2 else [Text("a"), Done(info={})]

    triton.script = script
    plan = BenchPlan((Load(concurrency=2),), requests(6), num_warmup_requests=0)
    [report] = await reports_of(triton, plan)
    assert (report.num_requests, report.num_errors) == (6, 3)
    assert report.errors["UNAVAILABLE"].count == 3 and report.errors["UNAVAILABLE"].example == "busy; later"
    assert report.measure("audio", "ttfp_s") is None and report.measure("text", "ttft_s").count == 3


async def test_a_server_that_refuses_at_once_is_not_asked_without_pause(triton):
    triton.script = [Fail(grpc.StatusCode.UNAVAILABLE, "TRITONE_UNAVAILABLE: busy; later")]
    level = await run(triton, Load(concurrency=2), requests(None), duration_s=0.35)
    assert 2 <= len(level.records) <= 10


async def test_a_deadline_is_a_failure_of_its_own_kind(triton):
    triton.script = [Text("a"), Wait(30), Done()]
    level = await run(triton, Load(concurrency=1), requests(1, deadline_s=0.1))
    [record] = level.records
    assert record.failure.code == "DEADLINE_EXCEEDED" and record.end_s < 30


async def test_a_request_without_an_end_is_given_up(triton, monkeypatch):
    monkeypatch.setattr("tritone_bench.load.LOST_S", 0.2)
    triton.script = [Text("a"), Wait(30), Done()]
    [record] = (await run(triton, Load(concurrency=1), requests(1))).records
    assert record.failure.code == "LOST" and "no end within 0.2 s" in record.failure.message


async def test_a_listener_at_playback_speed_reads_when_little_is_left(triton):
    triton.script = [Text("a"), *[Audio(SECOND // 2)] * 4, Done()]
    fast, played = [
        (await run(triton, Load(concurrency=1), requests(1), consume=consume)).records[0]
        for consume in ("fast", "playback")
    ]
    assert fast.end_s < played.end_s
    at_s = [arrival.at_s - played.audio[0].at_s for arrival in played.audio]
    due_s = [number * 0.5 - READ_AHEAD_S + 0.5 for number in range(4)]  # half a second less for the first
    assert all(at >= due - 0.01 for at, due in zip(at_s, [0.0, *due_s], strict=False))
    assert played.end_s >= 2.0 - READ_AHEAD_S
    if all(at <= number * 0.5 for number, at in enumerate(at_s)):
        assert played.figures().num_underruns == 0, "who reads in time hears no gap"
    else:
        assert played.figures().num_underruns > 0
    assert sum(arrival.duration_s for arrival in played.audio) == 2.0


async def test_many_listeners_at_playback_speed_do_not_wait_for_each_other(triton):
    triton.script = [*[Audio(SECOND // 4)] * 4, Done()]
    level = await run(triton, Load(concurrency=8), requests(8), consume="playback")
    listened_s = sum(record.end_s - record.audio[0].at_s for record in level.records)
    assert listened_s > 2 * level.wall_s, "one after the other they listen for less than all of it"
    assert all(record.end_s >= 0.5 - 0.01 and record.failure is None for record in level.records)


async def test_what_measuring_cost_is_known(triton):
    level = await run(triton, Load(concurrency=4), requests(8))
    assert 0 < level.cost.cpu_share < 8 and level.cost.load_average >= 0
    triton.script = [Wait(0.3), Text("a"), Done()]
    waiting = await run(triton, Load(concurrency=1), requests(2))
    assert waiting.cost.cpu_share < 0.8 and waiting.cost.loop_lag_p99_s is not None


async def test_the_warm_up_raises(triton):
    async with AsyncTritoneClient("127.0.0.1:1") as client:
        with pytest.raises(ConnectionFailed):
            await warm_up(client, requests(1), 1)
    triton.script = [Fail(grpc.StatusCode.UNAVAILABLE, "TRITONE_UNAVAILABLE: busy; later")]
    with pytest.raises(Unavailable):
        await reports_of(triton, BenchPlan((Load(concurrency=1),), requests(1)))


async def test_answers_of_odd_unicode_are_measured_like_others(triton):
    triton.script = [Text("\ufffd\u202e\x00\U0010ffff"), Audio(100), Text("\u0301\n\x1b[2J"), Done()]
    [report] = await reports_of(triton, BenchPlan((Load(concurrency=2),), requests(4)))
    assert report.num_errors == 0 and report.measure("text", "ttft_s").p50 > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"loads": ()},
        {"requests": requests(None)},
        {"duration_s": 0.0},
        {"num_warmup_requests": -1},
        {"num_repeats": 0},
    ],
)
def test_senseless_plans_are_refused(wrong):
    with pytest.raises(InvalidRequest):
        BenchPlan(**{"loads": (Load(concurrency=1),), "requests": requests(1), **wrong})
