"""The tritonserver of this machine: where it is, the backend directory it needs, and its command line.

    container   /opt/tritonserver/{TRITON_VERSION, bin, lib, backends/python, caches}
    package     <site-packages>/pytriton/tritonserver/{bin, backends/python, caches, python_backend_stubs}
                <site-packages>/nvidia_pytriton.libs

A server takes one backend directory. `compose` fills it: the python backend copied, since the server refuses
a library whose real path lies outside; the doors as links, so that a checkout can be edited in place. A stub
embeds the Python whose `python3` comes first on PATH. It ignores PYTHONPATH, but looks for modules beside the
python backend too, so a link to this library lies there for checkouts that are not installed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tritone
from tritone import allocator
from tritone.deploy import Deploy
from tritone.errors import ConfigError

CONTAINER = Path("/opt/tritonserver")
PACKAGE = "nvidia-pytriton"
PACKAGE_VERSION = "0.7.0"
PACKAGED_SERVERS = {"0.7.0": "2.51.0"}  # version of the package to version of the server in it
INSTALL_CURE = (
    f"install it with `pip install 'tritone[server]'` ({PACKAGE} {PACKAGE_VERSION}, x86-64 Linux, "
    "Python 3.11 or 3.12), or run inside a tritonserver container"
)

DOORS = ("tritone_pipeline", "tritone_engine", "tritone_batch")
STUB = "triton_python_backend_stub"
BACKEND_FILES = ("libtriton_python.so", "triton_python_backend_utils.py")

DEFAULT_POOL_THREADS = 32  # of the python backend, a model instance; BLS calls and responses share them
SPARE_POOL_THREADS = 8  # left to responses while every BLS thread waits
EXPLICIT = ("--model-control-mode=explicit", "--load-model=*")  # all at the start, any of them later
TRACE_HEADERS = "^(traceparent|tracestate)$"  # become request parameters, as clients may also send them
EXIT_TIMEOUT_S = 10  # how long the server waits for its models when it is asked to end


@dataclass(frozen=True)
class Interpreter:
    """The Python that the server's stubs embed: the one that runs this."""

    version: str  # "3.11"
    bin: Path  # holds `python3`, by which a stub finds its modules
    library: Path | None  # libpython; None when this Python was built without one

    @classmethod
    def current(cls) -> Interpreter:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return cls(version, Path(sys.prefix) / "bin", find_libpython(version, library_folders()))


@dataclass(frozen=True)
class Server:
    """A tritonserver and the python backend that belongs to it."""

    origin: str  # "container" or the package that holds it
    version: str  # e.g. "2.51.0"; "" when nothing says
    binary: Path
    backends: Path  # holds `python`
    stub: Path
    libraries: tuple[Path, ...]  # folders for LD_LIBRARY_PATH
    caches: Path

    def __str__(self) -> str:
        return f"Triton {self.version or 'of unknown version'} ({self.origin})"

    def options(self) -> frozenset[str]:
        """Its command line options, e.g. "grpc-port". Raises ConfigError when it cannot run at all."""
        return _options(self)


@dataclass(frozen=True)
class Listen:
    """Where the server listens."""

    host: str = "127.0.0.1"
    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002
    health: int = 8003  # of `tritone serve` itself

    def ports(self) -> dict[str, int]:
        return {"http": self.http, "grpc": self.grpc, "metrics": self.metrics, "health": self.health}

    @property
    def near(self) -> str:
        """The host as this machine reaches it."""
        return {"0.0.0.0": "127.0.0.1", "::": "[::1]", "[::]": "[::1]"}.get(self.host, self.host)

    @property
    def grpc_url(self) -> str:
        return f"{self.near}:{self.grpc}"

    @property
    def http_url(self) -> str:
        return f"http://{self.near}:{self.http}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self.near}:{self.metrics}/metrics"

    @property
    def health_url(self) -> str:
        return f"http://{self.near}:{self.health}"


@dataclass(frozen=True)
class Fault:
    """Why some versions of the server deserve a warning."""

    first: tuple[int, int]
    last: tuple[int, int]
    what: str
    cure: str


# Faults of decoupled BLS (24.10 to 26.06) are left out: nothing here iterates a decoupled BLS response.
FAULTS = (
    Fault(
        (0, 0), (2, 50), "is older than 2.51 (24.10), the oldest that Tritone was run on", "use a newer one"
    ),
    Fault(
        (2, 55),
        (2, 69),
        "is of the releases 25.02 to 26.05, reported to crash after days of concurrent BLS calls",
        "let whatever starts it start it again after a crash, or use 26.07 or newer",
    ),
)


def find(
    container: Path = CONTAINER, package: Path | None = None, python: Interpreter | None = None
) -> Server:
    """The server of a container, else the packaged one. Raises ConfigError saying what to install.

    package: the site-packages folder that holds pytriton; looked up when not given.
    """
    python = python or Interpreter.current()
    if (container / "bin" / "tritonserver").exists():
        return _container_server(container, python)
    package = package or _site_packages()
    if package is None:
        raise ConfigError("there is no tritonserver on this machine", INSTALL_CURE)
    return _packaged_server(package, python)


