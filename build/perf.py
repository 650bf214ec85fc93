"""perf_analyzer against a pipeline, on a server of its own or one that runs: what `make perf` runs.

    program ─► server, unless --url names one ─► gRPC stream, HTTP infer, HTTP generate_stream ─► tables

python build/perf.py [--pipeline NAME] [--url HOST:PORT --http HOST:PORT] [what `perf_analyzer run` takes]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import perf_analyzer_binary
from demo import interrupt, served

from tritone.errors import ConfigError

RECIPES = Path(__file__).parents[1] / "client" / "bench"
PIPELINE = "smoltalk"


def main() -> int:
    parser = argparse.ArgumentParser(description="Run perf_analyzer against a pipeline.", add_help=False)
    parser.add_argument("--pipeline", default=PIPELINE)
    parser.add_argument("--url", default="", help="gRPC, of a server that runs; default: start one")
    parser.add_argument("--http", default="", help="its HTTP address; default: the port before that of --url")
    args, words = parser.parse_known_args()
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
    environment = perf_analyzer_binary.environment(program)
    environment["PYTHONPATH"] = os.pathsep.join([str(RECIPES), *filter(None, [os.environ.get("PYTHONPATH")])])
    where = [f"--url={grpc}", f"--http={http}", f"--program={program}"]
    command = [sys.executable, "-m", "perf_analyzer", "run", pipeline, *where, *words]
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)  # the server must not outlive this
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
