"""Speech that runs in a loop: the same frames again and again, until somebody ends it."""

from __future__ import annotations

from dataclasses import dataclass, field

LONGEST_LOOP = 16  # frames; no loop that is longer is found


@dataclass
class LoopGuard:
    """Listens to the frames of one session."""

    most: int  # frames in a row that come again, as in a loop; 0: as many as will
    _past: list[tuple[int, ...]] = field(default_factory=list, init=False)  # the last frames
    _runs: list[int] = field(
        default_factory=lambda: [0] * (LONGEST_LOOP + 1), init=False
    )  # by length of a loop: frames in it

    def hear(self, frame: tuple[int, ...]) -> bool:
        """Take in the next frame's codes; whether the speech has run in a loop for too long."""
        past, runs = self._past, self._runs
        if frame in past:
            for length in range(1, LONGEST_LOOP + 1):
                again = len(past) >= length and past[-length] == frame
                runs[length] = runs[length] + 1 if again else 0
        elif any(runs):
            runs[:] = [0] * len(runs)
        past.append(frame)
        del past[:-LONGEST_LOOP]
        return bool(self.most) and max(runs) >= self.most
