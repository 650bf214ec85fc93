from __future__ import annotations

import json
from typing import Any

import pytest

from tritone.engines.chat import Conversation
from tritone.errors import InvalidRequest

AUDIO = {"type": "audio"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("messages", "wrong"),
    [
        ("nonsense", "messages is not JSON"),
        ("[]", "not a non-empty list"),
        ('{"role": "user"}', "not a non-empty list"),
        (["hi"], r"messages\[0\] is not an object"),
        (
            [{"role": "user", "content": "hi", "name": "Ann"}],
            r"messages\[0\] is not an object with role and content",
        ),
        (
            [{"role": "wizard", "content": "hi"}],
            r"messages\[0\].role is 'wizard'; use one of system, user, assistant",
        ),
        ([*user("hi"), {"role": "user", "content": " "}], r"messages\[1\].content is empty"),
        (user([]), r"messages\[0\].content is \[\]"),
        (user(None), r"messages\[0\].content is None"),
        (user([text(""), text(" ")]), r"messages\[0\].content is empty"),
        (user([{"type": "video"}]), r"content\[0\].type is 'video'"),
        (user([{"type": "text", "text": 5}]), r"content\[0\].text is 5"),
    ],
)
def test_what_is_wrong_is_named(messages: Any, wrong: str) -> None:
    raw = messages if isinstance(messages, str) else json.dumps(messages)
    with pytest.raises(InvalidRequest, match=wrong):
        Conversation.parse(raw)


def test_transcripts_fill_audio_parts_in_order() -> None:
    first, second = user([AUDIO]), user([text("About this:"), AUDIO, text("Be "), text("brief.")])
    conversation = Conversation.parse(json.dumps(first + second))
    assert (conversation.audio_parts, conversation.missing) == (2, 2)
    conversation.hear("Hello there. ")
    assert conversation.missing == 1
    conversation.hear(" Why?")
    contents = [message["content"] for message in conversation.messages()]
    assert contents == ["Hello there.", "About this:\nWhy?\nBe brief."]
    with pytest.raises(InvalidRequest, match="beyond the 2 audio parts"):
        conversation.hear("more")


def test_silence_is_refused_unless_there_is_text_too() -> None:
    silent = Conversation.parse(json.dumps(user([AUDIO])))
    silent.hear(" ")
    with pytest.raises(InvalidRequest, match=r"no speech was heard in the audio of messages\[0\]"):
        silent.messages()
    captioned = Conversation.parse(json.dumps(user([AUDIO, text("What do you hear?")])))
    captioned.hear("")
    assert captioned.messages()[0]["content"] == "What do you hear?"


def test_system_prompt_stands_in_for_a_missing_one() -> None:
    conversation = Conversation.parse(json.dumps(user("hi")))
    assert conversation.messages("Be kind.")[0] == {"role": "system", "content": "Be kind."}
    assert len(conversation.messages()) == 1
    own = Conversation.parse(json.dumps([{"role": "system", "content": "Be rude."}, *user("hi")]))
    assert [message["content"] for message in own.messages("Be kind.")] == ["Be rude.", "hi"]
