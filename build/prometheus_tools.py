"""Fetch Prometheus and promtool from Debian into the cache, without root, for the tests that scrape a server.

python build/prometheus_tools.py

Both are taken from PATH where they are installed. Where there is no apt-get, nothing is fetched, and those
tests are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "prometheus"
TIMEOUT_S = 120


def cache_folder() -> Path:
    root = os.environ.get("TRITONE_CACHE") or "~/.cache/tritone"
    return Path(root).expanduser() / "prometheus"


def installed_tools() -> tuple[str, str] | None:
    """The commands `prometheus` and `promtool`, or None."""
    path = f"{os.environ.get('PATH', '')}:{cache_folder() / 'usr' / 'bin'}"
    prometheus, promtool = (shutil.which(name, path=path) for name in ("prometheus", "promtool"))
    return (prometheus, promtool) if prometheus and promtool else None


def main() -> int:
    if installed_tools() is not None:
        return 0
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        print("no apt-get here: tests that need Prometheus are skipped; install it to run them")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(["apt-get", "download", "-o", "APT::Sandbox::User=root", PACKAGE], folder)
            (package,) = Path(folder).glob("*.deb")
            unpacked = Path(folder) / "unpacked"
            run(["dpkg", "-x", str(package), str(unpacked)], folder)
            binaries = cache_folder() / "usr" / "bin"
            binaries.mkdir(parents=True, exist_ok=True)
            for name in ("prometheus", "promtool"):
                shutil.copy2(unpacked / "usr" / "bin" / name, binaries / name)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            print(f"Prometheus could not be fetched ({error}): tests that need it are skipped")
            return 0
    print(f"Prometheus is in {cache_folder()}")
    return 0


def run(words: list[str], folder: str) -> None:
    subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main())
