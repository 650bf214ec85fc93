"""Weights of a checkpoint folder by name, from its safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from tritone.errors import ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Weights:
    """Reads what it is asked for and nothing else; a file is mapped only while a tensor of it lives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = self._locate()  # tensor name -> file

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        """The tensor as stored, backed by the mapped file: its pages are read when they are used."""
        if name not in self._files:
            cure = "its weights do not belong to its config.json: get both from one place"
            raise ConfigError(f"'{self.folder}' has no weight '{name}'", cure)
        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def _locate(self) -> dict[str, Path]:
        index, single = self.folder / INDEX, self.folder / SINGLE
        if index.is_file():
            files: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
            return {name: self.folder / file for name, file in files.items()}
        if not single.is_file():
            raise ConfigError(
                f"'{self.folder}' has no {SINGLE}", "name a folder with the weights of the stage"
            )
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
