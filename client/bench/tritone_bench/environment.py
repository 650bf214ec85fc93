"""Where and how a run was made: what it takes to read its figures, or to make them again."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tritone_client.client import PipelineDescription

PACKAGES = ("tritone", "tritonclient", "grpcio", "numpy")


@dataclass(frozen=True, slots=True)
class Environment:
    """The client's side."""

    command: str
    date: str  # of the start, ISO 8601, UTC
    versions: dict[str, str]  # Python and the packages that measure
    system: str
    cpu: str
    num_cores: int  # that this process may use
    memory_bytes: int
    load_average: float  # over the last minute, at the start


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the pipeline publishes about itself."""

    url: str
    pipeline: str
    deploy_digest: str | None  # of the deploy file it was rendered from
    contract_version: int | None
    modalities: tuple[str, ...]
    sample_rate_hz: int | None
    limits: dict[str, float]


def environment(arguments: Sequence[str]) -> Environment:
    """arguments: of the command `tritone`."""
    return Environment(
        command=shlex.join(["tritone", *arguments]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"python": platform.python_version(), **_versions()},
        system=f"{platform.system()} {platform.machine()}",
        cpu=_cpu(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        load_average=os.getloadavg()[0],
    )


def server_facts(url: str, description: PipelineDescription) -> ServerFacts:
    return ServerFacts(
        url=url,
        pipeline=description.name,
        deploy_digest=description.parameters.get("deploy_digest"),
        contract_version=description.contract_version,
        modalities=description.modalities,
        sample_rate_hz=description.sample_rate_hz,
        limits=dict(description.limits),
    )


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed as a package"
    return found


def _cpu() -> str:
    """The processor's name, from /proc where there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
