"""The trace that a request belongs to: named, taken from the active span, or none."""

import subprocess
import sys
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

import tritone_client
from tritone_client import AsyncTritoneClient, InvalidRequest, TritoneClient
from tritone_client.cli import main
from tritone_client.request import build_request

TRACEPARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"


@pytest.fixture
def click():
    """A span of the caller, active."""
    with trace.use_span(TracerProvider().get_tracer("test").start_span("click")) as span:
        yield span


def below(span):
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def test_a_traceparent_is_sent_as_it_is():
    assert build_request("hi", traceparent=TRACEPARENT).parameters == {"traceparent": TRACEPARENT}


@pytest.mark.parametrize(
    "traceparent",
    [
        *("", "hello", TRACEPARENT.upper(), TRACEPARENT[:-3], TRACEPARENT + "-x"),
        f"00-{'0' * 32}-{'cd' * 8}-01",
        f"00-{'ab' * 16}-{'0' * 16}-01",
        f"ff-{'ab' * 16}-{'cd' * 8}-01",
    ],
)
def test_one_that_is_none_is_refused_before_it_is_sent(traceparent):
    with pytest.raises(InvalidRequest, match=r"traceparent is .*give 00-"):
        build_request("hi", traceparent=traceparent)


def test_one_way_to_name_it_is_enough():
    with pytest.raises(InvalidRequest, match="twice"):
        build_request("hi", traceparent=TRACEPARENT, parameters={"traceparent": TRACEPARENT})


def test_without_an_active_span_nothing_is_sent():
    assert build_request("hi").parameters == {}


def test_the_active_span_is_the_parent(click):
    assert build_request("hi").parameters == {"traceparent": below(click)}


def test_what_is_named_wins_over_the_active_span(click):
    named = {"traceparent": TRACEPARENT}
    assert build_request("hi", **named).parameters == named
    assert build_request("hi", parameters=named).parameters == named


def test_a_caller_that_records_nothing_says_so():
    span = TracerProvider(sampler=ALWAYS_OFF).get_tracer("test").start_span("click")
    with trace.use_span(span):
        flags = int(build_request("hi").parameters["traceparent"][-2:], 16)
    assert not flags & TraceFlags.SAMPLED


def test_the_state_of_the_callers_trace_goes_along():
    context = SpanContext(1, 2, False, TraceFlags(1), TraceState([("vendor", "x")]))
    with trace.use_span(NonRecordingSpan(context)):
        parameters = build_request("hi").parameters
    assert parameters == {"traceparent": f"00-{1:032x}-{2:016x}-01", "tracestate": "vendor=x"}


async def test_each_way_to_ask_carries_it(triton, click):
    async with AsyncTritoneClient(triton.url) as client:
        await client.ask("hi")
        async for _ in client.stream("hi"):
            pass
        async for _ in client.say("hi"):
            pass
    assert [request.parameters["traceparent"] for request in triton.requests] == [below(click)] * 3


def test_the_sync_client_takes_that_of_the_calling_thread(triton, click):
    with TritoneClient(triton.url) as client:
        client.ask("hi")
        list(client.stream("hi"))
    assert [request.parameters["traceparent"] for request in triton.requests] == [below(click)] * 2


@pytest.mark.parametrize("words", [["chat", "hi"], ["say", "hi", "--out", "reply.wav"]])
def test_the_command_line_names_one(triton, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--url", triton.url, "--traceparent", TRACEPARENT]) == 0
    assert triton.requests[0].parameters["traceparent"] == TRACEPARENT
    assert main([*words, "--url", triton.url, "--traceparent", "x"]) == 1
    assert "traceparent is 'x'" in capsys.readouterr().err


def test_opentelemetry_is_not_needed():
    code = (
        "import sys; from tritone_client.request import build_request;"
        "print(build_request('hi').parameters, [name for name in sys.modules if 'opentelemetry' in name])"
    )
    folder = Path(tritone_client.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert done.stdout.strip() == "{} []", done.stdout + done.stderr
