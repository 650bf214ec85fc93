"""Both sides in tables of Markdown, and how many times as fast ours is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from comparison.servers import OURS, PEER
from tritone_bench.document import Document
from tritone_bench.level import LevelReport
from tritone_bench.table import NOTHING, number, percent

Cell = Callable[[LevelReport], float | None]


def _mean(modality: str, measure: str) -> Cell:
    def cell(report: LevelReport) -> float | None:
        spread = report.measure(modality, measure)
        return None if spread is None else spread.mean

    return cell


COLUMNS: Mapping[str, tuple[Cell, bool]] = {  # whether less is better
    "TTFT s": (_mean("text", "ttft_s"), True),
    "TTFP s": (_mean("audio", "ttfp_s"), True),
    "whole request s": (_mean("request", "e2el_s"), True),
    "RTF": (_mean("audio", "rtf"), True),
    "speech seconds per second": (lambda report: report.throughput.audio_s_per_s, False),
}


def pages(sides: Mapping[str, Mapping[int, Document]]) -> str:
    """Everything there is to say of the levels."""
    parts = []
    for side in (OURS, PEER):
        if sides.get(side):
            parts += [f"### {side}", "", *_table(sides[side]), ""]
    both = sorted(set(sides.get(OURS, ())) & set(sides.get(PEER, ())))
    if both:
        parts += ["### how many times as good ours is", "", *_ratios(sides, both), ""]
    return "\n".join(parts)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table, its columns as wide as they need."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    return [line(head), f"|{'|'.join('-' * (width + 1) + ':' for width in widths)}|", *map(line, rows)]


def _table(runs: Mapping[int, Document]) -> list[str]:
    head = ["concurrency", *COLUMNS, "streams without underrun", "errors"]
    rows = []
    for concurrency, run in runs.items():
        report = run.levels[0]
        cells = [number(cell(report)) for cell, _ in COLUMNS.values()]
        clean = percent(report.underruns.share_clean)
        rows.append([str(concurrency), *cells, clean, str(report.num_errors)])
    return markdown(head, rows)


def _ratios(sides: Mapping[str, Mapping[int, Document]], both: Sequence[int]) -> list[str]:
    rows = []
    for concurrency in both:
        ours, peer = (sides[side][concurrency].levels[0] for side in (OURS, PEER))
        cells = [
            _ratio(cell(peer), cell(ours)) if less else _ratio(cell(ours), cell(peer))
            for cell, less in COLUMNS.values()
        ]
        rows.append([str(concurrency), *cells])
    return markdown(["concurrency", *COLUMNS], rows)


def _ratio(more: float | None, less: float | None) -> str:
    return NOTHING if more is None or not less else f"{more / less:.2f}"