def _container_server(root: Path, python: Interpreter) -> Server:
    stub = root / "backends" / "python" / STUB
    if not stub.exists():
        raise ConfigError(
            f"the tritonserver in {root} has no python backend", "use an image whose tag ends in -py3"
        )
    embedded = stub_python(stub)
    if embedded not in ("", python.version):
        raise ConfigError(
            f"the stub of {root} embeds Python {embedded}, and this is Python {python.version}",
            f"install and run tritone with python{embedded}",
        )
    note = root / "TRITON_VERSION"
    version = note.read_text().strip() if note.exists() else os.environ.get("TRITON_SERVER_VERSION", "")
    return Server(
        origin=f"container, {root}",
        version=version,
        binary=root / "bin" / "tritonserver",
        backends=root / "backends",
        stub=stub,
        libraries=(root / "lib",),
        caches=root / "caches",
    )


def _packaged_server(site: Path, python: Interpreter) -> Server:
    root = site / "pytriton" / "tritonserver"
    if not (root / "bin" / "tritonserver").exists():
        raise ConfigError(f"{site / 'pytriton'} holds no tritonserver", INSTALL_CURE)
    stubs = root / "python_backend_stubs"
    stub = stubs / python.version / STUB
    if not stub.exists():
        known = sorted(
            (folder.name for folder in stubs.iterdir()), key=lambda name: int(name.partition(".")[2])
        )
        raise ConfigError(
            f"the packaged tritonserver has no stub for Python {python.version}",
            f"use one of Python {', '.join(known)} that Tritone supports (3.11, 3.12)",
        )
    package_version = _package_version(site)
    return Server(
        origin=f"{PACKAGE} {package_version}".strip(),
        version=PACKAGED_SERVERS.get(package_version, ""),
        binary=root / "bin" / "tritonserver",
        backends=root / "backends",
        stub=stub,
        libraries=(site / "nvidia_pytriton.libs",),
        caches=root / "caches",
    )


def _site_packages() -> Path | None:
    """Where pytriton is installed, without importing it."""
    spec = importlib.util.find_spec("pytriton")
    return Path(spec.origin).parent.parent if spec is not None and spec.origin else None


def _package_version(site: Path) -> str:
    for distribution in importlib.metadata.distributions(name=PACKAGE, path=[str(site)]):
        return distribution.version
    return ""


@functools.cache
def _options(server: Server) -> frozenset[str]:
    libraries = [*map(str, server.libraries), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    env = {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries)}
    try:
        answer = subprocess.run(
            [server.binary, "--help"], env=env, capture_output=True, text=True, timeout=30
        )
        found = frozenset(re.findall(r"^\s*--([a-z0-9-]+)", answer.stdout + answer.stderr, re.MULTILINE))
        reason = " ".join((answer.stderr.splitlines() or ["it printed no options"])[-1].split())
    except (OSError, subprocess.TimeoutExpired) as error:
        found, reason = frozenset(), str(error)
    if not found:
        raise ConfigError(f"{server.binary} does not run: {reason}", "install the library that it lacks")
    return found


def stub_python(stub: Path) -> str:
    """The Python version that a stub is linked to, e.g. "3.12"; "" when it does not say."""
    match = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes())
    return match.group(1).decode() if match else ""


def library_folders() -> list[Path]:
    """Where the libpython of the running interpreter may be."""
    configured = sysconfig.get_config_var("LIBDIR") or "/usr/lib"
    triplet = sysconfig.get_config_var("MULTIARCH") or ""
    # A relocated Python remembers the folder it was built for; base_prefix tells where it really is.
    return [
        Path(sys.base_prefix) / "lib",
        Path(configured),
        Path(configured) / triplet,
        Path("/usr/lib") / triplet,
    ]


def find_libpython(version: str, folders: Iterable[Path]) -> Path | None:
    name = f"libpython{version}.so.1.0"
    return next((folder / name for folder in folders if (folder / name).exists()), None)


