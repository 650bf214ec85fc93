"""Spans on a real server, sent to a real collector, and the times that `done` tells beside the client's."""

import asyncio
import json
import os
import signal
import statistics
import time
import urllib.request
from collections import Counter

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from trace_collector import Collector
from tritone_client import AudioChunk, InvalidRequest, TritoneClient, TritoneError, Unavailable
from waiting import PATIENCE_S

pytestmark = pytest.mark.server

SERVICES = {
    "fake",
    "fake_writer.door",
    "fake_writer.engine",
    "fake_singer.door",
    "fake_singer.engine",
    "fake_wave.door",
    "fake_wave.engine",
}
CALLER = "cd" * 8
CLOCK_S = 0.25  # how far clocks may differ that processes read one after the other, on a busy machine
LATE_S = PATIENCE_S  # a stage hears of a cancel this much later, at most


@pytest.fixture(scope="module")
def collector():
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def server(serve, echo_folder, collector):
    """`fake` is traced by its deploy file, if the caller asks for it; echo by the environment, always."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        overrides = [f"fake:tracing.otlp_endpoint={collector.url}", "fake:tracing.sample_ratio=0"]
        yield serve("fake", echo_folder, overrides=overrides)


_numbers = iter(range(1, 1000))


def new_trace():
    """A trace id, and the traceparent of a span in it."""
    trace_id = f"{os.getpid():016x}{next(_numbers):016x}"
    return trace_id, f"00-{trace_id}-{CALLER}-01"


def is_complete(spans):
    """The request's own span comes after all of its orchestrator; doors and engines have theirs by then, too,
    or a schedule later."""
    requests = [span for span in spans if span.name.startswith("chat ")]
    sessions = {span.name for span in spans if span.name.startswith("session ")}
    engines = stages_of(spans) - {"fake_wave"}
    wanted = {f"session {name}" for name in engines}
    opens = {span.name for span in spans if span.name.startswith("open ")}
    calls = sum(span.attributes.get("tritone.calls", 0) for span in spans)
    computed = sum(span.name.startswith("compute ") for span in spans)
    runs = sum(span.name.startswith("run ") for span in spans)
    came = sessions >= wanted and opens >= {f"open {name}" for name in engines}
    return bool(requests) and came and calls == computed == runs and is_whole(spans)


def is_whole(spans):
    """What is above each span has come, but for the caller's."""
    ids = {span.span_id for span in spans}
    return sum(span.parent_id not in ids for span in spans) == 1


def has(*names):
    """Whether spans of these names have come, and what is above them."""
    return lambda spans: set(names) <= {span.name for span in spans} and is_whole(spans)


def stages_of(spans):
    return {f"fake_{span.attributes['tritone.stage']}" for span in spans if span.name.startswith("stage ")}


