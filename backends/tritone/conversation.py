"""A message of a conversation, as far as the orchestrator and the engines read it alike."""

from __future__ import annotations

from typing import Any

from tritone.errors import InvalidRequest

ROLES = ("system", "user", "assistant")


def role_and_parts(item: Any, where: str) -> tuple[str, list[Any]]:
    """Of a message as JSON has it: {"role": …, "content": text or a list of parts}; parts are not looked at.

    where: names the message in errors. Raises InvalidRequest.
    """
    if not isinstance(item, dict) or set(item) - {"role", "content"}:
        raise InvalidRequest(f"{where} is not an object with role and content", "send just these two keys")
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role is {role!r}", f"use one of {', '.join(ROLES)}")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{where}.content is {content!r}", "send text or a list of parts")
    return role, content