def known_faults(version: str) -> list[Fault]:
    """What is known against a server version such as "2.51.0"."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return []
    release = (int(match.group(1)), int(match.group(2)))
    return [fault for fault in FAULTS if fault.first <= release <= fault.last]


def checkout_root() -> Path | None:
    """The `backends` folder of the checkout that this library runs from; None when it is installed."""
    folder = Path(tritone.__file__).resolve().parent.parent
    return folder if (folder / DOORS[0] / "model.py").exists() else None


def installed_library(python: Interpreter) -> Path | None:
    """The tritone package that the stubs find installed in their Python; None when there is none."""
    code = "import importlib.util as u; s = u.find_spec('tritone'); print(s.origin if s and s.origin else '')"
    # -E and -P: a stub has no PYTHONPATH, and its working directory is not where the library is.
    answer = subprocess.run([python.bin / "python3", "-EPc", code], capture_output=True, text=True)
    place = answer.stdout.strip()
    return Path(place).resolve().parent if place else None


def doors_folder() -> Path:
    """The folder that holds the three doors: of the checkout, else of the installed wheel."""
    folder = checkout_root() or Path(tritone.__file__).resolve().parent / "doors"
    for door in DOORS:
        if not (folder / door / "model.py").exists():
            raise ConfigError(f"the door '{door}' is missing in {folder}", "install tritone again")
    return folder


def compose(server: Server, folder: Path) -> Path:
    """Fill `folder` as the backend directory of `server`, also while a server uses it; gives it back."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder", "name a folder")
    backend = folder / "python"
    backend.mkdir(parents=True, exist_ok=True)
    for source in (*(server.backends / "python" / name for name in BACKEND_FILES), server.stub):
        _replace(source, backend / source.name)
    doors = doors_folder()
    for door in DOORS:
        _link(folder / door, doors / door)
    _link(backend / "tritone", Path(tritone.__file__).resolve().parent)
    return folder


def _link(link: Path, target: Path) -> None:
    if link.is_symlink():
        link.unlink()
    elif link.exists():
        raise ConfigError(
            f"{link} exists and is not a link made by tritone", "remove it or name another folder"
        )
    link.symlink_to(target)


def _replace(source: Path, target: Path) -> None:
    """Copy by rename, so that a server that has `target` mapped keeps the old file."""
    if not source.exists():
        raise ConfigError(f"the python backend lacks {source}", INSTALL_CURE)
    fresh = target.with_name(target.name + ".new")
    shutil.copy2(source, fresh)
    fresh.replace(target)


def search_paths(server: Server, python: Interpreter) -> dict[str, list[str]]:
    """What goes in front of the path variables of the server's environment."""
    libraries = [str(folder) for folder in server.libraries]
    if python.library is not None:
        libraries.append(str(python.library.parent))
    return {"LD_LIBRARY_PATH": libraries, "PATH": [str(python.bin)]}


def environment(server: Server, python: Interpreter, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment to start the server with."""
    env = dict(base)
    env.pop("PYTHONHOME", None)  # would overrule the interpreter that PATH names
    for name, folders in search_paths(server, python).items():
        env[name] = ":".join([*folders, *filter(None, [base.get(name)])])
    allocator.for_server(env)
    return env


def uses_tls(extra: Iterable[str], mutual: bool = False) -> bool:
    """Whether the user's own options give gRPC a TLS; mutual: one that asks clients for certificates."""
    name = "grpc-use-ssl-mutual" if mutual else "grpc-use-ssl(-mutual)?"
    return any(re.fullmatch(f"--?{name}(=(1|true|on|yes))?", option, re.IGNORECASE) for option in extra)


def pool_threads(deploys: Iterable[Deploy]) -> int | None:
    """The thread pool to ask the server for; None: its default will do."""
    needed = max((deploy.bls_threads for deploy in deploys), default=0) + SPARE_POOL_THREADS
    return needed if needed > DEFAULT_POOL_THREADS else None


def command(
    server: Server,
    repositories: Sequence[Path],
    backends: Path,
    listen: Listen,
    shm_prefix: str | None = None,
    threads: int | None = None,
    extra: Sequence[str] = (),
    supervised: bool = False,
) -> list[str]:
    """The whole command line.

    shm_prefix: begins the name of every shared-memory region of this server, so that they can be removed.
    threads: of the python backend's pool, a model instance; None leaves the default.
    extra: the user's own options; the last of two wins.
    supervised: somebody will load and unload single models.
    """
    words = [str(server.binary)]
    words += [f"--model-repository={folder.resolve()}" for folder in repositories]
    words += [
        f"--backend-directory={backends.resolve()}",
        *(EXPLICIT if supervised else ("--model-control-mode=none",)),
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
        f"--http-address={listen.host}",
        f"--http-port={listen.http}",
        f"--grpc-address={listen.host}",
        f"--grpc-port={listen.grpc}",
        f"--metrics-address={listen.host}",
        f"--metrics-port={listen.metrics}",
        *(f"--{protocol}-header-forward-pattern={TRACE_HEADERS}" for protocol in ("http", "grpc")),
    ]
    if server.caches.exists():
        words.append(f"--cache-directory={server.caches}")
    if shm_prefix is not None:
        words.append(f"--backend-config=python,shm-region-prefix-name={shm_prefix}")
    if threads is not None:
        words.append(f"--backend-config=python,thread-pool-size={threads}")
    return [*words, *extra]


def shell_line(paths: Mapping[str, Sequence[str]], words: Sequence[str]) -> str:
    """A line for a shell: search paths in front of the shell's own, then the command, an option a line."""
    variables = [
        f'{name}={shlex.quote(":".join(folders))}"${{{name}:+:${name}}}"' for name, folders in paths.items()
    ]
    return " \\\n  ".join([*variables, *(shlex.quote(word) for word in words)])
