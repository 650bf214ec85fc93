"""Weights of a checkpoint folder by name, from its safetensors files.

    name ─index─► file ─header─► dtype, shape, bytes from … to ─read─► tensor

A safetensors file is the length of its header (8 bytes, little-endian), the header (JSON: dtype, shape and
place of each tensor) and the tensors' bytes (https://github.com/huggingface/safetensors#format). They are
read straight into the tensor that is returned: a mapped file would stay mapped as long as a view of it lives.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tritone.checkpoint import INDEX, WEIGHTS
from tritone.errors import ConfigError


class Weights:
    """Reads what it is asked for and nothing else; no file stays open or mapped."""

    def __init__(self, folder: Path) -> None:
        """ConfigError if the folder has no weights, or not in files of this kind."""
        self.folder = folder
        self._headers: dict[Path, _Header] = {}  # of the files that were needed so far
        self._files = self._locate()  # tensor name -> file

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        """The tensor as stored, on the CPU in memory of its own; ConfigError if there is none."""
        header = self._header(self._files[name]) if name in self._files else None
        if header is None or name not in header.tensors:
            cure = "its weights do not belong to its config.json: get both from one place"
            raise ConfigError(f"'{self.folder}' has no weight '{name}'", cure)
        return header.read(name)

    def _locate(self) -> dict[str, Path]:
        index, single = self.folder / INDEX, self.folder / WEIGHTS
        if index.is_file():
            files: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
            return {name: self.folder / file for name, file in files.items()}
        if not single.is_file():
            raise ConfigError(
                f"'{self.folder}' has no {WEIGHTS}", "name a folder with the weights of the stage"
            )
        return dict.fromkeys(self._header(single).tensors, single)

    def _header(self, file: Path) -> _Header:
        if file not in self._headers:
            self._headers[file] = _Header(file)
        return self._headers[file]


class _Header:
    """Where the tensors of one file lie in it."""

    def __init__(self, file: Path) -> None:
        """ConfigError if the file is missing or not a safetensors file."""
        self._file = file
        try:
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                if length > _LONGEST_HEADER:
                    raise ValueError(f"a header of {length} bytes")
                self.tensors: dict[str, Any] = json.loads(stream.read(length))
        except (OSError, ValueError) as error:
            raise ConfigError(f"'{file}' cannot be read ({error})", "get the checkpoint again") from None
        self.tensors.pop("__metadata__", None)
        self._base = 8 + length

    def read(self, name: str) -> Tensor:
        """A tensor as stored; ConfigError for a dtype that torch has not, or a file that ends too early."""
        entry = self.tensors[name]
        begin, end = entry["data_offsets"]
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None or math.prod(entry["shape"]) * dtype.itemsize != end - begin:
            raise ConfigError(
                f"'{self._file}' has '{name}' as {entry['dtype']} {entry['shape']} in {end - begin} bytes",
                f"use weights of dtype {', '.join(_DTYPES)}",
            )
        data = torch.empty(end - begin, dtype=torch.uint8)
        with self._file.open("rb", buffering=0) as stream:
            stream.seek(self._base + begin)
            rest = data.numpy().data
            while rest:
                # One call reads 2 GB at most.
                count = stream.readinto(rest)
                if not count:
                    raise ConfigError(f"'{self._file}' ends within '{name}'", "get the checkpoint again")
                rest = rest[count:]
        return data.view(dtype).view(entry["shape"])


_LONGEST_HEADER = 100_000_000  # bytes, as the format has it

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
