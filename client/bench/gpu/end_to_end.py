"""Our server against a peer on the same machine: the same requests, both tables, and the ratio.

    python client/bench/gpu/end_to_end.py levels --out OUT --peer-python PYTHON     both, one after the other
    python client/bench/gpu/end_to_end.py goodput --out OUT --only ours             rate by bisection
    python client/bench/gpu/end_to_end.py endurance --out OUT                      9 minutes at 32, 20 % leave
    python client/bench/gpu/end_to_end.py stages --out OUT --concurrency 64         steps against their floors
    python client/bench/gpu/end_to_end.py ways --out OUT                            processes, streams, MPS
    python client/bench/gpu/end_to_end.py report --out OUT                          what there is, again
    python client/bench/gpu/end_to_end.py start --out OUT, later stop               one server for several

    real-size config ─► checkpoint without weights ─► tritone serve --profile dummy_one_h200 ─┐
                                                  └─► the peer by its own recipe ─────────────┴─► OUT/

A full-size checkpoint with random weights is made in OUT on first use. What is in OUT already is not measured
again, so that one comparison may take several commands; remove a file to measure it anew. `--tiny` does it
all on a CPU with a tiny model, to try the way and not the speed. Exit status 1 if something failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE), *(str(ROOT / name) for name in ("backends", "client", "client/bench", "build"))]

from comparison import endurance, goodput_search, levels, stage_floors, tables, ways  # noqa: E402
from comparison.checkpoint_folder import checkpoint_folder  # noqa: E402
from comparison.servers import (  # noqa: E402
    OURS,
    PEER,
    KeptServers,
    NotReady,
    OurStart,
    PeerStart,
    Served,
    our_server,
    peer_server,
)
from comparison.stage_trace import traced  # noqa: E402
from comparison.workload import TINY, Workload  # noqa: E402
from tritone.pipelines.qwen3_omni.sizes import OmniSizes  # noqa: E402
from tritone_bench.arrivals import Load  # noqa: E402
from tritone_bench.load import run_level, warm_up  # noqa: E402

PROFILE = "dummy_one_h200"
STAGES = ("thinker", "talker", "code2wav")
NOTHING_REMEMBERED = "stage.thinker.engine.prefix_cache=false"  # nor by the peer: prompts are asked twice
TINY_OVERRIDES = (
    *(f"stage.{stage}.engine.load_format=dummy" for stage in STAGES),
    "stage.talker.engine.max_looped_frames=0",
)


@dataclass(frozen=True)
class Run:
    """One command."""

    args: argparse.Namespace

    @property
    def out(self) -> Path:
        folder: Path = self.args.out
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def workload(self) -> Workload:
        return TINY if self.args.tiny else Workload()

    @property
    def words(self) -> list[str]:
        return ["python", "client/bench/gpu/end_to_end.py", *self.args.words]

    @property
    def sides(self) -> tuple[str, ...]:
        """Whom to measure: the peer only where there is one."""
        if self.args.only:
            return (self.args.only,)
        return (OURS, PEER) if self.args.peer_python else (OURS,)

    @cached_property
    def checkpoint(self) -> Path:
        """A folder with config and processor files, and no weights."""
        if self.args.checkpoint:
            return Path(self.args.checkpoint)
        return checkpoint_folder(self.out / "checkpoint", self.args.tiny)

    @property
    def kept(self) -> KeptServers:
        return KeptServers(self.out / "servers")

    def python_of(self, side: str) -> str | None:
        """The interpreter of a side's engines, whose torch counts; None: this one."""
        python: str | None = self.args.engine_python if side == OURS else self.args.peer_python
        return python

    @contextmanager
    def served(self, side: str, keep: bool = False) -> Iterator[Served]:
        """The server of one side while it is measured; one that runs already, if there is one."""
        if side == OURS and self.args.url:
            yield Served(OURS, self.args.url, self.args.pid or os.getpid(), 0.0)
            return
        running = self.kept.find(side)
        if running is not None:
            yield running
            return
        if side == OURS:
            server = our_server(self.our_start(), self.out / "servers", self.args.start_s, keep)
        else:
            if not self.args.peer_python:
                raise RuntimeError("the peer needs --peer-python, an interpreter that has vllm-omni")
            peer = PeerStart(self.checkpoint, self.args.peer_python, tuple(self.args.peer_arg))
            server = peer_server(peer, self.out / "servers", self.args.start_s, keep)
        with server as served:
            print(f"{side} is ready after {served.start_s:.0f} s at {served.url}", flush=True)
            yield served

    def our_start(self, *overrides: str) -> OurStart:
        """overrides: more of them; the command line's go last."""
        profile = None if self.args.tiny and self.args.profile == PROFILE else self.args.profile
        words = (
            "profiling=true",
            NOTHING_REMEMBERED,
            *self._engine_overrides,
            *overrides,
            *self.args.overrides,
        )
        return OurStart(self.checkpoint, profile, words)

    @property
    def _engine_overrides(self) -> tuple[str, ...]:
        python = self.args.engine_python
        own = tuple(f"stage.{stage}.python={json.dumps(python)}" for stage in STAGES) if python else ()
        return (*(TINY_OVERRIDES if self.args.tiny else ()), *own)


