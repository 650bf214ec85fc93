"""The secret that the doors of one tritonserver share, so that stage models heed nobody else.

    pipeline door ──control with the key──► stage door: is it ours?
          └──────────── key file ────────────────┘

The doors of a server are processes of their own that Triton starts in any order. The first one draws the key
and leaves it in a file that only this user can read; the others find it there by the name of the server.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from pathlib import Path

from tritone.errors import ConfigError

SUFFIX = ".key"


def server_key(server: str) -> str:
    """The key of a running server. server: see stage_door.server_name.

    Raises ConfigError when the folder for it cannot be had, or is not this user's alone.
    """
    folder = _folder()
    _sweep(folder)
    file = folder / f"{server}{SUFFIX}"
    fresh = folder / f"{server}-{os.getpid()}.new"
    with contextlib.suppress(FileNotFoundError):
        return _read(file)
    try:
        fresh.unlink(missing_ok=True)
        with open(fresh, "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
            out.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):  # another door was quicker
            os.link(fresh, file)
        fresh.unlink()
        return _read(file)
    except OSError as error:
        raise ConfigError(
            f"cannot write {file}: {error.strerror}", "point TMPDIR at a folder that takes it"
        ) from None


def forget(server_pid: int) -> None:
    """Remove the key of a server that has ended."""
    with contextlib.suppress(ConfigError):
        for file in _folder().glob(f"{server_pid}-*{SUFFIX}"):
            file.unlink(missing_ok=True)


def _folder() -> Path:
    # Containers that share the folder for temporary files count their processes each for itself.
    space = os.stat("/proc/self/ns/pid").st_ino
    folder = Path(tempfile.gettempdir()) / f"tritone-keys-{os.getuid()}-{space}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
    except OSError as error:
        raise ConfigError(
            f"cannot make {folder}: {error.strerror}", "point TMPDIR at another folder"
        ) from None
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise ConfigError(f"{folder} is open to others", "remove it, or point TMPDIR at another folder")
    return folder


def _read(file: Path) -> str:
    return file.read_text(encoding="ascii")


def _sweep(folder: Path) -> None:
    """Remove the keys of servers that have ended, also of those that were killed."""
    for file in folder.iterdir():
        pid = file.name.partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            file.unlink(missing_ok=True)
