"""The messages between doors, engines and orchestrators, and the local sockets that carry them.

    door ──Open, Run, Cancel, Ping──► engine        engine ──Opened, Ran, Pong, Refused──► door
    engine ──Piece──► engine (the next stage)       engine ──Credit──► engine (the stage before)
    engine ──Piece, Pieces, Finished, Delivered, Failed──► orchestrator's inbox
    `tritone serve` ──Drain──► orchestrator's inbox    `tritone reload` ──Reload──► `tritone serve`
    `tritone profile` ──Profile──► `tritone serve` ──TraceTorch──► engine    both ◄──Profiled, Refused──

Sockets are AF_UNIX SOCK_SEQPACKET in the abstract namespace: message borders are the kernel's, nothing is
left on disk after a kill -9, and a peer of another user is refused. A packet above INLINE_BYTES travels as
a sealed memfd whose descriptor is passed; the kernel frees it on the last close.
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

import msgspec

from tritone import arrays

INLINE_BYTES = 48 * 1024  # well under the default socket buffer, so that several packets fit
MAP_BYTES = 1 << 20  # smaller spilled packets are copied: a mapping keeps a descriptor as long as its arrays
SEND_TIMEOUT_S = 10.0  # a local peer that does not read for this long is taken for dead

_SEND_TIMEOUT = struct.pack("ll", int(SEND_TIMEOUT_S), 0)
_INLINE, _SPILLED = b"\0", b"\1"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of everything that crosses a process border."""


class Hello(Message, frozen=True):
    """First message of a connection: who speaks."""

    address: str  # where the speaker itself listens, "" if nowhere


class Route(msgspec.Struct, frozen=True, array_like=True):
    """Where some output ports of a session go: one consumer."""

    address: str  # socket of the consumer
    stage: str  # consuming stage's Triton model, "" for the orchestrator
    ports: dict[str, str]  # output port of the producer to input port of the consumer


class Open(Message, frozen=True):
    """Start a session on a stage."""

    call: int  # echoed in the answer
    stage: str  # Triton model name of the stage
    session: str
    inbox: str  # address of the orchestrator's inbox
    inputs: dict[str, Any]
    sources: int  # how many upstream stages will send pieces; 0: `inputs` is everything
    settings: dict[str, Any]
    routes: list[Route]
    whole: bool = False  # the engine gets nothing of its upstream stages before all of them have ended
    trace: dict[str, str] = {}  # carrier of the span above, see tracing; {}: none is recorded


class Opened(Message, frozen=True):
    call: int


class Refused(Message, frozen=True):
    """The answer to an Open or Run that failed as a whole."""

    call: int
    code: str  # TritoneError.code
    what: str
    cure: str


class Cancel(Message, frozen=True):
    """Forget a session on every stage of this engine process."""

    session: str


class Drain(Message, frozen=True):
    """To an orchestrator: take no more requests, end those that run; it hangs up when that is done."""

    grace_s: float = 0.0  # how long those that run may go on
    why: str = "the server is shutting down"  # what the refused are told


class Reload(Message, frozen=True):
    """To a `tritone serve`: read the deploy file of a pipeline again, and serve what it says."""

    pipeline: str  # "": every one


class Reloaded(Message, frozen=True):
    """What came of a Reload."""

    what: str
    cure: str = ""
    code: str = ""  # TritoneError.code; "": it was done


class Profile(Message, frozen=True):
    """To a `tritone serve`: take a profile of a process while it serves; answered Profiled or Refused."""

    pipeline: str
    stage: str  # or "orchestrator"
    kind: str  # a key of profiling.FORMS
    form: str  # of the file: one of these
    seconds: int
    instance: int = 0
    door: bool = False  # the stub of the stage, not its engine


class TraceTorch(Message, frozen=True):
    """To an engine process: record what torch does in it; answered Profiled or Refused."""

    call: int  # echoed in a Refused
    seconds: float


class Profiled(Message, frozen=True):
    data: bytes  # the file
    said: str  # what it holds, in a few words


class Ping(Message, frozen=True):
    call: int


class Pong(Message, frozen=True):
    call: int
    stats: dict[str, dict[str, Any]]  # by Triton model; "beat_age_s": since its loop last turned


class StreamChunk(msgspec.Struct, frozen=True, array_like=True):
    """One stream's share of a Run; see engines.base.Chunk."""

    session: str
    inputs: dict[str, Any]
    start: bool
    end: bool
    settings: dict[str, Any]
    trace: dict[str, str] = {}  # as for Open


class Run(Message, frozen=True):
    """One batch for a Triton-batched stage."""

    call: int
    stage: str
    chunks: list[StreamChunk]


class StreamResult(msgspec.Struct, frozen=True, array_like=True):
    """Outputs by port, or an error code with its two sentences."""

    outputs: dict[str, Any]
    code: str = ""
    what: str = ""
    cure: str = ""
    busy: tuple[float, float] = (0.0, 0.0)  # when the batch was computed, time.monotonic()
    batch: int = 1  # chunks of the batch


