"""A request as the tensor contract wants it, built and checked before anything is sent."""

from __future__ import annotations

import json
import math
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt
import tritonclient.grpc
from tritonclient.utils import np_to_triton_dtype

from tritone_client.errors import InvalidRequest

EncodedFile: TypeAlias = str | os.PathLike[str] | bytes
"""An encoded file: its path, or its bytes."""
RawAudio: TypeAlias = tuple[npt.ArrayLike, int]
"""Mono samples [n] (floats in [-1, 1], or int16) and their rate in Hz."""
Parameter: TypeAlias = bool | int | str

AUDIO_FORMATS = ("s16", "f32", "s16_base64", "wav", "flac", "opus")
DEADLINE_GRACE_S = 0.5
"""How long the client waits beyond the deadline, so that a server which ends in time can still say so."""


class RequestOptions(TypedDict, total=False):
    """The keyword arguments of every call that asks a pipeline; what is None or left out is not sent."""

    messages: Sequence[Mapping[str, Any]] | None  # a chat instead of a prompt: role, content
    audio: EncodedFile | RawAudio | Sequence[EncodedFile] | None
    image: EncodedFile | Sequence[EncodedFile] | None
    video: EncodedFile | Sequence[EncodedFile] | None
    modalities: str | Iterable[str] | None  # "text", "audio", "text,audio" …; default: all the pipeline makes
    speaker: str | None
    language: str | None
    instructions: str | None
    sampling: Mapping[str, Any] | None  # temperature, top_p, …; for one stage as {"talker": {…}}
    max_tokens: int | None  # shorthand: wins over the same key of `sampling`, like the next two
    temperature: float | None
    seed: int | None
    audio_format: str | None  # one of AUDIO_FORMATS; default s16
    return_timings: bool | None  # fill Done.stage_timings
    deadline_s: float | None
    parameters: Mapping[str, Parameter] | None  # Triton request parameters, e.g. traceparent


@dataclass(frozen=True, slots=True)
class Request:
    """Named input tensors and request parameters, ready to send."""

    inputs: Mapping[str, npt.NDArray[Any]]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    audio_format: str | None = None
    deadline_s: float | None = None
    grace_s: float = DEADLINE_GRACE_S

    @property
    def client_timeout_s(self) -> float | None:
        return None if self.deadline_s is None else self.deadline_s + self.grace_s

    async def as_stream(self, pipeline: str) -> AsyncIterator[dict[str, Any]]:
        """The one message that tritonclient's `stream_infer` sends."""
        # tritonclient has an argument of its own for the priority and refuses it among the parameters.
        parameters = dict(self.parameters)
        priority = parameters.pop("priority", 0)
        yield {
            "model_name": pipeline,
            "inputs": [_infer_input(name, tensor) for name, tensor in self.inputs.items()],
            "parameters": parameters,
            "priority": priority,
        }


def build_request(
    prompt: str | None = None,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    audio: EncodedFile | RawAudio | Sequence[EncodedFile] | None = None,
    image: EncodedFile | Sequence[EncodedFile] | None = None,
    video: EncodedFile | Sequence[EncodedFile] | None = None,
    modalities: str | Iterable[str] | None = None,
    speaker: str | None = None,
    language: str | None = None,
    instructions: str | None = None,
    sampling: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    audio_format: str | None = None,
    return_timings: bool | None = None,
    deadline_s: float | None = None,
    parameters: Mapping[str, Parameter] | None = None,
) -> Request:
    """Check one streamed request and turn it into tensors. The options are those of `RequestOptions`.

    Raises:
        InvalidRequest: nothing or two things are asked, a file cannot be read, samples are not mono, a
            deadline is not positive, or a parameter is not a bool, int or str.
    """
    if prompt is not None and messages is not None:
        raise InvalidRequest("both prompt and messages are given; make the prompt the last of the messages")
    if prompt is None and messages is None and audio is None and image is None and video is None:
        raise InvalidRequest("nothing is asked; give a prompt, messages, or audio")

    inputs: dict[str, npt.NDArray[Any]] = {}
    texts = {
        "text_input": prompt,
        "messages": None if messages is None else _json("messages", [dict(message) for message in messages]),
        "sampling_parameters": _sampling_json(sampling, max_tokens, temperature, seed),
        "modalities": _comma_list(modalities),
        "speaker": speaker,
        "language": language,
        "instructions": instructions,
        "audio_format": _checked_audio_format(audio_format),
    }
    inputs |= {name: _text_tensor(name, text) for name, text in texts.items() if text is not None}
    if isinstance(audio, tuple):
        inputs |= _raw_audio_tensors(*audio)
    elif audio is not None:
        inputs["audio"] = _file_tensor("audio", audio)
    if image is not None:
        inputs["image"] = _file_tensor("image", image)
    if video is not None:
        inputs["video"] = _file_tensor("video", video)
    if return_timings is not None:
        inputs["return_timings"] = np.array([return_timings])
    inputs["stream"] = np.array([True])
    return Request(inputs, _checked_parameters(parameters, deadline_s), audio_format, deadline_s)


