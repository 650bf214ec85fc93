"""Reports as a table: a row a measure, a column a level."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from tritone_bench.client_cost import BUSY_CPU_SHARE
from tritone_bench.level import LevelReport
from tritone_bench.percentiles import PERCENTS, Spread, samples_needed
from tritone_bench.stages import UNTOLD

if TYPE_CHECKING:
    from rich.table import Table

BURSTS = 2
"""Requests of a caller from which on a level is more than all its callers beginning at once."""
NOTHING = "-"
TOO_FEW = "*"
MEASURES = (
    ("text", "ttft_s", "TTFT (s)"),
    ("text", "tpot_s", "TPOT (s)"),
    ("text", "itl_s", "ITL (s)"),
    ("text", "e2el_s", "text E2EL (s)"),
    ("audio", "ttfp_s", "TTFP (s)"),
    ("audio", "gap_s", "inter-chunk gap (s)"),
    ("audio", "rtf", "RTF"),
    ("audio", "e2el_s", "audio E2EL (s)"),
    ("audio", "leading_silence_s", "leading silence (s)"),
    ("image", "e2el_s", "image E2EL (s)"),
    ("video", "e2el_s", "video E2EL (s)"),
    ("request", "e2el_s", "E2EL (s)"),
)
"""(modality, measure, name): every measure that has a spread, in the order in which it is shown."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measure at every level."""

    name: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """Rows that belong together; columns are the levels."""

    title: str
    rows: tuple[Row, ...]


def sections(reports: Sequence[LevelReport]) -> list[Section]:
    """All that there is to say, without the rows that nobody has a figure for."""
    found = [
        Section("latency, p50 / p90 / p99", _rows(reports, _latency_rows())),
        Section("throughput", _rows(reports, _throughput_rows())),
        Section("playback", _rows(reports, _playback_rows())),
        Section("stages, p50", _stage_rows(reports)),
        Section("client", _rows(reports, _client_rows())),
    ]
    return [section for section in found if section.rows]


def titles(reports: Sequence[LevelReport]) -> list[str]:
    """The heads of the columns."""
    repeats = len({report.repeat for report in reports}) > 1
    return [f"{report.load}{f' #{report.repeat + 1}' if repeats else ''}" for report in reports]


def notes(reports: Sequence[LevelReport]) -> list[str]:
    """What must be known to read the table."""
    found = []
    spreads = [
        value for report in reports for by_name in report.measures.values() for value in by_name.values()
    ]
    if any(value.too_few for value in spreads):
        needs = ", ".join(f"p{percent} needs {samples_needed(percent)}" for percent in PERCENTS)
        found.append(f"{TOO_FEW} fewer samples than the percentile needs, so the largest seen ({needs})")
    if any(report.client.is_bottleneck for report in reports):
        found.append(
            f"the client filled more than {BUSY_CPU_SHARE:.0%} of a core: it may be what limits the figures"
        )
    if any(report.goodput and report.goodput.share is None for report in reports):
        found.append("goodput: no request has what one of the bounds is about")
    for report, title in zip(reports, titles(reports), strict=True):
        num_callers = report.load.concurrency
        if num_callers and report.num_requests < BURSTS * num_callers:
            few = f"{report.num_requests} requests are fewer than {BURSTS} a caller"
            found.append(f"{title}: {few}: a burst, not a load")
        for code, error in report.errors.items():
            found.append(f"{title}: {error.count} failed with {code}, e.g. {error.example}")
    return found


def show(reports: Sequence[LevelReport], out: TextIO | None = None) -> None:
    """Print sections and notes."""
    from rich.console import Console
    from rich.text import Text

    out = out or sys.stdout
    # A pipe is as wide as its lines: a table that wraps cannot be read by a program.
    console = Console(file=out, highlight=False, width=None if out.isatty() else 10_000)
    for section in sections(reports):
        console.print(_drawn(section, titles(reports)))
    for note in notes(reports):
        console.print(Text(note), soft_wrap=True)


def triple(value: Spread | None) -> str:
    """`0.120 / 0.150 / 0.310*`; a star where there were too few samples."""
    if value is None:
        return NOTHING
    return " / ".join(
        f"{number(value.percentile(percent))}{TOO_FEW if percent in value.too_few else ''}"
        for percent in PERCENTS
    )


