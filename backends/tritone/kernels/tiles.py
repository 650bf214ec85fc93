"""How large a piece of a product one program of a kernel computes.

    kind, rows, inner, outer ─► MEASURED, by shape ─► else the rule for all shapes ─► Tile

Chosen by size alone, so that nothing is tuned at start and a row's rounding never depends on the machine's
mood. The rules are what was fastest on an H200 for decoders of 1,024 columns with experts of 384 and of 2,048
with experts of 768; convolutions have one of their own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # which takes its time for every program
MOST_ROWS = 64  # of a tile of gemm
MOST_GROUPED = 128  # rows of a tile of those that chose an expert
MOST_SPLITS = 4
TILE_NUMBERS = 4  # of a tile of a prompt: its first row, how many, their slot, the place of the first
MOST_COLUMNS = 128  # of a tile of a convolution
MULTIPROCESSORS = 132  # that want a program each
QUERIES = 128  # of such a tile: rows times the heads that share a key

Kind: TypeAlias = Literal[
    "gemv",
    "gemm",
    "gemm_parts",
    "router",
    "pair_up",
    "pair_down",
    "experts_up",
    "experts_down",
    "grouped_up",
    "grouped_down",
]


@dataclass(frozen=True)
class Tile:
    width: int  # columns of y
    depth: int  # of x and the weight at a time
    warps: int
    stages: int = 1
    split: int = 1  # sums that are left to be added up
    rows: int = 0  # columns of a stream at a time; 0: all


class Shape(NamedTuple):
    """Of a product, the rows rounded up to those that a tile holds."""

    kind: Kind
    height: int
    inner: int  # columns of x
    outer: int  # columns of y


def tile_rows(group: int) -> int:
    """Rows of a tile of a prompt, where so many query heads share a key head."""
    return max(1, QUERIES // _power_of_two(group))


def most_tiles(rows: int, spans: int, tall: int) -> int:
    """That rows in so many spans can make."""
    return rows // tall + spans


MEASURED: dict[Shape, Tile] = {}
"""Where another tile than the rule's was faster: `--tiles` of thinker_step.py and prompt_pass.py, in
client/bench/gpu, finds them."""


def tile_of(kind: Kind, rows: int, inner: int, outer: int, item: int = 2) -> Tile:
    """For y [rows, outer] of x [rows, inner]; outer: without the gates of a GLU.

    Of what is grouped, the rows of an expert if all had as many. item: bytes of a number, of which more than
    two leave room for fewer in the memory that a program has for itself.
    """
    shape = Shape(kind, height(kind, rows), inner, outer)
    tile = MEASURED.get(shape) or _RULES[kind](shape)
    if item > 2 and kind in ("grouped_up", "grouped_down") and not INTERPRETED:
        return replace(tile, depth=min(32, tile.depth), stages=2)
    return tile


def height(kind: Kind, rows: int) -> int:
    """Rows of a tile."""
    if kind in ("gemv", "pair_up", "pair_down"):
        return rows
    whole = max(16, _power_of_two(rows))
    if kind in ("experts_up", "experts_down"):
        return whole
    return min(MOST_GROUPED if kind in ("grouped_up", "grouped_down") else MOST_ROWS, whole)


def convolution_tile(batch: int, length: int, inner: int, outer: int, item: int = 2) -> Tile:
    """For y [batch, length, outer] of rows of `inner` channels, whatever the taps."""
    tall, depth = max(16, _power_of_two(length)), max(16, _power_of_two(inner))
    if INTERPRETED:
        return Tile(max(16, _power_of_two(outer)), depth, 4, rows=tall)
    tall, depth = min(MOST_COLUMNS, tall), min(64, depth)
    if depth > 32 and inner % depth:
        depth = 32
    if item > 2:
        return Tile(64, min(32, depth), 4, 2, rows=min(64, tall))
    programs = batch * -(-length // tall) * -(-outer // 128)
    is_wide = programs >= MULTIPROCESSORS and (outer % 128 == 0 or outer % 64 != 0)
    return Tile(128, depth, 8, 3, rows=tall) if is_wide else Tile(64, depth, 4, 3, rows=tall)


def _gemv(shape: Shape) -> Tile:
    if INTERPRETED:
        return Tile(1024, shape.inner, 4)
    return Tile(4, shape.inner, 4 if shape.inner <= 2048 else 8)


def _gemm(shape: Shape) -> Tile:
    if INTERPRETED:
        return Tile(1024, _depth(shape), 4)
    return Tile(32 if shape.outer <= 8192 else 64, _depth(shape), 4, 4)


def _gemm_parts(shape: Shape) -> Tile:
    if INTERPRETED:
        return Tile(1024, _depth(shape), 4, split=2)
    # Enough programs to ask for the whole bandwidth of some 130 multiprocessors.
    split = MOST_SPLITS if shape.inner >= 2048 else 2 if shape.inner >= 512 else 1
    return Tile(32, _depth(shape), 4, 4, split)


def _router(shape: Shape) -> Tile:
    # Every program adds up what was left of its row: the fewer, the more rows there are.
    width = max(8, shape.height // 2)
    return Tile(width, _power_of_two(shape.inner), 8 if width == 8 else 16)


def _pair_up(shape: Shape) -> Tile:
    return Tile(256 if INTERPRETED else 8, min(1024, _power_of_two(shape.inner)), 4)


def _pair_down(shape: Shape) -> Tile:
    # All columns of a piece are full, where they can be.
    depth = next((size for size in (256, 128, 64) if shape.inner % size == 0), _power_of_two(shape.inner))
    return Tile(64 if INTERPRETED else 4, depth, 8)


def _experts_up(shape: Shape) -> Tile:
    if shape.height > 32:
        return Tile(64, min(64, _depth(shape)), 4, 3)
    return Tile(32, _depth(shape), 4, 4)


def _experts_down(shape: Shape) -> Tile:
    if shape.height > 32:
        return Tile(128, min(64, _depth(shape)), 4, 3)
    return Tile(32, _depth(shape), 4, 4)


def _grouped_up(shape: Shape) -> Tile:
    if INTERPRETED:
        return Tile(256, _power_of_two(shape.inner), 4)
    return Tile(64, min(64, _depth(shape)), 8 if shape.height > 64 else 4, 4)


def _grouped_down(shape: Shape) -> Tile:
    if INTERPRETED:
        return Tile(256, _power_of_two(shape.inner), 4)
    return Tile(128 if shape.height > 32 else 64, min(64, _depth(shape)), 8 if shape.height > 64 else 4, 4)


_RULES = {
    "gemv": _gemv,
    "gemm": _gemm,
    "gemm_parts": _gemm_parts,
    "router": _router,
    "pair_up": _pair_up,
    "pair_down": _pair_down,
    "experts_up": _experts_up,
    "experts_down": _experts_down,
    "grouped_up": _grouped_up,
    "grouped_down": _grouped_down,
}


def _depth(shape: Shape) -> int:
    return min(128, _power_of_two(shape.inner))


def _power_of_two(number: int) -> int:
    """The next one that is not smaller."""
    return 1 << (number - 1).bit_length()
