"""Ways to lay the stages of our server over processes on one GPU, each measured as all others are.

    <out>/ways/<way>/levels/ours-4.json …     documents of tritone_bench, one level each
                     servers/                 logs of the way's server
                     refused.txt              why it did not start, if it did not

A level whose file is there is not run again; neither is a way that did not start, until refused.txt is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from comparison import levels, tables
from comparison.servers import OURS
from tritone_bench.document import Document
from tritone_bench.table import NOTHING, number

STAGES = ("thinker", "talker", "code2wav")
SPEECH_RATE = "speech seconds per second"
VLLM_SHARE = 0.7  # of a GPU that talker and code2wav need as well
VLLM_STEP_TOKENS = 4096  # of prompts, beside those of running answers, which do not wait long for them


@dataclass(frozen=True)
class Way:
    """What the deploy file says differently."""

    meaning: str
    overrides: tuple[str, ...] = ()
    needs_gpu: bool = False


def _together(word: str, *stages: str) -> tuple[str, ...]:
    return tuple(f"stage.{stage}.colocate={word}" for stage in stages)


def _one_stream(*stages: str) -> tuple[str, ...]:
    return tuple(f"stage.{stage}.own_stream=false" for stage in stages)


SPEECH = STAGES[1:]
APART = ("mps=false",)  # which the profile turns on
WAYS: Mapping[str, Way] = {
    "apart": Way("a process a stage", APART),
    "mps": Way("the same under MPS", ("mps=true",), needs_gpu=True),
    "speech": Way("talker and code2wav in one process", (*_together("speech", *SPEECH), *APART)),
    "speech-mps": Way(
        "the same, and the thinker beside it, under MPS",
        (*_together("speech", *SPEECH), "mps=true"),
        needs_gpu=True,
    ),
    "speech-one-stream": Way(
        "talker and code2wav in one process and one stream",
        (*_together("speech", *SPEECH), *_one_stream(*SPEECH), *APART),
    ),
    "all": Way("all stages in one process", (*_together("all", *STAGES), *APART)),
}
DEFAULT = ("apart", "mps", "speech", "all")


def thinker_overrides(kind: str) -> tuple[str, ...]:
    """Of the thinker's engine, the same for every way."""
    if kind != "vllm":
        return ()
    return (
        "stage.thinker.engine.kind=vllm",
        f"stage.thinker.engine.prefill_chunk_tokens={VLLM_STEP_TOKENS}",
        f"stage.thinker.engine.engine_args.gpu_memory_utilization={VLLM_SHARE}",
        "stage.thinker.env={VLLM_USE_FLASHINFER_SAMPLER: '0'}",  # it would be compiled at the start
    )


class Measured:
    """The files of one way, with one kind of thinker."""

    def __init__(self, out: Path, way: str, thinker: str) -> None:
        self.name = way if thinker == "torch" else f"{way} ({thinker})"
        self.folder = out / "ways" / (way if thinker == "torch" else f"{way}-{thinker}")
        self.levels = levels.Levels(self.folder)
        self._refusal = self.folder / "refused.txt"

    @property
    def refusal(self) -> str | None:
        """Why its server did not start."""
        return self._refusal.read_text() if self._refusal.is_file() else None

    def refuse(self, reason: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._refusal.write_text(reason)

    def read(self) -> dict[int, Document]:
        return self.levels.read(OURS)


def all_measured(out: Path) -> list[Measured]:
    """What there is, in the order in which ways are listed."""
    found = [Measured(out, way, thinker) for thinker in ("torch", "vllm") for way in WAYS]
    return [measured for measured in found if measured.refusal is not None or measured.read()]


def table(measured: Sequence[Measured]) -> list[str]:
    """Lines of Markdown: every level of every way, beside the first way that has it; and what is best."""
    runs = {one.name: one.read() for one in measured}
    columns = {name: tables.COLUMNS[name] for name in ("TTFP s", SPEECH_RATE, "whole request s")}
    speech = columns[SPEECH_RATE][0]
    rows, best = [], []
    for concurrency in sorted({level for levels_of in runs.values() for level in levels_of}):
        made = {name: found[concurrency].levels[0] for name, found in runs.items() if concurrency in found}
        first = speech(next(iter(made.values())))
        for name, report in made.items():
            mine = speech(report)
            times = f"{mine / first:.2f}" if mine and first else NOTHING
            cells = [number(cell(report)) for cell, _ in columns.values()]
            rows.append([str(concurrency), name, *cells, times, str(report.num_errors)])
        good = {name: report for name, report in made.items() if not report.num_errors}
        if good:
            most = max(good, key=lambda name: speech(good[name]) or 0.0)
            soonest = min(good, key=lambda name: columns["TTFP s"][0](good[name]) or float("inf"))
            best.append(f"- at {concurrency}: most speech {most}, first sound soonest {soonest}")
    head = ["concurrency", "way", *columns, "times the first way's speech", "errors"]
    refused = [f"- {one.name} did not start: {one.refusal}" for one in measured if one.refusal is not None]
    return [*(tables.markdown(head, rows) if rows else []), "", *best, *refused]
