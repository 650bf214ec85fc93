"""A checkpoint folder without weights: config, tokenizer and processor files, full-size or tiny."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any


def checkpoint_folder(folder: Path, tiny: bool) -> Path:
    """`folder`, filled if it is not yet. The scripts of build/ must be importable."""
    if not (folder / "config.json").is_file():
        scratch = folder.with_name(f".{folder.name}")
        for rest in (folder, scratch):
            shutil.rmtree(rest, ignore_errors=True)
        scratch.mkdir(parents=True)
        if tiny:
            _write_tiny(scratch)
        else:
            importlib.import_module("qwen3_omni_real_size").build(scratch)
        scratch.rename(folder)
    return folder


def _write_tiny(folder: Path) -> None:
    tiny: Any = importlib.import_module("qwen3_omni_tiny")
    files: Any = importlib.import_module("qwen3_omni_processor_files")
    ids = tiny.token_ids()
    files.write_tokenizer(folder, *tiny.byte_pairs(), tiny.SPECIAL_TOKENS, tiny.CONTEXT_TOKENS)
    files.write_processor(folder, max_pixels=128 * 128)
    files.write_json(folder / "config.json", tiny.model_config(ids))
    files.write_json(folder / "generation_config.json", tiny.generation_config(ids))
