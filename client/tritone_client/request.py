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

from tritone_client.caller_trace import trace_parameters
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
    system: str | None  # how the assistant should behave; with messages, make it the first of them
    image: EncodedFile | Sequence[EncodedFile] | None
    audio: EncodedFile | RawAudio | Sequence[EncodedFile] | None
    video: EncodedFile | Sequence[EncodedFile] | None
    images: Sequence[EncodedFile] | None  # the same as image with a list, like the next two
    audios: Sequence[EncodedFile] | None
    videos: Sequence[EncodedFile] | None
    use_audio_in_video: bool | None  # hear the sound of the videos along with their pictures
    modalities: str | Iterable[str] | None  # "text", "audio", "text,audio" …; default: all the pipeline makes
    speaker: str | None
    language: str | None
    instructions: str | None
    sampling: Mapping[str, Any] | None  # temperature, top_p, …; for one stage as {"talker": {…}}
    max_tokens: int | None  # shorthand: wins over the same key of `sampling`, like the next two
    temperature: float | None
    seed: int | None
    audio_format: str | None  # one of AUDIO_FORMATS; default s16
    initial_codec_chunk_frames: int | None  # codec frames of the first audio chunk: small is early
    codec_chunk_frames: int | None  # of every later one, as soon as growth allows
    codec_chunk_growth: float | None  # at most so many times the size before; 0: full size at once
    return_timings: bool | None  # fill Done.stage_timings
    deadline_s: float | None
    traceparent: str | None  # the span to record the request's spans below; default: the active one
    parameters: Mapping[str, Parameter] | None  # other Triton request parameters, e.g. queue_priority


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
    system: str | None = None,
    image: EncodedFile | Sequence[EncodedFile] | None = None,
    audio: EncodedFile | RawAudio | Sequence[EncodedFile] | None = None,
    video: EncodedFile | Sequence[EncodedFile] | None = None,
    images: Sequence[EncodedFile] | None = None,
    audios: Sequence[EncodedFile] | None = None,
    videos: Sequence[EncodedFile] | None = None,
    use_audio_in_video: bool | None = None,
    modalities: str | Iterable[str] | None = None,
    speaker: str | None = None,
    language: str | None = None,
    instructions: str | None = None,
    sampling: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    audio_format: str | None = None,
    initial_codec_chunk_frames: int | None = None,
    codec_chunk_frames: int | None = None,
    codec_chunk_growth: float | None = None,
    return_timings: bool | None = None,
    deadline_s: float | None = None,
    traceparent: str | None = None,
    parameters: Mapping[str, Parameter] | None = None,
) -> Request:
    """Check one streamed request and turn it into tensors. The options are those of `RequestOptions`.

    A system text, or more than one file, makes the prompt a conversation of its own: images, audio, videos,
    then the words.

    Raises:
        InvalidRequest: nothing or two things are asked, a file cannot be read, samples are not mono, a
            deadline is not positive, a traceparent is not one, or a parameter is not a bool, int or str.
    """
    media = _media_tensors(
        _either("image", image, images), _either("audio", audio, audios), _either("video", video, videos)
    )
    if prompt is not None and messages is not None:
        raise InvalidRequest("both prompt and messages are given; make the prompt the last of the messages")
    if system is not None and messages is not None:
        raise InvalidRequest("both system and messages are given; make the system text the first message")
    if prompt is None and messages is None and not media:
        raise InvalidRequest("nothing is asked; give a prompt, messages, or media")
    if use_audio_in_video and "video" not in media:
        raise InvalidRequest("use_audio_in_video is true but there is no video; give one or leave it out")
    kinds = _parts(media)
    if messages is None and (system is not None or len(kinds) > 1):
        messages, prompt = _conversation(system, kinds, prompt), None

    inputs: dict[str, npt.NDArray[Any]] = dict(media)
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
    if return_timings is not None:
        inputs["return_timings"] = np.array([return_timings])
    inputs["stream"] = np.array([True])
    named: dict[str, Parameter | None] = {
        "use_audio_in_video": use_audio_in_video,
        "initial_codec_chunk_frames": initial_codec_chunk_frames,
        "codec_chunk_frames": codec_chunk_frames,
        "codec_chunk_growth": None if codec_chunk_growth is None else _number_parameter(codec_chunk_growth),
    }
    given = {name: value for name, value in named.items() if value is not None}
    all_parameters = {**_trace(traceparent, parameters or {}), **(parameters or {}), **given}
    return Request(inputs, _checked_parameters(all_parameters, deadline_s), audio_format, deadline_s)


def operation_request(operation: str, deadline_s: float) -> Request:
    """A request that asks the pipeline about itself, e.g. `ping`; late is failed, so without grace."""
    inputs = {"op": _string_tensor([operation.encode()])}
    return Request(inputs, _checked_parameters(None, deadline_s), deadline_s=deadline_s, grace_s=0.0)


def _trace(traceparent: str | None, parameters: Mapping[str, Parameter]) -> dict[str, str]:
    if "traceparent" not in parameters:
        return trace_parameters(traceparent)
    if traceparent is not None:
        raise InvalidRequest("traceparent is given twice; leave it out of the parameters")
    return {}


def _either(name: str, one: Any, several: Any) -> Any:
    """The files of a kind, by whichever of its two names they come."""
    if one is not None and several is not None:
        raise InvalidRequest(f"both {name} and {name}s are given; give all of them as {name}s")
    if isinstance(several, str | bytes | os.PathLike):
        raise InvalidRequest(f"{name}s is one file; give a list of files, or {name}")
    return one if several is None else list(several) or None


def _media_tensors(image: Any, audio: Any, video: Any) -> dict[str, npt.NDArray[Any]]:
    """The media inputs, in the order in which the model sees them."""
    tensors: dict[str, npt.NDArray[Any]] = {}
    if image is not None:
        tensors["image"] = _file_tensor("image", image)
    if isinstance(audio, tuple):
        tensors |= _raw_audio_tensors(*audio)
    elif audio is not None:
        tensors["audio"] = _file_tensor("audio", audio)
    if video is not None:
        tensors["video"] = _file_tensor("video", video)
    return tensors


def _parts(media: Mapping[str, npt.NDArray[Any]]) -> list[str]:
    """The kind of every attached file, in order; raw samples are one."""
    parts: list[str] = []
    for name, tensor in media.items():
        if name in ("image", "audio", "video"):
            parts += [name] * len(tensor)
        elif name == "audio_input":
            parts.append("audio")
    return parts


def _conversation(system: str | None, kinds: Sequence[str], prompt: str | None) -> list[dict[str, Any]]:
    """One turn of the user, after the system's; media parts stand for the media tensors, in their order."""
    content: str | list[dict[str, str]] = prompt or ""
    if kinds:
        words = [{"type": "text", "text": prompt}] if prompt and prompt.strip() else []
        content = [*({"type": kind} for kind in kinds), *words]
    user = {"role": "user", "content": content}
    return [user] if system is None else [{"role": "system", "content": system}, user]


def _number_parameter(value: float) -> int | str:
    """Triton has no parameter that is a float."""
    return int(value) if float(value).is_integer() else repr(float(value))


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