class Ran(Message, frozen=True):
    call: int
    results: list[StreamResult]


class Loading(Message, frozen=True):
    """The engine process lives but serves nothing yet."""


class Ready(Message, frozen=True):
    """Every stage of the engine process is loaded and warm."""

    load_s: float


class LoadFailed(Message, frozen=True):
    what: str
    cure: str


class Piece(Message, frozen=True):
    """What one step of a stage gave one session, on its way to one consumer."""

    session: str
    source: str  # Triton model name of the producing stage
    stage: str  # consuming stage's Triton model, "" for the orchestrator
    number: int  # counts the pieces of this session on this route from 0
    values: dict[str, Any]  # by input port of the consumer
    last: bool  # the producer ends
    made_s: float = 0.0  # time.monotonic(), which all processes of a machine share


class Pieces(Message, frozen=True):
    """What one step of a stage gave several sessions of one orchestrator: a packet, not one for each."""

    pieces: list[Piece]


class Credit(Message, frozen=True):
    """To the producer of a session's pieces: they were taken, so that more may be sent."""

    session: str
    source: str  # Triton model name of the producing stage
    stage: str  # consuming stage's Triton model
    number: int  # of the last piece that was taken, -1: none
    closed: bool = False  # the consumer wants no more pieces of this session


class StageTimes(msgspec.Struct, frozen=True, array_like=True):
    """When a stage had a session; moments by time.monotonic(), which all processes of a machine share."""

    opened_s: float
    ended_s: float
    first_output_s: float | None = None  # None: it gave nothing
    last_output_s: float | None = None
    queued_s: float | None = None  # how long it waited in the engine's own queue; None: there is none
    steps: int = 0  # of the engine that gave it something
    batch: float | None = None  # mean number of sessions that such a step gave something


class Finished(Message, frozen=True):
    """A session ended on a stage."""

    session: str
    source: str
    reason: str  # stop, length, repetition
    usage: dict[str, Any]
    times: StageTimes
    busy: Any = ()  # float64 [n, 2]: when the stage computed while it had the session, time.monotonic()
    is_delivered: bool = True  # the stages after it have taken all of it; else Delivered or Failed follows


class Delivered(Message, frozen=True):
    """The stages after a stage have taken all that it gave to a session, which had Finished there."""

    session: str
    source: str


class Failed(Message, frozen=True):
    """A session failed on a stage; nothing more comes from it."""

    session: str
    source: str
    code: str
    what: str
    cure: str


AnyMessage = (
    Hello
    | Open
    | Opened
    | Refused
    | Cancel
    | Drain
    | Reload
    | Reloaded
    | Profile
    | TraceTorch
    | Profiled
    | Ping
    | Pong
    | Run
    | Ran
    | Loading
    | Ready
    | LoadFailed
    | Piece
    | Pieces
    | Credit
    | Finished
    | Delivered
    | Failed
)


class Disconnected(Exception):
    """The peer of a channel is gone."""


_encoder = msgspec.msgpack.Encoder(enc_hook=arrays.packed)
_decoder = msgspec.msgpack.Decoder(AnyMessage, ext_hook=arrays.unpacked)


def encode(message: AnyMessage) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | memoryview | mmap.mmap) -> Any:
    """The message in `data`. Arrays are read-only views of it."""
    return _decoder.decode(data)


class Channel:
    """One connected socket. `send` may be called from any thread; `receive` from one."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

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
        if len(data) > INLINE_BYTES:
            descriptors = [_spill(data)]
            parts = [_SPILLED]
        else:
            parts = [_INLINE, data]
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
            data, rights, message_flags, _ = self._sock.recvmsg(
                INLINE_BYTES + 1, socket.CMSG_SPACE(4), flags | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            raise
        except ConnectionResetError:  # told once, ahead of what the peer sent: it ended with ours unread
            return self.receive(flags)
        except OSError as error:
            raise Disconnected(str(error)) from None
        if not data:
            raise Disconnected("end of stream")
        descriptors = [
            struct.unpack("i", payload[:4])[0] for _, kind, payload in rights if kind == socket.SCM_RIGHTS
        ]
        try:
            if message_flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise Disconnected("a packet was cut short")
            if data[:1] == _INLINE:
                return decode(memoryview(data)[1:])
            size = os.fstat(descriptors[0]).st_size
            if size < MAP_BYTES:
                return decode(os.pread(descriptors[0], size, 0))
            return decode(mmap.mmap(descriptors[0], 0, access=mmap.ACCESS_READ))
        except (msgspec.MsgspecError, ValueError, IndexError) as error:
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
    """A channel to the process that serves `address`. Raises Disconnected when there is none."""
    sock = _socket()
    try:
        sock.connect("\0" + address)
    except OSError as error:
        sock.close()
        raise Disconnected(f"{address}: {error.strerror}") from None
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
