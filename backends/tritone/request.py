"""One client request, read and checked: everything after this works with plain, valid values."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tritone.contract import AUDIO_DATA_OUTPUTS, AUDIO_FORMATS, PARAMETERS
from tritone.conversation import role_and_parts
from tritone.deploy import MAX_CHUNK_GROWTH, Chunks, Deploy, Limits, Urls, is_chunk_growth
from tritone.errors import InvalidRequest, Unsupported, suggestion
from tritone.fetch import check_urls
from tritone.pipeline import Pipeline
from tritone.ports import Array
from tritone.sampling import Sampling

MEDIA = ("image", "audio", "video")
MAX_NAME_CHARACTERS = 256
MAX_PRIORITY = 100
MAX_DRAWN_SEED = (1 << 53) - 1  # every JSON reader repeats it exactly


@dataclass(frozen=True)
class Request:
    """What a client asked for, with every default filled in."""

    messages: tuple[Mapping[str, Any], ...]  # role and content; content is a list of {"type": ...} parts
    media: Mapping[str, list[bytes]]  # "image" / "audio" / "video": encoded files in order
    audio_input: Array | None  # float32 [n], raw mono samples; then messages refer to it as one audio part
    audio_input_rate_hz: int | None
    limits: Limits
    modalities: tuple[str, ...]
    sampling: Mapping[str, Sampling]  # by stage that samples; seed set
    seed: int
    deadline_s: float
    chunks: Chunks
    speaker: str | None = None
    language: str | None = None
    instructions: str | None = None
    priority: int = 0  # lower is sooner, among requests that wait for their turn
    use_audio_in_video: bool = False  # the sound of a video is heard along with its pictures
    audio_format: str = "s16"
    stream: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    return_timings: bool = False

    @property
    def messages_json(self) -> str:
        return json.dumps(self.messages, ensure_ascii=False)

    def parts(self, kind: str) -> int:
        """How many content parts of a kind the conversation has."""
        return sum(part["type"] == kind for message in self.messages for part in message["content"])

    @property
    def ends_with_assistant(self) -> bool:
        """The conversation ends with the assistant's words, which are then spoken as they are."""
        return bool(self.messages[-1]["role"] == "assistant")

    def text_of_last(self) -> str:
        return "".join(part.get("text", "") for part in self.messages[-1]["content"])


def read_request(
    values: Mapping[str, Any],
    parameters: Mapping[str, Any],
    deploy: Deploy,
    drawn_seed: int,
    wanted_outputs: Collection[str] | None = None,
    may_stream: bool = True,
) -> Request:
    """The request behind unpacked input `values` (by port name) and Triton request `parameters`.

    drawn_seed: used when the caller gives none. wanted_outputs: names of the outputs that the caller asked
    Triton for, None for all; a modality without any of its outputs is not made. may_stream: false for the
    model that gives one response.
    Raises InvalidRequest or Unsupported naming the field, the value and what to do.
    """
    pipeline = deploy.pipeline
    _check_parameters(parameters)
    for name in ("modalities", "speaker", "language", "audio_format"):
        if len(values.get(name) or "") > MAX_NAME_CHARACTERS:
            raise InvalidRequest(
                f"{name} has {len(values[name])} characters", f"send at most {MAX_NAME_CHARACTERS}"
            )
    if values.get("session"):
        raise InvalidRequest("session is reserved for live audio input", "leave it out")
    if values.get("stream") and not may_stream:
        raise InvalidRequest(
            f"stream is true, but {pipeline.name}_sync gives one response", f"call {pipeline.name}"
        )
    media = {kind: values[kind] for kind in MEDIA if values.get(kind)}
    samples, rate = values.get("audio_input"), values.get("audio_input_rate")
    if (samples is None) != (rate is None):
        missing = "audio_input_rate" if rate is None else "audio_input"
        raise InvalidRequest(f"{missing} is missing", "send audio_input and audio_input_rate together")
    if samples is not None and "audio" in media:
        raise InvalidRequest("audio and audio_input are both given", "send one of them")
    messages = _messages(values, media, samples is not None, deploy.limits, deploy.urls)
    sampling, seed = _sampling(values.get("sampling_parameters"), parameters.get("seed"), deploy, drawn_seed)
    return Request(
        messages=messages,
        media=media,
        audio_input=samples,
        audio_input_rate_hz=rate,
        limits=deploy.limits,
        modalities=_modalities(values.get("modalities"), pipeline, wanted_outputs),
        sampling=sampling,
        seed=seed,
        deadline_s=_deadline_s(parameters.get("deadline_ms"), deploy),
        chunks=_chunks(parameters, deploy.chunks),
        priority=_priority(parameters.get("queue_priority", 0)),
        use_audio_in_video=_use_audio_in_video(parameters, pipeline),
        audio_format=_choice("audio_format", values.get("audio_format"), AUDIO_FORMATS, "s16"),
        speaker=values.get("speaker") or None,
        language=values.get("language") or None,
        instructions=values.get("instructions") or None,
        stream=bool(values.get("stream")),
        return_num_input_tokens=bool(values.get("return_num_input_tokens")),
        return_num_output_tokens=bool(values.get("return_num_output_tokens")),
        return_timings=bool(values.get("return_timings")),
    )


