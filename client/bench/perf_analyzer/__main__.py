"""The command `python -m perf_analyzer`: run the recipes, or show what an export says.

    run PIPELINE      against a server; `make perf` starts one, and fetches the program
    show EXPORT …     the figures of files that perf_analyzer wrote with --profile-export-file

Exit codes: 0 every request was answered, 1 not (one sentence on stderr), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from perf_analyzer.export import read
from perf_analyzer.figures import Figures, figures, table
from perf_analyzer.recipe import RECIPES, Load, PerfAnalyzer, Target, inputs_of
from tritone_client.errors import InvalidRequest, TritoneError

CONCURRENCIES = (1, 4)
RATE_HZ = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    words = list(sys.argv[1:] if argv is None else argv)
    border = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:border])
    args.extra = words[border + 1 :]
    try:
        rows = list(args.rows(args))
    except TritoneError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    if args.json:
        for heading, level in rows:
            print(json.dumps({"recipe": heading, **asdict(level)}))
    else:
        for heading in dict.fromkeys(heading for heading, _ in rows):
            print(f"\n{table(heading, [level for name, level in rows if name == heading])}")
    errors = [error for _, level in rows for error in level.errors]
    if errors:
        failed = sum(sum(level.errors.values()) for _, level in rows)
        return _fail(f"{failed} requests failed, with {errors[0]}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perf_analyzer", description="perf_analyzer against a pipeline, in our measures."
    )
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)

    run = commands.add_parser(
        "run",
        help="run perf_analyzer against a server",
        epilog="Options for perf_analyzer itself may follow `--`, e.g. -- --request-parameter=seed:7:int",
    )
    run.add_argument("pipeline", metavar="PIPELINE")
    run.add_argument(
        "--url", default="127.0.0.1:8001", metavar="HOST:PORT", help="gRPC; default: %(default)s"
    )
    run.add_argument("--http", default="127.0.0.1:8000", metavar="HOST:PORT", help="default: %(default)s")
    run.add_argument(
        "--recipes", default=",".join(RECIPES), metavar="LIST", help="of %(default)s; default: all"
    )
    run.add_argument(
        "--concurrency", type=_numbers, default=CONCURRENCIES, metavar="LIST", help="default: 1,4; 0: none"
    )
    run.add_argument(
        "--rate", type=float, default=RATE_HZ, metavar="R", help="and R requests/s; default: 2; 0: none"
    )
    run.add_argument("--distribution", choices=("poisson", "constant"), default="constant")
    run.add_argument("--requests", type=int, default=20, metavar="N", help="in each run; default: 20")
    run.add_argument("--input", type=Path, metavar="FILE", help="default: the ready one of the pipeline")
    run.add_argument("--out", type=Path, metavar="DIR", help="keep inputs and exports there")
    run.add_argument("--program", type=Path, metavar="FILE", help="default: the perf_analyzer on PATH")
    run.add_argument("--json", action="store_true", help="print JSON lines")
    run.set_defaults(rows=_run)

    show = commands.add_parser("show", help="the figures of exports")
    show.add_argument("exports", nargs="+", type=Path, metavar="EXPORT")
    show.add_argument("--json", action="store_true", help="print JSON lines")
    show.set_defaults(rows=_show)
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers, as 1,4")
    return tuple(int(part) for part in parts if int(part))


def _run(args: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    program = args.program or shutil.which("perf_analyzer")
    if program is None:
        raise InvalidRequest("there is no perf_analyzer on PATH; `make perf` fetches one, or give --program")
    target = Target(args.url, args.http.removeprefix("http://"))
    questions = inputs_of(args.pipeline, args.input)
    analyzer = PerfAnalyzer(Path(program), args.pipeline, target, questions, extra=args.extra)
    loads = [Load(concurrency, num_requests=args.requests) for concurrency in args.concurrency]
    if args.rate:
        loads.append(Load(None, args.rate, args.distribution, args.requests))
    with tempfile.TemporaryDirectory(prefix="tritone-perf-") as temporary:
        folder = args.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for recipe in args.recipes.split(","):
            for load in loads:
                run = analyzer.run(recipe, load, folder / f"{args.pipeline}-{recipe}-{load.name}.json")
                said = "\n".join(line for line in run.said.splitlines() if line.strip())
                print(
                    f"\n{RECIPES[recipe]}\n{said}", file=sys.stderr if args.json else sys.stdout, flush=True
                )
                for level in run.levels:
                    yield RECIPES[recipe], figures(level)


def _show(args: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    for path in args.exports:
        for level in read(path):
            yield path.stem, figures(level)


def _fail(sentence: str) -> int:
    print(f"perf_analyzer: {' '.join(sentence.split())}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
