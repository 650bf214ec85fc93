"""How the command line shows an answer while it arrives: on a terminal, into a pipe, or as JSON lines."""

from __future__ import annotations

import dataclasses
import json
import sys
from abc import abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from tritone_client.events import AudioChunk, Done, EncodedAudio, Event, Media, Progress, TextDelta


class Display(AbstractContextManager["Display"]):
    """Shows the events of one answer in the order of arrival, and a summary at the end."""

    @abstractmethod
    def show(self, event: Event) -> None:
        """Called with every event, as it arrives."""

    @abstractmethod
    def summarize(self, done: Done, out: Path | None) -> None:
        """Called once, after the last event. `out` is the file that holds the audio."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None


def choose_display(as_json: bool) -> Display:
    """The display that fits stdout."""
    if as_json:
        return JsonDisplay(sys.stdout)
    return TerminalDisplay() if sys.stdout.isatty() else PlainDisplay(sys.stdout, sys.stderr)


class PlainDisplay(Display):
    """Text alone on stdout, so that it can be piped; the summary goes to stderr."""

    def __init__(self, out: TextIO, notes: TextIO):
        self._out = out
        self._notes = notes
        self._in_line = False

    def show(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            print(event.text, end="", file=self._out, flush=True)
            self._in_line = not event.text.endswith("\n")

    def summarize(self, done: Done, out: Path | None) -> None:
        self._end_line()
        print(summary_line(done, out), file=self._notes)

    def __exit__(self, *_: Any) -> None:
        self._end_line()

    def _end_line(self) -> None:
        if self._in_line:
            print(file=self._out, flush=True)
            self._in_line = False


class JsonDisplay(Display):
    """One JSON object per line: each event, then a summary. Audio appears as its number of samples."""

    def __init__(self, out: TextIO):
        self._out = out
        self._texts: list[str] = []

    def show(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            self._texts.append(event.text)
        self._print(event_json(event))

    def summarize(self, done: Done, out: Path | None) -> None:
        self._print(
            {
                "event": "summary",
                "text": "".join(self._texts),
                "out": None if out is None else str(out),
                "seed": done.seed,
                **dataclasses.asdict(done.measured),
            }
        )

    def _print(self, line: dict[str, Any]) -> None:
        print(json.dumps(line, ensure_ascii=False), file=self._out, flush=True)


class TerminalDisplay(Display):
    """Text as it streams, and below it a live line with the audio seconds."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        self._live = Live(console=self._console, transient=True, auto_refresh=False)
        self._line = ""  # the last line of the text, still growing
        self._audio_s = 0.0

    def __enter__(self) -> TerminalDisplay:
        self._live.start()
        return self

    def show(self, event: Event) -> None:
        from rich.text import Text

        full: list[str] = []
        if isinstance(event, TextDelta):
            # Only the growing line is live: redrawing a text taller than the screen would repeat it.
            full, self._line = split_lines(self._line + event.text, self._console.width)
        elif isinstance(event, AudioChunk):
            self._audio_s += event.duration_s
        status = Text(f"♪ {self._audio_s:.1f} s of audio" if self._audio_s else "…", style="dim")
        with self._console:  # in one write: a line that is full leaves the live part as it appears above it
            self._live.update(Text("\n").join([Text(self._line), status]), refresh=True)
            for line in full:
                self._console.print(Text(line))

    def summarize(self, done: Done, out: Path | None) -> None:
        from rich.text import Text

        self._stop()
        self._console.print(Text(summary_line(done, out), style="dim"))

    def __exit__(self, *_: Any) -> None:
        self._stop()

    def _stop(self) -> None:
        from rich.text import Text

        with self._console:
            self._live.stop()
            if self._line:
                self._console.print(Text(self._line))
                self._line = ""


def split_lines(text: str, width: int) -> tuple[list[str], str]:
    """Cut a text into the lines that are full at `width` terminal cells and the rest, which may grow."""
    from rich.cells import cell_len, chop_cells

    *lines, rest = text.split("\n")
    while cell_len(rest) > width:
        head = chop_cells(rest, width)[0]
        cut = head.rfind(" ") + 1 or len(head)
        lines.append(rest[:cut].rstrip())
        rest = rest[cut:]
    return lines, rest


def summary_line(done: Done, out: Path | None) -> str:
    """E.g. `TTFT 0.12 s · TTFP 0.45 s · RTF 0.38 · 3.2 s of audio in reply.wav`."""
    measured = done.measured
    parts = []
    if measured.ttft_s is not None:
        parts.append(f"TTFT {measured.ttft_s:.3f} s")
    if measured.ttfp_s is not None:
        parts.append(f"TTFP {measured.ttfp_s:.3f} s")
    if measured.rtf is not None:
        parts.append(f"RTF {measured.rtf:.2f}")
        parts.append(f"{measured.audio_s:.1f} s of audio" + (f" in {out}" if out else ""))
    parts.append(f"{measured.e2el_s:.2f} s in all")
    cut_short = {modality: why for modality, why in done.finish_reasons.items() if why != "stop"}
    parts += [f"{modality} ended by {why}" for modality, why in cut_short.items()]
    return " · ".join(parts)


def event_json(event: Event) -> dict[str, Any]:
    """An event as plain JSON values; sound, pictures and files by their size only."""
    match event:
        case TextDelta():
            return {"event": "text", "index": event.index, "text": event.text}
        case AudioChunk():
            return {
                "event": "audio",
                "index": event.index,
                "num_samples": len(event.samples),
                "sample_rate_hz": event.sample_rate_hz,
                "sample_offset": event.sample_offset,
            }
        case EncodedAudio():
            return {
                "event": "audio",
                "index": event.index,
                "num_bytes": len(event.data),
                "audio_format": event.audio_format,
            }
        case Media():
            return {
                "event": event.modality,
                "index": event.index,
                "num_frames": 0 if event.frames is None else len(event.frames),
                "num_files": len(event.files),
            }
        case Progress():
            return {"event": "progress", "index": event.index, "info": dict(event.info)}
        case Done():
            return {
                "event": "done",
                "index": event.index,
                "finish_reasons": dict(event.finish_reasons),
                "usage": dict(event.usage),
                "stage_timings": dict(event.stage_timings),
                "seed": event.seed,
            }
