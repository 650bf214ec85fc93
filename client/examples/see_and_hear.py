"""Ask about a picture with a spoken question: print the text as it streams, keep the speech in a WAV file.

python see_and_hear.py picture.png question.wav "Answer in one sentence." --out reply.wav
"""

import argparse
import asyncio
import sys

from tritone_client import AsyncTritoneClient, AudioChunk, Done, TextDelta, TritoneError, WavWriter


async def see_and_hear(url: str, pipeline: str, picture: str, recording: str, words: str, out: str) -> None:
    async with AsyncTritoneClient(url, pipeline) as client:
        events = client.stream(
            words,
            images=[picture],  # paths or bytes; the files go to the server as they are
            audios=[recording],
            system="You describe what you see to someone who cannot.",
            deadline_s=120,
        )
        with WavWriter(out) as wav:
            async for event in events:
                match event:
                    case TextDelta(text=text):
                        print(text, end="", flush=True)
                    case AudioChunk():
                        wav.write(event)
                    case Done(usage=usage, finish_reasons=reasons):
                        print(f"\n{usage.get('prompt_tokens', 0)} tokens of prompt; ended by {dict(reasons)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("picture")
    parser.add_argument("recording")
    parser.add_argument("words", nargs="?", default="Answer the question about the picture.")
    parser.add_argument("--url", default="127.0.0.1:8001")
    parser.add_argument("--pipeline", default="qwen3_omni")
    parser.add_argument("--out", default="reply.wav")
    args = parser.parse_args()
    try:
        asyncio.run(see_and_hear(args.url, args.pipeline, args.picture, args.recording, args.words, args.out))
    except (TritoneError, OSError, KeyboardInterrupt) as error:
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else str(error))