def _check_parameters(parameters: Mapping[str, Any]) -> None:
    sampling_keys = Sampling.__dataclass_fields__
    for name, value in parameters.items():
        if name in PARAMETERS:
            pass
        elif name in sampling_keys:
            raise InvalidRequest(
                f"unknown parameter '{name}'", f"put '{name}' into the sampling_parameters JSON"
            )
        else:
            raise InvalidRequest(
                f"unknown parameter '{name}'", suggestion(name, {*PARAMETERS, *sampling_keys})
            )
        kind = PARAMETERS[name]
        fits = isinstance(value, int | float | str if kind is float else kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            accepted = "an int or a numeric string" if kind is float else kind.__name__
            raise InvalidRequest(f"parameter {name} is {value!r:.80}", f"send {accepted}")


def _messages(
    values: Mapping[str, Any], media: Mapping[str, list[bytes]], raw_audio: bool, limits: Limits, urls: Urls
) -> tuple[Mapping[str, Any], ...]:
    counts = {kind: len(media.get(kind, ())) for kind in MEDIA}
    counts["audio"] += raw_audio
    if sum(counts.values()) > limits.media_parts:
        raise InvalidRequest(
            f"{sum(counts.values())} media parts are given", f"send at most {limits.media_parts}"
        )
    for kind, files in media.items():
        most = int(getattr(limits, f"{kind}_bytes"))
        for number, file in enumerate(files):
            if len(file) > most:
                name = kind if len(files) == 1 else f"{kind}[{number}]"
                raise InvalidRequest(f"{name} has {len(file)} bytes", f"send at most {most} bytes a file")
    check_urls(media, urls)
    text, conversation = values.get("text_input"), values.get("messages")
    if text is not None and conversation is not None:
        raise InvalidRequest("text_input and messages are both given", "send one of them")
    if text is not None:
        _check_size("text_input", text, limits)
    if conversation is not None:
        return _conversation(_json("messages", conversation, limits), counts)
    parts: list[dict[str, str]] = [{"type": kind} for kind in MEDIA for _ in range(counts[kind])]
    if text is not None and text.strip():
        parts.append({"type": "text", "text": text})
    elif text is not None and not parts:
        raise InvalidRequest("text_input is empty", "send a prompt")
    if not parts:
        raise InvalidRequest("the request has no prompt", "send text_input, messages or media")
    return ({"role": "user", "content": parts},)


def _check_size(name: str, text: str, limits: Limits) -> None:
    size = len(text.encode())
    if size > limits.text_bytes:
        raise InvalidRequest(f"{name} has {size} bytes of text", f"send at most {limits.text_bytes}")


def _json(name: str, text: str, limits: Limits) -> Any:
    """The JSON value in `text`, of a size that is allowed and with strings that are Unicode."""
    _check_size(name, text, limits)
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name} holds half of a surrogate pair", "send whole characters") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not JSON ({error})", "send valid JSON") from None
    return value


