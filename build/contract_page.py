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
- `trace_id`: 32 hex digits, if spans of the request are recorded.
- `timings`, with `return_timings`: see below.

### Timings

All moments, `…_at_s`, are seconds since the server received the request, on one clock for all stages and
processes; other `…_s` are durations. What a stage does not know is left out.

| of the request | |
|---|---|
| `received_unix_s` | the zero of the moments, in seconds of Unix time |
| `queued_s` | it waited for its turn: admission |
| `ttft_s`, `ttfp_s` | the first text, the first packet of sound was handed to Triton: moments |
| `total_s` | until `done` was made; `idle_s` of it no stage computed |
| `stages` | by stage, what follows |

| of a stage | |
|---|---|
| `opened_at_s` | it took the request; of a stage that Triton batches: its first call began |
| `first_output_at_s`, `last_output_at_s` | it gave something |
| `ended_at_s` | it was done; missing if it was cut off |
| `first_output_s`, `total_s` | the same, since it opened; waits for input and for other requests included |
| `queued_s` | of it in the engine's own queue; where Triton batches: in calls, until they computed |
| `tokens`, `frames` | of text or of speech that it drew; codec frames that it made or decoded |
| `steps`, `batch` | engine steps that gave it something; mean number of requests that they gave some |
| `calls`, `calls_s`, `batch` | where Triton batches: a call a chunk; mean number of chunks together |
| `busy_s` | it computed, for other requests of the same batches too |
| `busy` | when: `[begin, end]` moments, ascending, at most 256; of more, the shortest gaps are filled |
| `call_spans` | `[begin, end, frames, batch]` of the first 256 calls |

```json
{"received_unix_s": 1796014467.120331, "queued_s": 0.000041, "ttft_s": 0.0213, "ttfp_s": 0.0551,
 "total_s": 0.4211, "idle_s": 0.0102, "stages": {
  "talker": {"opened_at_s": 0.0021, "first_output_at_s": 0.0413, "last_output_at_s": 0.31,
   "ended_at_s": 0.3101, "first_output_s": 0.0392, "total_s": 0.308, "queued_s": 0.0005, "busy_s": 0.2768,
   "frames": 120, "steps": 120, "batch": 2.41, "busy": [[0.0231, 0.0413], [0.0514, 0.31]]},
  "code2wav": {"opened_at_s": 0.045, "first_output_at_s": 0.0551, "last_output_at_s": 0.4207,
   "ended_at_s": 0.4208, "calls": 2, "calls_s": 0.1102, "queued_s": 0.0642, "busy_s": 0.0408,
   "frames": 120, "batch": 1.5, "busy": [[0.0501, 0.0549], [0.3798, 0.4158]],
   "call_spans": [[0.045, 0.0551, 4, 1], [0.3207, 0.4208, 116, 2]]}}}
```
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
    "traceparent": "the caller's span (W3C Trace Context): spans of the request are recorded below it",
    "tracestate": "what came with it, at most 512 characters",
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
            DONE.replace("{reasons}", reasons),
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
