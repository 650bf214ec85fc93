"""The report as one HTML file that needs nothing else: tables, pictures inside it, definitions, environment.

Needs matplotlib and jinja2, the extra `bench`.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tritone_bench.document import Document
from tritone_bench.plots import Drawing
from tritone_bench.table import notes, sections, titles
from tritone_client.errors import InvalidRequest

NEEDED = ("matplotlib", "jinja2")
TEMPLATE = Path(__file__).with_name("page.html.j2")
DEFINITIONS = {
    "TTFT": "time to first token: from sending the request to the first text",
    "TPOT": "time per output token: (last text − first text) / (output tokens − 1)",
    "ITL": "inter-token latency: between two text deltas of one answer; of all answers together",
    "TTFP": "time to first packet: from sending the request to the first chunk of sound",
    "E2EL": "end-to-end latency: from sending the request to its end; of a modality, to its last output",
    "RTF": "real-time factor: E2EL / seconds of sound; below 1 the sound is made faster than it is heard",
    "inter-chunk gap": "between the arrivals of two chunks of sound of one answer; of all answers together",
    "leading silence": "how long the sound itself stays below −50 dB of full scale at its start",
    "underrun": "a listener who starts with the first chunk has heard all that has come, and hears silence",
    "goodput": "share of all requests that were answered and meet every bound that was given",
    "percentile": "the smallest value seen that at least so many percent of the values do not exceed",
}


def check_can_draw() -> None:
    """Raises InvalidRequest with what to install."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise InvalidRequest(
            f"a report needs {' and '.join(missing)}; install with pip install '.[bench]' in a checkout, or "
            "'tritone[bench]' from a package, and draw it from the --json file with --read"
        )


def render(document: Document, drawings: Sequence[Drawing]) -> str:
    """The page."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        document=document,
        columns=titles(document.levels),
        sections=sections(document.levels),
        notes=notes(document.levels),
        drawings=[(drawing, _embedded(drawing)) for drawing in drawings],
        definitions=DEFINITIONS,
    )


def _embedded(drawing: Drawing) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(drawing.svg()).decode()}"
