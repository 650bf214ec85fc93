"""Where and how a run was made: what it takes to read its figures, or to make them again."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tritone_client.client import PipelineDescription

PACKAGES = ("tritone", "tritonclient", "grpcio", "numpy")
ENGINE_PACKAGES = ("torch", "triton")
GPU_QUERY = (
    "nvidia-smi",
    "--query-gpu=name,memory.total,driver_version",
    "--format=csv,noheader,nounits",
)
ANSWER_S = 60.0  # that a program may take: nvidia-smi wakes a GPU, and an interpreter may lie on a slow disk
CHANGED = "+changed"  # behind a commit, where files that git knows differ from it


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One, as nvidia-smi tells it."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Environment:
    """The client's side, and what of the engines' can be seen from there; None: it could not, or an older
    file does not say."""

    command: str
    date: str  # of the start, ISO 8601, UTC
    versions: dict[str, str]  # Python and the packages that measure
    system: str
    cpu: str
    num_cores: int  # that this process may use
    memory_bytes: int
    load_average: float  # over the last minute, at the start
    gpus: tuple[GpuFacts, ...] | None = None  # of this machine; none where there is no nvidia-smi
    driver: str | None = None  # of these
    torch: str | None = None  # in the interpreter of the engines
    triton: str | None = None  # the language of kernels, there
    commit: str | None = None  # of the work tree that measures, CHANGED behind it if it is not that


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


def environment(arguments: Sequence[str], engine_python: str | None = None) -> Environment:
    """arguments: of the command `tritone`. engine_python: interpreter of the engines; None: this one."""
    gpus, driver = _gpus()
    torch, triton = _engine_versions(engine_python)
    return Environment(
        command=shlex.join(["tritone", *arguments]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"python": platform.python_version(), **_versions()},
        system=f"{platform.system()} {platform.machine()}",
        cpu=_cpu(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        load_average=os.getloadavg()[0],
        gpus=gpus,
        driver=driver,
        torch=torch,
        triton=triton,
        commit=_commit(Path(__file__)),
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


def _gpus(query: Sequence[str] = GPU_QUERY) -> tuple[tuple[GpuFacts, ...], str | None]:
    """Those that nvidia-smi lists, whichever of them engines use, and their driver."""
    rows = [line.rsplit(", ", 2) for line in (_said(query) or "").splitlines()]
    found = [row for row in rows if len(row) == 3 and row[1].isdecimal()]
    gpus = tuple(GpuFacts(name, int(mib) << 20) for name, mib, _ in found)
    return gpus, found[0][2].strip() if found else None


def _engine_versions(python: str | None) -> list[str | None]:
    """Of ENGINE_PACKAGES, None for one that is not there. Nothing of them is imported."""
    python = python or sys.executable
    code = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    return [said and said.strip() for name in ENGINE_PACKAGES for said in [_said([python, "-c", code, name])]]


def _commit(file: Path) -> str | None:
    """Of the work tree that holds this very file; None where git knows nothing of it."""
    git = ("git", "-C", str(file.parent))
    # A package that is installed below somebody else's work tree is none of that one's files.
    if _said([*git, "ls-files", "--error-unmatch", file.name]) is None:
        return None
    commit = _said([*git, "rev-parse", "HEAD"])
    changes = _said([*git, "status", "--porcelain", "--untracked-files=no"])
    if commit is None or changes is None:
        return None
    return commit.strip() + (CHANGED if changes.strip() else "")


def _said(words: Sequence[str]) -> str | None:
    """What a program printed; None if it is not there, fails or takes too long."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _cpu() -> str:
    """The processor's name, from /proc where there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
