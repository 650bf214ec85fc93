"""The highest Poisson rate at which listeners are still served well, found by bisection.

    rate doubles until a probe fails ─► halves the gap between the highest good and the lowest bad rate

A probe is good if it has no error, p99 of TTFP is at most 0.5 s and 99 % of the streams have no underrun.
Each is written as it ends, and a search goes on from the probes that there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from comparison.servers import Served
from comparison.workload import Workload
from tritone_bench.arrivals import Load
from tritone_bench.level import LevelReport, summarize
from tritone_bench.load import run_level

TTFP_P99_S = 0.5
CLEAN_SHARE = 0.99
PRECISION = 1.1  # between the highest good rate and the lowest bad one
LOWEST_PER_S = 0.02
SAMPLES = 100  # that a 99th percentile needs
LONGEST_S = 240.0


class Probe(msgspec.Struct, frozen=True):
    """One rate, tried once."""

    rate_per_s: float
    num_requests: int
    num_errors: int
    ttfp_p99_s: float | None
    share_clean: float | None
    late_p99_s: float | None  # how late the client was: a probe with much of it measures the client

    @property
    def is_good(self) -> bool:
        has_sound = self.ttfp_p99_s is not None and self.share_clean is not None
        return (
            not self.num_errors
            and has_sound
            and (self.ttfp_p99_s or 0) <= TTFP_P99_S
            and (self.share_clean or 0) >= CLEAN_SHARE
        )

    @classmethod
    def of(cls, rate_per_s: float, report: LevelReport) -> Probe:
        ttfp = report.measure("audio", "ttfp_s")
        return cls(
            rate_per_s,
            report.num_requests,
            report.num_errors,
            None if ttfp is None else ttfp.p99,
            report.underruns.share_clean,
            report.late_p99_s,
        )


def next_rate(probes: Sequence[Probe], first: float) -> float | None:
    """The rate to try next; None when the search is done."""
    good = max((probe.rate_per_s for probe in probes if probe.is_good), default=0.0)
    bad = min((probe.rate_per_s for probe in probes if not probe.is_good), default=math.inf)
    if not probes:
        return first
    if math.isinf(bad):
        return good * 2
    if not good:
        return bad / 2 if bad / 2 >= LOWEST_PER_S else None
    return math.sqrt(good * bad) if bad / good > PRECISION else None


def goodput(probes: Sequence[Probe]) -> float:
    """Requests a second; 0 if no rate was good. A rate above a bad one proves nothing."""
    bad = min((probe.rate_per_s for probe in probes if not probe.is_good), default=math.inf)
    return max((p.rate_per_s for p in probes if p.is_good and p.rate_per_s < bad), default=0.0)


async def search(
    served: Served,
    workload: Workload,
    file: Path,
    first: float,
    *,
    duration_s: float,
    samples: int = SAMPLES,
    most: int,
) -> list[Probe]:
    """Go on with the probes in `file`, `most` more of them at most.

    A probe lasts `duration_s`, or longer until `samples` requests are due; first: the rate to begin with.
    """
    probes = read(file)
    async with served.client() as client:
        for _ in range(most):
            rate = next_rate(probes, first)
            if rate is None:
                break
            lasts_s = min(LONGEST_S, max(duration_s, samples / rate))
            load = Load(request_rate_per_s=rate, arrival="poisson")
            run = await run_level(client, load, workload.requests(None), duration_s=lasts_s)
            probes.append(Probe.of(rate, summarize(load, 0, run)))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(msgspec.json.format(msgspec.json.encode(probes), indent=1))
            print(told(served.side, probes[-1]), flush=True)
    return probes


def read(file: Path) -> list[Probe]:
    return msgspec.json.decode(file.read_bytes(), type=list[Probe]) if file.is_file() else []


def told(side: str, probe: Probe) -> str:
    verdict = "good" if probe.is_good else "too much"
    late = f"{probe.ttfp_p99_s:.3f} s" if probe.ttfp_p99_s is not None else "none"
    clean = f"{probe.share_clean:.1%}" if probe.share_clean is not None else "none"
    return (
        f"{side} {probe.rate_per_s:.3f} requests/s: {verdict} ({probe.num_requests} requests, "
        f"{probe.num_errors} errors, p99 TTFP {late}, streams without underrun {clean})"
    )
