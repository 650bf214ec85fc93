"""Requests from a file: JSON Lines with one object a request, or plain text with one prompt a line.

    {"prompt": "Why is the sky blue?", "max_tokens": 64, "seed": 7}
    {"messages": [{"role": "user", "content": "Hello!"}], "speaker": "Ethan"}
    {"prompt": "What is said?", "audio": "question.wav", "image": ["a.png", "b.jpg"]}

Media are paths, relative to the file, and are read once. FIELDS are all there are; `prompt`, `messages` or
media must be given. What a line leaves out comes from the command line. Empty lines are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

from tritone_bench.request_set import Ask
from tritone_client.errors import InvalidRequest
from tritone_client.request import RequestOptions, build_request

MEDIA = ("image", "audio", "video")

Check: TypeAlias = Callable[[Any], bool]


def _is_whole(low: int) -> Check:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= low


def _is_number(low: float) -> Check:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value >= low


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_words(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_paths(value: Any) -> bool:
    return _is_words(value) or (isinstance(value, list) and bool(value) and all(map(_is_words, value)))


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


FIELDS: Mapping[str, tuple[Check, str]] = {
    "prompt": (_is_words, "some text"),
    "messages": (_is_messages, "a list of objects with role and content"),
    "system": (_is_words, "some text"),
    "image": (_is_paths, "a path, or a list of paths"),
    "audio": (_is_paths, "a path, or a list of paths"),
    "video": (_is_paths, "a path, or a list of paths"),
    "use_audio_in_video": (lambda value: isinstance(value, bool), "true or false"),
    "modalities": (_is_words, 'a list with commas, e.g. "text,audio"'),
    "speaker": (_is_words, "the name of a voice"),
    "language": (_is_words, "the name of a language"),
    "instructions": (_is_text, "some text"),
    "seed": (_is_whole(0), "a whole number from 0 on"),
    "max_tokens": (_is_whole(1), "a whole number from 1 on"),
    "min_tokens": (_is_whole(0), "a whole number from 0 on"),
    "temperature": (_is_number(0), "a number from 0 on"),
    "sampling": (lambda value: isinstance(value, dict), 'an object, e.g. {"talker": {"max_tokens": 100}}'),
    "deadline_s": (_is_number(0.001), "a positive number of seconds"),
    "initial_codec_chunk_frames": (_is_whole(1), "a whole number from 1 on"),
    "codec_chunk_frames": (_is_whole(1), "a whole number from 1 on"),
    "codec_chunk_growth": (_is_number(0), "a number from 0 on"),
}


def read_requests(path: Path, defaults: RequestOptions) -> tuple[Ask, ...]:
    """The requests of a JSON Lines file.

    Raises:
        InvalidRequest: naming the line, the field and its value; or the file holds no request.
        OSError: the file cannot be read.
    """
    asks = []
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            where = f"{path} line {number}"
            asks.append(_ask(where, _object(where, line), path.parent, defaults))
    if not asks:
        raise InvalidRequest(f"{path} holds no requests; write one JSON object a line")
    return tuple(asks)


def read_prompts(path: Path, defaults: RequestOptions) -> tuple[Ask, ...]:
    """One request a line of plain text. Raises as `read_requests` does."""
    asks = tuple(Ask(line.strip(), defaults) for line in _lines(path) if line.strip())
    if not asks:
        raise InvalidRequest(f"{path} holds no prompts; write one per line")
    return asks


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")  # JSON strings may hold other line ends
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where} is not JSON ({error}); write one object a line") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f'{where} is {_shown(value)}; write an object, e.g. {{"prompt": "Hello?"}}')
    return value


def _ask(where: str, given: dict[str, Any], folder: Path, defaults: RequestOptions) -> Ask:
    for name, value in given.items():
        if name not in FIELDS:
            close = get_close_matches(name, FIELDS, n=1)
            cure = f"did you mean {close[0]!r}?" if close else f"the fields are {', '.join(FIELDS)}"
            raise InvalidRequest(f"{where} has an unknown field {name!r}; {cure}")
        is_right, wanted = FIELDS[name]
        if not is_right(value):
            raise InvalidRequest(f"{where}: {name} is {_shown(value)}; give {wanted}")
    for name in MEDIA:
        if name in given:
            paths = [given[name]] if isinstance(given[name], str) else given[name]
            given[name] = [_bytes(where, name, folder / path) for path in paths]
    prompt = given.pop("prompt", None)
    shared: dict[str, Any] = {name: value for name, value in defaults.items() if value is not None}
    limits = ("max_tokens", "temperature")  # as `sampling` of their own they give way to those of the line
    sampling: dict[str, Any] = {name: shared.pop(name) for name in limits if name in shared}
    sampling |= {**shared.pop("sampling", {}), **given.pop("sampling", {})}
    if "min_tokens" in given:
        sampling["min_tokens"] = given.pop("min_tokens")
    if "seed" in sampling:
        given.setdefault("seed", sampling.pop("seed"))
    options: RequestOptions = {**shared, **given}  # type: ignore[typeddict-item]
    if sampling:
        options["sampling"] = sampling
    try:
        build_request(prompt, **options)
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error}") from None
    return Ask(prompt, options)


def _bytes(where: str, name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(
            f"{where}: {name} is {str(path)!r}, which cannot be read ({error.strerror}); name a file there is"
        ) from None


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:40]}…"
