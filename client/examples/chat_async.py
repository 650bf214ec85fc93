"""Ask a pipeline with asyncio: print the text as it streams, keep the speech in a WAV file.

python chat_async.py "Why is the sky blue?" --out reply.wav
"""

import argparse
import asyncio
import sys

from tritone_client import AsyncTritoneClient, AudioChunk, Done, TextDelta, TritoneError, WavWriter


async def chat(url: str, question: str, out: str) -> None:
    async with AsyncTritoneClient(url, "smoltalk") as client:
        with WavWriter(out) as wav:
            async for event in client.stream(question, modalities=["text", "audio"], deadline_s=60):
                match event:
                    case TextDelta(text=text):
                        print(text, end="", flush=True)
                    case AudioChunk():
                        wav.write(event)
                    case Done(measured=measured):
                        print(f"\n{measured.audio_s:.1f} s of audio in {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("question", nargs="?", default="Why is the sky blue?")
    parser.add_argument("--url", default="127.0.0.1:8001")
    parser.add_argument("--out", default="reply.wav")
    args = parser.parse_args()
    try:
        asyncio.run(chat(args.url, args.question, args.out))
    except (TritoneError, OSError, KeyboardInterrupt) as error:
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else str(error))