def check_tree(spans, caller_id, slack_s=CLOCK_S):
    """One tree below the caller's span, each span within the one above."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    (root,) = [span for span in spans if span.parent_id not in by_id]
    assert root.parent_id == caller_id and root.name.startswith("chat ")
    for span in spans:
        assert span.began_s <= span.ended_s
        if span is not root:
            above = by_id[span.parent_id]
            assert above.began_s - CLOCK_S <= span.began_s and span.ended_s <= above.ended_s + slack_s, span


async def fails(client, kind, prompt, **options):
    with pytest.raises(kind):
        await client.ask(prompt, **options)


async def test_the_spans_of_one_request_form_one_tree_below_the_clients(server, collector):
    """The caller has a span that is active, and says nothing else."""
    with trace.use_span(TracerProvider().get_tracer("test").start_span("a user's click")) as click:
        async with server.client("fake") as client:
            answer = await client.ask("words=12 pace_ms=2 frames_per_word=3", seed=3)
    context = click.get_span_context()
    trace_id, caller_id = f"{context.trace_id:032x}", f"{context.span_id:016x}"
    assert answer.done.info["trace_id"] == trace_id
    spans = collector.until(is_complete, trace_id)
    check_tree(spans, caller_id)
    assert {span.service for span in spans} == SERVICES
    calls = Counter(span.name for span in spans)
    num_chunks = calls.pop("run fake_wave")
    assert num_chunks == calls.pop("compute fake_wave") > 1
    assert set(calls.values()) == {1} and set(calls) == {
        *("chat fake", "queue", "stage writer", "stage singer", "stage wave"),
        *("open fake_writer", "open fake_singer", "session fake_writer", "session fake_singer"),
    }
    named = {span.name: span for span in spans}
    request = named["chat fake"].attributes
    assert request["gen_ai.usage.output_tokens"] == 12 and request["gen_ai.request.seed"] == 3
    assert named["stage wave"].attributes["tritone.frames"] == 36
    assert not any(span.error for span in spans)
    kinds = {span.name.split()[0]: span.kind for span in spans}
    assert kinds["chat"] == kinds["open"] == kinds["run"] == "server" and kinds["stage"] == "client"
    resource = named["session fake_singer"].resource
    assert resource["service.namespace"] == "tritone" and resource["tritone.stage"] == "singer"
    assert resource["process.pid"] in server.engine_pids("singer")


async def test_text_alone_has_spans_of_the_writer_alone(server, collector):
    trace_id, traceparent = new_trace()
    async with server.client("fake") as client:
        await client.ask("hello", modalities="text", traceparent=traceparent)
    spans = collector.until(is_complete, trace_id)
    check_tree(spans, CALLER)
    assert {span.name for span in spans} == {
        *("chat fake", "queue", "stage writer", "open fake_writer", "session fake_writer")
    }


async def test_twenty_requests_at_once_do_not_mix(server, collector):
    traces = [new_trace() for _ in range(20)]
    async with server.client("fake") as client:
        answers = await asyncio.gather(
            *(
                client.ask(f"words={3 + number} pace_ms=1 wave_ms=30", seed=number, traceparent=traceparent)
                for number, (_, traceparent) in enumerate(traces)
            )
        )
    batches = []
    for number, ((trace_id, _), answer) in enumerate(zip(traces, answers, strict=True)):
        assert answer.done.info["trace_id"] == trace_id
        spans = collector.until(is_complete, trace_id)
        check_tree(spans, CALLER)
        named = {span.name: span.attributes for span in spans}
        assert named["chat fake"]["gen_ai.request.seed"] == number
        assert named["chat fake"]["gen_ai.usage.output_tokens"] == 3 + number
        assert named["session fake_singer"]["tritone.usage.codec_frames"] == 3 * (3 + number)
        assert named["stage wave"]["tritone.frames"] == 3 * (3 + number)
        batches += [span.attributes["tritone.batch"] for span in spans if span.name == "run fake_wave"]
    assert max(batches) > 1, "some chunks of different requests share a batch, and still have their own spans"


async def test_who_does_not_ask_for_spans_has_none(server, collector):
    trace_id, traceparent = new_trace()
    async with server.client("fake") as client:
        unsampled = await client.ask("hello", traceparent=traceparent[:-2] + "00")
        silent = await client.ask("hello")
        other_id, other = new_trace()
        await client.ask("hello", traceparent=other)
    collector.until(is_complete, other_id)
    assert "trace_id" not in unsampled.done.info and "trace_id" not in silent.done.info
    assert collector.spans(trace_id) == []


async def test_the_environment_switches_a_pipeline_on_that_says_nothing(server, collector):
    async with server.client("echo") as client:
        answer = await client.ask("one two three")
    trace_id = answer.done.info["trace_id"]
    services = {service.removeprefix("fake") for service in SERVICES}
    spans = collector.until(
        lambda spans: (
            services <= {span.service.removeprefix("echo") for span in spans}
            and "chat echo" in {span.name for span in spans}
        ),
        trace_id,
    )
    assert {span.service.removeprefix("echo") for span in spans} == services
    assert {span.parent_id for span in spans if span.name == "chat echo"} == {""}


async def test_a_request_that_is_refused_says_so(server, collector):
    trace_id, traceparent = new_trace()
    async with server.client("fake") as client:
        await fails(client, InvalidRequest, "hello pase_ms=3", traceparent=traceparent)
    (span,) = collector.until(bool, trace_id)
    assert (span.name, span.error, span.parent_id) == ("chat fake", "INVALID_ARG", CALLER)
    assert "pase_ms" not in str(span.attributes)


async def test_a_stage_that_fails_is_the_one_that_has_the_error(server, collector):
    trace_id, traceparent = new_trace()
    async with server.client("fake") as client:
        await fails(client, TritoneError, "words=20000 pace_ms=2 fail=singer@5", traceparent=traceparent)
    spans = collector.until(has("chat fake", "session fake_singer", "session fake_writer"), trace_id)
    check_tree(spans, CALLER, LATE_S)
    errors = {span.name: span.error for span in spans if span.error}
    assert errors["chat fake"] == errors["stage singer"] == errors["session fake_singer"] == "INTERNAL"
    assert errors["stage writer"] == errors["session fake_writer"] == "CANCELLED"


async def test_a_listener_who_leaves_cancels_every_span(server, collector):
    trace_id, traceparent = new_trace()
    async with server.client("fake") as client:
        async for event in client.stream("words=20000 pace_ms=5", traceparent=traceparent):
            if isinstance(event, AudioChunk):
                break
    spans = collector.until(has("chat fake", "session fake_singer", "session fake_writer"), trace_id)
    check_tree(spans, CALLER, LATE_S)
    cancelled = {span.name for span in spans if span.error == "CANCELLED"}
    assert cancelled >= {"chat fake", "stage writer", "stage singer", "stage wave", "session fake_writer"}
    assert {span.error for span in spans} <= {"", "CANCELLED"}


async def test_a_killed_engine_leaves_an_error_where_its_request_waited(server, collector):
    trace_id, traceparent = new_trace()
    async with server.client("fake") as client:
        await client.ask("words=2 pace_ms=0", traceparent=new_trace()[1])
        collector.until(lambda spans: "fake_singer.engine" in {span.service for span in spans})
        stream = client.stream("words=20000 pace_ms=5", traceparent=traceparent)
        async for event in stream:
            if isinstance(event, AudioChunk):
                break
        os.kill(pid_of(collector, "fake_singer.engine"), signal.SIGKILL)
        with pytest.raises(Unavailable, match="singer"):
            async for _ in stream:
                pass
        spans = collector.until(has("chat fake", "session fake_writer"), trace_id)
        errors = {span.name: span.error for span in spans if span.error}
        assert errors["chat fake"] == "UNAVAILABLE"
        assert errors["stage singer"] == "ENGINE_LOST"
        assert errors["session fake_writer"] in ("CANCELLED", "ENGINE_LOST")
        assert "session fake_singer" not in {span.name for span in spans}, "who was killed tells nothing"
        check_tree(spans, CALLER, LATE_S)
        await until_it_serves(client)


def pid_of(collector, service):
    """By its last span."""
    return [span for span in collector.spans() if span.service == service][-1].resource["process.pid"]


async def until_it_serves(client):
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await client.ping()
        except Unavailable:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


async def test_headers_of_grpc_and_of_http_infer_name_a_caller_too(server, collector):
    trace_id, traceparent = new_trace()
    with TritoneClient(server.grpc_url, "fake", headers={"traceparent": traceparent}) as client:
        assert client.ask("hello").done.info["trace_id"] == trace_id
    trace_id, traceparent = new_trace()
    values = {"text_input": "hello", "modalities": "text"}
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [1], "data": [value]} for name, value in values.items()
    ]
    request = urllib.request.Request(
        f"{server.http_url}/v2/models/fake_sync/infer", data=json.dumps({"inputs": inputs}).encode()
    )
    request.add_header("traceparent", traceparent)  # which goes out with a capital
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        assert trace_id in response.read().decode()
    spans = collector.until(is_complete, trace_id)
    assert {span.service for span in spans} == {"fake_sync", "fake_writer.door", "fake_writer.engine"}


async def test_what_done_tells_agrees_with_the_clients_clock(server):
    """At concurrency 1: the client's times hold the server's, and the way there and back."""
    ways = {"ttft_s": [], "ttfp_s": [], "total_s": []}
    async with server.client("fake") as client:
        for number in range(15):
            began_s = time.time()
            done = (await client.ask("words=20 pace_ms=2", seed=number, return_timings=True)).done
            ended_s = time.time()
            told, seen = done.info["timings"], done.measured
            assert began_s - CLOCK_S <= told["received_unix_s"] <= ended_s
            for name, seen_s in (("ttft_s", seen.ttft_s), ("ttfp_s", seen.ttfp_s), ("total_s", seen.e2el_s)):
                ways[name].append(seen_s - told[name])
            check_timings(told)
    medians = {name: statistics.median(values) for name, values in ways.items()}
    print({name: f"{1000 * value:.1f} ms" for name, value in medians.items()})
    assert all(min(values) > 0 for values in ways.values()), "the server saw it before its client did"
    assert all(0 < median < PATIENCE_S for median in medians.values()), medians


def check_timings(told):
    """The moments of each stage are in their order, within the request, and of the stages in theirs."""
    for name, stage in told["stages"].items():
        moments = [stage[f"{moment}_at_s"] for moment in ("opened", "first_output", "last_output", "ended")]
        assert moments == sorted(moments) and moments[0] > 0 and moments[-1] <= told["total_s"], name
        spans = [moment for span in stage["busy"] for moment in span]
        assert spans == sorted(spans) and len(stage["busy"]) <= 256
        assert sum(end - begin for begin, end in stage["busy"]) == pytest.approx(stage["busy_s"], abs=1e-3)
        assert stage["batch"] == 1 and 0 <= stage.get("queued_s", 0) <= told["total_s"]
    writer, singer, wave = (told["stages"][name] for name in ("writer", "singer", "wave"))
    assert (writer["tokens"], writer["steps"]) == (20, 20) and (singer["frames"], wave["frames"]) == (60, 60)
    assert len(wave["call_spans"]) == wave["calls"] and "calls" not in writer
    assert sum(frames for _, _, frames, _ in wave["call_spans"]) == 60
    assert writer["first_output_at_s"] < singer["first_output_at_s"] < wave["first_output_at_s"]
    assert wave["first_output_at_s"] <= told["ttfp_s"] and writer["first_output_at_s"] <= told["ttft_s"]
    assert 0 <= told["queued_s"] < writer["opened_at_s"]


async def test_a_collector_that_refuses_fails_no_request_and_is_told_once_a_process(server, collector):
    def complaints():
        return [line for line in server.log.read_text().splitlines() if "takes no spans" in line]

    async with server.client("fake") as client:
        collector.status = 400
        for number in range(4):
            before = collector.num_exports
            answer = await client.ask("words=5 pace_ms=0", seed=number, traceparent=new_trace()[1])
            assert answer.done.finish_reasons == {"text": "stop", "audio": "stop"}
            collector.until(lambda _, before=before: collector.num_exports >= before + len(SERVICES))
        assert 1 <= len(complaints()) <= len(SERVICES)
        collector.status = 200
        trace_id, traceparent = new_trace()
        await client.ask("words=5 pace_ms=0", traceparent=traceparent)
        check_tree(collector.until(is_complete, trace_id), CALLER)
    assert "Traceback" not in server.log.read_text()


def test_what_has_ended_is_sent_before_the_server_is_gone(serve_once, collector):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
        server = serve_once("fake", overrides=[f"tracing.otlp_endpoint={collector.url}"])
    trace_id, traceparent = new_trace()
    with TritoneClient(server.grpc_url, "fake") as client:
        client.ask("words=12 pace_ms=1", traceparent=traceparent)
    assert collector.spans(trace_id) == []
    server.process.send_signal(signal.SIGTERM)
    server.process.communicate(timeout=6 * PATIENCE_S)
    assert server.process.returncode == 0
    spans = collector.spans(trace_id)
    check_tree(spans, CALLER)
    assert is_complete(spans) and {span.service for span in spans} == SERVICES
