"""Whatever goes wrong arrives as one class and one sentence."""

import grpc
import pytest
from fake_triton import Fail
from tritonclient.utils import InferenceServerException

from tritone_client import (
    AsyncTritoneClient,
    Cancelled,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    ServerFault,
    TritoneError,
    Unavailable,
)
from tritone_client.errors import from_triton

Status = grpc.StatusCode


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("status", "message", "kind", "code", "text"),
    [
        (Status.INVALID_ARGUMENT, "TRITONE_INVALID_ARG: bad; fix", InvalidRequest, "INVALID_ARG", "bad; fix"),
        (Status.UNIMPLEMENTED, "TRITONE_UNSUPPORTED: no video", InvalidRequest, "UNSUPPORTED", "no video"),
        (Status.ALREADY_EXISTS, "TRITONE_ALREADY_EXISTS: twice", InvalidRequest, "ALREADY_EXISTS", "twice"),
        (Status.NOT_FOUND, "TRITONE_NOT_FOUND: no such", NotFound, "NOT_FOUND", "no such"),
        (Status.UNAVAILABLE, "TRITONE_UNAVAILABLE: busy; later", Unavailable, "UNAVAILABLE", "busy; later"),
        (Status.CANCELLED, "TRITONE_CANCELLED: stopped", Cancelled, "CANCELLED", "stopped"),
        (Status.UNKNOWN, "TRITONE_DEADLINE_EXCEEDED: late", DeadlineExceeded, "DEADLINE_EXCEEDED", "late"),
        (Status.INTERNAL, "TRITONE_INTERNAL: broken", ServerFault, "INTERNAL", "broken"),
        (Status.UNKNOWN, "TRITONE_UNKNOWN: odd", ServerFault, "UNKNOWN", "odd"),
        # the prefix says more than the status, and may stand behind Triton's own words
        (
            Status.INTERNAL,
            "in model 'x', message: TRITONE_INVALID_ARG: a\n",
            InvalidRequest,
            "INVALID_ARG",
            "a",
        ),
        # without a prefix the status decides
        (Status.INVALID_ARGUMENT, "unexpected input", InvalidRequest, "INVALID_ARG", "unexpected input"),
        (Status.UNIMPLEMENTED, "decoupled", InvalidRequest, "UNSUPPORTED", "decoupled"),
        (Status.NOT_FOUND, "unknown model", NotFound, "NOT_FOUND", "unknown model"),
        (
            Status.UNAVAILABLE,
            "Exceeds maximum queue size",
            Unavailable,
            "UNAVAILABLE",
            "Exceeds maximum queue",
        ),
        (Status.RESOURCE_EXHAUSTED, "too large", Unavailable, "UNAVAILABLE", "too large"),
        (Status.CANCELLED, "stop", Cancelled, "CANCELLED", "stop"),
        (Status.DEADLINE_EXCEEDED, "late", DeadlineExceeded, "DEADLINE_EXCEEDED", "late"),
        (Status.INTERNAL, "Stub process is not healthy.", ServerFault, "INTERNAL", "Stub process"),
    ],
)
async def test_server_errors_map_to_the_tree(triton, status, message, kind, code, text):
    triton.script = [Fail(status, message)]
    async with AsyncTritoneClient(triton.url) as client:
        with pytest.raises(TritoneError) as caught:
            await client.ask("hi")
    assert type(caught.value) is kind
    assert caught.value.code == code
    assert text in str(caught.value) and "TRITONE_" not in str(caught.value)
    assert "triton_grpc_error" not in triton.requests[0].metadata, "a server of 2.51 may crash at it"


def test_an_error_string_of_a_stream_keeps_its_code():
    error = from_triton(InferenceServerException("TRITONE_NOT_FOUND: no such voice"), "host:1", "smoltalk")
    assert type(error) is NotFound and str(error) == "no such voice"


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("Request for unknown model: 'x' is not found", NotFound),
        ("Request for unknown model: 'x' has no available versions", Unavailable),
        ("unexpected inference input 'language' for model 'x'", InvalidRequest),
        ("[request id: 1] expected 3 inputs but got 2 inputs for model 'x'", InvalidRequest),
        ("Exceeds maximum queue size", Unavailable),
        ("Server is stopping, scheduler for model has stopped accepting new requests", Unavailable),
        ("something else", ServerFault),
    ],
)
def test_bare_strings_of_triton_are_known_by_their_words(message, kind):
    error = from_triton(InferenceServerException(message), "host:1", "x")
    assert type(error) is kind and message in str(error)
    assert ("check the pipeline's name" in str(error)) == (kind is NotFound)


def test_an_unknown_code_is_the_servers_fault():
    error = from_triton(InferenceServerException("TRITONE_MELTED: hot"), "host:1", "smoltalk")
    assert type(error) is ServerFault and error.code == "MELTED"


@pytest.mark.asyncio
async def test_nobody_at_the_url():
    async with AsyncTritoneClient("127.0.0.1:1", "qwen3_omni") as client:
        for call in (client.ask("hi"), client.ping(), client.limits()):
            with pytest.raises(ConnectionFailed) as error:
                await call
            assert "127.0.0.1:1" in str(error.value)
            assert "refused" in str(error.value)
            assert "tritone serve qwen3_omni" in str(error.value)


@pytest.mark.asyncio
async def test_server_dies_in_the_middle_of_an_answer(triton):
    from fake_triton import Hang, Text

    triton.script = [Text("Hel"), Hang()]
    async with AsyncTritoneClient(triton.url) as client:
        with pytest.raises(ConnectionFailed) as error:
            async for _ in client.stream("hi"):
                triton.stop()
    assert "was lost" in str(error.value)


def test_a_url_with_a_scheme_is_refused():
    with pytest.raises(InvalidRequest, match="without a scheme"):
        AsyncTritoneClient("http://127.0.0.1:8000")
