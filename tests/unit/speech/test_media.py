"""Attached files arrive as bytes or as base64 text, and come out as bytes."""

import base64

import pytest

from tritone.media import unwrapped

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
MP4 = b"\x00\x00\x00\x18ftypisom" + bytes(range(256))
WAV = b"RIFF\x24\x08\x00\x00WAVEfmt " + bytes(range(256))
JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF" + bytes(range(256))


@pytest.mark.parametrize("data", [PNG, MP4, WAV, JPEG], ids=["png", "mp4", "wav", "jpeg"])
@pytest.mark.parametrize(
    "wrap",
    [
        bytes,
        base64.b64encode,
        base64.encodebytes,
        lambda data: b"data:application/octet-stream;base64," + base64.b64encode(data),
        lambda data: b" data:video/mp4;codecs=avc1;base64, " + base64.encodebytes(data),
    ],
    ids=["bytes", "base64", "base64 lines", "data URI", "data URI with lines"],
)
def test_a_file_comes_out_as_it_was(data, wrap):
    assert unwrapped(wrap(data)) == data


@pytest.mark.parametrize("data", [b"", b"short", b"A" * 61, b"data:image/png;base64,", b"A" * 80 + b"!" * 4])
def test_what_is_no_base64_is_left_for_who_decodes_it(data):
    assert unwrapped(data) == data
