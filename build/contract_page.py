"""Write client/CONTRACT.md, the tensor contract for clients in any language, from the declared ports.

python build/contract_page.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from tritone import contract, pipelines
from tritone.ports import Port

PAGE = Path(__file__).parents[1] / "client" / "CONTRACT.md"
HEAD = f"""\
<!-- Written by `python build/contract_page.py` from the declared ports: edit those, not this. -->
# The tensor contract, version {contract.CONTRACT_VERSION}

What a client in any language sees of a pipeline model. `<pipeline>` is decoupled: one response an event,
the last one `done`; with `stream` false it gives one response with everything. `<pipeline>_sync` is the same,
not decoupled. Every input is optional; a prompt (`text_input`, `messages` or media) is needed. A conversation
in `messages` that ends with the assistant's words is spoken as it is.
"""
MEDIA = """\
## Media

Encoded files go into `image`, `audio` and `video`, one element a file, as they are or as base64 text (a data
URI is accepted too). With `text_input` they come before the words: images, audio, videos. In `messages` the
n-th part of a kind, `{"type": "image"}`, stands for the n-th element of that tensor; raw samples
(`audio_input`) are the one `{"type": "audio"}`. The model configuration publishes what a request may bring:
`max_media_parts`, `max_image_bytes`, `max_image_pixels`, `max_audio_bytes`, `max_audio_s`, `max_video_bytes`,
`max_video_s` (bytes: of one file as it is sent).

A URL in place of a file is refused, unless the server's deploy.yaml allows its host (`urls:`); then the
server fetches it, within the same limits and the deadline of the request.
"""
DONE = """\
## The last response

`finish_reason` maps each modality to one of

{reasons}

`info` holds

- `seed`: repeats the answer.
- `usage`: `prompt_tokens` and `completion_tokens` of the stage that writes the text, `codec_frames` of the
  speech, `audio_s`, and under `stages` all that each stage counts. What no stage counts is left out.
- `timings`, with `return_timings`: `ttft_s`, `ttfp_s`, `total_s` on the server's clock, `idle_s` of it in
  which no stage computed, and under `stages` seconds by stage: `total_s` and `first_output_s` since the stage
  was opened; of a stage that is called a chunk at a time `calls` and `calls_s`. Both hold waits for input and
  for other requests. `busy_s`: how long it computed, for other requests of the same batches too.
"""
TAIL = """\
## Errors

`TRITONE_<CODE>: what is wrong; what to do`, with Triton's code: INVALID_ARG, NOT_FOUND, UNSUPPORTED,
UNAVAILABLE (try again later), CANCELLED or INTERNAL. DEADLINE_EXCEEDED comes with Triton's code CANCELLED, if
nothing was made in time; a deadline that passes in the middle of an answer is no error: the answer ends with
the finish reason `deadline`.

Triton itself checks names, dtypes and shapes of tensors before Tritone sees them, in its own words.
"""
PARAMETER_DOCS = {
    "deadline_ms": "the answer ends then, with finish reason `deadline`",
    "seed": "the same seed gives the same answer; also in sampling_parameters",
    "priority": "without effect: Triton keeps it to itself",
    "queue_priority": "0 (default) to 100: among requests that wait for their turn, lower is sooner",
    "traceparent": "reserved",
    "initial_codec_chunk_frames": "codec frames of the first audio chunk",
    "codec_chunk_frames": "codec frames of every later one, as soon as growth allows",
    "codec_chunk_growth": "at most so many times the chunk before, rounded up (1 or more); 0: no such bound",
    "use_audio_in_video": "hear the sound of the videos too; only where `video` is taken",
}
PARAMETER_KINDS = {float: "int or numeric string"}


def table(ports: Iterable[Port]) -> str:
    rows = [f"| `{port.name}` | {port.dtype} {list(port.dims)} | {port.doc} |" for port in ports]
    return "\n".join(("| tensor | dtype, shape | meaning |", "|---|---|---|", *rows))


def page() -> str:
    inputs: dict[str, Port] = {}
    outputs: dict[str, Port] = {}
    for name in pipelines.names():
        pipeline = pipelines.get(name)
        inputs.update({port.name: port for port in pipeline.inputs})
        outputs.update({port.name: port for port in pipeline.outputs})
    takes = "\n".join(
        f"- `{name}`: {', '.join(f'`{port.name}`' for port in pipelines.get(name).accepts)}; "
        f"makes {', '.join(pipelines.get(name).modalities)}"
        for name in pipelines.names()
    )
    parameters = "\n".join(
        f"| `{name}` | {PARAMETER_KINDS.get(kind, kind.__name__)} | {PARAMETER_DOCS[name]} |"
        for name, kind in contract.PARAMETERS.items()
    )
    reasons = "\n".join(f"- `{reason}`: {doc}" for reason, doc in contract.FINISH_REASONS.items())
    return "\n".join(
        (
            HEAD,
            f"## Inputs\n\n{table(inputs.values())}\n",
            f"What each pipeline takes as a prompt:\n\n{takes}\n",
            MEDIA,
            f"## Request parameters\n\n| parameter | type | meaning |\n|---|---|---|\n{parameters}\n",
            f"## Outputs\n\n{table(outputs.values())}\n",
            DONE.format(reasons=reasons),
            TAIL,
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Write client/CONTRACT.md from the declared ports.")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    if parser.parse_args().check:
        return int(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
