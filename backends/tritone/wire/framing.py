"""Messages as bytes: msgpack, with numpy arrays as they lie in memory.

message ─► encode ─► bytes      an array: its dtype and shape, then its elements
message ◄─ decode ◄─ bytes      arrays are views of the bytes, read-only
"""

from __future__ import annotations

import functools
import mmap
import struct
from typing import Any

import msgspec
import numpy as np

from tritone.wire.messages import AnyMessage

_ARRAY = 1  # msgpack extension type of a numpy array


def _enc_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        if array.dtype == object:
            return [bytes(item) for item in array.reshape(-1)]
        body = array.data.cast("B") if array.size else b""
        return msgspec.msgpack.Ext(_ARRAY, b"".join((_head(array.dtype.str, array.shape), body)))
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"cannot send {type(value).__name__}")


@functools.lru_cache(32)  # of few kinds, over and over: the frames of every session of every step
def _head(dtype: str, shape: tuple[int, ...]) -> bytes:
    """What says how the bytes of an array are read."""
    head = msgspec.msgpack.encode((dtype, shape))
    return struct.pack("<H", len(head)) + head


def _ext_hook(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise ValueError(f"unknown extension {code}")
    (size,) = struct.unpack_from("<H", data)
    dtype, shape = msgspec.msgpack.decode(data[2 : 2 + size])
    return np.frombuffer(data, dtype=dtype, offset=2 + size).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc_hook)
_decoder = msgspec.msgpack.Decoder(AnyMessage, ext_hook=_ext_hook)


def encode(message: AnyMessage) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | memoryview | mmap.mmap) -> Any:
    """The message in `data`. Arrays are read-only views of it."""
    return _decoder.decode(data)
