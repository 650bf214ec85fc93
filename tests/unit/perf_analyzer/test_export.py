"""Exports of perf_analyzer are read as the answers that they record, and measured as a client measures."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from perf_analyzer.export import Answer, Audio, Text, read
from perf_analyzer.figures import figures, table
from tritone_client.errors import InvalidRequest

SENT_NS = 1_796_014_581_000_000_000
NOTHING = {  # of outputs that a response does not carry
    "text_output": "",
    "audio_output": 13422,
    "audio_f32": 4.8e35,
    "audio_encoded": "",
    "sample_rate": -88604561,
    "sample_offset": 140378770436670,
    "num_output_tokens": 2059302807,
    "info": "",
    "finish_reason": "",
}
USAGE = {"usage": {"completion_tokens": 3, "audio_s": 0.3}}


def response(event: str, **outputs: Any) -> dict[str, Any]:
    return {**NOTHING, "event": event, **outputs}


def pcm(num_samples: int) -> dict[str, Any]:
    return response("audio", audio_output=[-7] * num_samples, sample_rate=1000)


def request(*responses: tuple[float, Any], sent_ms: float = 0.0, **inputs: Any) -> dict[str, Any]:
    """responses: when each came, in ms after the request."""
    begin_ns = SENT_NS + round(sent_ms * 1e6)
    return {
        "timestamp": begin_ns,
        "request_inputs": inputs,
        "response_timestamps": [begin_ns + round(at_ms * 1e6) for at_ms, _ in responses],
        "response_outputs": [outputs for _, outputs in responses],
    }


def write(folder: Path, *requests: dict[str, Any], mode: str = "concurrency", value: float = 2) -> Path:
    path = folder / "export.json"
    load = {"mode": mode, "value": value}
    experiment = {"experiment": load, "requests": list(requests), "window_boundaries": [1, 2]}
    path.write_text(json.dumps({"experiments": [experiment], "version": "", "service_kind": "triton"}))
    return path


def only(path: Path) -> Answer:
    [level] = read(path)
    [answer] = level.answers
    return answer


def sse(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


STREAM = (
    (10, response("text", text_output="one ")),
    (16, response("text", text_output="two ")),
    (21, pcm(100)),
    (22, response("text", text_output="three")),
    (41, pcm(200)),
    (60, response("done", info=json.dumps(USAGE))),
)


def test_a_stream_over_grpc(tmp_path: Path) -> None:
    answer = only(write(tmp_path, request(*STREAM)))
    assert [(type(a), round(a.at_s, 6)) for a in answer.arrivals] == [
        (Text, 0.01),
        (Text, 0.016),
        (Audio, 0.021),
        (Text, 0.022),
        (Audio, 0.041),
    ]
    assert [a.duration_s for a in answer.arrivals if isinstance(a, Audio)] == [0.1, 0.2]
    assert answer.end_s == pytest.approx(0.06) and answer.sent_s == pytest.approx(SENT_NS / 1e9)
    assert (answer.audio_s, answer.num_tokens, answer.error) == (0.3, 3, "")


def test_its_figures(tmp_path: Path) -> None:
    later = request((12, response("done", info="{}")), sent_ms=138)
    [level] = read(write(tmp_path, request(*STREAM), later))
    measured = figures(level)
    assert measured.load == "concurrency 2" and measured.num_requests == 2 and measured.errors == {}
    spread = {name: values and round(values[0], 6) for name, values in measured.spread.items()}
    assert spread == {"TTFT": 0.01, "TPOT": 0.006, "TTFP": 0.021, "gap": 0.02, "E2EL": 0.012, "RTF": 0.2}
    e2el = measured.spread["E2EL"]
    assert e2el is not None and e2el[1:] == (pytest.approx(0.06),) * 2
    # 2 requests and 0.3 s of sound, from the first request to the last event, 150 ms later
    assert measured.requests_per_s == pytest.approx(2 / 0.15) and measured.audio_s_per_s == pytest.approx(2)


def test_an_empty_final_response_is_no_part_of_the_answer(tmp_path: Path) -> None:
    assert only(write(tmp_path, request(*STREAM, (900, response(""))))).end_s == pytest.approx(0.06)


def test_an_answer_in_one_piece_has_no_measures_of_a_stream(tmp_path: Path) -> None:
    whole = response("done", text_output="one two", audio_output=[1, 2], info=json.dumps(USAGE))
    path = write(tmp_path, request((80, whole)))
    spread = figures(read(path)[0]).spread
    assert only(path).arrivals == []
    assert {name for name, values in spread.items() if values} == {"E2EL", "RTF"}
    assert spread["RTF"] is not None and spread["RTF"][0] == pytest.approx(0.08 / 0.3)


def test_a_stream_over_http_is_cut_anywhere(tmp_path: Path) -> None:
    sound = base64.b64encode(bytes(2 * 250)).decode()
    text = "".join(
        [
            sse(event="text", text_output="one "),
            sse(event="text", text_output="two"),
            sse(event="audio", audio_encoded=sound, sample_rate=1000, sample_offset=0, text_output=""),
            sse(event="done", info=json.dumps(USAGE), text_output=""),
        ]
    )
    borders = [0, text.index("two"), text.index(sound) + 100, len(text) - 1, len(text)]
    parts = [text[begin:end] for begin, end in pairwise(borders)]
    timed = [(10.0 * number, {"response": part}) for number, part in enumerate([*parts, ""], start=1)]
    payload = json.dumps({"text_input": "…", "stream": True, "audio_format": "s16_base64"})
    answer = only(write(tmp_path, request(*timed, payload=payload)))
    assert [(type(a), round(a.at_s, 6)) for a in answer.arrivals] == [
        (Text, 0.01),
        (Text, 0.02),
        (Audio, 0.03),
    ]
    sounds = [arrival for arrival in answer.arrivals if isinstance(arrival, Audio)]
    assert sounds[0].duration_s == 0.25 and answer.end_s == pytest.approx(0.04) and answer.error == ""


def test_an_error_in_a_stream_over_http_is_one(tmp_path: Path) -> None:
    parts = [sse(event="text", text_output="one "), sse(error="TRITONE_INTERNAL: it broke; try again"), ""]
    failed = request(*((10.0 * n, {"response": part}) for n, part in enumerate(parts, start=1)))
    [level] = read(write(tmp_path, failed, request(*STREAM), mode="request_rate", value=2.5))
    measured = figures(level)
    assert measured.load == "2.5 requests/s" and measured.num_requests == 2
    assert measured.errors == {"TRITONE_INTERNAL: it broke; try again": 1}
    assert measured.spread["TTFT"] == (pytest.approx(0.01),) * 3, "of the one that is complete"


@pytest.mark.parametrize(
    ("responses", "error"),
    [
        (STREAM[:-1], "the answer ended without its last event"),
        ((), "the answer ended without its last event"),
        (((5, {"response": "<html>\n\n"}),), "the server sent '<html>'"),
    ],
)
def test_an_answer_that_is_not_complete(tmp_path: Path, responses: Any, error: str) -> None:
    assert only(write(tmp_path, request(*responses))).error == error


@pytest.mark.parametrize(
    ("audio_format", "outputs", "duration_s"),
    [
        ("s16", {"audio_output": 5}, 0.001),  # one sample
        ("s16", {"audio_output": []}, 0.0),
        ("f32", {"audio_f32": [0.5] * 50}, 0.05),
        ("s16_base64", {"audio_encoded": base64.b64encode(bytes(20)).decode()}, 0.01),
        ("opus", {"audio_encoded": "x"}, None),
    ],
)
def test_the_length_of_a_packet(
    tmp_path: Path, audio_format: str, outputs: dict[str, Any], duration_s: float | None
) -> None:
    packet = response("audio", sample_rate=1000, **outputs)
    asked = request((1, packet), (2, response("done")), audio_format=audio_format)
    [arrival] = only(write(tmp_path, asked)).arrivals
    assert arrival == Audio(pytest.approx(0.001), duration_s)


@pytest.mark.parametrize("content", ["", '{"experiments":[{"experiment"', "[]", '{"experiments": 3}'])
def test_a_file_that_breaks_off(tmp_path: Path, content: str) -> None:
    path = tmp_path / "export.json"
    path.write_text(content)
    with pytest.raises(InvalidRequest, match=r"export\.json is not a complete export of perf_analyzer"):
        read(path)


def test_the_table(tmp_path: Path) -> None:
    [level] = read(write(tmp_path, request(*STREAM)))
    lines = table("gRPC stream", [figures(level)] * 2).splitlines()
    assert lines[0].split() == ["gRPC", "stream", "concurrency", "2", "concurrency", "2"]
    assert lines[1].split() == ["requests", "/", "failed", *["1", "/", "0"] * 2]
    assert lines[4].startswith("TTFP, ms: p50 / p90 / p99 ") and lines[4].count("21.0 / 21.0 / 21.0") == 2
    assert len({len(line) for line in lines}) == 1
