"""What perf_analyzer wrote with `--profile-export-file`, read as the answers of a pipeline.

    timestamp, response_timestamps, response_outputs ─► Answer: what came when, or why it failed

Over gRPC an export gives every response all outputs of the model, and a number that means nothing to those
that it does not carry: `event` says which are to be believed. Over HTTP an entry is what one read of the
socket gave, so an event of `generate_stream` may be spread over several, or share one.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tritone_client.errors import InvalidRequest

PCM16_BYTES = 2
NS = 1e-9


@dataclass(frozen=True)
class Text:
    """A response that brought text."""

    at_s: float  # since the request was sent, like every time here


@dataclass(frozen=True)
class Audio:
    """A response that brought sound."""

    at_s: float
    duration_s: float | None  # None where the samples are encoded


@dataclass(frozen=True)
class Answer:
    """One request, as perf_analyzer saw it."""

    sent_s: float  # by the clock of its machine
    arrivals: Sequence[Text | Audio]  # in order; none where the answer came in one piece
    end_s: float  # the last event
    audio_s: float  # length of the speech; 0 if there was none
    num_tokens: int | None  # of the text, as the server counts them
    error: str  # why it is not complete; "": it is


@dataclass(frozen=True)
class Level:
    """What was asked under one load."""

    mode: str  # concurrency or request_rate
    value: float  # requests at a time, or in a second
    answers: Sequence[Answer]


class _Outputs(msgspec.Struct):
    """One response: the outputs that are read, or (over HTTP) the bytes of one read."""

    event: str = ""
    text_output: str | list[str] = ""
    audio_output: msgspec.Raw = msgspec.Raw()
    audio_f32: msgspec.Raw = msgspec.Raw()
    audio_encoded: str | list[str] = ""
    sample_rate: float = 0.0
    info: str = ""
    error: str = ""
    response: str | None = None


class _Request(msgspec.Struct):
    timestamp: int  # ns
    response_timestamps: list[int]
    response_outputs: list[_Outputs]
    request_inputs: dict[str, Any] = {}


class _Load(msgspec.Struct):
    mode: str
    value: float


class _Experiment(msgspec.Struct):
    experiment: _Load
    requests: list[_Request]


class _Export(msgspec.Struct):
    experiments: list[_Experiment]


def read(path: Path) -> list[Level]:
    """The levels of load of an export, in its order. Raises InvalidRequest where it is none, OSError."""
    try:
        export = msgspec.json.decode(path.read_bytes(), type=_Export)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(
            f"{path} is not a complete export of perf_analyzer ({error}); it breaks off when a number in it "
            "is not finite: run it again, as README.md of these recipes says"
        ) from None
    return [
        Level(
            experiment.experiment.mode,
            experiment.experiment.value,
            [_answer(request) for request in experiment.requests],
        )
        for experiment in export.experiments
    ]


def _answer(request: _Request) -> Answer:
    arrivals: list[Text | Audio] = []
    done: _Outputs | None = None
    error, end_s = "", 0.0
    audio_format = _audio_format(request.request_inputs)
    for at_s, outputs in _events(request):
        if outputs.error:
            error, end_s = outputs.error, at_s
        elif outputs.event == "done":
            done, end_s = outputs, at_s
        elif outputs.event == "audio":
            arrivals.append(Audio(at_s, _duration_s(outputs, audio_format)))
        elif "".join(outputs.text_output):
            arrivals.append(Text(at_s))
    usage = _usage(done.info) if done is not None else {}
    if done is None and not error:
        error = "the answer ended without its last event"
    heard_s = sum(arrival.duration_s or 0.0 for arrival in arrivals if isinstance(arrival, Audio))
    return Answer(
        sent_s=request.timestamp * NS,
        arrivals=arrivals,
        end_s=end_s,
        audio_s=usage.get("audio_s", heard_s),
        num_tokens=usage.get("completion_tokens"),
        error=error,
    )


def _events(request: _Request) -> Iterator[tuple[float, _Outputs]]:
    """Each response with the time when it was complete."""
    pending = ""
    for stamp, outputs in zip(request.response_timestamps, request.response_outputs, strict=False):
        at_s = (stamp - request.timestamp) * NS
        if outputs.response is None:
            yield at_s, outputs
            continue
        *complete, pending = (pending + outputs.response).split("\n\n")
        for event in complete:
            yield at_s, _sent_event(event)


def _sent_event(event: str) -> _Outputs:
    """A server-sent event, `data: {…}`; a failure has the one key `error`."""
    try:
        return msgspec.json.decode(event.removeprefix("data:").encode(), type=_Outputs)
    except msgspec.MsgspecError:
        return _Outputs(error=f"the server sent {event[:80]!r}")


def _audio_format(inputs: dict[str, Any]) -> str:
    """What was asked for; a request over generate_stream has one input, `payload`."""
    payload = inputs.get("payload")
    if isinstance(payload, str):
        inputs = json.loads(payload)
    return str(inputs.get("audio_format", "s16"))


def _duration_s(outputs: _Outputs, audio_format: str) -> float | None:
    match audio_format:
        case "s16":
            num_samples = _length(outputs.audio_output)
        case "f32":
            num_samples = _length(outputs.audio_f32)
        case "s16_base64":
            num_samples = len(base64.b64decode("".join(outputs.audio_encoded))) // PCM16_BYTES
        case _:
            return None
    return num_samples / outputs.sample_rate if outputs.sample_rate > 0 else None


def _length(array: msgspec.Raw) -> int:
    """Of a JSON array of numbers, or of one number; counted and not parsed, since there are many."""
    text = bytes(array).strip()
    return text.count(b",") + 1 if text not in (b"", b"[]") else 0


def _usage(info: str) -> dict[str, Any]:
    return dict(json.loads(info or "{}").get("usage", {}))
