"""Between text and token ids, before and after generation.

    messages ─chat template─► prompt ─tokeniser─► ids
          id ─bytes─► whole characters ─stop strings─► text

Everything here depends on its arguments and the checkpoint only: no clock, no chance.
"""

from __future__ import annotations

import codecs
import json
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from tritone.checkpoint import read_config
from tritone.errors import ConfigError, InvalidRequest

# Unicode noncharacters; between them stands the number of a control token that a user typed.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"


class ChatTokenizer:
    """Tokeniser and chat template of a checkpoint."""

    def __init__(self, folder: Path, tokenizer: Tokenizer | None = None) -> None:
        """folder: holds config.json, a chat template and, unless `tokenizer` is given, tokenizer.json."""
        self._tokenizer = _read_tokenizer(folder) if tokenizer is None else tokenizer
        # What a control token means is a switch of the tokeniser, which two threads must not turn at once.
        self._turn = threading.Lock()
        if '"ByteLevel"' not in json.dumps(json.loads(self._tokenizer.to_str())["decoder"]):
            raise ConfigError(
                f"the tokeniser in '{folder}' is not byte-level", "use a checkpoint that has such a one"
            )
        added = self._tokenizer.get_added_tokens_decoder()
        control = sorted((token.content for token in added.values() if token.special), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, (*control, _OPEN, _CLOSE))))
        self.token_bytes = _token_bytes(self._tokenizer)
        self._ids = _special_ids(folder)
        self._template = _template(folder)

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end an answer."""
        eos = self._ids.get("eos_token_id")
        return frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer. Any thread may ask.

        messages: role and content each; content is text, or a list of parts of which some have text.
        A control token that a user typed, such as an end-of-turn mark, stays text: it cannot end the turn.
        """
        typed: list[str] = []

        def hide(match: re.Match[str]) -> str:
            typed.append(match.group())
            return f"{_OPEN}{len(typed) - 1}{_CLOSE}"

        def hidden(content: Any) -> Any:
            if isinstance(content, str):
                return self._control.sub(hide, content)
            return [{**p, "text": self._control.sub(hide, p["text"])} if "text" in p else p for p in content]

        rendered = self._render([{**message, "content": hidden(message["content"])} for message in messages])
        pieces = re.split(f"{_OPEN}(\\d+){_CLOSE}", rendered)  # text, number, text, number, … text
        with self._turn:
            ids = self._encode(pieces[0])
            for number, piece in zip(pieces[1::2], pieces[2::2], strict=True):
                ids += self._encode_plain(typed[int(number)]) + self._encode(piece)
        return ids

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        names = {
            f"{name}_token": self._tokenizer.id_to_token(self._ids[f"{name}_token_id"])
            for name in ("bos", "eos", "pad")
            if isinstance(self._ids.get(f"{name}_token_id"), int)
        }
        try:
            text: str = self._template.render(messages=list(messages), add_generation_prompt=True, **names)
            return text
        except TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template refuses messages: {error}", "change the roles or their order"
            ) from None

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        """Ids of `text`, with control tokens in it as the characters that they are written with."""
        self._tokenizer.encode_special_tokens = True
        try:
            return self._encode(text)
        finally:
            self._tokenizer.encode_special_tokens = False


class Detokenizer:
    """Token ids to text, one at a time, whole UTF-8 characters only.

    The pieces joined are the text of all the ids; bytes that belong to no character become U+FFFD, as in any
    decoder. Of a character that the last id leaves unfinished nothing comes out.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        # A model's vocabulary can be padded beyond the tokeniser's.
        return self._decoder.decode(self._token_bytes[token]) if token < len(self._token_bytes) else ""

    @property
    def has_part(self) -> bool:
        """The beginning of a character has come, and not its end."""
        return bool(self._decoder.getstate()[0])


class StopStrings:
    """Text up to the first stop string; what might begin one is held back until that is decided.

    Of several stop strings the one that ends first counts, so that the cut never depends on how the text
    was split.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that is now safe to show; nothing after `found`."""
        if self.found:
            return ""
        text = self._held + text
        ends = [(start + len(stop), start) for stop in self._strings if (start := text.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        held = self._unsafe(text)
        safe, self._held = text[: len(text) - held], text[len(text) - held :]
        return safe

    @property
    def held(self) -> int:
        """How many characters are held back."""
        return len(self._held)

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        text, self._held = self._held, ""
        return text

    def _unsafe(self, text: str) -> int:
        """How many characters at the end of `text` a stop string could begin with."""
        longest = max(map(len, self._strings), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._strings):
                return length
        return 0


def _special_ids(folder: Path) -> dict[str, Any]:
    """`*_token_id` of generation_config.json, and of config.json where it has none."""
    generation = folder / "generation_config.json"
    given = json.loads(generation.read_bytes()) if generation.is_file() else {}
    return {**read_config(folder), **{name: value for name, value in given.items() if value is not None}}


def _read_tokenizer(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"'{folder}' has no tokenizer.json", "fetch the checkpoint again")
    return Tokenizer.from_file(str(file))


def _template(folder: Path) -> Any:
    """The compiled chat template; it runs in a sandbox, since it came with the weights."""
    file = folder / "chat_template.jinja"
    source: Any = file.read_text(encoding="utf-8") if file.is_file() else None
    for older in ("chat_template.json", "tokenizer_config.json"):
        if source is None and (folder / older).is_file():
            source = json.loads((folder / older).read_bytes()).get("chat_template")
    if not isinstance(source, str):
        raise ConfigError(f"'{folder}' has no chat_template.jinja", "use the checkpoint of a chat model")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(source)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes that each token id stands for; none for a control token."""
    values = {character: bytes([byte]) for byte, character in enumerate(_byte_alphabet())}
    added = tokenizer.get_added_tokens_decoder()
    table = [b""] * (max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1)
    for token, token_id in tokenizer.get_vocab(with_added_tokens=False).items():
        table[token_id] = b"".join(values.get(character) or character.encode() for character in token)
    for token_id, added_token in added.items():
        table[token_id] = b"" if added_token.special else added_token.content.encode()
    return table


def _byte_alphabet() -> list[str]:
    """What byte-level BPE writes for each byte: its character, or one from U+0100 on if that has no shape."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printing else next(spare)) for byte in range(256)]
