"""Pictures of a run. Needs matplotlib, which is loaded when something is drawn.

levels    latency, throughput and TTFP against the load
streams   one answer: its sound as it came and as it was heard, and its stages at work
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tritone_bench.level import LevelReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Drawing:
    """One picture."""

    name: str  # of its file
    title: str
    caption: str  # how to read it
    figure: Figure

    def png(self) -> bytes:
        return self._saved("png")

    def svg(self) -> bytes:
        return self._saved("svg")

    def _saved(self, kind: str) -> bytes:
        from tritone_bench.plots.style import styled

        data = io.BytesIO()
        with styled():
            undated = {"Date": None} if kind == "svg" else None
            self.figure.savefig(data, format=kind, dpi=110, metadata=undated)
        return data.getvalue()


def draw(reports: Sequence[LevelReport]) -> list[Drawing]:
    """All pictures that these levels have figures for."""
    if not reports:
        return []
    from tritone_bench.plots import levels, streams
    from tritone_bench.plots.style import styled

    pictures: tuple[tuple[str, str, str, Callable[[Sequence[LevelReport]], Figure | None]], ...] = (
        ("latency", "Latency against load", levels.LATENCY_CAPTION, levels.latency),
        ("throughput", "Throughput against load", levels.THROUGHPUT_CAPTION, levels.throughput),
        ("ttfp", "Distribution of TTFP", levels.TTFP_CAPTION, levels.ttfp),
        ("timeline", "A stream and its playback", streams.TIMELINE_CAPTION, streams.timeline),
        ("gantt", "The stages of one request", streams.GANTT_CAPTION, streams.gantt),
    )
    with styled():
        drawn = [(name, title, caption, picture(reports)) for name, title, caption, picture in pictures]
    return [
        Drawing(name, title, caption, figure) for name, title, caption, figure in drawn if figure is not None
    ]


def save(drawings: Sequence[Drawing], folder: Path) -> list[Path]:
    """Write each as `<name>.png` into the folder, which is made. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for drawing in drawings:
        path = folder / f"{drawing.name}.png"
        path.write_bytes(drawing.png())
        paths.append(path)
    return paths
