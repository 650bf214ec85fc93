"""The connections that clients have to a tritonserver, and hanging up on them.

A request whose door died has no end in the server: nothing wakes its client any more, however long it waits.
Only the end of its connection does, and the server offers no way to that. So its sockets are borrowed:

    /proc/net/tcp ──inodes of its ports──► /proc/<pid>/fd ──pidfd_getfd──► shutdown
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Container
from pathlib import Path

PROC = Path("/proc")
ESTABLISHED = "01"
PIDFD_GETFD = 438  # the number of the system call, on every architecture
LAST_DATA_SENT = 44  # place of tcpi_last_data_sent, milliseconds, in struct tcp_info


def hang_up(pid: int, ports: Container[int], quiet_s: float = 0.0) -> int | None:
    """End the connections that clients have to these ports of a child process; how many.

    quiet_s: only those on which the process sent nothing for so long. None where the kernel forbids that.
    """
    inodes = _inodes(ports)
    ended = 0
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        for entry in (PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                if entry.readlink().name in inodes:
                    ended += _end(process, int(entry.name), quiet_s)
    except OSError:
        return None
    finally:
        os.close(process)
    return ended


def _inodes(ports: Container[int]) -> set[str]:
    """The sockets of established connections to local ports, as links in /proc name them."""
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in (PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == ESTABLISHED and int(fields[1].rpartition(":")[2], 16) in ports:
                    found.add(f"socket:[{fields[9]}]")
    return found


def _end(process: int, descriptor: int, quiet_s: float) -> bool:
    """Whether a connection was ended. Raises OSError where the kernel forbids that."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = libc.syscall(PIDFD_GETFD, process, descriptor, 0)
    if number < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    with socket.socket(fileno=number) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        if struct.unpack_from("I", info, LAST_DATA_SENT)[0] < quiet_s * 1000:
            return False
        with contextlib.suppress(OSError):  # the client was faster
            connection.shutdown(socket.SHUT_RDWR)
    return True
