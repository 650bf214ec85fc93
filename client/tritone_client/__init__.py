"""Client of Tritone pipelines on Triton Inference Server: ask, and text and speech stream back.

async with AsyncTritoneClient("127.0.0.1:8001", "smoltalk") as client:
    async for event in client.stream("Why is the sky blue?"):
        ...                                     # TextDelta, AudioChunk, …, Done

with TritoneClient() as client:                 # the same without asyncio
    answer = client.ask("Why is the sky blue?")
"""

from tritone_client.answer import Answer, gather
from tritone_client.client import AsyncTritoneClient, PipelineDescription
from tritone_client.errors import (
    BrokenStream,
    Cancelled,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    ServerFault,
    TritoneError,
    Unavailable,
)
from tritone_client.events import (
    AudioChunk,
    Done,
    EncodedAudio,
    Event,
    FinishReason,
    Media,
    Progress,
    StageTimings,
    TextDelta,
    Timings,
    Usage,
)
from tritone_client.request import RequestOptions
from tritone_client.sync import TritoneClient
from tritone_client.wav import WavWriter, write_wav

__all__ = [
    "Answer",
    "AsyncTritoneClient",
    "AudioChunk",
    "BrokenStream",
    "Cancelled",
    "ConnectionFailed",
    "DeadlineExceeded",
    "Done",
    "EncodedAudio",
    "Event",
    "FinishReason",
    "InvalidRequest",
    "Media",
    "NotFound",
    "PipelineDescription",
    "Progress",
    "RequestOptions",
    "ServerFault",
    "StageTimings",
    "TextDelta",
    "Timings",
    "TritoneClient",
    "TritoneError",
    "Unavailable",
    "Usage",
    "WavWriter",
    "gather",
    "write_wav",
]