def start(run: Run) -> int:
    """Leave one server running for the next commands; the two have no place on one GPU together."""
    side = run.args.only or OURS
    with run.served(side, keep=True) as served:
        run.kept.note(served)
    return 0


def stop(run: Run) -> int:
    for side in run.sides if run.args.only else (OURS, PEER):
        run.kept.end(side)
    return 0


def measure_levels(run: Run) -> int:
    kept = levels.Levels(run.out)
    for side in run.sides:
        missing = kept.missing(side, run.args.concurrency)
        if missing:
            with run.served(side) as served:
                for concurrency in missing:
                    one = levels.measure(served, run.workload, concurrency, run.words, run.python_of(side))
                    made = asyncio.run(one)
                    kept.write(side, concurrency, made)
                    print(f"{side}: concurrency {concurrency} measured", flush=True)
    return report(run)


def search_goodput(run: Run) -> int:
    for side in run.sides:
        file = run.out / f"goodput-{side}.json"
        if goodput_search.next_rate(goodput_search.read(file), run.args.rate) is None:
            continue
        with run.served(side) as served:
            search = goodput_search.search(
                served,
                run.workload,
                file,
                run.args.rate,
                duration_s=run.args.probe_s,
                samples=run.args.samples,
                most=run.args.probes,
            )
            asyncio.run(search)
    return report(run)


def endure(run: Run) -> int:
    for side in run.sides:
        with run.served(side) as served:
            minutes = endurance.endure(
                served, run.workload, run.args.concurrency[-1], run.args.duration_s, run.args.abort_share
            )
            endured = asyncio.run(minutes)
        endurance.write(run.out / f"endurance-{side}.json", endured)
    return report(run)


def measure_ways(run: Run) -> int:
    """A server for each way that lacks a level; one that does not start is noted, and the others go on."""
    for name in run.args.ways:
        way, kept = ways.WAYS[name], ways.Measured(run.out, name, run.args.thinker)
        missing = kept.levels.missing(OURS, run.args.concurrency)
        if not missing or kept.refusal is not None:
            continue
        if run.args.tiny and way.needs_gpu:
            print(f"{kept.name}: needs a GPU, and is left out", flush=True)
            continue
        start = run.our_start(*way.overrides, *ways.thinker_overrides(run.args.thinker))
        try:
            with our_server(start, kept.folder / "servers", run.args.start_s) as served:
                print(f"{kept.name}: ready after {served.start_s:.0f} s", flush=True)
                for concurrency in missing:
                    one = levels.measure(served, run.workload, concurrency, run.words, run.python_of(OURS))
                    made = asyncio.run(one)
                    kept.levels.write(OURS, concurrency, made)
        except RuntimeError as error:
            if not isinstance(error, NotReady):  # with more time it may be
                kept.refuse(str(error))
            print(f"{kept.name}: {error}", file=sys.stderr, flush=True)
    return report(run)


def measure_stages(run: Run) -> int:
    with run.served(OURS) as served:
        for concurrency in run.args.concurrency:
            steps = asyncio.run(_steps(run, served, concurrency))
            sizes = OmniSizes.read(run.checkpoint)
            chip = stage_floors.Chip(run.args.bandwidth_tb_s * 1e12, run.args.rate_tflops * 1e12)
            item_bytes = 4 if run.args.tiny else 2
            lines = stage_floors.table(steps, sizes, run.workload, item_bytes, chip)
            (run.out / f"stages-{concurrency}.md").write_text("\n".join(lines) + "\n")
    return report(run)


async def _steps(run: Run, served: Served, concurrency: int) -> dict[str, stage_floors.Step]:
    """Steps of each stage while so many callers ask, each several times."""
    requests = run.workload.requests(run.args.rounds * concurrency)
    async with served.client() as client:
        await warm_up(client, requests, 1)
        load = asyncio.create_task(run_level(client, Load(concurrency=concurrency), requests))
        kernels: dict[str, float] = {}
        if not run.args.tiny:
            kernels = await traced(client, served.pid, STAGES, run.out / "servers")
        steps = stage_floors.steps_of((await load).records)
    return {name: replace(step, kernel_s=kernels.get(name)) for name, step in steps.items()}


