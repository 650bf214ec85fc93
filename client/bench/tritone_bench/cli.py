"""`tritone bench`: its arguments, and what becomes of them.

measure a pipeline   tritone bench NAME --concurrency 1,4,16 --json A.json --report A.html
draw a saved run     tritone bench --read A.json --report A.html
compare two          tritone bench --compare A.json B.json
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tritone_bench import compare, document, environment, table
from tritone_bench.arrivals import ARRIVALS, Load
from tritone_bench.bench import BenchPlan, run_bench
from tritone_bench.document import Document
from tritone_bench.goodput import read_bounds
from tritone_bench.level import LevelReport
from tritone_bench.load import CONSUMES
from tritone_bench.page import check_can_draw
from tritone_bench.progress import RunProgress
from tritone_bench.prompts import PROMPTS
from tritone_bench.request_file import read_prompts, read_requests
from tritone_bench.request_set import DELIVERY_OPTIONS, Ask, RequestSet
from tritone_client.client import AsyncTritoneClient
from tritone_client.errors import InvalidRequest, ServerFault
from tritone_client.request import RequestOptions

DEFAULT_CONCURRENCIES = (1, 8)
DEFAULT_NUM_REQUESTS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All but those that every command has which asks a server."""
    load = parser.add_argument_group("load").add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        type=_whole_list,
        metavar="LIST",
        help="callers at a time, a level each; default: 1,8",
    )
    load.add_argument(
        "--request-rate", type=_rates, metavar="LIST", help="requests a second, a level each, answered or not"
    )
    level = parser.add_argument_group("level")
    level.add_argument(
        "--arrival", choices=ARRIVALS, default="poisson", help="of --request-rate; default: poisson"
    )
    level.add_argument(
        "--requests", type=_whole, metavar="N", help="per level; default: 32, or what --duration-s allows"
    )
    level.add_argument(
        "--duration-s", type=float, metavar="S", help="begin no request of a level after so long"
    )
    level.add_argument("--warmup", type=int, default=1, metavar="N", help="unmeasured requests; default: 1")
    level.add_argument("--repeats", type=_whole, default=1, metavar="N", help="of all levels; default: 1")
    level.add_argument(
        "--consume",
        choices=CONSUMES,
        default="fast",
        help="read answers as fast as they come (default), or at the speed of a listener",
    )
    asked = parser.add_argument_group("what is asked", "default: a built-in list of questions")
    source = asked.add_mutually_exclusive_group()
    source.add_argument("--input", type=Path, metavar="FILE.jsonl", help="a request a line, as JSON")
    source.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt a line, as plain text")
    asked.add_argument("--modalities", metavar="LIST", help="default: all there are")
    asked.add_argument(
        "--fixed-length",
        action="append",
        type=_length,
        default=[],
        metavar="[STAGE=]N",
        help="exactly so many tokens of text, or of a stage that samples, e.g. talker=100; repeatable",
    )
    out = parser.add_argument_group("what is reported")
    out.add_argument(
        "--goodput", metavar="BOUNDS", help="share of requests that meet them all, e.g. ttfp=0.5,underrun=0"
    )
    out.add_argument("--json", type=Path, metavar="FILE", help="everything, written after every level")
    out.add_argument("--report", type=Path, metavar="FILE.html", help="one page with tables and pictures")
    out.add_argument("--plots", type=Path, metavar="FOLDER", help="the pictures alone, as PNG")
    saved = parser.add_argument_group("saved runs, without a server").add_mutually_exclusive_group()
    saved.add_argument("--read", type=Path, metavar="FILE.json", help="show, and draw, a run of --json")
    saved.add_argument("--compare", type=Path, nargs=2, metavar="FILE.json", help="two runs and their ratio")


def needs_server(args: argparse.Namespace) -> bool:
    """Whether anything is to be measured."""
    return args.read is None and args.compare is None


def show_saved(args: argparse.Namespace) -> int:
    """Show a saved run, or compare two.

    Raises:
        InvalidRequest: a file is no such run, two do not compare, or nothing can be drawn here.
        OSError: a file cannot be read or written.
    """
    if args.compare is not None:
        names = (args.compare[0], args.compare[1])
        compare.show(compare.compare(document.read(names[0]), document.read(names[1]), names), names)
        return 0
    run = document.read(args.read)
    _check_targets(args)
    if args.report or args.plots:
        check_can_draw()
    table.show(run.levels)
    _draw(args, run)
    return 0


def plan_of(args: argparse.Namespace, options: RequestOptions) -> BenchPlan:
    """What to run. options: of every request.

    Raises:
        InvalidRequest: naming the argument, or the line of a file.
        OSError: a file cannot be read.
    """
    first_seed = options.get("seed")
    shared: RequestOptions = {**options, "seed": None, "modalities": args.modalities}
    if args.fixed_length:
        fixed = shared["sampling"] = _fixed(args.fixed_length)
        if shared.get("max_tokens") is not None and "max_tokens" in fixed:
            raise InvalidRequest("--max-tokens and --fixed-length both limit the text; leave one of them out")
    if args.input is not None:
        source, asks = str(args.input), read_requests(args.input, shared)
    elif args.prompts is not None:
        source, asks = str(args.prompts), read_prompts(args.prompts, shared)
    else:
        source, asks = "built-in questions", tuple(Ask(prompt, shared) for prompt in PROMPTS)
    num_requests = args.requests
    if num_requests is None and args.duration_s is None:
        num_requests = DEFAULT_NUM_REQUESTS
    if args.request_rate is not None:
        loads = tuple(Load(request_rate_per_s=rate, arrival=args.arrival) for rate in args.request_rate)
    else:
        loads = tuple(Load(concurrency=number) for number in args.concurrency or DEFAULT_CONCURRENCIES)
    return BenchPlan(
        loads=loads,
        requests=RequestSet(source, asks, num_requests, first_seed or 0),
        consume=args.consume,
        duration_s=args.duration_s,
        num_warmup_requests=args.warmup,
        num_repeats=args.repeats,
        bounds={} if args.goodput is None else read_bounds(args.goodput),
    )


