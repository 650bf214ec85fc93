"""What this machine lacks to serve, one finding a line: for `tritone doctor` and before `tritone serve`."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import importlib.util
import os
import random
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import tritone
from tritone import deploy_reader, repository, room
from tritone import server as servers
from tritone.admin import is_loopback
from tritone.checkpoint import checkpoint_dir
from tritone.deploy import Deploy
from tritone.errors import ConfigError
from tritone.finding import Finding, from_error, ok, problem, warning
from tritone.gpus import num_gpus
from tritone.memory_plan import MIB, num_instances, size
from tritone.pipeline import Checkpoint
from tritone.room import Room
from tritone.server import Interpreter, Listen, Server, known_faults
from tritone.tracing import is_on

SHM = Path("/dev/shm")
GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")  # first and last that the system gives away
FREE_PORTS_FROM = 20_000
MOST_PORTS_TRIED = 64
INSTANCE_SHM_BYTES = 8 * MIB  # of one model instance under load; a region never shrinks


# -- the machine ---------------------------------------------------------------------------------------------


def check_python(
    version: tuple[int, int] = sys.version_info[:2], executable: str = sys.executable
) -> Finding:
    text = f"Python {version[0]}.{version[1]}, {executable}"
    if (3, 11) <= version <= (3, 12):
        return ok("python", text)
    return problem(
        "python", text, "use Python 3.11 or 3.12, the ones that have numpy < 2 and all that Tritone uses"
    )


def check_numpy(version: str | None = None) -> Finding:
    version = version or package_version("numpy")
    if version is None:
        return problem("numpy", "is not installed", "run `pip install 'numpy<2'`")
    if int(version.partition(".")[0]) >= 2:
        return problem(
            "numpy", f"{version}: Triton's Python stub aborts on text with it", "run `pip install 'numpy<2'`"
        )
    return ok("numpy", version)


def check_libpython(python: Interpreter) -> Finding:
    if python.library is not None:
        return ok("libpython", str(python.library))
    return problem(
        "libpython",
        f"libpython{python.version}.so.1.0 is not on this machine, and Triton's stub embeds it",
        f"install your system's libpython{python.version} package, or a Python built with --enable-shared",
    )


def check_server(find: Callable[[], Server] = servers.find) -> tuple[Server | None, list[Finding]]:
    """The server, if there is one, and what there is to say about it."""
    try:
        server = find()
    except ConfigError as error:
        return None, [from_error("server", error)]
    try:
        server.options()
    except ConfigError as error:
        return None, [from_error("server", error)]
    findings = [ok("server", str(server))]
    findings += [
        warning("server", f"Triton {server.version} {fault.what}", fault.cure)
        for fault in known_faults(server.version)
    ]
    return server, findings


def check_backends(server: Server) -> Finding:
    missing = [name for name in servers.BACKEND_FILES if not (server.backends / "python" / name).exists()]
    if missing:
        return problem(
            "backends", f"{server.backends / 'python'} lacks {', '.join(missing)}", servers.INSTALL_CURE
        )
    try:
        doors = servers.doors_folder()
    except ConfigError as error:
        return from_error("backends", error)
    present = sorted(folder.name for folder in server.backends.iterdir() if folder.is_dir())
    return ok("backends", f"{', '.join(present)} of the server; doors in {doors}")


def check_library(installed: Path | None, running: Path) -> Finding:
    """installed: the package in the Python of the stubs, None when there is none; running: this one."""
    if installed not in (None, running):
        return warning(
            "library",
            f"the doors will import the tritone in {installed}, and this is the one in {running}",
            "install this one with `pip install`, or run the other",
        )
    return ok("library", f"{tritone.__version__} in {running}")


def check_shm(free_bytes: int, instances: int) -> Finding:
    """instances: model instances that will share it."""
    needed = instances * INSTANCE_SHM_BYTES
    text = f"/dev/shm has {size(free_bytes)} free"
    if free_bytes < needed:
        return problem(
            "shm",
            f"{text}, {instances} model instances may fill {size(needed)}",
            "give the container more (docker: --shm-size=1g; Kubernetes: a memory emptyDir at /dev/shm), "
            "or delete what old servers left there",
        )
    if free_bytes < 4 * needed:
        return warning(
            "shm", f"{text}, little for long recordings at {instances} instances", "give 1 GiB or more"
        )
    return ok("shm", text)


def check_cores(cores: int) -> Finding:
    if cores < 2:
        return warning("cores", f"{cores} core", "give two or more: the server and the engines share it")
    return ok("cores", f"{cores} cores")


def check_torch(version: str | None, cuda: str | None, gpus: int, needs_gpu: bool = False) -> Finding:
    """version, cuda: of the installed torch, None when there is none; gpus: that this machine shows."""
    if version is None:
        return warning(
            "torch", "is not installed", "run `pip install 'tritone[smoltalk]'` if the engines run here"
        )
    text = f"torch {version}, " + (f"CUDA {cuda}" if cuda else "CPU build") + f", {gpus} GPU(s)"
    if needs_gpu and (cuda is None or gpus == 0):
        return problem(
            "torch", f"{text}, but a stage has `device: gpu`", "use a CUDA build and a GPU, or device: cpu"
        )
    if gpus and cuda is None:
        return warning("torch", text, "install a CUDA build of torch to use the GPUs")
    return ok("torch", text)


def check_ports(listen: Listen) -> list[Finding]:
    """One finding a taken port; one good one when all are free."""
    given = {name: port for name, port in listen.ports().items() if port != 0}
    twice = sorted({port for port in given.values() if list(given.values()).count(port) > 1})
    if twice:
        return [
            problem(
                "ports",
                f"port {twice[0]} is given twice",
                "give each of http, grpc, metrics and health its own",
            )
        ]
    taken = [refusal for name, port in given.items() if (refusal := _refusal(listen.host, name, port))]
    if taken:
        return taken
    numbers = ", ".join(f"{name} {port or 'any'}" for name, port in listen.ports().items())
    return [ok("ports", f"{numbers} free on {listen.host}")]


def _refusal(host: str, name: str, port: int) -> Finding | None:
    try:
        bind(host, port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            cure = f"stop what listens there, or give --{name}-port (0 takes a free one)"
            return problem("ports", f"{name} port {port} on {host} is taken", cure)
        reason = error.strerror or str(error)
        return problem(
            "ports", f"cannot listen on {host}, {name} port {port}: {reason}", "give another --host or port"
        )
    return None


def check_exposure(listen: Listen, extra: Sequence[str] = ()) -> Finding:
    """extra: the user's own options for the server, where TLS may be asked for."""
    host = listen.host
    if is_loopback(host):
        return ok("exposure", f"only this machine reaches {host}")
    if servers.uses_tls(extra):
        return ok("exposure", f"{host}: gRPC with TLS; HTTP and metrics are clear text")
    return warning(
        "exposure",
        f"whoever reaches {host} may ask every pipeline, in clear text",
        "give TLS options after `--`, or keep 127.0.0.1 behind a proxy; see SECURITY.md",
    )


