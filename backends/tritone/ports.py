"""A tensor is declared once, as a `Port`; pbtxt, packing, unpacking and the client docs derive from it.

Inside the library values are plain: one STRING is `str`, one number is `int` or `float`, one BOOL is
`bool`; arrays stay arrays, except STRING [-1], which is a list of `bytes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tritone.errors import InvalidRequest, suggestion

Array = npt.NDArray[Any]

NUMPY_DTYPES: Mapping[str, Any] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "STRING": np.object_,
}


@dataclass(frozen=True)
class Port:
    """One tensor of a Triton model."""

    name: str
    dtype: str  # a key of NUMPY_DTYPES: Triton's TYPE_* without the prefix
    dims: tuple[int, ...]  # without a batch dimension; -1 is free
    doc: str  # one phrase for the client docs: meaning and unit
    optional: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in NUMPY_DTYPES:
            raise ValueError(
                f"port '{self.name}' has dtype {self.dtype}; {suggestion(self.dtype, NUMPY_DTYPES)}"
            )

    @property
    def is_scalar(self) -> bool:
        return self.dims == (1,)

    def pack(self, value: Any) -> Array:
        """The tensor of a plain value: shape `dims` with every -1 filled in, dtype of the port.

        Raises ValueError when the value does not fit: a fault of ours and not of a caller.
        """
        if self.dtype == "STRING":
            items = (value,) if isinstance(value, (str, bytes)) else tuple(value)
            array = np.empty(len(items), np.object_)
            array[:] = [item.encode() if isinstance(item, str) else bytes(item) for item in items]
        else:
            array = np.ascontiguousarray(value, dtype=NUMPY_DTYPES[self.dtype])
            if array.ndim == 0:
                array = array.reshape(1)
        if not self._fits(array.shape):
            raise ValueError(f"{self.name} of shape {list(array.shape)} is not {list(self.dims)}")
        return array

    def unpack(self, array: Array) -> Any:
        """The plain value of a tensor that a client sent.

        Raises InvalidRequest for a wrong shape, or text that is not UTF-8.
        """
        if not self._fits(array.shape):
            raise InvalidRequest(
                f"{self.name} has shape {list(array.shape)}", f"send {self.dtype} of shape {list(self.dims)}"
            )
        if self.dtype == "STRING":
            items = [bytes(item) for item in array.reshape(-1)]
            return self._text(items[0]) if self.is_scalar else items
        return array.reshape(-1)[0].item() if self.is_scalar else array

    def _text(self, data: bytes) -> str:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequest(
                f"{self.name} is not valid UTF-8 (byte {data[error.start]:#04x} at position {error.start})",
                "send UTF-8 text",
            ) from None

    def _fits(self, shape: tuple[int, ...]) -> bool:
        return shape == self.dims or (
            len(shape) == len(self.dims)
            and all(want in (-1, got) for want, got in zip(self.dims, shape, strict=True))
        )


def by_name(ports: Iterable[Port]) -> dict[str, Port]:
    return {port.name: port for port in ports}
