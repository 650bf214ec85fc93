"""What the reference answers on the tiny checkpoint: computed once a machine, read by every parity test.

    CASES[name] ─► Reference.answer ─► <cache>/qwen3_omni/reference/<key>/<name>.npz ─► answer(name)

The key covers the checkpoint, the cases and the versions of what computes them. A case holds the request as a
client sends it (`messages`, `image_files`, `audio_files`, `video_files`, limits); an answer holds prompt ids,
text ids, codes and waveform.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import qwen3_omni_reference
import qwen3_omni_tiny
from qwen3_omni_reference import Answer, Case, Margins, cases

from tritone.checkpoint import checkpoint_dir

__all__ = ["CASES", "Answer", "Case", "answer", "checkpoint"]

CASES: dict[str, Case] = cases()
ARRAYS = ("prompt_ids", "text_ids", "codes", "waveform")


@functools.cache
def checkpoint() -> Path:
    """The folder of the tiny checkpoint, built if this machine has none."""
    qwen3_omni_tiny.main([])
    return checkpoint_dir(qwen3_omni_tiny.PIPELINE)


@functools.cache
def answer(name: str) -> Answer:
    """The reference's answer to CASES[name]."""
    file = _folder() / f"{name}.npz"
    if not file.exists():
        _keep(_reference().answer(CASES[name]), file)
    with np.load(file) as kept:
        facts = json.loads(str(kept["facts"]))
        margins = Margins(**facts.pop("margins"))
        return Answer(**{key: kept[key] for key in ARRAYS}, **facts, margins=margins)


def _keep(given: Answer, file: Path) -> None:
    facts = {key: value for key, value in asdict(given).items() if key not in ARRAYS}
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".npz", delete=False) as scratch:
        np.savez(scratch, facts=json.dumps(facts), **{key: getattr(given, key) for key in ARRAYS})
    os.replace(scratch.name, file)  # two test runs at once write the same


@functools.cache
def _reference() -> qwen3_omni_reference.Reference:
    return qwen3_omni_reference.Reference(checkpoint())


@functools.cache
def _folder() -> Path:
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")]
    sources = [(checkpoint() / "README.md").read_bytes(), Path(qwen3_omni_reference.__file__).read_bytes()]
    key = hashlib.sha256(b"".join(sources) + ",".join(versions).encode()).hexdigest()[:16]
    return checkpoint().parent / "reference" / key
