"""What an engine will hold in memory, told before it is started.

    config.json, files, options ─► an engine's `memory` ─► terms ─► memory_plan.py: their sum by device

Nothing is loaded, and nothing heavy is imported: a plan is made where there is neither torch nor a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tritone.checkpoint import released_bytes

LoadFormat: TypeAlias = Literal["auto", "dummy"]
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # by the `dtype` of an engine
FILES_FACTOR = 1.3  # memory per byte of files, of engines that tell nothing better


@dataclass(frozen=True)
class Term:
    """One part of what an engine process holds on its device; of an engine on several GPUs, on each."""

    name: str  # e.g. "KV cache"
    num_bytes: int
    how: str  # the arithmetic, for people
    is_exact: bool = True  # else an allowance, or the most that an estimate allows
    lower: str = ""  # the engine options that make it smaller, if there are any
    holds: tuple[Term, ...] = ()  # what must find room in it, of an engine that fills it by itself

    @property
    def held_bytes(self) -> int:
        return sum(term.num_bytes for term in self.holds)


@dataclass(frozen=True)
class Ground:
    """What a stage is planned on."""

    stage: str
    checkpoint: Path  # folder with the stage's weights
    is_released: bool = False  # the folder is all stages' own, in the Hugging Face layout
    on_gpu: bool = False
    num_gpus: int = 1  # that the engine is spread over
    gpu_bytes: int | None = None  # of each, in all; None: there is no GPU, or nothing says how large it is


class Planned:
    """Every engine: it tells beforehand what it will hold."""

    spans_gpus = False  # one engine can be spread over several GPUs (`device: [gpu:0, gpu:1]`)
    leaves_default_stream = False  # its runtime does so by itself: all its threads then need one stream

    @classmethod
    def memory(cls, ground: Ground, options: Any) -> list[Term]:
        """The terms of one engine process, without what every process takes. ConfigError as when it loads.

        options: of this engine. An engine that tells nothing of its own is taken for its files.
        """
        return stored(ground)


def stored(ground: Ground) -> list[Term]:
    """The files of a stage's weights, and some more for what is made of them; no term if there are none."""
    if ground.is_released:
        num_bytes = released_bytes(ground.checkpoint).get(ground.stage, 0)
    else:
        files = ground.checkpoint.rglob("*") if ground.checkpoint.is_dir() else ()
        num_bytes = sum(file.stat().st_size for file in files if file.is_file())
    if not num_bytes:
        return []
    how = f"{num_bytes:,} B of files × {FILES_FACTOR}"
    return [Term("weights", int(FILES_FACTOR * num_bytes), how, is_exact=False)]


def gpu_share(ground: Ground, utilization: float, holds: tuple[Term, ...] = ()) -> Term:
    """All that an engine takes which fills a share of its GPU by itself: weights, KV cache and graphs.

    holds: the least of these without which it does not start.
    """
    size = ground.gpu_bytes or 0
    how = f"{utilization:.0%} of {size / (1 << 30):.1f} GiB, with weights, KV cache and graphs in it"
    return Term("share of the GPU", int(utilization * size), how, lower="gpu_memory_utilization", holds=holds)


def product(factors: dict[str, int], item_bytes: int) -> tuple[int, str]:
    """Bytes of a tensor, and how they come about: `{"layers": 48, "slots": 16}` to "48 layers × 16 slots"."""
    num_bytes = item_bytes
    for factor in factors.values():
        num_bytes *= factor
    words = " × ".join(f"{factor:,} {name}" for name, factor in factors.items())
    return num_bytes, f"{words} × {item_bytes} B"