def report(run: Run) -> int:
    """Print all that OUT holds, and write it as pages."""
    kept = levels.Levels(run.out)
    sides = {side: kept.read(side) for side in (OURS, PEER)}
    parts = ["# Ours and the peer, end to end", "", tables.pages(sides)]
    good = True
    for side in (OURS, PEER):
        probes = goodput_search.read(run.out / f"goodput-{side}.json")
        if probes:
            done = goodput_search.next_rate(probes, run.args.rate) is None
            state = "" if done else ", so far: the search is not at its end"
            parts += [f"### goodput of {side}: {goodput_search.goodput(probes):.3f} requests/s{state}", ""]
            parts += [f"- {goodput_search.told(side, probe)}" for probe in probes] + [""]
        endured = endurance.read(run.out / f"endurance-{side}.json")
        if endured is not None:
            good = good and endured.is_good
            parts += [f"### endurance of {side}", "", endured.told(), ""]
        if sides[side]:
            made = levels.joined(list(sides[side].values()))
            good = good and not any(level.num_errors for level in made.levels)
            levels.write_pages(run.out, side, made)
    for file in sorted(run.out.glob("stages-*.md"), key=lambda file: int(file.stem.partition("-")[2])):
        parts += [f"### steps at concurrency {file.stem.partition('-')[2]}", "", file.read_text()]
    laid = ways.all_measured(run.out)
    if laid:
        good = good and all(one.refusal is None for one in laid)
        parts += ["### stages over processes, ours", "", *ways.table(laid), ""]
    text = "\n".join(parts)
    (run.out / "comparison.md").write_text(text)
    print(text)
    return 0 if good else 1


COMMANDS = {
    "start": (start, "start a server, and leave it for the next commands", "1"),
    "stop": (stop, "end what `start` started", "1"),
    "levels": (measure_levels, "all at once, at each concurrency", "1,4,16,64"),
    "goodput": (search_goodput, "the highest rate that is still served well", "1"),
    "endurance": (endure, "minutes under load, with callers who leave", "32"),
    "ways": (measure_ways, "stages apart, together, under MPS", "1,4,16,64"),
    "stages": (measure_stages, "steps of our stages against their floors", "1,4,16,64"),
    "report": (report, "what OUT holds", "1"),
}


def main(argv: list[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (function, meaning, concurrency) in COMMANDS.items():
        command = commands.add_parser(name, help=meaning)
        command.set_defaults(function=function, words=words)
        _add_arguments(command, concurrency)
    args = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with a command that is cut off
    try:
        status: int = args.function(Run(args))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return status


def _add_arguments(parser: argparse.ArgumentParser, concurrency: str) -> None:
    def add(option: str, **settings: Any) -> None:
        parser.add_argument(option, **settings)

    add("--out", type=Path, required=True, metavar="DIR", help="for checkpoint, logs and results")
    add("--only", choices=(OURS, PEER), help="one side; default: both, or ours without --peer-python")
    add("--concurrency", type=_whole_list, default=_whole_list(concurrency), metavar="LIST")
    add("--checkpoint", type=Path, metavar="DIR", help="another one than what is made in OUT")
    add("--profile", default=PROFILE, metavar="NAME", help=f"of our deploy file; default: {PROFILE}")
    add("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="of it, too")
    add("--url", metavar="HOST:PORT", help="of gRPC, of a `tritone serve` that runs; default: start one")
    add("--pid", type=int, metavar="N", help="of that one, for its memory and its traces")
    add("--engine-python", metavar="PYTHON", help="interpreter of our engines; default: the server's")
    add("--peer-python", metavar="PYTHON", help="an interpreter with vllm-omni")
    add("--peer-arg", action="append", default=[], metavar="WORD", help="one more argument of the peer")
    add("--start-s", type=float, default=540.0, metavar="S", help="that a server may take to start")
    add("--tiny", action="store_true", help="a tiny model on a CPU")
    add("--rate", type=float, default=1.0, metavar="N", help="goodput: the first rate")
    add("--probe-s", type=float, default=30.0, metavar="S", help="goodput: a rate is tried for, at least")
    add(
        "--samples",
        type=int,
        default=goodput_search.SAMPLES,
        metavar="N",
        help="goodput: and so many requests",
    )
    add("--probes", type=int, default=4, metavar="N", help="goodput: rates to try in this command")
    add("--duration-s", type=float, default=540.0, metavar="S", help="endurance: how long")
    add("--abort-share", type=float, default=0.2, metavar="X", help="endurance: of callers who leave")
    add("--rounds", type=int, default=3, metavar="N", help="stages: requests of a caller")
    add("--ways", type=_way_list, default=ways.DEFAULT, metavar="LIST", help=f"of {', '.join(ways.WAYS)}")
    add("--thinker", choices=("torch", "vllm"), default="torch", help="ways: its engine")
    add("--bandwidth-tb-s", type=float, default=4.8, metavar="N", help="stages: of the GPU's memory")
    add("--rate-tflops", type=float, default=989.0, metavar="N", help="stages: of its dense products")


def _way_list(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in ways.WAYS:
            raise argparse.ArgumentTypeError(f"there is no way '{name}'; give some of {', '.join(ways.WAYS)}")
    return names


def _whole_list(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
