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
TAIL = """\
## Errors

`TRITONE_<CODE>: what is wrong; what to do`, with Triton's code: INVALID_ARG, NOT_FOUND, UNSUPPORTED,
UNAVAILABLE (try again later), CANCELLED or INTERNAL. DEADLINE_EXCEEDED comes with Triton's code CANCELLED, if
nothing was made in time; a deadline that passes in the middle of an answer is no error: the answer ends with
the finish reason `deadline`. Other finish reasons are `stop` and `length`.

Triton itself checks names, dtypes and shapes of tensors before Tritone sees them, in its own words.
"""
PARAMETER_DOCS = {
    "deadline_ms": "the answer ends then, with finish reason `deadline`",
    "seed": "the same seed gives the same answer; also in sampling_parameters",
    "priority": "reserved",
    "traceparent": "reserved",
    "initial_codec_chunk_frames": "codec frames of the first audio chunk",
    "codec_chunk_frames": "codec frames of every later one",
}


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
        f"| `{name}` | {kind.__name__} | {PARAMETER_DOCS[name]} |"
        for name, kind in contract.PARAMETERS.items()
    )
    return "\n".join(
        (
            HEAD,
            f"## Inputs\n\n{table(inputs.values())}\n",
            f"What each pipeline takes as a prompt:\n\n{takes}\n",
            f"## Request parameters\n\n| parameter | type | meaning |\n|---|---|---|\n{parameters}\n",
            f"## Outputs\n\n{table(outputs.values())}\n",
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
