"""Asks the peer over its own HTTP API, and gives what it answers as events of our client.

    POST /v1/chat/completions ──► server-sent events
        modality "text"   delta.content is text              ─► TextDelta
        modality "audio"  delta.content is a WAV file, base64 ─► AudioChunk
        [DONE]                                               ─► Done

So the same benchmark runs against both. Sampling settings go as one mapping a stage (`sampling_params_list`).
"""

from __future__ import annotations

import base64
import io
import json
import wave
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any

import aiohttp
import numpy as np

from tritone_client.errors import ServerFault
from tritone_client.events import AudioChunk, Done, Event, Samples, TextDelta, Timings, Usage

MODEL = "peer"  # the name under which it serves its checkpoint
UNMEASURED = Timings(None, None, 0.0, 0.0, None)  # the benchmark measures by itself


class PeerClient:
    """An async context manager; offers what the benchmark asks of AsyncTritoneClient."""

    def __init__(self, url: str) -> None:
        """url: http://host:port."""
        self.url = url
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
        )

    async def __aenter__(self) -> PeerClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.close()

    async def ask(self, prompt: str | None = None, **options: Any) -> None:
        """Ask, and wait for the end."""
        async with aclosing(self.stream(prompt, **options)) as events:
            async for _ in events:
                pass

    async def stream(self, prompt: str | None = None, **options: Any) -> AsyncGenerator[Event, None]:
        """Ask, and yield the answer event by event; leaving early hangs up. Raises ServerFault."""
        offset = index = 0
        usage: Usage = {}
        reasons: dict[str, Any] = {}
        try:
            async with self._http.post(
                f"{self.url}/v1/chat/completions", json=body(prompt or "", options)
            ) as answer:
                if answer.status != 200:
                    raise ServerFault(f"the peer answers {answer.status}: {(await answer.text())[:300]}")
                async for chunk in _chunks(answer.content):
                    usage |= _usage(chunk)
                    modality = str(chunk.get("modality", "text"))
                    for choice in chunk.get("choices", ()):
                        content = (choice.get("delta") or {}).get("content") or ""
                        if choice.get("finish_reason"):
                            reasons[modality] = choice["finish_reason"]
                        if content and modality == "audio":
                            samples, rate_hz = decoded(content)
                            reasons.setdefault("audio", "stop")
                            yield AudioChunk(samples, rate_hz, offset, index)
                            offset += len(samples)
                        elif content:
                            reasons.setdefault("text", "stop")
                            yield TextDelta(content, index)
                        index += 1
        except aiohttp.ClientError as error:
            raise ServerFault(f"the peer's connection broke: {error}") from None
        yield Done(reasons, usage, {}, None, {}, UNMEASURED, index)


def body(prompt: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a request. options: as for our client, of which it takes lengths and seed."""
    sampling = options.get("sampling") or {}
    text_tokens = sampling.get("max_tokens", 100)
    frames = (sampling.get("talker") or {}).get("max_tokens", 251) - 1
    seed = options.get("seed") or 0
    endless = {"ignore_eos": True, "seed": seed}
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": [{"type": "text", "text": prompt}]}],
        "modalities": ["text", "audio"],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "sampling_params_list": [
            {"temperature": 0.0, "max_tokens": text_tokens, **endless},
            {
                "temperature": 0.9,
                "top_k": 50,
                "repetition_penalty": 1.05,
                "max_tokens": frames,
                "detokenize": False,
                **endless,
            },
            {"temperature": 0.0, "max_tokens": 65536, "detokenize": False},
        ],
    }


def decoded(content: str) -> tuple[Samples, int]:
    """Samples int16 [n] and their rate of a WAV file in base64."""
    with wave.open(io.BytesIO(base64.b64decode(content))) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
        return samples[:: file.getnchannels()], file.getframerate()


async def _chunks(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The objects of a stream of server-sent events; ServerFault for an error among them."""
    rest = b""
    async for piece in content.iter_any():  # a line may be longer than the reader's own limit
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if not data or data == b"[DONE]" or not line.startswith(b"data:"):
                continue
            chunk: dict[str, Any] = json.loads(data)
            if "error" in chunk:
                raise ServerFault(f"the peer says: {str(chunk['error'])[:300]}")
            yield chunk


def _usage(chunk: Mapping[str, Any]) -> Usage:
    told = chunk.get("usage") or {}
    usage: Usage = {}
    if told.get("prompt_tokens"):
        usage["prompt_tokens"] = int(told["prompt_tokens"])
    if told.get("completion_tokens"):
        usage["completion_tokens"] = int(told["completion_tokens"])
    return usage
