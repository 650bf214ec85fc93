"""What changes with the load: latency, throughput, and how TTFP is distributed."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tritone_bench.arrivals import Load
from tritone_bench.level import LevelReport
from tritone_bench.percentiles import PERCENTS, median
from tritone_bench.plots.style import (
    BLACK,
    COLOURS,
    DASHES,
    GREEN,
    PERCENTILE_LOOKS,
    from_zero,
    legend_above,
    load_axis,
    panels,
)

LATENCY_CAPTION = (
    "Percentiles over the answers of a level; of repeats the median, with their range as a bar. A hollow "
    "mark rests on fewer samples than its percentile needs and is the largest value seen."
)
THROUGHPUT_CAPTION = (
    "What completed answers made in a second of the level; of repeats the median and the range."
)
TTFP_CAPTION = "Share of the answers whose first chunk of sound had arrived by then, all repeats together."

NUDGES = {"p50": -0.03, "p99": 0.03}
"""How far to the side a percentile is drawn that has a range, as a share of its load."""
LATENCIES = (
    ("text", "ttft_s", "TTFT", "s"),
    ("audio", "ttfp_s", "TTFP", "s"),
    ("request", "e2el_s", "E2EL", "s"),
    ("text", "tpot_s", "TPOT", "s"),
    ("audio", "gap_s", "inter-chunk gap", "s"),
    ("audio", "rtf", "RTF", "s a second of sound"),
)


def latency(reports: Sequence[LevelReport]) -> Figure | None:
    """A panel a measure, a line a percentile."""
    shown = [row for row in LATENCIES if any(report.measure(row[0], row[1]) for report in reports)]
    if not shown:
        return None
    num_columns = min(3, len(shown))
    num_rows = -(-len(shown) // num_columns)
    figure, axes = panels(num_rows, num_columns, 3.4 * num_columns, 0.5 + 2.7 * num_rows)
    for panel, (modality, measure, name, unit) in zip(axes, shown, strict=False):
        _percentile_lines(panel, reports, modality, measure)
        panel.set_title(name)
        panel.set_ylabel(unit)
        from_zero(panel)
    for panel in axes[len(shown) :]:
        panel.set_visible(False)
    spreads = [report.measure(modality, measure) for modality, measure, *_ in shown for report in reports]
    if any(one is not None and one.too_few for one in spreads):
        axes[0].plot([], [], "o", color=BLACK, markerfacecolor="white", label="hollow: too few samples")
    legend_above(figure, axes[0])
    return figure


def throughput(reports: Sequence[LevelReport]) -> Figure | None:
    """A panel a unit."""
    units = (
        ("requests", "requests/s", [r.throughput.requests_per_s for r in reports]),
        ("text", "output tokens/s", [r.throughput.text_tokens_per_s for r in reports]),
        ("sound", "audio seconds/s", [r.throughput.audio_s_per_s for r in reports]),
    )
    shown = [row for row in units if any(row[2])]
    if not shown:
        return None
    figure, axes = panels(1, len(shown), 3.4 * len(shown), 2.9)
    for panel, (name, unit, values) in zip(axes, shown, strict=True):
        by_load = _by_load(reports, values)
        _line(panel, by_load, GREEN, "o", "-", name, hollow=())
        load_axis(panel, [load.value for load in by_load], reports[0].load.unit)
        panel.set_title(name)
        panel.set_ylabel(unit)
        from_zero(panel)
    return figure


def ttfp(reports: Sequence[LevelReport]) -> Figure | None:
    """The empirical distribution, a curve a level."""
    loads = list(dict.fromkeys(report.load for report in reports))
    seen = {
        load: [
            one.ttfp_s
            for report in reports
            if report.load == load
            for one in report.requests
            if one.ttfp_s is not None
        ]
        for load in loads
    }
    if not any(seen.values()):
        return None
    figure, [panel] = panels(1, 1, 6.4, 3.6)
    for number, (load, values) in enumerate(seen.items()):
        if values:
            colour = COLOURS[number % len(COLOURS)]
            label = f"{load} ({len(values)} answers)"
            panel.ecdf(
                values, color=colour, linestyle=DASHES[number % len(DASHES)], linewidth=1.8, label=label
            )
    panel.set_xlabel("TTFP (s after the request was sent)")
    panel.set_ylabel("share of answers")
    panel.set_xlim(left=0)
    panel.set_ylim(0, 1.02)
    panel.legend(loc="lower right")
    return figure


def _percentile_lines(panel: Axes, reports: Sequence[LevelReport], modality: str, measure: str) -> None:
    for percent in PERCENTS:
        colour, marker, dashes = PERCENTILE_LOOKS[percent]
        spreads = [report.measure(modality, measure) for report in reports]
        by_load = _by_load(reports, [None if one is None else one.percentile(percent) for one in spreads])
        hollow = {
            report.load
            for report, one in zip(reports, spreads, strict=True)
            if one is not None and percent in one.too_few
        }
        _line(panel, by_load, colour, marker, dashes, f"p{percent}", hollow)
    load_axis(panel, list(dict.fromkeys(report.load.value for report in reports)), reports[0].load.unit)


def _by_load(reports: Sequence[LevelReport], values: Sequence[float | None]) -> dict[Load, list[float]]:
    """The values of all repeats of each level that has any."""
    found: dict[Load, list[float]] = {}
    for report, value in zip(reports, values, strict=True):
        if value is not None:
            found.setdefault(report.load, []).append(value)
    return found


def _line(
    panel: Axes,
    by_load: dict[Load, list[float]],
    colour: str,
    marker: str,
    dashes: str,
    label: str,
    hollow: set[Load] | tuple[()],
) -> None:
    # Ranges of several percentiles stand beside each other.
    nudge = NUDGES.get(label, 0.0) if any(len(values) > 1 for values in by_load.values()) else 0.0
    x = [load.value * (1 + nudge) for load in by_load]
    y = [median(values) or 0.0 for values in by_load.values()]
    below = [middle - min(values) for middle, values in zip(y, by_load.values(), strict=True)]
    above = [max(values) - middle for middle, values in zip(y, by_load.values(), strict=True)]
    panel.errorbar(
        x,
        y,
        yerr=[below, above],
        color=colour,
        linestyle=dashes,
        marker=marker,
        markersize=5,
        capsize=2,
        label=label,
    )
    for load, at, height in zip(by_load, x, y, strict=True):
        if load in hollow:
            panel.plot(
                [at], [height], marker=marker, markersize=5, color=colour, markerfacecolor="white", zorder=5
            )
