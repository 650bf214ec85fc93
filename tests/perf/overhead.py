"""What a setting costs: processor time per request of two servers that differ in it, measured in turns.

    python tests/perf/overhead.py --b 'tracing.otlp_endpoint={collector}'
    python tests/perf/overhead.py --a metrics=false --b metrics=true
    python tests/perf/overhead.py --sampled --requests 192

Both serve the weight-free pipeline, on which nothing but the chain itself takes time, so a cost shows as much
as it ever can. They take turns with the same requests, A B B A, so that other work of the machine meets both;
what counts is the ratio within each round. A turn's time is what the processes of its server have taken since
its turn before, so that spans count that are sent while the other has its turn. Two servers that differ in
nothing still differ, by a tenth and more, in how tritonserver comes to batch: --starts begins anew with
others. --sampled leaves that out: A and B ask the same server, which sends spans of those requests only whose
callers want it, and those are B's; a turn then ends when its spans are sent. {collector} stands for the URL
of a collector of spans that keeps nothing, whose own time does not count, like the client's. On a machine
that others use, --together has both serve at the same time: what disturbs one then disturbs the other as
much.

    collector ◄─ spans ─ server B ◄─┐
                         server A ◄─┴─ the same requests, by turns
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

sys.path += [str(Path(__file__).parents[1] / "soak"), str(Path(__file__).parents[2] / "backends")]

from paired import Ratio
from soak_listener import all_of
from soak_load import PIPELINE, mixed_jobs
from soak_server import SoakServer, served
from soak_watch import processors_s

SCHEDULE = "OTEL_BSP_SCHEDULE_DELAY"
SEND_EVERY_S = 5.0  # where a turn waits for it
COLLECTOR = Path(__file__).with_name("trace_collector.py")

Round = tuple[dict[str, float], dict[str, float]]
"""Of A and of B, by process: milliseconds of processor time per request."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    override = {"action": "append", "default": [], "metavar": "KEY=VALUE"}
    parser.add_argument("--a", help="overrides of server A's deploy file; repeatable", **override)
    parser.add_argument("--b", help="of server B's", **override)
    parser.add_argument("--starts", type=int, default=3, metavar="N", help="of both servers; default: 3")
    parser.add_argument("--rounds", type=int, default=12, metavar="N", help="a start; default: 12")
    parser.add_argument("--requests", type=int, default=48, metavar="N", help="a turn; default: 48")
    parser.add_argument("--at-once", type=int, default=32, metavar="N", help="default: 32")
    parser.add_argument("--together", action="store_true", help="both at the same time, not by turns")
    parser.add_argument("--sampled", action="store_true", help="of one server: B's callers want spans")
    parser.add_argument("--limit", type=float, metavar="R", help="exit 1 if the ratio is above")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    args = parser.parse_args(argv)
    if args.sampled:
        os.environ[SCHEDULE] = f"{1000 * SEND_EVERY_S:.0f}"
        args.b += ["tracing.otlp_endpoint={collector}", "tracing.sample_ratio=0"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with a command that is cut off
    work = Work(args.rounds, args.requests, args.at_once, args.together, args.sampled)
    with ExitStack() as stack:
        url = stack.enter_context(collector()) if "{collector}" in str(args.a + args.b) else ""
        overrides = [tuple(text.replace("{collector}", url) for text in texts) for texts in (args.a, args.b)]
        starts = [list(one_start(overrides, work)) for _ in range(args.starts)]
    rounds = [measured for start in starts for measured in start]
    ratio = Ratio.of(map(total, rounds))
    load = os.getloadavg()[0]
    if args.json:
        figures = {
            "a": args.a,
            "b": args.b,
            "processor_ms_per_request": starts,
            "ratio": asdict(ratio),
            "load_average": load,
        }
        args.json.write_text(json.dumps(figures, indent=1))
    print_processes(rounds)
    by_start = ", ".join(f"{median(b / a for a, b in map(total, start)):.3f}" for start in starts)
    print(f"B / A, processor time per request: {ratio}")
    print(f"medians by start: {by_start}; load average {load:.1f}")
    return int(args.limit is not None and ratio.mean > args.limit)


@dataclass(frozen=True)
class Work:
    """What the servers of a start are given."""

    rounds: int
    requests: int
    at_once: int
    together: bool  # both at the same time
    sampled: bool  # A and B are one server, and B's callers want spans


class Meter:
    """What a server's processes take."""

    def __init__(self, server: SoakServer, sampled: bool = False) -> None:
        """sampled: the callers want spans."""
        self.server = server
        self._sampled = sampled
        self._read = processors_s(server.process.pid)

    async def turn(self, seed: int, work: Work) -> dict[str, float]:
        """By process, milliseconds of processor time per request since the turn before."""
        jobs = mixed_jobs(random.Random(seed), work.requests)
        if self._sampled:
            jobs = [replace(job, parameters={"traceparent": new_traceparent()}) for job in jobs]
        if work.sampled:
            self._read = processors_s(self.server.process.pid)  # the turn before was on the same processes
        async with self.server.client(PIPELINE) as client:
            outcomes = await all_of(client, jobs, work.at_once)
        faults = [outcome for outcome in outcomes if outcome.kind != "exact"]
        if faults:
            raise SystemExit(f"{len(faults)} of {work.requests} requests failed, e.g. {faults[0]}")
        if work.sampled:
            await asyncio.sleep(1.1 * SEND_EVERY_S)
        before, self._read = self._read, processors_s(self.server.process.pid)
        taken = {name: now_s - before.get(name, 0.0) for name, now_s in self._read.items()}
        return {name: 1000 * taken_s / work.requests for name, taken_s in taken.items()}


def new_traceparent() -> str:
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


def one_start(overrides: list[tuple[str, ...]], work: Work) -> Iterator[Round]:
    """The rounds of two servers; the one before them, which warms them up, is left out."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overhead-")))
        if work.sampled:
            (folder / "both").mkdir()
            server = stack.enter_context(served(PIPELINE, folder / "both", overrides[1]))
            meters = [Meter(server), Meter(server, sampled=True)]
        else:
            for name in "ab":
                (folder / name).mkdir()
            each = zip("ab", overrides, strict=True)
            meters = [Meter(stack.enter_context(served(PIPELINE, folder / name, its))) for name, its in each]
        for number in range(work.rounds + 1):
            measured = asyncio.run(one_round(meters, number, work))
            if number:
                a, b = total(measured)
                print(f"round {number}: A {a:.1f} ms, B {b:.1f} ms", flush=True)
                yield measured


async def one_round(meters: list[Meter], number: int, work: Work) -> Round:
    a, b = meters
    if work.together:
        first, second = await asyncio.gather(a.turn(number, work), b.turn(number, work))
        return first, second
    if number % 2:
        return await a.turn(number, work), await b.turn(number, work)
    late = await b.turn(number, work)
    return await a.turn(number, work), late


def total(measured: Round) -> tuple[float, float]:
    a, b = measured
    return sum(a.values()), sum(b.values())


def print_processes(rounds: list[Round]) -> None:
    names = sorted({name for measured in rounds for times in measured for name in times})
    print(f"{'ms per request':24}{'A':>9}{'B':>9}{'B - A':>9}")
    for name in names:
        a, b = (sum(measured[i].get(name, 0.0) for measured in rounds) / len(rounds) for i in (0, 1))
        print(f"{name:24}{a:9.3f}{b:9.3f}{b - a:+9.3f}")


@contextmanager
def collector() -> Iterator[str]:
    """The URL of one in a process of its own."""
    words = [sys.executable, str(COLLECTOR)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


if __name__ == "__main__":
    sys.exit(main())
