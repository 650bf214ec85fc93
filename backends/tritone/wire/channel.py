"""The local sockets that carry messages, to and from processes of the same user.

    send ─► packet ─┬─ up to INLINE_BYTES ─► socket ───────────────────► receive
                    └─ larger: sealed memfd, its descriptor ─► socket ─┘

Sockets are AF_UNIX SOCK_SEQPACKET in the abstract namespace: message borders are the kernel's, nothing is
left on disk after a kill -9, and a peer of another user is refused. The kernel frees a memfd on its last
close.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import socket
import struct
import threading
from typing import Any

from tritone.wire.framing import decode, encode
from tritone.wire.messages import AnyMessage

INLINE_BYTES = 48 * 1024  # well under the default socket buffer, so that several packets fit
MAP_BYTES = 1 << 20  # smaller spilled packets are copied: a mapping keeps a descriptor as long as its arrays
SEND_TIMEOUT_S = 10.0  # a local peer that does not read for this long is taken for dead

_SEND_TIMEOUT = struct.pack("ll", int(SEND_TIMEOUT_S), 0)
_INLINE, _SPILLED = b"\0", b"\1"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class Disconnected(Exception):
    """The peer of a channel is gone."""


class Channel:
    """One connected socket. `send` may be called from any thread; `receive` from one."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._room = memoryview(bytearray(INLINE_BYTES + 1))  # a packet comes here; what it holds is copied

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def peer_pid(self) -> int:
        """Of the process that listens there, or that connected."""
        return _peer(self._sock)[0]

    def send(self, message: AnyMessage, wait: bool = True) -> None:
        """Raises Disconnected when the peer is gone or does not read for SEND_TIMEOUT_S (0 unless `wait`)."""
        data = encode(message)
        with self._lock:
            try:
                self._write(data, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError as error:
                self.shutdown()
                raise Disconnected(str(error)) from None

    def try_send(self, packet: bytes) -> bool:
        """Send an encoded message if that needs no waiting; False if it does. Raises Disconnected."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._write(packet, socket.MSG_DONTWAIT)
            return True
        except BlockingIOError:
            return False
        finally:
            self._lock.release()

    def wait_readable(self, timeout_s: float) -> bool:
        """Until `receive` has something to tell; False when that does not happen in time."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def wait_writable(self, timeout_s: float) -> bool:
        """Until `try_send` may succeed, or the peer is gone; False when neither happens in time."""
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLOUT)
        except ValueError:  # closed meanwhile
            return True
        return bool(poll.poll(timeout_s * 1000))

    def _write(self, data: bytes, flags: int) -> None:
        """Raises Disconnected; BlockingIOError when there is no room (DONTWAIT: now, else for long)."""
        descriptors: list[int] = []
        parts = [_INLINE, data]
        if len(data) > INLINE_BYTES:
            try:
                descriptors, parts = [_spill(data)], [_SPILLED]
            except OSError as error:  # out of descriptors or memory: one peer is lost, not the process
                self.shutdown()
                raise Disconnected(f"no shared memory: {error.strerror}") from None
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd)) for fd in descriptors]
        try:
            self._sock.sendmsg(parts, rights, flags)
        except BlockingIOError:
            raise
        except OSError as error:
            self.shutdown()  # what the peer sent before it went can still be received
            raise Disconnected(str(error)) from None
        finally:
            for fd in descriptors:
                os.close(fd)

    def receive(self, flags: int = 0) -> Any:
        """The next message. Raises Disconnected at the end, BlockingIOError if MSG_DONTWAIT finds none."""
        try:
            size, rights, message_flags, _ = self._sock.recvmsg_into(  # room for one descriptor, no padding
                [self._room], socket.CMSG_LEN(4), flags | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            raise
        except ConnectionResetError:  # told once, ahead of what the peer sent: it ended with ours unread
            return self.receive(flags)
        except OSError as error:
            raise Disconnected(str(error)) from None
        if not size:
            raise Disconnected("end of stream")
        descriptors = [
            struct.unpack("i", payload[:4])[0] for _, kind, payload in rights if kind == socket.SCM_RIGHTS
        ]
        try:
            if message_flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise Disconnected("a packet was cut short")
            if self._room[:1] == _INLINE:
                return decode(bytes(self._room[1:size]))
            size = os.fstat(descriptors[0]).st_size
            if size < MAP_BYTES:
                return decode(os.pread(descriptors[0], size, 0))
            return decode(mmap.mmap(descriptors[0], 0, access=mmap.ACCESS_READ))
        except Disconnected:
            raise
        except Exception as error:  # what is no array may raise anything in numpy
            raise Disconnected(f"a packet is not a message: {error}") from None
        finally:
            for fd in descriptors:
                os.close(fd)

    def shutdown(self) -> None:
        """End both directions: wakes a thread that waits in `receive`."""
        with contextlib.suppress(OSError):  # the peer was faster
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shutdown()
        self._sock.close()


def _spill(data: bytes) -> int:
    """A sealed memfd that holds `data`; sealed so that the reader may map it without fear of a fault."""
    fd = os.memfd_create("tritone", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def listen(address: str) -> socket.socket:
    """A listening socket. Raises OSError (EADDRINUSE) when another process serves the address."""
    sock = _socket()
    try:
        sock.bind("\0" + address)
        sock.listen(128)
    except BaseException:
        sock.close()
        raise
    return sock


def accept(server: socket.socket) -> Channel:
    """The next peer of this user; others are turned away."""
    while True:
        sock, _ = server.accept()
        if _peer(sock)[1] == os.getuid():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
            return Channel(sock)
        sock.close()


def connect(address: str) -> Channel:
    """A channel to the process that serves `address`. Raises Disconnected when there can be none."""
    try:
        sock = _socket()
    except OSError as error:  # out of descriptors
        raise Disconnected(f"{address}: {error.strerror}") from None
    try:
        sock.connect("\0" + address)
    except OSError as error:
        sock.close()
        raise Disconnected(f"{address}: {error.strerror or error}") from None
    if _peer(sock)[1] != os.getuid():
        sock.close()
        raise Disconnected(f"{address} belongs to another user")
    return Channel(sock)


def _socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    # Bounds `connect` too, when the backlog of a stopped process is full. Accepted sockets do not inherit it.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
    return sock


def _peer(sock: socket.socket) -> tuple[int, int]:
    """Process and user on the other side."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return int(pid), int(uid)
