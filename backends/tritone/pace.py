"""When the outputs of one answer came, by modality: what TTFT, TPOT, TTFP and gaps are computed from."""

from __future__ import annotations

import time


class Pace:
    """Times are seconds since the request was received."""

    def __init__(self, received_s: float) -> None:
        """received_s: time.monotonic()."""
        self._received_s = received_s
        self.first_s: dict[str, float] = {}  # by modality
        self.last_s: dict[str, float] = {}
        self.gaps_s: list[float] = []  # from each packet of sound to the next

    def note(self, modality: str) -> None:
        """An output of the modality goes out, or is kept for a whole answer."""
        now_s = self.now_s
        if modality == "audio" and modality in self.last_s:
            self.gaps_s.append(now_s - self.last_s[modality])
        self.first_s.setdefault(modality, now_s)
        self.last_s[modality] = now_s

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._received_s
