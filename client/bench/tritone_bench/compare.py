"""Two runs side by side: every figure of both, their ratio, and how far repeats of each lie apart.

    A.json ─┐
            ├─► the same requests? ─► level by level ─► A, B, B / A
    B.json ─┘

Levels are matched by their load. Of a level that was repeated, the median of the repeats is compared and the
range is shown; where the two ranges overlap the ratio is within the spread and proves nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tritone_bench.document import Document
from tritone_bench.level import LevelReport
from tritone_bench.percentiles import PERCENTS, median
from tritone_bench.table import MEASURES, NOTHING, TOO_FEW, number
from tritone_client.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure at one level of two runs; each side is one value a repeat."""

    name: str
    a: tuple[float, ...]
    b: tuple[float, ...]
    has_too_few: bool = False  # samples for this percentile, in one of them

    @property
    def ratio(self) -> float | None:
        """Median of b / median of a; None if a is 0."""
        a, b = median(self.a), median(self.b)
        return None if not a or b is None else b / a

    @property
    def is_within_spread(self) -> bool | None:
        """Whether the ranges overlap; None unless both were repeated."""
        if min(len(self.a), len(self.b)) < 2:
            return None
        return min(self.a) <= max(self.b) and min(self.b) <= max(self.a)


@dataclass(frozen=True, slots=True)
class LevelComparison:
    """One level of two runs."""

    load: str
    ratios: tuple[Ratio, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """All levels that both runs have."""

    levels: tuple[LevelComparison, ...]
    differences: tuple[str, ...]  # in how the two were run
    unmatched: tuple[str, ...]  # levels of one run alone


def compare(a: Document, b: Document, names: tuple[Path, Path]) -> Comparison:
    """Compare two runs of one request set.

    Raises:
        InvalidRequest: they asked different requests, or have no level in common.
    """
    if a.request_set.digest != b.request_set.digest:
        raise InvalidRequest(
            f"{names[0]} and {names[1]} asked different requests ({_asked(a)}; {_asked(b)}); "
            "measure both with the same input, seed, lengths and number of requests"
        )
    loads = [list(dict.fromkeys(report.load for report in document.levels)) for document in (a, b)]
    both = [load for load in loads[0] if load in loads[1]]
    if not both:
        raise InvalidRequest(
            f"{names[0]} and {names[1]} have no level in common "
            f"({', '.join(map(str, loads[0]))}; {', '.join(map(str, loads[1]))}); "
            "measure both with the same levels"
        )
    levels = [
        LevelComparison(
            str(load),
            _ratios(
                [report for report in a.levels if report.load == load],
                [report for report in b.levels if report.load == load],
            ),
        )
        for load in both
    ]
    unmatched = [str(load) for side in loads for load in side if load not in both]
    return Comparison(tuple(levels), tuple(_differences(a, b)), tuple(unmatched))


def show(comparison: Comparison, names: tuple[Path, Path], out: TextIO | None = None) -> None:
    """Print a table a level."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = out or sys.stdout
    console = Console(file=out, highlight=False, width=None if out.isatty() else 10_000)
    print(f"A is {names[0]}, B is {names[1]}", file=out)
    for difference in comparison.differences:
        print(f"they differ in {difference}", file=out)
    for level in comparison.levels:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
        table.add_column(Text(level.load), no_wrap=True)
        for column in ("A", "B", "B / A"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for ratio in level.ratios:
            verdict = "within the spread" if ratio.is_within_spread else ""
            shown = NOTHING if ratio.ratio is None else f"{ratio.ratio:.2f}"
            name = f"{ratio.name}{TOO_FEW}" if ratio.has_too_few else ratio.name
            table.add_row(name, _range(ratio.a), _range(ratio.b), shown, verdict)
        console.print(table)
    if any(ratio.has_too_few for level in comparison.levels for ratio in level.ratios):
        print(f"{TOO_FEW} fewer samples than the percentile needs, in one of them or both", file=out)
    if comparison.unmatched:
        print(f"in one of the two alone: {', '.join(comparison.unmatched)}", file=out)
    if all(ratio.is_within_spread is None for level in comparison.levels for ratio in level.ratios):
        print("no level was repeated in both (--repeats), so how far runs lie apart is unknown", file=out)


def _ratios(a: Sequence[LevelReport], b: Sequence[LevelReport]) -> tuple[Ratio, ...]:
    ratios = []
    for name in _figures(a[0]):
        of_a, of_b = _seen(a, name), _seen(b, name)
        if of_a and of_b:
            few = any(name in _too_few(report) for report in (*a, *b))
            ratios.append(Ratio(name, of_a, of_b, few))
    return tuple(ratios)


def _seen(reports: Sequence[LevelReport], name: str) -> tuple[float, ...]:
    values = (_figures(report)[name] for report in reports)
    return tuple(value for value in values if value is not None)


def _too_few(report: LevelReport) -> set[str]:
    """Names of the percentiles that rest on too few samples."""
    spreads = [(name, report.measure(modality, measure)) for modality, measure, name in MEASURES]
    return {f"{name} p{percent}" for name, one in spreads if one is not None for percent in one.too_few}


def _figures(report: LevelReport) -> dict[str, float | None]:
    """Every figure that is compared, by its name."""
    figures: dict[str, float | None] = {}
    for modality, measure, name in MEASURES:
        spread = report.measure(modality, measure)
        for percent in PERCENTS:
            figures[f"{name} p{percent}"] = None if spread is None else spread.percentile(percent)
    throughput, underruns = report.throughput, report.underruns
    return {
        **figures,
        "requests/s": throughput.requests_per_s,
        "text tokens/s": throughput.text_tokens_per_s or None,
        "audio seconds/s": throughput.audio_s_per_s or None,
        "streams without underrun": underruns.share_clean,
        "silence heard (s)": underruns.silence_s if underruns.num_streams else None,
        "errors": float(report.num_errors),
        "goodput": report.goodput.share if report.goodput else None,
    }


def _differences(a: Document, b: Document) -> list[str]:
    pairs = {
        "the pipeline": (a.server.pipeline, b.server.pipeline),
        "the deploy digest": (a.server.deploy_digest, b.server.deploy_digest),
        "how answers are read": (a.plan.consume, b.plan.consume),
        "the duration of a level (s)": (a.plan.duration_s, b.plan.duration_s),
        "how answers are delivered": (a.plan.delivery, b.plan.delivery),
        "the processor": (a.environment.cpu, b.environment.cpu),
        "the number of cores": (a.environment.num_cores, b.environment.num_cores),
        "versions": (a.environment.versions, b.environment.versions),
        "the commit": (a.environment.commit, b.environment.commit),
        "the GPUs": (_gpus(a), _gpus(b)),
        "torch": (a.environment.torch, b.environment.torch),
        "triton": (a.environment.triton, b.environment.triton),
        "load average at the start": (
            f"{a.environment.load_average:.1f}",
            f"{b.environment.load_average:.1f}",
        ),
    }
    return [f"{what}: {of_a} and {of_b}" for what, (of_a, of_b) in pairs.items() if of_a != of_b]


def _gpus(document: Document) -> str:
    gpus, driver = document.environment.gpus, document.environment.driver
    if gpus is None:
        return "not noted"
    return f"{', '.join(gpu.name for gpu in gpus)}, driver {driver}" if gpus else "none"


def _asked(document: Document) -> str:
    facts = document.request_set
    count = "as many as time allowed" if facts.num_requests is None else f"{facts.num_requests} a level"
    return f"{facts.source}, {count}, seed {facts.first_seed}, digest {facts.digest}"


def _range(values: Sequence[float]) -> str:
    if len(values) == 1:
        return number(values[0])
    return f"{number(median(values))} ({number(min(values))} – {number(max(values))})"
