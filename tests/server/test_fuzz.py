"""Strangers at a real server: whatever they send is refused in declared words, and harms nobody else.

Requests are built as protobuf messages and as raw bodies, since a client library would refuse most of them.
"""

import asyncio
import json
import re
import socket
import stat
import threading
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2, service_pb2_grpc

from echo import expected_pcm
from tritone_client import AudioChunk
from waiting import PATIENCE_S

pytestmark = pytest.mark.server

DECLARED = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNAVAILABLE", "UNIMPLEMENTED"}
DECLARED_HTTP = {200, 400, 404, 501, 503}
NOT_READ = re.compile('^{"error":"[^"]*(?:[Uu]nable to parse|failed to parse|attempt to|Expected JSON)')
MAX_DEPTH = 500  # of JSON; tens of thousands crash the HTTP part of Triton itself, see SECURITY.md
SECRET = "xyzzy-secret-words"
STRANGERS = 200  # more than there are places beside those of the streams, were they kept
LEAVERS = 60
few = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def server(serve, echo_folder):
    return serve(echo_folder, overrides=["max_in_flight=16", "stage.writer.engine.step_s=0.002"])


@pytest.fixture(scope="module")
def stub(server):
    with grpc.insecure_channel(server.grpc_url) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def text(data):
    """One element of a BYTES tensor, as it travels."""
    return len(data).to_bytes(4, "little") + data


def message(model, tensors, parameters=None, outputs=()):
    """tensors: (name, dtype, shape, raw bytes) of each."""
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, dtype, shape, raw in tensors:
        request.inputs.add(name=name, datatype=dtype, shape=shape)
        request.raw_input_contents.append(raw)
    for name, value in (parameters or {}).items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    for name in outputs:
        request.outputs.add(name=name)
    return request


def outcome(stub, request):
    """The status of a unary call, and what it says."""
    try:
        stub.ModelInfer(request, timeout=6 * PATIENCE_S)
    except grpc.RpcError as error:
        return error.code().name, error.details()
    return "OK", ""


async def say(server, words="still exact, every sample"):
    """Ask for speech; whether it is what it must be."""
    samples = []
    async with server.client("echo") as client:
        async for event in client.stream(words, audio_format="f32", parameters={"codec_chunk_frames": 4}):
            if isinstance(event, AudioChunk):
                samples.append(event.samples)
    return np.array_equal(np.concatenate(samples), expected_pcm(f"{words} "))


# -- gRPC --------------------------------------------------------------------------------------------------

NAMES = ["text_input", "messages", "sampling_parameters", "modalities", "stream", "op", "session", "control"]
DTYPES = ["BYTES", "BOOL", "UINT8", "INT32", "INT64", "FP32", "FP16", "UINT64", "nothing", ""]
raws = (
    st.binary(max_size=30)
    | st.text(max_size=20).map(lambda words: text(words.encode()))
    | st.sampled_from(
        [
            b"\xff\xff\xff\xff",
            b"\x00\x00\x00\x80",
            text(b"\xff\xfe"),
            text(b"[" * 9000),
            text(b'{"seed": 1e999}'),
        ]
    )
)
tensors = st.lists(
    st.tuples(
        st.sampled_from(NAMES) | st.text(max_size=5),
        st.sampled_from(DTYPES),
        st.just([1]) | st.lists(st.integers(-2, 3) | st.just(2**62), max_size=3),
        raws,
    ),
    max_size=4,
)
values = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=9)
parameters = st.dictionaries(
    st.sampled_from(
        ["seed", "deadline_ms", "priority", "codec_chunk_frames", "temperature", "sequence_start"]
    )
    | st.text(max_size=6),
    values,
    max_size=3,
)


@few
@given(st.sampled_from(["echo", "echo_sync", "echo_writer", "echo_wave", "ech"]), tensors, parameters)
def test_any_grpc_request_ends_in_a_declared_status(stub, model, tensors, parameters):
    status, words = outcome(stub, message(model, tensors, parameters))
    assert status in DECLARED, (status, words)


