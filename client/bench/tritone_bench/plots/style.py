"""How every picture looks: colours that the colour-blind tell apart (Okabe and Ito), and lines that differ in
more than colour."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, YELLOW, BLACK = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#E69F00",
    "#CC79A7",
    "#56B4E9",
    "#F0E442",
    "#000000",
)
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
DASHES = ("-", "--", "-.", ":")
PERCENTILE_LOOKS = {50: (BLUE, "o", "-"), 90: (ORANGE, "s", "--"), 99: (VERMILION, "^", ":")}
"""Percent: colour, marker and dashes."""


def styled() -> AbstractContextManager[Any]:
    """matplotlib's settings for everything drawn inside."""
    return matplotlib.rc_context(
        {
            "font.size": 9,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 10,
            "legend.frameon": False,
            "svg.hashsalt": "tritone",  # the same run gives the same file
        }
    )


def panels(
    num_rows: int, num_columns: int, width: float, height: float, **shared: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of equal panels, row by row; width and height in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False, **shared)
    return figure, list(axes.flat)


def load_axis(axes: Axes, values: Sequence[float], unit: str) -> None:
    """An x axis with a tick a level; doubling is equally wide everywhere."""
    if len(values) > 1 and max(values) / min(values) > 2:
        axes.set_xscale("log", base=2)
    axes.set_xticks(list(values), [f"{value:g}" for value in values])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(unit)
    margin = 0.08
    if len(values) == 1:
        axes.set_xlim(values[0] * (1 - margin), values[0] * (1 + margin))


def from_zero(axes: Axes) -> None:
    """A y axis that begins at 0 and has room for the marks at its top."""
    axes.set_ylim(0, max(axes.get_ylim()[1] * 1.06, 1e-9))


def legend_above(figure: Figure, axes: Axes, num_columns: int = 4) -> None:
    """One legend for all panels, outside of them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=num_columns)