def operation_request(operation: str, deadline_s: float) -> Request:
    """A request that asks the pipeline about itself, e.g. `ping`; late is failed, so without grace."""
    inputs = {"op": _string_tensor([operation.encode()])}
    return Request(inputs, _checked_parameters(None, deadline_s), deadline_s=deadline_s, grace_s=0.0)


def _comma_list(words: str | Iterable[str] | None) -> str | None:
    return words if words is None or isinstance(words, str) else ",".join(words)


def _infer_input(name: str, tensor: npt.NDArray[Any]) -> Any:
    infer_input = tritonclient.grpc.InferInput(name, tensor.shape, np_to_triton_dtype(tensor.dtype))
    return infer_input.set_data_from_numpy(tensor)


def _string_tensor(values: Iterable[bytes]) -> npt.NDArray[np.object_]:
    # dtype object: a bytes dtype would cut trailing zeros off a file
    return np.array(list(values), dtype=np.object_)


def _text_tensor(name: str, text: str) -> npt.NDArray[np.object_]:
    try:
        return _string_tensor([text.encode()])
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name} holds surrogates, which UTF-8 lacks; give whole characters") from None


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name} cannot be JSON ({error}); use plain numbers and strings") from None


def _sampling_json(
    sampling: Mapping[str, Any] | None, max_tokens: int | None, temperature: float | None, seed: int | None
) -> str | None:
    shorthands = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    given = {name: value for name, value in shorthands.items() if value is not None}
    merged = {**(sampling or {}), **given}
    return _json("sampling", merged) if merged else None


def _checked_audio_format(audio_format: str | None) -> str | None:
    if audio_format is not None and audio_format not in AUDIO_FORMATS:
        raise InvalidRequest(f"unknown audio_format {audio_format!r}; use one of {', '.join(AUDIO_FORMATS)}")
    return audio_format


def _file_tensor(name: str, files: Any) -> npt.NDArray[np.object_]:
    """STRING [number of files] with the files' bytes as they are; the server decodes them."""
    if isinstance(files, str | bytes | os.PathLike):
        files = [files]
    return _string_tensor(file if isinstance(file, bytes) else _file_bytes(name, file) for file in files)


def _file_bytes(name: str, path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        reason = error.strerror or error
        raise InvalidRequest(f"cannot read the {name} file {os.fspath(path)!r}: {reason}") from None


def _raw_audio_tensors(samples: npt.ArrayLike, rate_hz: int) -> dict[str, npt.NDArray[Any]]:
    """`audio_input` FP32 [n] and `audio_input_rate` INT32 [1]."""
    array = np.asarray(samples)
    if array.ndim != 1 or array.size == 0:
        raise InvalidRequest(f"audio samples have shape {list(array.shape)}; give mono samples of shape [n]")
    if array.dtype == np.int16:
        array = array / np.float32(32768)
    elif not np.issubdtype(array.dtype, np.floating):
        raise InvalidRequest(f"audio samples are {array.dtype}; give floats in [-1, 1] or int16")
    if rate_hz <= 0:
        raise InvalidRequest(f"the audio's rate is {rate_hz} Hz; give a positive rate")
    return {"audio_input": array.astype(np.float32), "audio_input_rate": np.array([rate_hz], dtype=np.int32)}


def _checked_parameters(
    parameters: Mapping[str, Parameter] | None, deadline_s: float | None
) -> dict[str, Parameter]:
    checked = dict(parameters or {})
    for name, value in checked.items():
        if not isinstance(value, bool | int | str):
            kind = type(value).__name__
            raise InvalidRequest(f"parameter {name!r} is a {kind}; use a bool, an int or a str")
        if name.startswith(("triton_", "sequence_")) or name in ("timeout", "headers", "binary_data_output"):
            raise InvalidRequest(f"parameter {name!r} belongs to Triton; for a time limit use deadline_s")
    if deadline_s is not None:
        if not (deadline_s > 0 and math.isfinite(deadline_s)):
            raise InvalidRequest(f"deadline_s is {deadline_s}; give a positive number of seconds")
        checked["deadline_ms"] = math.ceil(deadline_s * 1000)
    return checked