def bind(host: str, port: int, shared: bool = True) -> socket.socket:
    """A socket bound as a server would bind it. shared: others that do not listen may have it too."""
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probe = socket.socket(family, socket.SOCK_STREAM)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, shared)
        probe.bind((host, port))
    except OSError:
        probe.close()
        raise
    return probe


def bind_free(host: str) -> socket.socket:
    """A socket bound to a free port, one that the system does not give away by itself where there is any.

    Who opens a connection would else take the port in the time in which a server loads, before it listens.
    """
    ports = range(FREE_PORTS_FROM, int(GIVEN_PORTS.read_text().split()[0]))
    for port in random.sample(ports, min(len(ports), MOST_PORTS_TRIED)):
        with contextlib.suppress(OSError):
            return bind(host, port, shared=False)
    return bind(host, 0, shared=False)


# -- a pipeline ----------------------------------------------------------------------------------------------


def check_checkpoint(deploy: Deploy) -> list[Finding]:
    """One finding a damaged or absent stage; one good one when all are there."""
    if deploy.pipeline.checkpoint is Checkpoint.NONE:
        return [ok("checkpoint", f"{deploy.pipeline.name} needs none")]
    findings: dict[str, Finding] = {}  # by text: an absent checkpoint is absent for every stage
    for stage in deploy.pipeline.stages:
        try:
            deploy.require_checkpoint(stage.name)
        except ConfigError as error:
            findings.setdefault(str(error), from_error("checkpoint", error))
    return list(findings.values()) or [ok("checkpoint", f"{deploy.pipeline.name} in {deploy.checkpoint}")]


def check_urls(deploy: Deploy) -> list[Finding]:
    """One finding where requests may name media by URL."""
    hosts = ", ".join(deploy.urls.allow)
    return [ok("urls", f"{deploy.pipeline.name} fetches media from {hosts}")] if hosts else []


def check_tracing(deploy: Deploy) -> list[Finding]:
    """One finding where spans are sent."""
    if not is_on(deploy.tracing):
        return []
    name = deploy.pipeline.name
    collector = deploy.tracing.otlp_endpoint or "the collector that the environment names"
    if importlib.util.find_spec("opentelemetry") is None:
        cure = "pip install 'tritone[tracing]', also for engines with a python of their own"
        return [warning("tracing", f"{name} has no spans: opentelemetry is not installed", cure)]
    return [ok("tracing", f"{name} sends spans to {collector}")]


def check_threads(deploy: Deploy, extra: Sequence[str] = ()) -> Finding:
    """extra: the user's own options for the server, where a pool size may be given."""
    sizes = [
        int(match.group(1)) for option in extra if (match := re.search(r"thread-pool-size=(\d+)$", option))
    ]
    pool = sizes[-1] if sizes else servers.pool_threads([deploy]) or servers.DEFAULT_POOL_THREADS
    text = f"{deploy.pipeline.name}: {deploy.bls_threads} BLS threads of a pool of {pool}"
    if deploy.bls_threads >= pool:
        cure = f"lower bls_threads below {pool}, or give a larger thread-pool-size"
        return problem("threads", f"{text}: responses could wait for ever", cure)
    return ok("threads", text)


