"""What one part of a soak run found: figures, and everything that must not be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from soak_listener import Outcome


@dataclass
class Report:
    """Of one part."""

    part: str
    title: str
    figures: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    series: list[Any] = field(default_factory=list)  # what the figures were drawn from, for the JSON

    def judge(self, outcomes: Iterable[Outcome], allowed: Iterable[str] = ("exact",)) -> None:
        """Count how they ended; each end that is not allowed is a problem."""
        outcomes, allowed = list(outcomes), set(allowed)
        counts = Counter(outcome.kind for outcome in outcomes)
        for kind, count in counts.items():
            self.figures[kind] = self.figures.get(kind, 0) + count
        bad = [outcome for outcome in outcomes if outcome.kind not in allowed]
        self.problems += [f"{o.kind}: {o.detail} (seed {o.job.seed}, '{o.job.prompt}')" for o in bad[:5]]
        if len(bad) > 5:
            self.problems.append(f"and {len(bad) - 5} more of {len(outcomes)}")

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            self.problems.append(what)

    def __str__(self) -> str:
        width = max(map(len, self.figures), default=0)
        lines = [f"{self.part}  {self.title}: {'FAILED' if self.problems else 'ok'}"]
        lines += [f"   {name:<{width}}  {_shown(value)}" for name, value in self.figures.items()]
        lines += [f"   ! {problem}" for problem in self.problems]
        return "\n".join(lines)


def spread(values: Iterable[float]) -> str:
    """Median and range, for a table."""
    found = np.asarray(list(values), float)
    if not len(found):
        return "-"
    return f"{np.median(found):.3g} ({found.min():.3g} – {found.max():.3g}, n {len(found)})"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
