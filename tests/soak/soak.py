"""Load and faults for hours or for a minute, on the weight-free pipeline; every sample is accounted for.

    python tests/soak/soak.py [PART ...] [--scale 0.1] [--minutes 30] [--json FILE]

    a  load         2,000 requests, 64 at a time
    b  memory       5,000 requests of which 1,000 are left at random points: no slope of any process, over all
                    of them, of pages or of live blocks
    c  aborts       1,000 listeners, and 200 over HTTP, leave after the first chunk; then 10 stay
    d  admission    4 times as many requests at once as are allowed
    e  plain        a and d on plain tritonserver with its default thread pool
    f  paced        listeners that play chunks of 2 s
    g  slow         readers of a chunk a second from a stage that makes 50
    h  kills        mixed traffic while engines are killed at random
    i  faults       one fault of each kind in each stage, with others under way
    j  hangs        the same with engines that never return
    k  resumed      h with a deploy that lets interrupted requests go on: none may fail
    l  doors        the stubs of Triton are killed: health tells it within 5 s, and all is well again

Exit status: 0, or 1 when anything was lost, hung, wrong, or grew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import soak_faults
import soak_load
from soak_report import Report
from soak_server import SoakServer, plain, served

PARTS = "abcdefghijkl"
SHORT_PATIENCE = tuple(f"stage.{stage}.call_timeout_s=2" for stage in soak_faults.STAGES)
RESUMING = ("resumes=20",)

Work = Coroutine[Any, Any, Report]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="letters as above; default: all of them")
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="of all sizes; default: 1")
    parser.add_argument(
        "--minutes", type=float, default=1.0, metavar="M", help="of parts h and k; default: 1"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the reports there")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for logs; default: a temporary one")
    args = parser.parse_args(argv)
    parts = sorted(set("".join(args.parts) or PARTS))
    if unknown := set(parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    folder = args.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"logs in {folder}; load average {os.getloadavg()[0]:.1f}", flush=True)
    reports = []
    for report in run(parts, args.scale, args.minutes * 60, folder):
        reports.append(report)
        print(report, flush=True)
    failed = [report for report in reports if report.problems]
    if args.json:
        args.json.write_text(json.dumps([asdict(report) for report in reports], indent=1, default=str))
    print(f"{len(reports) - len(failed)} of {len(reports)} reports without a problem")
    return 1 if failed else 0


def run(parts: list[str], scale: float, kill_s: float, folder: Path) -> Iterator[Report]:
    """A report a part, or several; each group of parts on a fresh server."""

    def size(full: int, least: int = 1) -> int:
        return max(round(full * scale), least)

    usual: dict[str, Callable[[SoakServer], Work]] = {
        "a": lambda server: soak_load.load(server, size(2000), 64),
        "b": lambda server: soak_load.memory(server, size(5000, 100), size(1000), size(500), 32),
        "c": lambda server: soak_load.aborts(server, size(1000), size(200)),
        "d": soak_load.admission,
        "f": lambda server: soak_load.paced(server, size(16), size(5, 2)),
        "g": lambda server: soak_load.slow(server, 60 * scale),
        "h": lambda server: soak_faults.kills(server, kill_s),
        "k": lambda server: soak_faults.kills(server, kill_s, part="k", allowed=("exact", "left")),
        "l": lambda server: soak_faults.doors(server, size(3)),
    }
    for part in parts:
        begun_s = time.monotonic()
        if part == "e":
            with plain("fake", _folder(folder, part)) as server:
                for work in (usual["a"], usual["d"]):
                    report = asyncio.run(work(server))
                    report.part, report.title = "e", f"plain tritonserver: {report.title}"
                    yield report
        elif part in "ij":
            overrides = SHORT_PATIENCE if part == "j" else ()
            with served("fake", _folder(folder, part), overrides) as server:
                for kind in ("hang",) if part == "j" else ("fail", "raise", "oom", "kill"):
                    for stage in soak_faults.STAGES:
                        told_s = soak_faults.PATIENCE_S if kind == "hang" else 2.0
                        fault = soak_faults.one_fault(server, kind, stage, size(5), told_within_s=told_s)
                        report = asyncio.run(fault)
                        report.part = part
                        yield report
        else:
            overrides = RESUMING if part == "k" else ()
            with served("fake", _folder(folder, part), overrides) as server:
                yield asyncio.run(usual[part](server))
        print(f"-- part {part} took {time.monotonic() - begun_s:.0f} s", file=sys.stderr, flush=True)


def _folder(folder: Path, part: str) -> Path:
    place = folder / part
    place.mkdir(parents=True, exist_ok=True)
    return place


if __name__ == "__main__":
    sys.exit(main())
