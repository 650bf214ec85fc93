"""All events of one request, gathered into one value."""

from __future__ import annotations

from collections.abc import AsyncIterable
from dataclasses import dataclass

import numpy as np

from tritone_client.errors import BrokenStream
from tritone_client.events import AudioChunk, Done, EncodedAudio, Event, Media, Samples, TextDelta


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A whole answer."""

    text: str
    samples: Samples  # int16 or float32 [n], mono; empty int16 if there was no raw audio
    sample_rate_hz: int | None  # None if there was no raw audio
    encoded_audio: bytes  # one whole file if audio_format was wav, flac or opus; otherwise empty
    media: tuple[Media, ...]
    done: Done


async def gather(events: AsyncIterable[Event]) -> Answer:
    """Wait for the last event and join them all.

    Raises:
        BrokenStream: the events end without `Done`.
        TritoneError: whatever the events raise.
    """
    texts: list[str] = []
    chunks: list[AudioChunk] = []
    encoded: list[bytes] = []
    media: list[Media] = []
    done: Done | None = None
    async for event in events:
        match event:
            case TextDelta():
                texts.append(event.text)
            case AudioChunk():
                chunks.append(event)
            case EncodedAudio():
                encoded.append(event.data)
            case Media():
                media.append(event)
            case Done():
                done = event
    if done is None:
        raise BrokenStream("the events ended without Done")
    samples: Samples = np.concatenate([c.samples for c in chunks]) if chunks else np.empty(0, dtype=np.int16)
    rate_hz = chunks[0].sample_rate_hz if chunks else None
    return Answer("".join(texts), samples, rate_hz, b"".join(encoded), tuple(media), done)
