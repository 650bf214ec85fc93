"""A listener over HTTP who closes the socket once the first sound has come."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

PATIENCE_S = 30.0


async def leave_at_first_sound(http_url: str, pipeline: str, prompt: str, seed: int) -> bool:
    """Ask by `generate_stream` and leave; whether sound came."""
    place = urlsplit(http_url)
    body = json.dumps({"text_input": prompt, "stream": True, "audio_format": "s16_base64", "seed": seed})
    head = (
        f"POST /v2/models/{pipeline}/generate_stream HTTP/1.1\r\nHost: {place.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        try:
            writer.write((head + body).encode())
            await writer.drain()
            while line := await reader.readline():
                if b'"event":"audio"' in line:
                    return True
            return False
        finally:
            writer.close()
