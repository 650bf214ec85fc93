"""A torch profile of an engine process, taken while its stages go on.

    TraceTorch ─► begin ── wait, watch its memory ── end ─► Chrome trace, compressed ─► Profiled
                    │                                 │
    stage threads ──▼────── step  step  step  step ───▼─────── step  step  step ──────────────►

Recording is process-wide, so it sees the threads of all stages that share the process, and stage threads need
not take part. It holds the names and times of operations, and no shapes, values or lines of code. It costs
memory by the operation and, at its end, about half a second for each 100,000 of them in which no stage of
the process moves: so it ends early when it grows large.
"""

from __future__ import annotations

import ctypes
import gzip
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tritone import wire
from tritone.errors import InvalidRequest, TritoneError, Unavailable, Unsupported

MAX_SECONDS = 60
MAX_RECORD_BYTES = 32 << 20  # of memory: some 140,000 operations
MAX_TRACE_BYTES = 64 << 20  # of the compressed file
WATCH_EVERY_S = 0.1
COMPRESSION_LEVEL = 3  # higher ones are slow and gain little
PROFILING_OFF = "profiling is off for this pipeline"
PROFILING_CURE = "set `profiling: true` in its deploy.yaml, or serve it with --set profiling=true"


class TorchTrace:
    """Takes one recording at a time, where the deploy file allows any. Thread-safe."""

    def __init__(self, allowed: bool) -> None:
        self._allowed = allowed
        self._busy = threading.Lock()

    def answer(self, order: wire.TraceTorch) -> wire.Profiled | wire.Refused:
        """What `take` gives or why it does not; returns when the recording is over."""
        try:
            return self.take(order.seconds)
        except TritoneError as error:
            return wire.Refused(order.call, error.code, error.what, error.cure)
        except Exception as error:
            what = f"torch cannot be profiled: {type(error).__name__}: {' '.join(str(error).split())}"
            return wire.Refused(order.call, TritoneError.code, what, "give --kind py-spy")

    def take(self, seconds: float) -> wire.Profiled:
        """A gzipped Chrome trace. Raises TritoneError where there can be none."""
        if not self._allowed:
            raise Unsupported(PROFILING_OFF, PROFILING_CURE)
        if not 0 < seconds <= MAX_SECONDS:
            raise InvalidRequest(f"a profile of {seconds:g} s is asked for", f"give at most {MAX_SECONDS}")
        if "torch" not in sys.modules:
            raise Unsupported(
                "kind torch needs an engine that runs on torch, and this one does not", "give --kind py-spy"
            )
        if not self._busy.acquire(blocking=False):
            raise Unavailable("this process is being profiled already", "try again when that is done")
        try:
            return self._record(seconds)
        finally:
            self._busy.release()

    def _record(self, seconds: float) -> wire.Profiled:
        first = _recording()  # the first one of a process takes seconds to begin
        first.start()
        first.stop()
        recording = _recording()
        recording.start()
        began_s = time.monotonic()
        try:
            is_whole = _wait(seconds)
        finally:
            recorded_s = time.monotonic() - began_s
            recording.stop()
        with tempfile.TemporaryDirectory(prefix="tritone-trace-") as folder:
            data = _compressed(recording, Path(folder))
        why = "" if is_whole else f", ended early at {MAX_RECORD_BYTES >> 20} MiB of records"
        return wire.Profiled(data, f"{recorded_s:.1f} s of torch{why}")


def _recording() -> Any:
    """A profiler of all threads of this process, and of its GPU if it uses one."""
    import torch
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True))


def _wait(seconds: float) -> bool:
    """Whether all of the time passed before the process had grown too much."""
    begin_bytes, deadline = _bytes_in_use(), time.monotonic() + seconds
    while (left_s := deadline - time.monotonic()) > 0:
        if _bytes_in_use() - begin_bytes > MAX_RECORD_BYTES:
            return False
        time.sleep(min(WATCH_EVERY_S, left_s))
    return True


def _compressed(recording: Any, folder: Path) -> bytes:
    """Raises TritoneError when it is too large."""
    plain, packed = folder / "trace.json", folder / "trace.json.gz"
    recording.export_chrome_trace(str(plain))
    # Not by the profiler itself, which goes through the file line by line and lets no other thread run.
    with plain.open("rb") as source, gzip.open(packed, "wb", COMPRESSION_LEVEL) as target:
        shutil.copyfileobj(source, target, 1 << 20)
    if packed.stat().st_size > MAX_TRACE_BYTES:
        what = f"the trace takes {packed.stat().st_size >> 20} MiB, and {MAX_TRACE_BYTES >> 20} are allowed"
        raise TritoneError(what, "give fewer --seconds")
    return packed.read_bytes()


class _Mallinfo2(ctypes.Structure):
    """What the C library says of its memory: mallinfo2(3), size_t each."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def _bytes_in_use() -> int:
    """Memory that this process has asked for and not given back; what it once held does not count."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return int(info.hblkhd + info.uordblks)