def _conversation(raw: Any, counts: Mapping[str, int]) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(raw, list) or not raw:
        raise InvalidRequest("messages is not a non-empty list", 'send [{"role": "user", "content": "…"}]')
    messages = [_message(item, f"messages[{i}]") for i, item in enumerate(raw)]
    for kind, count in counts.items():
        used = sum(part["type"] == kind for message in messages for part in message["content"])
        if used != count:
            raise InvalidRequest(
                f"messages refers to {used} {kind} parts but {count} are attached",
                f'attach one {kind} for every {{"type": "{kind}"}} part',
            )
    return tuple(messages)


def _message(item: Any, where: str) -> Mapping[str, Any]:
    role, content = role_and_parts(item, where)
    parts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in (*MEDIA, "text"):
            raise InvalidRequest(f"{where}.content[{i}].type is {kind!r}", "use text, image, audio or video")
        unknown = set(part) - ({"type", "text"} if kind == "text" else {"type"})
        if unknown:
            raise InvalidRequest(
                f"{where}.content[{i}] has '{min(unknown)}'", "send media in their own tensors"
            )
        if kind == "text" and not (isinstance(part.get("text"), str) and part["text"].strip()):
            raise InvalidRequest(
                f"{where}.content[{i}].text is empty", "send some text or leave the part out"
            )
        parts.append({"type": kind, "text": part["text"]} if kind == "text" else {"type": kind})
    if role != "user" and any(part["type"] != "text" for part in parts):
        raise InvalidRequest(f"{where} attaches media to role {role}", "attach media to user messages")
    return {"role": role, "content": parts}


def _sampling(
    text: str | None, seed_parameter: int | None, deploy: Deploy, drawn_seed: int
) -> tuple[dict[str, Sampling], int]:
    defaults = {name: stage.sampling for name, stage in deploy.stages.items() if stage.sampling is not None}
    given = _json("sampling_parameters", text, deploy.limits) if text and text.strip() else {}
    if not isinstance(given, dict):
        raise InvalidRequest("sampling_parameters is not a JSON object", 'send e.g. {"temperature": 0.7}')
    by_stage = {key: value for key, value in given.items() if key in deploy.stages}
    shared = {key: value for key, value in given.items() if key not in by_stage}
    for name, changes in by_stage.items():
        if name not in defaults:
            raise InvalidRequest(
                f"sampling_parameters.{name}: this stage does not sample", suggestion(name, defaults)
            )
        if not isinstance(changes, dict):
            raise InvalidRequest(f"sampling_parameters.{name} is {changes!r}", "send a JSON object")
    if "seed" in shared and seed_parameter is not None:
        raise InvalidRequest("seed is given twice", "send it as parameter or in sampling_parameters")
    # Keys without a stage go to the stage that writes the text; the seed goes to all.
    writer = deploy.pipeline.finals.get("text", "").partition(".")[0]
    seed_change = {"seed": shared.pop("seed")} if "seed" in shared else {}
    if seed_parameter is not None:
        seed_change = {"seed": seed_parameter}
    merged = {}
    seed = drawn_seed
    if shared and writer not in defaults:
        Sampling().merged(shared)  # an unknown key is worth its suggestion
        raise InvalidRequest(
            f"sampling_parameters has {sorted(shared)}", "this pipeline samples no text; leave them out"
        )
    if seed_change:
        checked = Sampling().merged(seed_change).seed
        assert checked is not None
        seed = checked
    for name, default in defaults.items():
        settings = default.merged(shared) if name == writer else default
        settings = settings.merged(by_stage.get(name, {}), f"sampling_parameters.{name}")
        if settings.seed is None or (seed_change and "seed" not in by_stage.get(name, {})):
            settings = settings.merged({"seed": seed})
        merged[name] = settings
    return merged, seed


