"""What was looked at, and what was found: a line of `tritone doctor` each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from tritone.errors import ConfigError


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    subject: str  # one or two words
    what: str
    cure: str = ""
    detail: tuple[str, ...] = ()  # lines below it, e.g. the arithmetic

    def __str__(self) -> str:
        line = f"{self.level:<8} {self.subject:<11} {self.what}" + (f"; {self.cure}" if self.cure else "")
        return "\n".join((line, *self.detail))


def ok(subject: str, what: str) -> Finding:
    return Finding(Level.OK, subject, what)


def warning(subject: str, what: str, cure: str) -> Finding:
    return Finding(Level.WARNING, subject, what, cure)


def problem(subject: str, what: str, cure: str) -> Finding:
    return Finding(Level.PROBLEM, subject, what, cure)


def from_error(subject: str, error: ConfigError) -> Finding:
    return problem(subject, error.what, error.cure)


def worst(findings: Iterable[Finding]) -> Level:
    levels = {finding.level for finding in findings}
    return next((level for level in (Level.PROBLEM, Level.WARNING) if level in levels), Level.OK)
