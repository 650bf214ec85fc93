"""perf_analyzer against a pipeline, on a server of its own or one that runs: what `make perf` runs.

    program ─► server, unless --url names one ─► gRPC stream, HTTP infer, HTTP generate_stream ─► tables

python build/perf.py [--pipeline NAME] [--url HOST:PORT --http HOST:PORT] [what `perf_analyzer run` takes]
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import perf_analyzer_binary
from demo import interrupt, served

from perf_analyzer.__main__ import main as run_recipes
from tritone.errors import ConfigError

PIPELINE = "smoltalk"


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--pipeline", default=PIPELINE)
    parser.add_argument("--url", default="", help="gRPC, of a server that runs; default: start one")
    parser.add_argument("--http", default="", help="its HTTP address; default: the port before that of --url")
    args, words = parser.parse_known_args()
    if {"-h", "--help"} & set(words):
        return run_recipes(["run", "--help"])
    try:
        program = perf_analyzer_binary.fetch()
    except ConfigError as error:
        print(f"perf: {error}", file=sys.stderr)
        return 1
    if args.url:
        return measure(program, args.pipeline, args.url, args.http or port_before(args.url), words)
    with served(args.pipeline) as addresses:
        if addresses is None:
            return 1
        return measure(program, args.pipeline, addresses["grpc"], addresses["http"], words)


def port_before(url: str) -> str:
    """Triton's HTTP port is the one before that of gRPC, unless somebody says otherwise."""
    host, _, port = url.rpartition(":")
    return f"{host}:{int(port) - 1}" if port.isdecimal() else url


def measure(program: Path, pipeline: str, grpc: str, http: str, words: Sequence[str]) -> int:
    """Run the recipes; returns their status."""
    os.environ.update(perf_analyzer_binary.environment(program))
    where = [f"--url={grpc}", f"--http={http}", f"--program={program}"]
    return run_recipes(["run", pipeline, *where, *words])


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)  # the server must not outlive this
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
