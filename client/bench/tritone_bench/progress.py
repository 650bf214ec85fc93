"""How far a run is: a live line on a terminal, a sentence a level elsewhere. Both on stderr."""

from __future__ import annotations

from types import TracebackType
from typing import TextIO

from tritone_bench.arrivals import Load
from tritone_bench.bench import BenchPlan
from tritone_bench.level import LevelReport
from tritone_bench.record import RequestRecord


class RunProgress:
    """Watches a run; a context manager."""

    def __init__(self, out: TextIO, plan: BenchPlan):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._plan = plan
        self._out = out
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(file=out, highlight=False),
            transient=True,
            disable=not out.isatty(),
        )
        self._task = self._progress.add_task("warm-up", total=plan.num_warmup_requests, note="")
        self._num_errors = 0

    def __enter__(self) -> RunProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def warming_up(self, plan: BenchPlan) -> None:
        return None  # it is what the line says from the start

    def level_begins(self, load: Load, repeat: int) -> None:
        self._num_errors = 0
        self._progress.remove_task(self._task)
        title, total = f"{load}{_turn(repeat, self._plan)}", self._plan.requests.num_requests
        self._task = self._progress.add_task(title, total=total, note="")

    def request_ends(self, record: RequestRecord) -> None:
        self._num_errors += record.failure is not None
        note = f"{self._num_errors} failed" if self._num_errors else ""
        self._progress.update(self._task, advance=1, note=note)

    def level_ends(self, report: LevelReport) -> None:
        turn = _turn(report.repeat, self._plan)
        failed = f", {report.num_errors} failed" if report.num_errors else ""
        line = f"{report.load}{turn}: {report.num_requests} requests in {report.wall_s:.1f} s{failed}"
        if self._progress.disable:
            print(line, file=self._out, flush=True)
        else:
            self._progress.console.print(line)


def _turn(repeat: int, plan: BenchPlan) -> str:
    return f" ({repeat + 1} of {plan.num_repeats})" if plan.num_repeats > 1 else ""
