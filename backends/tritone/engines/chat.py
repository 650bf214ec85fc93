"""The conversation of a request: chat messages read and checked, with room for what the ears will hear."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tritone.conversation import role_and_parts
from tritone.errors import InvalidRequest

EXAMPLE = 'send [{"role": "user", "content": "Hello"}]'


class Heard:
    """An audio part: what was said in it is known once its transcript has come."""

    text: str | None = None


@dataclass(frozen=True)
class Message:
    role: str
    parts: tuple[str | Heard, ...]  # text, or the place of a transcript

    @property
    def content(self) -> str:
        """Text parts joined as they are; what was heard stands on a line of its own."""
        content = ""
        after_heard = False
        for part in self.parts:
            text = (part.text or "").strip() if isinstance(part, Heard) else part
            if not text:
                continue
            if content and (after_heard or isinstance(part, Heard)):
                content += "\n"
            content += text
            after_heard = isinstance(part, Heard)
        return content


class Conversation:
    """Messages in order; complete when every audio part has its transcript."""

    def __init__(self, messages: list[Message]) -> None:
        self._messages = messages
        self._unheard = [part for message in messages for part in message.parts if isinstance(part, Heard)]
        self._next = 0  # index in `_unheard` of the part that the next transcript belongs to

    @classmethod
    def parse(cls, text: str) -> Conversation:
        """Read the JSON list of messages; InvalidRequest naming the message and the key."""
        try:
            items = json.loads(text)
        except ValueError as error:
            raise InvalidRequest(f"messages is not JSON ({error})", EXAMPLE) from None
        if not isinstance(items, list) or not items:
            raise InvalidRequest("messages is not a non-empty list", EXAMPLE)
        return cls([_message(item, f"messages[{i}]") for i, item in enumerate(items)])

    @property
    def audio_parts(self) -> int:
        return len(self._unheard)

    @property
    def missing(self) -> int:
        """Transcripts that have not come yet."""
        return len(self._unheard) - self._next

    def hear(self, transcript: str) -> None:
        """Fill the first audio part that has no transcript."""
        if not self.missing:
            raise InvalidRequest(
                f"a transcript came beyond the {self.audio_parts} audio parts of messages",
                "send one audio part for every piece of audio",
            )
        self._unheard[self._next].text = transcript
        self._next += 1

    def messages(self, system_prompt: str = "") -> list[dict[str, str]]:
        """Role and content of every message of a complete conversation.

        system_prompt: put in front when the conversation has no system message.
        Raises InvalidRequest when nothing was said in a message.
        """
        messages = list(self._rendered())
        if system_prompt and all(message["role"] != "system" for message in messages):
            messages.insert(0, {"role": "system", "content": system_prompt})
        return messages

    def _rendered(self) -> Iterator[dict[str, str]]:
        for i, message in enumerate(self._messages):
            content = message.content
            if not content.strip():
                raise InvalidRequest(
                    f"no speech was heard in the audio of messages[{i}]", "speak up, or send text"
                )
            yield {"role": message.role, "content": content}


def _message(item: Any, where: str) -> Message:
    role, content = role_and_parts(item, where)
    message = Message(role, tuple(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)))
    if not message.content.strip() and not any(isinstance(part, Heard) for part in message.parts):
        raise InvalidRequest(f"{where}.content is empty", "send some text or leave the message out")
    return message


def _part(part: Any, where: str) -> str | Heard:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "audio":
        return Heard()
    if kind != "text":
        raise InvalidRequest(f"{where}.type is {kind!r}", "use text or audio")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text is {text!r}", "send a string")
    return text
