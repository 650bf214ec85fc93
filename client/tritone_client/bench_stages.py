"""Where the time of an answer went, as the server says in `done`.

    thinker   ▓▓▓▓▓▓░░▓▓░▓▓                     ▓ busy: the stage computes
    talker        ▓▓▓░▓▓▓▓░▓▓▓░▓▓               ░ open, but it waits: for input, for its turn, for a batch
    code2wav         ▓░░░▓░░░░▓▓
              ────────────────────► time        idle: no stage computes, the chain itself takes this long

Stages work at the same time, so their shares may add up to more than the whole. A pipeline that does not say
how long a stage was busy, or how long all were idle, gives None there: waits must not pass for work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tritone_client.events import Done, StageTimings

if TYPE_CHECKING:
    from tritone_client.bench import LevelReport


@dataclass(frozen=True, slots=True)
class StageTimes:
    """What one answer tells of its stages."""

    stages: Mapping[str, StageTimings]
    total_s: float | None  # the whole request, on the server
    idle_s: float | None  # of it, while no stage computed
    num_audio_chunks: int

    @staticmethod
    def of(done: Done, num_audio_chunks: int) -> StageTimes:
        timings = done.info.get("timings", {})
        return StageTimes(done.stage_timings, timings.get("total_s"), timings.get("idle_s"), num_audio_chunks)


@dataclass(frozen=True, slots=True)
class StageReport:
    """One stage at one level of concurrency: medians over the requests that tell them."""

    open_p50_s: float | None  # from its opening to its end, or in calls to it: waits included
    first_output_p50_s: float | None
    busy_p50_s: float | None
    busy_share_p50: float | None  # busy, of the whole request


UNTOLD = StageReport(None, None, None, None)


def report_stages(answers: Sequence[StageTimes]) -> dict[str, StageReport]:
    """The report of every stage that any answer tells of, in the order of first mention."""
    names = dict.fromkeys(name for answer in answers for name in answer.stages)
    return {name: _report(name, answers) for name in names}


def chain_overhead(answers: Sequence[StageTimes]) -> float | None:
    """Seconds per audio chunk in which no stage computed, the median; None if no answer says so."""
    per_chunk = [
        answer.idle_s / answer.num_audio_chunks
        for answer in answers
        if answer.idle_s is not None and answer.num_audio_chunks
    ]
    return percentile(per_chunk, 50)


def stage_table(reports: Sequence[LevelReport]) -> str:
    """The stages of all levels side by side, one column per level; empty if no answer told of a stage."""
    rows = [("concurrency", [str(report.concurrency) for report in reports])]
    for name in dict.fromkeys(name for report in reports for name in report.stages):
        stages = [report.stages.get(name, UNTOLD) for report in reports]
        rows += [
            (f"{name}: share of time p50", [_percent(stage.busy_share_p50) for stage in stages]),
            (f"{name}: busy p50 (s)", [_seconds(stage.busy_p50_s) for stage in stages]),
            (f"{name}: open p50 (s)", [_seconds(stage.open_p50_s) for stage in stages]),
            (f"{name}: first output p50 (s)", [_seconds(stage.first_output_p50_s) for stage in stages]),
        ]
    overheads = [report.chain_overhead_p50_s for report in reports]
    rows.append(("chain overhead / audio chunk p50 (s)", [_seconds(overhead) for overhead in overheads]))
    told = [row for row in rows if any(cell != "-" for cell in row[1])]
    return align(told) if len(told) > 1 else ""


def align(rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """A table of rows (name, cells), ruled below the first."""
    name_width = max(len(name) for name, _ in rows)
    widths = [max(map(len, column)) for column in zip(*(cells for _, cells in rows), strict=True)]
    lines = []
    for name, cells in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join([name.ljust(name_width), *aligned]))
    rule = "─" * len(lines[0])
    return "\n".join([lines[0], rule, *lines[1:]])


def percentile(values: Sequence[float], percent: float) -> float | None:
    """A value that was really seen, not one between two."""
    return float(np.percentile(values, percent, method="inverted_cdf")) if values else None


def _report(name: str, answers: Sequence[StageTimes]) -> StageReport:
    told = [(answer.stages[name], answer.total_s) for answer in answers if name in answer.stages]
    shares = [stage["busy_s"] / total_s for stage, total_s in told if "busy_s" in stage and total_s]
    return StageReport(
        open_p50_s=_median([stage.get("total_s", stage.get("calls_s")) for stage, _ in told]),
        first_output_p50_s=_median([stage.get("first_output_s") for stage, _ in told]),
        busy_p50_s=_median([stage.get("busy_s") for stage, _ in told]),
        busy_share_p50=percentile(shares, 50),
    )


def _median(values: Sequence[float | None]) -> float | None:
    return percentile([value for value in values if value is not None], 50)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
