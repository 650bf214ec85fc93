"""Ask a pipeline from ordinary code: two questions, one answer as a whole and one as it streams.

python chat_sync.py --out reply.wav
"""

import argparse

from tritone_client import TextDelta, TritoneClient, Unavailable, write_wav


def main(url: str, out: str) -> None:
    with TritoneClient(url, "smoltalk") as client:
        try:
            answer = client.ask("Say good morning.", seed=7)
        except Unavailable as error:
            raise SystemExit(f"the pipeline is busy, try again: {error}") from None
        print(answer.text)
        if answer.sample_rate_hz is not None:
            write_wav(out, answer.samples, answer.sample_rate_hz)
        print(f"finished by {dict(answer.done.finish_reasons)}, seed {answer.done.seed}")

        # Text alone: audio that nobody asks for is never made.
        for event in client.stream("Why is the sky blue?", modalities="text", max_tokens=64):
            if isinstance(event, TextDelta):
                print(event.text, end="", flush=True)
        print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="127.0.0.1:8001")
    parser.add_argument("--out", default="reply.wav")
    args = parser.parse_args()
    main(args.url, args.out)
