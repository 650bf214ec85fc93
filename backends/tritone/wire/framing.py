"""Messages as bytes: msgpack, with numpy arrays as they lie in memory.

message ─► encode ─► bytes      an array: its dtype and shape, then its elements
message ◄─ decode ◄─ bytes      arrays are views of the bytes, read-only
"""

from __future__ import annotations

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
        head = msgspec.msgpack.encode((array.dtype.str, array.shape))
        body = array.data.cast("B") if array.size else b""
        return msgspec.msgpack.Ext(_ARRAY, b"".join((struct.pack("<H", len(head)), head, body)))
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"cannot send {type(value).__name__}")


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