def _modalities(
    text: str | None, pipeline: Pipeline, wanted_outputs: Collection[str] | None
) -> tuple[str, ...]:
    asked = pipeline.modalities if text is None else tuple(word.strip() for word in text.split(","))
    for word in asked:
        if word not in pipeline.modalities:
            raise InvalidRequest(f"modalities has '{word}'", suggestion(word, pipeline.modalities))
    if wanted_outputs is not None and not {port.name for port in AUDIO_DATA_OUTPUTS} & set(wanted_outputs):
        asked = tuple(word for word in asked if word != "audio")
        if not asked:
            raise InvalidRequest(
                "modalities is 'audio' but no audio output is requested",
                f"request one of {', '.join(port.name for port in AUDIO_DATA_OUTPUTS)}",
            )
    return tuple(m for m in pipeline.modalities if m in asked)


def _deadline_s(deadline_ms: int | None, deploy: Deploy) -> float:
    if deadline_ms is None:
        return deploy.deadline_s
    longest_ms = int(deploy.limits.deadline_s * 1000)
    if not 1 <= deadline_ms <= longest_ms:
        raise InvalidRequest(f"parameter deadline_ms is {deadline_ms}", f"send 1 to {longest_ms}")
    return deadline_ms / 1000


def _chunks(parameters: Mapping[str, Any], defaults: Chunks) -> Chunks:
    sizes = {}
    for name in ("initial_codec_chunk_frames", "codec_chunk_frames"):
        sizes[name] = parameters.get(name, getattr(defaults, name))
        if not 1 <= sizes[name] <= 4096:
            raise InvalidRequest(f"parameter {name} is {sizes[name]}", "send 1 to 4096")
    return Chunks(
        **sizes,
        max_ahead_s=defaults.max_ahead_s,
        codec_chunk_growth=_growth(parameters, defaults.codec_chunk_growth),
    )


def _growth(parameters: Mapping[str, Any], default: float) -> float:
    value = parameters.get("codec_chunk_growth", default)
    try:
        growth = float(value)
    except (ValueError, OverflowError):
        growth = -1.0
    if not is_chunk_growth(growth):
        raise InvalidRequest(
            f"parameter codec_chunk_growth is {value!r:.40}", f"send 0 or 1 to {MAX_CHUNK_GROWTH}"
        )
    return growth


def _priority(value: int) -> int:
    if not 0 <= value <= MAX_PRIORITY:
        raise InvalidRequest(f"parameter queue_priority is {value}", f"send 0 to {MAX_PRIORITY}")
    return value


def _use_audio_in_video(parameters: Mapping[str, Any], pipeline: Pipeline) -> bool:
    if "use_audio_in_video" not in parameters:
        return False
    if all(port.name != "video" for port in pipeline.accepts):
        raise Unsupported(
            f"parameter use_audio_in_video is given, but pipeline '{pipeline.name}' takes no video",
            "leave it out",
        )
    return bool(parameters["use_audio_in_video"])


def _choice(name: str, value: str | None, known: tuple[str, ...], default: str) -> str:
    if value is None:
        return default
    if value not in known:
        raise InvalidRequest(f"{name} is '{value}'", suggestion(value, known))
    return value


def check_supported(request: Request, pipeline: Pipeline) -> None:
    """Raise Unsupported when the conversation holds media that the pipeline has no stage for."""
    accepted = {port.name for port in pipeline.accepts}
    for kind in MEDIA:
        if request.parts(kind) and kind not in accepted:
            raise Unsupported(f"pipeline '{pipeline.name}' takes no {kind}", "leave it out")
