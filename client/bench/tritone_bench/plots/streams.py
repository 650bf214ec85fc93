"""One answer in pictures: its sound as it arrived and as it was heard, and its stages at work.

seconds of sound │      ┌──── arrived            stage │ ░▓▓░▓▓▓▓░▓           ░ open   ▓ busy
                 │   ┌──┘ ╱ heard                      │    ░▓░▓▓░▓▓
                 │ ┌─┘ ╱─╱  flat: silence              │       □  □  □        a call, a chunk
                 └──────────────► time                 └──────────────► time
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tritone_bench.level import LevelReport, Stream
from tritone_bench.playback import heard_at, play
from tritone_bench.plots.style import BLACK, BLUE, GREEN, ORANGE, SKY, VERMILION, legend_above, panels
from tritone_bench.stages import first_moment, stages_of

TIMELINE_CAPTION = (
    "Seconds of sound that had arrived, and that a listener who starts with the first chunk had heard. "
    "Where the two meet the listener runs out and hears silence until the next chunk. Typical: of median "
    "E2EL; worst: with the most silence."
)
GANTT_CAPTION = (
    "When each stage was open for one request and when it computed; other requests of the same batches are "
    "part of its work. A box is one call to a stage that Triton batches."
)


def timeline(reports: Sequence[LevelReport]) -> Figure | None:
    """The typical and the worst stream of the highest load."""
    report = _highest(reports)
    shown = {kind: stream for kind, stream in report.streams.items() if stream.audio}
    if "worst" in shown and shown["worst"] == shown.get("typical"):
        del shown["worst"]
    if not shown:
        return None
    figure, axes = panels(len(shown), 1, 7.6, 0.6 + 2.9 * len(shown))
    for panel, (kind, stream) in zip(axes, shown.items(), strict=True):
        _draw_stream(panel, stream)
        panel.set_title(f"{report.load}, {kind} stream (request {stream.number}): {_told(stream)}")
    _draw_silence(axes[0], 0.0, 0.0, label="silence heard")
    legend_above(figure, axes[0], num_columns=5)
    return figure


def gantt(reports: Sequence[LevelReport]) -> Figure | None:
    """The stages of the typical request, at the lowest and at the highest load; None without moments."""
    chosen = [_lowest(reports), _highest(reports)]
    if chosen[0].load == chosen[1].load:
        del chosen[1]
    shown = [(report, report.streams["typical"]) for report in chosen if "typical" in report.streams]
    shown = [(report, stream) for report, stream in shown if _placed(stream)]
    if not shown:
        return None
    num_stages = max(len(_placed(stream)) for _, stream in shown)
    figure, axes = panels(len(shown), 1, 7.6, 0.7 + len(shown) * (0.9 + 0.42 * num_stages))
    for panel, (report, stream) in zip(axes, shown, strict=True):
        _draw_stages(panel, stream)
        panel.set_title(f"{report.load}, request {stream.number}")
    legend_above(figure, axes[0], num_columns=6)
    return figure


def _told(stream: Stream) -> str:
    """How the playback went, in a few words."""
    playback = play(stream.audio)
    count = len(playback.underruns)
    if not playback.can_underrun:
        return "all in one chunk"
    if not count:
        return "no underrun"
    return f"{playback.underrun_s:.2f} s of silence in {count} underrun{'' if count == 1 else 's'}"


def _draw_stream(panel: Axes, stream: Stream) -> None:
    arrived_s, corners_s = 0.0, [(stream.audio[0].at_s, 0.0)]
    for at_s, duration_s in stream.audio:
        corners_s.append((at_s, arrived_s))
        arrived_s += duration_s
        corners_s.append((at_s, arrived_s))
    heard = heard_at(stream.audio)
    end_s = max(heard[-1][0], stream.end_s) if heard else stream.end_s
    corners_s.append((end_s, arrived_s))
    panel.plot(*zip(*corners_s, strict=True), color=BLUE, linewidth=1.6, label="arrived")
    if heard:
        panel.plot(*zip(*heard, strict=True), color=VERMILION, linestyle="--", linewidth=1.6, label="heard")
    for begin_s, until_s in play(stream.audio).underruns:
        _draw_silence(panel, begin_s, until_s)
    if stream.text:
        panel.plot(
            stream.text,
            [-0.04] * len(stream.text),
            linestyle="none",
            marker="|",
            markersize=7,
            color=BLACK,
            transform=panel.get_xaxis_transform(),
            clip_on=False,
            label="a text delta",
        )
    panel.axvline(stream.audio[0].at_s, color=GREEN, linestyle=":", linewidth=1.4, label="TTFP")
    panel.tick_params(axis="x", pad=9)
    panel.set_xlim(0, end_s * 1.02)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("s after the request was sent")
    panel.set_ylabel("seconds of sound")


def _draw_silence(panel: Axes, begin_s: float, end_s: float, label: str | None = None) -> None:
    panel.axvspan(begin_s, end_s, color=ORANGE, alpha=0.45, linewidth=0, label=label)


def _draw_stages(panel: Axes, stream: Stream) -> None:
    stages = _placed(stream)
    total_s = stream.timings.get("total_s") or max(_end_s(stage, stream) for stage in stages.values())
    labels = dict.fromkeys(("open", "queued", "computing", "a call"), "")  # each once in the legend

    def once(name: str) -> str | None:
        return name if labels.pop(name, None) is not None else None

    for row, (_, stage) in enumerate(stages.items()):
        opened_s, ended_s = stage["opened_at_s"], _end_s(stage, stream)
        panel.barh(row, ended_s - opened_s, 0.62, opened_s, color=SKY, alpha=0.45, label=once("open"))
        busy = stage.get("busy", [])
        if not stage.get("call_spans") and stage.get("queued_s"):
            panel.barh(
                row,
                min(stage["queued_s"], ended_s - opened_s),
                0.62,
                opened_s,
                fill=False,
                edgecolor=VERMILION,
                hatch="////",
                linewidth=0,
                label=once("queued"),
            )
        if busy:
            spans = [(begin_s, end_s - begin_s) for begin_s, end_s in busy]
            panel.broken_barh(spans, (row - 0.31, 0.62), facecolors=BLUE, label=once("computing"))
        for begin_s, end_s, *_ in stage.get("call_spans", []):
            panel.barh(
                row,
                end_s - begin_s,
                0.76,
                begin_s,
                fill=False,
                edgecolor=BLACK,
                linewidth=0.8,
                label=once("a call"),
            )
    for name, colour in (("ttft_s", ORANGE), ("ttfp_s", GREEN)):
        if stream.timings.get(name):
            panel.axvline(
                stream.timings[name], color=colour, linestyle=":", linewidth=1.6, label=name[:4].upper()
            )
    panel.set_yticks(range(len(stages)), list(stages))
    panel.set_ylim(len(stages) - 0.4, -0.6)
    panel.set_xlim(0, total_s * 1.02)
    panel.set_xlabel("s after the server received the request")
    panel.grid(axis="y", visible=False)


def _placed(stream: Stream) -> Mapping[str, Mapping[str, Any]]:
    """The stages that say when they were opened, in the order of their first outputs."""
    stages = {name: stage for name, stage in stages_of(stream.timings).items() if "opened_at_s" in stage}
    return dict(sorted(stages.items(), key=lambda item: first_moment(item[1]) or 0.0))


def _end_s(stage: Mapping[str, Any], stream: Stream) -> float:
    end_s: float = stage.get(
        "ended_at_s", stage.get("last_output_at_s", stream.timings.get("total_s", stream.end_s))
    )
    return end_s


def _lowest(reports: Sequence[LevelReport]) -> LevelReport:
    return min(reports, key=lambda report: report.load.value)


def _highest(reports: Sequence[LevelReport]) -> LevelReport:
    return max(reports, key=lambda report: report.load.value)