def check_repository(folder: Path) -> list[Finding]:
    """Whether plain tritonserver can be pointed at `folder`."""
    if not folder.exists():
        return [problem("repository", f"'{folder}' does not exist", "name the folder that holds deploy.yaml")]
    if not (folder / repository.DEPLOY).is_file():
        return [from_error("repository", repository.misplaced(folder))]
    try:
        deploy = deploy_reader.load(folder / repository.DEPLOY)
        stale = repository.stale(deploy, folder)
    except ConfigError as error:
        return [from_error("repository", error)]
    if stale:
        cure = f"run `tritone render {folder}`"
        return [
            problem("repository", f"{', '.join(stale)} not rendered from {folder / repository.DEPLOY}", cure)
        ]
    findings = [ok("repository", f"'{folder}' is rendered: {', '.join(_models(deploy))}")]
    findings += [
        problem(
            "repository",
            f"'{folder / name}' is no model of the pipeline, and Triton would load it",
            "remove it",
        )
        for name in repository.strangers(deploy, folder)
    ]
    return [
        *findings,
        check_threads(deploy),
        *check_urls(deploy),
        *check_tracing(deploy),
        *check_checkpoint(deploy),
        *room.check_planned([deploy], Room.now()),
    ]


def _models(deploy: Deploy) -> list[str]:
    pipeline = deploy.pipeline
    return [
        pipeline.name,
        f"{pipeline.name}_sync",
        *(deploy.stage(stage.name).model for stage in pipeline.stages),
    ]


# -- what the machine says -----------------------------------------------------------------------------------


def package_version(name: str) -> str | None:
    """Of an installed package, without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_cuda() -> str | None:
    """The CUDA version that the installed torch is built for, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    note = Path(spec.origin).parent / "version.py"
    match = re.search(r"^cuda\b.*= '([\d.]+)'", note.read_text() if note.exists() else "", re.MULTILINE)
    return match.group(1) if match else None


# -- all together --------------------------------------------------------------------------------------------


def machine(python: Interpreter) -> tuple[Server | None, list[Finding]]:
    """The checks that have nothing to do with a pipeline."""
    server, findings = check_server(lambda: servers.find(python=python))
    findings = [check_python(), check_numpy(), check_libpython(python), *findings]
    if server is not None:
        findings.append(check_backends(server))
    running = Path(tritone.__file__).resolve().parent
    findings.append(check_library(servers.installed_library(python), running))
    return server, findings


def for_pipelines(
    pipelines: Sequence[Deploy], there: Room, listen: Listen, extra: Sequence[str] = ()
) -> Iterator[Finding]:
    """The checks before these pipelines are served together."""
    yield check_shm(shutil.disk_usage(SHM).free, sum(num_instances(deploy) for deploy in pipelines))
    yield from room.check_planned(pipelines, there)
    yield from check_ports(listen)
    yield check_exposure(listen, extra)
    for deploy in pipelines:
        yield check_threads(deploy, extra)
        yield from check_urls(deploy)
        yield from check_tracing(deploy)
        yield from check_checkpoint(deploy)
    if any(stage.placed.is_gpu for deploy in pipelines for stage in deploy.stages.values()):
        yield check_torch(package_version("torch"), torch_cuda(), num_gpus(), needs_gpu=True)


def checkpoints_present() -> Finding:
    root = checkpoint_dir("_").parent.parent
    marks = (file for name in ("manifest.json", "config.json") for file in root.glob(f"*/*/{name}"))
    found = sorted({mark.parent.parent.name for mark in marks})
    if found:
        return ok("checkpoints", f"{', '.join(found)} in {root}")
    return warning("checkpoints", f"none in {root}", "run e.g. `make weights`, or set TRITONE_CACHE")


def examine(repositories: Sequence[Path], listen: Listen) -> Iterator[Finding]:
    """Everything `tritone doctor` says."""
    _, findings = machine(Interpreter.current())
    yield from findings
    yield check_shm(shutil.disk_usage(SHM).free, instances=6)
    there = Room.now()
    free_bytes, total_bytes = there.ram.free_bytes or 0, there.ram.total_bytes or 0
    yield ok("memory", f"{size(free_bytes)} of {size(total_bytes)} available")
    for number, gpu in enumerate(there.gpus):
        yield ok("gpu", f"gpu:{number} {gpu.name}, {size(gpu.free_bytes)} of {size(gpu.total_bytes)} free")
    yield check_cores(len(os.sched_getaffinity(0)))
    yield check_torch(package_version("torch"), torch_cuda(), num_gpus())
    yield checkpoints_present()
    yield from check_ports(listen)
    for folder in repositories:
        yield from check_repository(folder)
