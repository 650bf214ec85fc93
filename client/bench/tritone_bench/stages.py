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
from typing import Any

from tritone_bench.percentiles import median
from tritone_bench.record import RequestRecord


@dataclass(frozen=True, slots=True)
class StageReport:
    """One stage at one level: medians over the requests that tell them."""

    open_p50_s: float | None  # from its opening to its end, or in calls to it: waits included
    first_output_p50_s: float | None
    busy_p50_s: float | None
    busy_share_p50: float | None  # busy, of the whole request


UNTOLD = StageReport(None, None, None, None)


def report_stages(records: Sequence[RequestRecord]) -> dict[str, StageReport]:
    """The report of every stage that any answer tells of, in the order of their first outputs."""
    begun_s: dict[str, list[float | None]] = {}
    for record in records:
        for name, stage in stages_of(record.timings).items():
            begun_s.setdefault(name, []).append(first_moment(stage))
    names = sorted(begun_s, key=lambda name: median(begun_s[name]) or 0.0)
    return {name: _report(name, records) for name in names}


def first_moment(stage: Mapping[str, Any]) -> float | None:
    """When a stage first gave something, which orders stages as a request passes them; None if untold.

    Not when it was opened: those that wait for others are opened before them.
    """
    moment: float | None = stage.get("first_output_at_s", stage.get("opened_at_s"))
    return moment


def chain_overhead(records: Sequence[RequestRecord]) -> float | None:
    """Seconds per chunk of sound in which no stage computed, the median; None if no answer says so."""
    told = [record for record in records if record.audio and "idle_s" in record.timings]
    return median(record.timings["idle_s"] / len(record.audio) for record in told)


def stages_of(timings: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The timings of every stage, by its name; empty if the server tells none."""
    stages: Mapping[str, Mapping[str, Any]] = timings.get("stages", {})
    return stages


def _report(name: str, records: Sequence[RequestRecord]) -> StageReport:
    told = [
        (stages[name], r.timings.get("total_s")) for r in records if name in (stages := stages_of(r.timings))
    ]
    return StageReport(
        open_p50_s=median(stage.get("total_s", stage.get("calls_s")) for stage, _ in told),
        first_output_p50_s=median(stage.get("first_output_s") for stage, _ in told),
        busy_p50_s=median(stage.get("busy_s") for stage, _ in told),
        busy_share_p50=median(
            stage["busy_s"] / total_s for stage, total_s in told if "busy_s" in stage and total_s
        ),
    )