@few
@given(raws, parameters)
def test_any_prompt_and_parameters_end_in_a_declared_status(stub, raw, parameters):
    bounded = {"deadline_ms": 20_000, **parameters}
    status, words = outcome(stub, message("echo_sync", [("text_input", "BYTES", [1], raw)], bounded))
    assert status in DECLARED, (status, words)


# -- HTTP --------------------------------------------------------------------------------------------------

json_trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=9,
)
infer_bodies = st.fixed_dictionaries(
    {
        "inputs": st.lists(
            st.fixed_dictionaries(
                {
                    "name": st.sampled_from(NAMES) | json_trees,
                    "datatype": st.sampled_from(DTYPES) | json_trees,
                    "shape": st.just([1]) | json_trees,
                    "data": st.just(["hi"]) | json_trees,
                }
            ),
            max_size=2,
        )
    },
    optional={"parameters": json_trees, "id": json_trees, "outputs": json_trees},
)
deep = st.tuples(st.sampled_from([("[", "]"), ('{"a":', "}")]), st.integers(1, MAX_DEPTH), st.booleans()).map(
    lambda made: made[0][0] * made[1] + ("1" + made[0][1] * made[1] if made[2] else "")
)
bodies = (
    st.binary(max_size=60)
    | (json_trees | infer_bodies).map(lambda tree: json.dumps(tree).encode())
    | deep.map(str.encode)
    | deep.map(lambda tree: b'{"text_input":' + tree.encode() + b"}")
)


def post(server, path, body, headers=()):
    """The status of a raw POST and the end of the answer."""
    address = urlsplit(server.http_url)
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    with socket.create_connection((address.hostname, address.port), timeout=6 * PATIENCE_S) as connection:
        connection.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode() + body)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    assert answer, "the server hung up"
    return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2].decode(errors="replace")


def is_declared(answer):
    """Triton's own HTTP part says 500 to JSON that it cannot read, before Tritone gets to see it."""
    status, words = answer
    return status in DECLARED_HTTP or (status == 500 and NOT_READ.search(words) is not None)


PATHS = [
    "echo/generate",
    "echo/generate_stream",
    "echo_sync/infer",
    "echo_writer/infer",
    "echo_wave/infer",
    "x/infer",
]


@few
@given(st.sampled_from(PATHS), bodies)
def test_any_http_body_ends_in_a_declared_status(server, path, body):
    answer = post(server, f"/v2/models/{path}", body)
    assert is_declared(answer), answer


@few
@given(bodies, st.integers(-1, 2**31))
def test_any_binary_header_ends_in_a_declared_status(server, body, length):
    headers = [f"Inference-Header-Content-Length: {length}"]
    answer = post(server, "/v2/models/echo_sync/infer", body, headers)
    assert is_declared(answer), answer


# -- stage models ------------------------------------------------------------------------------------------

controls = st.binary(max_size=40) | (
    st.fixed_dictionaries(
        {"call": st.fixed_dictionaries({"op": st.sampled_from(["open", "chunk", "drop", "keep", "ping"])})},
        optional={"key": st.text(max_size=70)},
    )
    | json_trees
).map(lambda tree: json.dumps(tree).encode())


@few
@given(st.sampled_from(["echo_writer", "echo_singer", "echo_wave"]), controls)
def test_a_stage_model_refuses_every_stranger(stub, model, control):
    batch = [1] if model == "echo_wave" else []
    sequence = {"sequence_id": 9, "sequence_start": True, "sequence_end": True} if batch else {}
    tensors = [("control", "UINT8", [*batch, len(control)], control)]
    status, words = outcome(stub, message(model, tensors, sequence))
    assert status == "INVALID_ARGUMENT", words
    if control:
        assert "call the pipeline model instead" in words


def begin(number, control=b"x", **more):
    """A sequence on the stage that Triton batches, begun and not ended."""
    tensors = [("control", "UINT8", [1, len(control)], control)]
    return message("echo_wave", tensors, {"sequence_id": number, "sequence_start": True, **more})


