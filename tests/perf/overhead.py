"""What a setting costs: processor time per request of two servers that differ in it, measured in turns.

    python tests/perf/overhead.py --b 'tracing.otlp_endpoint={collector}'
    python tests/perf/overhead.py --a metrics=false --b metrics=true

Both serve the weight-free pipeline, on which nothing but the chain itself takes time, so a cost shows as much
as it ever can. They take turns with the same requests, A B B A, so that other work of the machine meets both;
what counts is the ratio within each round. {collector} stands for the URL of a collector of spans that keeps
nothing, whose own time does not count, like the client's. On a machine that others use, --together has both
serve at the same time: what disturbs one then disturbs the other as much.

    collector ◄─ spans ─ server B ◄─┐
                         server A ◄─┴─ the same requests, by turns
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path += [str(Path(__file__).parents[1] / "soak"), str(Path(__file__).parents[2] / "backends")]

from soak_listener import all_of
from soak_load import PIPELINE, mixed_jobs
from soak_server import SoakServer, served
from soak_watch import processor_s

COLLECTOR = Path(__file__).with_name("trace_collector.py")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    override = {"action": "append", "default": [], "metavar": "KEY=VALUE"}
    parser.add_argument("--a", help="overrides of server A's deploy file; repeatable", **override)
    parser.add_argument("--b", help="of server B's", **override)
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument("--requests", type=int, default=96, metavar="N", help="a turn; default: 96")
    parser.add_argument("--at-once", type=int, default=32, metavar="N", help="default: 32")
    parser.add_argument("--together", action="store_true", help="both at the same time, not by turns")
    parser.add_argument("--limit", type=float, metavar="R", help="exit 1 if the median ratio is above")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    args = parser.parse_args(argv)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overhead-")))
        url = stack.enter_context(collector()) if "{collector}" in str(args.a + args.b) else ""
        servers = []
        for name, overrides in (("a", args.a), ("b", args.b)):
            (folder / name).mkdir()
            filled = tuple(text.replace("{collector}", url) for text in overrides)
            servers.append(stack.enter_context(served(PIPELINE, folder / name, filled)))
        work = Work(args.requests, args.at_once, args.together)
        rounds = list(measure(*servers, args.rounds, work))
    ratios = sorted(b / a for a, b in rounds)
    figures = {
        "a": args.a,
        "b": args.b,
        "processor_ms_per_request": [[round(1000 * value, 2) for value in pair] for pair in rounds],
        "ratio": {"median": median(ratios), "least": ratios[0], "most": ratios[-1]},
        "load_average": os.getloadavg()[0],
    }
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    print(
        f"B / A, processor time per request: {median(ratios):.3f} ({ratios[0]:.3f} - {ratios[-1]:.3f}), "
        f"{args.rounds} rounds of {args.requests} requests, {args.at_once} at a time; "
        f"load average {figures['load_average']:.1f}"
    )
    return int(args.limit is not None and median(ratios) > args.limit)


@dataclass(frozen=True)
class Work:
    """What a server is given in a round."""

    requests: int
    at_once: int
    together: bool  # with the other server


def measure(a: SoakServer, b: SoakServer, rounds: int, work: Work) -> Iterator[tuple[float, float]]:
    """Seconds of processor time per request of A and of B, a pair a round; the first round warms both up."""
    for number in range(rounds + 1):
        order = (a, b) if number % 2 else (b, a)
        first, second = asyncio.run(one_round(order, number, work))
        pair = (first, second) if order == (a, b) else (second, first)
        if number:
            print(f"round {number}: A {1000 * pair[0]:.1f} ms, B {1000 * pair[1]:.1f} ms", flush=True)
            yield pair


async def one_round(servers: tuple[SoakServer, SoakServer], seed: int, work: Work) -> list[float]:
    """What each took a request."""
    if work.together:
        return await asyncio.gather(*(turn(server, seed, work) for server in servers))
    return [await turn(server, seed, work) for server in servers]


async def turn(server: SoakServer, seed: int, work: Work) -> float:
    async with server.client(PIPELINE) as client:
        before_s = processor_s(server.process.pid)
        outcomes = await all_of(client, mixed_jobs(random.Random(seed), work.requests), work.at_once)
        taken_s = processor_s(server.process.pid) - before_s
    faults = [outcome for outcome in outcomes if outcome.kind != "exact"]
    if faults:
        raise SystemExit(f"{len(faults)} of {work.requests} requests failed, e.g. {faults[0]}")
    return taken_s / work.requests


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
