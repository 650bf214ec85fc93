"""So many requests at once, all of the same lengths: what each side makes of them, kept a file a level.

    <out>/levels/ours-4.json  peer-4.json  …     documents of tritone_bench, one level each

A level is run twice and the second run counts: the first meets what is not warm yet. A level whose file is
there is not run again, so that a comparison can be made in several goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from comparison.servers import OURS, PIPELINE, Served
from comparison.workload import Workload
from tritone_bench import document, environment, page
from tritone_bench.arrivals import Load
from tritone_bench.bench import BenchPlan, run_bench
from tritone_bench.document import Document
from tritone_bench.level import LevelReport
from tritone_bench.request_set import RequestSet
from tritone_client.errors import InvalidRequest

RUNS = 2


class Levels:
    """The files of a folder."""

    def __init__(self, out: Path) -> None:
        self._folder = out / "levels"

    def missing(self, side: str, concurrencies: Sequence[int]) -> list[int]:
        """Those that were not measured yet."""
        return [number for number in concurrencies if not self._file(side, number).is_file()]

    def read(self, side: str) -> dict[int, Document]:
        """What there is of one side, by concurrency."""
        found = {}
        for file in self._folder.glob(f"{side}-*.json"):
            found[int(file.stem.rpartition("-")[2])] = document.read(file)
        return dict(sorted(found.items()))

    def write(self, side: str, concurrency: int, run: Document) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        document.write(run, self._file(side, concurrency))

    def _file(self, side: str, concurrency: int) -> Path:
        return self._folder / f"{side}-{concurrency}.json"


async def measure(
    served: Served, workload: Workload, concurrency: int, words: Sequence[str], python: str | None = None
) -> Document:
    """One level. words: of the command, for the report; python: interpreter of the engines, else this one."""
    requests = workload.requests(concurrency)
    async with served.client() as client:
        plan = BenchPlan((Load(concurrency=concurrency),), requests, num_repeats=RUNS)
        reports = [report async for report in run_bench(client, plan)]
        return described(served, await facts(served, client), requests, words, (reports[-1],), RUNS, python)


def described(
    served: Served,
    about: environment.ServerFacts,
    requests: RequestSet,
    words: Sequence[str],
    reports: tuple[LevelReport, ...],
    runs: int,
    python: str | None,
) -> Document:
    """Reports with where and how they were made."""
    return Document(
        schema=document.SCHEMA,
        environment=replace(environment.environment(words, python), command=" ".join(words)),
        server=about,
        plan=document.PlanFacts("fast", None, 1, runs, {}),
        request_set=document.RequestSetFacts(
            source=f"{requests.source}; all at once, the last of {runs} runs",
            digest=requests.digest,
            num_different=len(requests.asks),
            num_requests=requests.num_requests,
            first_seed=requests.first_seed,
            options={},
        ),
        levels=tuple(replace(report, repeat=0) for report in reports),
    )


async def facts(served: Served, client: Any) -> environment.ServerFacts:
    """What the server says of itself; the peer says nothing."""
    if served.side == OURS:
        return environment.server_facts(served.url, await client.describe())
    return environment.ServerFacts(served.url, f"peer of {PIPELINE}", None, None, ("text", "audio"), None, {})


def joined(runs: Sequence[Document]) -> Document:
    """Documents of one side as one, for a page with all levels."""
    first = runs[0]
    return replace(
        first,
        levels=tuple(level for run in runs for level in run.levels),
        request_set=replace(first.request_set, num_requests=None),
    )


def write_pages(out: Path, side: str, run: Document) -> None:
    """All levels of a side as one document, and where pictures can be drawn as a page."""
    file, picture = out / f"{side}.json", out / f"{side}.html"
    if picture.is_file() and file.is_file() and file.read_bytes() == document.encode(run):
        return
    document.write(run, file)
    try:
        page.check_can_draw()
    except InvalidRequest:
        return  # `report` draws it where matplotlib is
    from tritone_bench import plots

    picture.write_text(page.render(run, plots.draw(run.levels)), encoding="utf-8")
