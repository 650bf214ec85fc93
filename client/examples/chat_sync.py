"""Ask a pipeline from ordinary code: one answer as a whole, with speech, and one as it streams, as text.

python chat_sync.py "Why is the sky blue?" --out reply.wav
"""

import argparse
import sys

from tritone_client import TextDelta, TritoneClient, TritoneError, Unavailable, write_wav


def main(url: str, question: str, out: str) -> None:
    with TritoneClient(url, "smoltalk") as client:
        try:
            answer = client.ask(question, seed=7)
        except Unavailable as error:
            raise SystemExit(f"the pipeline is busy, try again: {error}") from None
        print(answer.text)
        if answer.sample_rate_hz is not None:
            write_wav(out, answer.samples, answer.sample_rate_hz)
        print(f"finished by {dict(answer.done.finish_reasons)}, seed {answer.done.seed}")

        # Text alone: audio that nobody asks for is never made.
        for event in client.stream("Say good morning.", modalities="text", max_tokens=64):
            if isinstance(event, TextDelta):
                print(event.text, end="", flush=True)
        print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("question", nargs="?", default="Why is the sky blue?")
    parser.add_argument("--url", default="127.0.0.1:8001")
    parser.add_argument("--out", default="reply.wav")
    args = parser.parse_args()
    try:
        main(args.url, args.question, args.out)
    except (TritoneError, OSError, KeyboardInterrupt) as error:
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else str(error))
