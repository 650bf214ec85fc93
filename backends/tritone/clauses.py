"""Where a growing text is cut into clauses, each of which is spoken in one breath. Pure: no torch, no Triton.

The first clause is short, so that speech starts soon. Each later one may be twice as long, since it is
written while the one before is heard, up to a whole sentence, which a voice reads best. What decides about a
cut is the text up to it and the blanks behind it, so the clauses are the same however the text arrives. They
concatenate to the text: a clause begins with the blanks that follow the one before.

Made for languages that put blanks between words; other text is cut by the limit in characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

# With the marks around it; a dash inside a run of characters ends one.
_WORD = re.compile(r"[^\s—]*—+|[^\s—]+")
_BLANKS = re.compile(r"\s*")
_OPENERS = "\"'“‘«([{*_`"
_CLOSERS = "\"'”’»)]}*_`"
_SENTENCE_MARKS = (".", "!", "?", "…")
_CLAUSE_MARKS = (",", ";", ":", "—")
_DASHES = ("-", "--", "–")
_INITIALS = re.compile(r"(?:[^\W\d_]\.)+")  # J. U.S. e.g. p.m.
_LIST_MARK = re.compile(r"(?:\d{1,3}|[^\W\d_])[.)]")  # 1. b)
_ABBREVIATION_LIST = """
    dr mr mrs ms prof st mt ft gen gov sen rep capt lt col sgt rev hon jr sr vs etc cf al approx nos vol fig
    ch pp ed eds dept est inc ltd co corp ave blvd jan feb mar apr jun jul aug sep sept oct nov dec
"""
_ABBREVIATIONS = frozenset(_ABBREVIATION_LIST.split())
# Words that lean on what follows: they begin phrases, and no clause without a mark should end with one.
_LEANING_LIST = """
    a an the this that these those my your his her its our their of to in on at by for from with into over
    under about after before beside between through without against during near until since behind above below
    across along among around toward towards upon within as than and or but nor so if when while because which
    who whose is are was were be been am will would can could should may might must do does did has have had
    not no very more most i we you he she it they there
"""
_LEANING = frozenset(_LEANING_LIST.split())


class _Break(IntEnum):
    """How well a clause may end after a word."""

    NONE = 0
    CLAUSE = 1
    SENTENCE = 2


@dataclass(frozen=True)
class ClauseLimits:
    """Sizes in words that hold a letter or a digit."""

    first_words: int = 6  # the first clause ends here, punctuation or not; each later one at twice as many
    max_words: int = 28  # but here at the latest
    first_clause_words: int = 2  # fewest before a comma that ends the first clause; later twice as many
    clause_words: int = 9  # but a comma after so many always ends one
    sentence_words: int = 3  # fewest before a sentence end that ends a later clause
    max_characters: int = 240  # any clause does


@dataclass(frozen=True)
class _Word:
    end: int  # index in the window after its last character
    words: int  # of the clause up to here
    rank: _Break
    leaning: bool


class ClauseCutter:
    def __init__(self, limits: ClauseLimits | None = None) -> None:
        self._limits = limits or ClauseLimits()
        self._rest = ""
        self._num_spoken = 0  # clauses with words in them

    def push(self, text: str) -> list[str]:
        """The clauses that `text` completes."""
        self._rest += text
        return self._cut(ended=False)

    def finish(self) -> list[str]:
        """The clauses of what is left; the text has ended."""
        clauses = self._cut(ended=True)
        rest, self._rest = self._rest, ""
        return [*clauses, rest] if rest else clauses

    def _cut(self, ended: bool) -> list[str]:
        clauses = []
        begin, size = 0, self._limits.max_characters + 1
        while True:
            window = self._rest[begin : begin + size]
            end = self._find_end(window, ended and begin + len(window) == len(self._rest))
            if end is None:
                break
            self._num_spoken += _is_spoken(window[:end])
            clauses.append(window[:end])
            begin += end
        self._rest = self._rest[begin:]
        return clauses

    def _find_end(self, window: str, ended: bool) -> int | None:
        """Where the clause at the head of `window` ends, once nothing that may follow can change it.

        window: at most one character more than a clause may have.
        """
        limits = self._limits
        full = len(window) > limits.max_characters
        most_words = min(self._grown(limits.first_words), max(limits.first_words, limits.max_words))
        passed: list[_Word] = []
        for word in _words(window, ended, full):
            passed.append(word)
            if self._ends_clause(word):
                return word.end
            if word.words >= most_words:
                return _best_end(passed)
        if not full:
            return None
        return _best_end(passed) if passed else limits.max_characters

    def _ends_clause(self, word: _Word) -> bool:
        limits = self._limits
        if word.rank is _Break.SENTENCE:
            return word.words >= (limits.sentence_words if self._num_spoken else 1)
        if word.rank is _Break.CLAUSE:
            return word.words >= min(
                self._grown(limits.first_clause_words), max(limits.first_clause_words, limits.clause_words)
            )
        return False

    def _grown(self, words: int) -> int:
        """A limit of the first clause, as it is for the present one."""
        return words << min(self._num_spoken, 16)


def _words(window: str, ended: bool, full: bool) -> Iterator[_Word]:
    """The words of `window` that are complete, together with the blanks behind them.

    A newline among these counts as the end of a sentence, so a word waits for all of them if that can matter.
    """
    count, line_begins = 0, True
    for match in _WORD.finditer(window):
        text, end = match.group(), match.end()
        if end == len(window) and not ended:
            return
        blanks = _BLANKS.match(window, end)
        assert blanks is not None  # it may be empty
        rank = _Break.SENTENCE if "\n" in blanks.group() else _rank(text, line_begins)
        if blanks.end() == len(window) and rank < _Break.SENTENCE and not (ended or full):
            return
        count += _is_spoken(text)
        yield _Word(end, count, rank, text.lower().strip(_OPENERS + _CLOSERS) in _LEANING)
        line_begins = "\n" in blanks.group()


def _rank(word: str, line_begins: bool) -> _Break:
    bare = word.rstrip(_CLOSERS)
    if word in _DASHES or bare.endswith(_CLAUSE_MARKS):
        return _Break.CLAUSE
    if not bare.endswith(_SENTENCE_MARKS):
        return _Break.NONE
    stem = bare.lstrip(_OPENERS)
    if _INITIALS.fullmatch(stem) or stem[:-1].lower() in _ABBREVIATIONS:
        return _Break.NONE
    if line_begins and _LIST_MARK.fullmatch(stem):
        return _Break.NONE
    return _Break.SENTENCE


def _best_end(passed: list[_Word]) -> int:
    """The end of a clause that has reached a limit without a mark that ends it.

    Best at its last comma, if that is not too early; else where a phrase begins, else after a word that can
    stand last. One of the words passed is left for the next clause: a word alone is hard to understand.
    """
    total = passed[-1].words
    inner = list(pairwise(passed))
    choices = (
        [word for word in passed if word.rank > _Break.NONE and word.words >= max(2, total // 4)],
        [word for word, after in inner if after.leaning and not word.leaning and word.words >= total // 2],
        [word for word, _ in inner if not word.leaning and word.words >= total // 2],
        passed,
    )
    return next(words[-1].end for words in choices if words)


def _is_spoken(text: str) -> bool:
    return any(map(str.isalnum, text))