async def measure(
    args: argparse.Namespace,
    client: AsyncTritoneClient,
    plan: BenchPlan,
    options: RequestOptions,
) -> int:
    """Run the plan, show the table, and write what was asked for.

    Args:
        args: `arguments` are the words of the command line, for the report.
        options: of every request, as given.

    Raises:
        ServerFault: requests failed; everything is written all the same.
        InvalidRequest: the pictures cannot be drawn here; everything else is written all the same.
        TritoneError: already the warm-up fails.
    """
    _check_targets(args)
    around = environment.environment(args.arguments)
    server = environment.server_facts(client.url, await client.describe())
    reports: list[LevelReport] = []

    def run() -> Document:
        return Document(
            schema=document.SCHEMA,
            environment=around,
            server=server,
            plan=_plan_facts(plan, options),
            request_set=_request_set_facts(plan, args, options),
            levels=tuple(reports),
        )

    with RunProgress(sys.stderr, plan) as progress:
        async for report in run_bench(client, plan, progress):
            reports.append(report)
            if args.json is not None:
                document.write(run(), args.json)  # an interrupted run keeps its complete levels
    table.show(reports)
    if args.report or args.plots:
        check_can_draw()
    _draw(args, run())
    _complain_of_failures(reports)
    return 0


def _draw(args: argparse.Namespace, run: Document) -> None:
    if not (args.report or args.plots):
        return
    from tritone_bench import page, plots

    drawings = plots.draw(run.levels)
    if args.report is not None:
        args.report.write_text(page.render(run, drawings), encoding="utf-8")
        print(f"report in {args.report}", file=sys.stderr)
    if args.plots is not None:
        plots.save(drawings, args.plots)
        print(f"{len(drawings)} pictures in {args.plots}", file=sys.stderr)


def _complain_of_failures(reports: Sequence[LevelReport]) -> None:
    num_errors = sum(report.num_errors for report in reports)
    if not num_errors:
        return
    counts: dict[str, int] = {}
    examples: dict[str, str] = {}
    for report in reports:
        for code, error in report.errors.items():
            counts[code] = counts.get(code, 0) + error.count
            examples.setdefault(code, error.example)
    code = max(counts, key=lambda code: counts[code])
    raise ServerFault(f"{num_errors} requests failed, {counts[code]} of them with {code}: {examples[code]}")


def _check_targets(args: argparse.Namespace) -> None:
    """Raise InvalidRequest before the run for what could not be written after it."""
    for path in (args.json, args.report):
        if path is None:
            continue
        if not path.parent.is_dir():
            raise InvalidRequest(
                f"{path}: there is no folder {str(path.parent)!r} to write it into; make it first"
            )
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise InvalidRequest(f"{path} cannot be written; give another name")
    if args.plots is not None and args.plots.exists() and not args.plots.is_dir():
        raise InvalidRequest(f"{args.plots} is a file; give a folder for the pictures")


def _plan_facts(plan: BenchPlan, options: RequestOptions) -> document.PlanFacts:
    return document.PlanFacts(
        consume=plan.consume,
        duration_s=plan.duration_s,
        num_warmup_requests=plan.num_warmup_requests,
        num_repeats=plan.num_repeats,
        delivery={name: value for name, value in _given(options).items() if name in DELIVERY_OPTIONS},
    )


def _request_set_facts(
    plan: BenchPlan, args: argparse.Namespace, options: RequestOptions
) -> document.RequestSetFacts:
    asked = {**_given(options), "modalities": args.modalities, "sampling": _fixed(args.fixed_length) or None}
    return document.RequestSetFacts(
        source=plan.requests.source,
        digest=plan.requests.digest,
        num_different=len(plan.requests.asks),
        num_requests=plan.requests.num_requests,
        first_seed=plan.requests.first_seed,
        options={
            name: value
            for name, value in asked.items()
            if value is not None and name not in DELIVERY_OPTIONS and name != "seed"
        },
    )


def _given(options: RequestOptions) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _fixed(lengths: Sequence[tuple[str | None, int]]) -> dict[str, Any]:
    """Sampling settings under which a stage makes exactly so many tokens or frames."""
    sampling: dict[str, Any] = {}
    for stage, length in lengths:
        exactly = {"min_tokens": length, "max_tokens": length}
        sampling |= exactly if stage is None else {stage: exactly}
    return sampling


def _length(text: str) -> tuple[str | None, int]:
    stage, equals, number = text.rpartition("=")
    if equals and not stage.strip():
        raise argparse.ArgumentTypeError(f"{text!r} names no stage; write N or STAGE=N")
    return (stage.strip() if equals else None), _whole(number)


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _whole_list(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_whole(part.strip()) for part in text.split(",")))


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        rates = (math.nan,)
    if not all(rate > 0 and math.isfinite(rate) for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of positive numbers, such as 0.5,1,2")
    return rates
