"""Numpy arrays in messages: an extension type of msgpack, so that a reader copies nothing.

length of the head, uint16 ─ head: dtype, shape ─ bytes, in C order
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import msgspec
import numpy as np

_ARRAY = 1  # msgpack extension type


def packed(value: Any) -> Any:
    """What msgspec is to encode in place of a numpy value."""
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        if array.dtype == object:
            return [bytes(item) for item in array.reshape(-1)]
        body = array.data.cast("B") if array.size else b""
        return msgspec.msgpack.Ext(_ARRAY, b"".join((_head(array.dtype.str, array.shape), body)))
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"cannot send {type(value).__name__}")


@functools.lru_cache(256)  # of few kinds, over and over: the frames of every session of every step
def _head(dtype: str, shape: tuple[int, ...]) -> bytes:
    """What says how the bytes of an array are read."""
    head = msgspec.msgpack.encode((dtype, shape))
    return struct.pack("<H", len(head)) + head


def unpacked(code: int, data: memoryview) -> Any:
    """The array of an extension, a read-only view of `data`."""
    if code != _ARRAY:
        raise ValueError(f"unknown extension {code}")
    (size,) = struct.unpack_from("<H", data)
    dtype, shape = msgspec.msgpack.decode(data[2 : 2 + size])
    return np.frombuffer(data, dtype=dtype, offset=2 + size).reshape(shape)