async def test_sequences_of_strangers_hold_no_place(server, stub):
    refused = Counter(outcome(stub, begin(10_000 + n))[0] for n in range(STRANGERS))
    refused[outcome(stub, begin("a name"))[0]] += 1
    assert refused == {"INVALID_ARGUMENT": STRANGERS + 1}
    for number in (10_000, 10_000 + STRANGERS - 1, "a name"):
        await gone(stub, number)
    assert all(await asyncio.gather(*(say(server) for _ in range(16))))


async def gone(stub, number, within_s=3 * PATIENCE_S):
    """Wait until Triton keeps no sequence of this number."""
    deadline = time.monotonic() + within_s
    going_on = begin(number, sequence_start=False)
    while "must specify the START flag" not in outcome(stub, going_on)[1]:
        assert time.monotonic() < deadline, f"sequence {number} is kept"
        await asyncio.sleep(0.05)


async def test_strangers_that_leave_at_once_leave_room_for_speech(server, stub):
    """Their places are kept for Triton's idle time, since a cancelled request reaches no door."""
    for number in range(LEAVERS):
        stub.ModelInfer.future(begin(30_000 + number)).cancel()
    assert all(await asyncio.gather(*(say(server) for _ in range(16))))
    for number in range(LEAVERS):
        await gone(stub, 30_000 + number)


async def test_malformed_tensors_of_strangers_fail_no_chunk_of_a_stream(server, stub):
    """Triton fails a batch as a whole if it cannot read one of its tensors, so it must never get there."""
    poisons = [("BYTES", [1, 1], b"\xff\xff\xff\xff"), ("UINT8", [1, 9], b"x"), ("UINT8", [1, 2**31], b"x")]
    ending = threading.Event()
    outcomes = Counter()

    def flood(number):
        while not ending.is_set():
            number += 10
            poison = [("control", *poisons[number % 3])]
            sequence = {"sequence_id": number, "sequence_start": True, "sequence_end": True}
            outcomes[outcome(stub, message("echo_wave", poison, sequence))[0]] += 1

    floods = [threading.Thread(target=flood, args=(50_000 + n,)) for n in range(4)]
    for thread in floods:
        thread.start()
    try:
        for _ in range(3):
            assert all(await asyncio.gather(*(say(server) for _ in range(8))))
    finally:
        ending.set()
        for thread in floods:
            thread.join()
    assert set(outcomes) == {"INVALID_ARGUMENT"} and sum(outcomes.values()) >= 4


# -- afterwards --------------------------------------------------------------------------------------------


async def test_what_was_asked_is_in_no_log(server, stub):
    secret = SECRET.encode()
    for name in ("text_input", "messages", "sampling_parameters", "modalities", "op", "session"):
        raw = text(
            json.dumps([{"role": "user", "content": SECRET}]).encode() if name == "messages" else secret
        )
        outcome(stub, message("echo_sync", [(name, "BYTES", [1], raw)], {"speaker": SECRET}))
        outcome(stub, message("echo_sync", [(name, "BYTES", [1], raw)]))
    outcome(
        stub, message("echo_wave", [("control", "UINT8", [1, len(secret)], secret)], {"sequence_id": SECRET})
    )
    post(server, "/v2/models/echo_sync/infer", b'{"inputs": "' + secret + b'"}')
    assert await say(server, f"say {SECRET} to me")
    assert SECRET not in server.log.read_text(errors="replace")


def test_no_other_user_can_read_the_memory_of_the_server(server):
    regions = [path for path in Path("/dev/shm").iterdir() if f"tritone_{server.process.pid}_" in path.name]
    assert len(regions) >= 5, "one for each stub"
    assert {stat.S_IMODE(region.stat().st_mode) for region in regions} == {0o600}


async def test_the_server_is_as_it_was(server):
    """Last: everything above happened to this server, and it was started once."""
    assert server.process.poll() is None
    assert all(await asyncio.gather(*(say(server) for _ in range(16))))
    async with server.client("echo") as client, asyncio.timeout(PATIENCE_S):
        while any(
            engine["active"]
            for stage in (await client.ping(PATIENCE_S)).values()
            for engine in stage["engines"]
        ):
            await asyncio.sleep(0.05)
    log = server.log.read_text(errors="replace")
    assert log.count("Started GRPCInferenceService") == 1 and "Signal (" not in log
