"""What stands on a terminal after each write."""

import io
import re
import time

from tritone_client import AudioChunk, TextDelta
from tritone_client.display import TerminalDisplay

STEPS = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|(.)", re.DOTALL)


class Screen(io.StringIO):
    """A terminal of endless height; `seen` are the rows after each write."""

    def __init__(self):
        super().__init__()
        self.seen: list[list[str]] = []
        self._rows, self._row, self._column = [""], 0, 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for count, control, character in STEPS.findall(text):
            row = self._rows[self._row]
            if control == "A":
                self._row -= int(count or 1)
            elif control == "K":
                self._rows[self._row] = row[: self._column] if count in ("", "0") else ""
            elif character == "\r":
                self._column = 0
            elif character == "\n":
                self._row, self._column = self._row + 1, 0
                self._rows += [""] * (self._row + 1 - len(self._rows))
            elif character:
                self._rows[self._row] = row[: self._column].ljust(self._column) + character
                self._rows[self._row] += row[self._column + 1 :]
                self._column += 1
        if text:
            self.seen.append([row.rstrip() for row in self._rows])
        return len(text)


def test_a_line_that_is_full_never_stands_there_twice(monkeypatch):
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    with TerminalDisplay() as display:
        display.show(TextDelta("The first line.", 0))
        time.sleep(0.2)  # a line that is refreshed by a clock is on the screen by now
        display.show(TextDelta("\n", 1))
        display.show(TextDelta("The second line.\nThe third", 2))
        display.show(AudioChunk(b"\0" * 12_000, 24_000, 0, 3))
        display.show(TextDelta(" line.", 4))
    for rows in screen.seen:
        assert all(rows.count(line) <= 1 for line in ("The first line.", "The second line."))
    assert ["The first line.", "The second line.", "The third", "♪ 0.5 s of audio"] in screen.seen
    assert [row for row in screen.seen[-1] if row] == [
        "The first line.",
        "The second line.",
        "The third line.",
    ]
    shown = ["The first line." in rows for rows in screen.seen]
    assert shown == sorted(shown)  # nor does it vanish in between