def number(value: float | None) -> str:
    """Of seconds a place below the millisecond where that is all there is; of larger figures fewer places."""
    if value is None:
        return NOTHING
    size = abs(value)
    places = 0 if not size else 4 if size < 0.00995 else 3 if size < 99.95 else 1
    return f"{value:.{places}f}"


def percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0%}"


_Cell = Callable[[LevelReport], str]


def _latency_rows() -> Iterable[tuple[str, _Cell]]:
    for modality, measure, name in MEASURES:
        yield name, lambda report, m=modality, n=measure: triple(report.measure(m, n))  # type: ignore[misc]


def _throughput_rows() -> Iterable[tuple[str, _Cell]]:
    yield "requests", lambda report: str(report.num_requests)
    yield "errors", lambda report: str(report.num_errors)
    yield "requests/s", lambda report: number(report.throughput.requests_per_s)
    yield "text tokens/s", lambda report: number(report.throughput.text_tokens_per_s or None)
    yield "audio seconds/s", lambda report: number(report.throughput.audio_s_per_s or None)
    yield "goodput", lambda report: percent(report.goodput.share) if report.goodput else NOTHING
    yield (
        "good requests/s",
        lambda report: number(report.goodput.requests_per_s) if report.goodput else NOTHING,
    )


def _playback_rows() -> Iterable[tuple[str, _Cell]]:
    yield "streams", lambda report: str(report.underruns.num_streams or NOTHING)
    yield "answers of one chunk", lambda report: str(report.underruns.num_single_chunk or NOTHING)
    yield "streams without underrun", lambda report: percent(report.underruns.share_clean)
    yield (
        "underruns",
        lambda report: str(report.underruns.num_underruns) if report.underruns.num_streams else NOTHING,
    )
    yield (
        "silence heard (s)",
        lambda report: number(report.underruns.silence_s) if report.underruns.num_streams else NOTHING,
    )
    yield (
        "silence of a stream (s), p50 / p90 / p99",
        lambda report: triple(report.underruns.silence_per_stream_s),
    )


def _client_rows() -> Iterable[tuple[str, _Cell]]:
    yield "sent late p99 (s)", lambda report: number(None if report.load.concurrency else report.late_p99_s)
    yield "CPU share of a core", lambda report: percent(report.client.cpu_share)
    yield "event loop late p99 (s)", lambda report: number(report.client.loop_lag_p99_s)
    yield "load average at the start", lambda report: f"{report.client.load_average:.1f}"


def _stage_rows(reports: Sequence[LevelReport]) -> tuple[Row, ...]:
    def rows() -> Iterable[tuple[str, _Cell]]:
        for name in dict.fromkeys(name for report in reports for name in report.stages):
            yield f"{name}: share of time", lambda r, n=name: percent(r.stages.get(n, UNTOLD).busy_share_p50)  # type: ignore[misc]
            yield f"{name}: busy (s)", lambda r, n=name: number(r.stages.get(n, UNTOLD).busy_p50_s)  # type: ignore[misc]
            yield f"{name}: open (s)", lambda r, n=name: number(r.stages.get(n, UNTOLD).open_p50_s)  # type: ignore[misc]
            yield (
                f"{name}: first output (s)",
                lambda r, n=name: number(r.stages.get(n, UNTOLD).first_output_p50_s),  # type: ignore[misc]
            )
        yield "chain overhead a chunk (s)", lambda report: number(report.chain_overhead_p50_s)

    return _rows(reports, rows())


def _rows(reports: Sequence[LevelReport], rows: Iterable[tuple[str, _Cell]]) -> tuple[Row, ...]:
    drawn = (Row(name, tuple(cell(report) for report in reports)) for name, cell in rows)
    return tuple(row for row in drawn if any(cell != NOTHING for cell in row.cells))


def _drawn(section: Section, columns: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    table.add_column(Text(section.title), no_wrap=True)
    for column in columns:
        table.add_column(Text(column), justify="right", no_wrap=True)
    for row in section.rows:
        table.add_row(Text(row.name), *map(Text, row.cells))
    return table
