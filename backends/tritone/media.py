"""Files as callers attach them: the bytes themselves or, over HTTP, base64 text of them.

Decoding takes as long as the file wants. So decoders call a Check between its parts, with which whoever asked
can end the work.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable

Check = Callable[[], None]
"""Raises TritoneError when nobody wants the file any more."""

_DATA_URI = re.compile(rb"\s*data:[^,]{0,200};base64,")
_BASE64_HEAD = re.compile(rb"[A-Za-z0-9+/\s]{8,}={0,2}\s*")
_URL = re.compile(rb"[ \t\r\n]{0,64}(?:file:|[a-z][a-z0-9+.-]{0,30}://)", re.IGNORECASE)


def unwrapped(data: bytes) -> bytes:
    """`data`, or the file inside when it is base64 text or a data URI.

    No file of a known kind begins with 64 bytes that are all letters of base64. Text that is broken comes
    back as it is; whoever decodes the file refuses it.
    """
    prefix = _DATA_URI.match(data)
    text = data[prefix.end() :] if prefix else data
    if not _BASE64_HEAD.fullmatch(text[:64]):
        return data
    try:
        return base64.b64decode(text.translate(None, b" \t\r\n"), validate=True)
    except binascii.Error:
        return data


def wanted() -> None:
    """The Check of a file that is wanted whatever happens."""


def is_url(data: bytes) -> bool:
    """Whether a caller sent the place of a file; no file of a known kind begins like that."""
    return _URL.match(data) is not None
