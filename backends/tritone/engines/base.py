"""What the engine host asks of a stage: two interfaces, one per answer to "who batches?".

    Engine       the engine batches: requests come and go while it steps (AR stages, ASR, diffusion)
    BatchEngine  Triton batches: one call with the chunks of many streams (Code2Wav)

An engine lives on one thread of its own; the host never calls two of its methods at once, so engines hold
no locks. Values inside are plain: text is `str`, a scalar is `int`, `float` or `bool`, everything else an
`np.ndarray`. An engine imports its heavy libraries inside `__init__`, so that its `Options` can be checked
in a process that has none of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tritone.engines.memory import Planned
from tritone.engines.stage_stream import StageStream
from tritone.errors import TritoneError
from tritone.ports import Array

Value = str | int | float | bool | list[bytes] | Array | None
Values = Mapping[str, Value]


@dataclass(frozen=True)
class Placement:
    """Where and from what an engine is built."""

    checkpoint: Path  # folder with the stage's weights
    device: str = "cpu"  # "cpu" or "cuda:<index>", counted among the GPUs that the process sees
    threads: int = 1  # intra-op threads of the stage on a CPU
    max_batch_size: int = 16  # of a stage that Triton batches: streams in one call
    chunk_frames: tuple[int, ...] = (4, 25)  # sizes of the chunks that it is given, unless a request differs
    num_gpus: int = 1  # that the engine is to be spread over, from `device` on
    stream: StageStream = field(default_factory=StageStream, compare=False)  # for all threads of the engine


@dataclass(frozen=True)
class Delta:
    """What one step gave one session."""

    session: str
    outputs: Values = field(default_factory=dict)  # by output port of the stage
    finish_reason: str | None = None  # set on the last delta: stop, length, repetition
    usage: Mapping[str, int | float] = field(default_factory=dict)  # on the last delta: counts for `done`
    error: TritoneError | None = None  # ends this session and no other


QUEUED, PREFILL, DECODE = "queued", "prefill", "decode"
"""Phases of a session on an engine, as the field calls them; an engine may have others."""


def _wake_nobody() -> None:
    """No loop owns the engine yet."""


def _note_nothing(session: str, phase: str) -> None:
    """No loop owns the engine yet."""


class Engine(Planned, ABC):
    """A stage whose engine batches by itself."""

    Options: ClassVar[type]  # frozen dataclass: the deploy file's `engine:` block of this stage
    wake: Callable[[], None] = staticmethod(_wake_nobody)
    """Set by the loop. An engine with threads of its own calls it, from any of them, when `has_work` has
    become true: a loop that sleeps then turns at once."""
    note_phase: Callable[[str, str], None] = staticmethod(_note_nothing)
    """Set by the loop. An engine whose sessions pass through phases says here that a session enters one."""

    @abstractmethod
    def __init__(self, placement: Placement, options: Any) -> None:
        """Load and warm up; raise `ConfigError` when the checkpoint does not fit."""

    @abstractmethod
    def add_request(self, session: str, inputs: Values, settings: Mapping[str, Any]) -> None:
        """Admit a session.

        inputs: the values of the stage's input ports that are known now (others arrive by `push`).
        settings: per-request settings of this stage, e.g. {"sampling": {...}, "seed": 7}.
        Raises InvalidRequest (bad input), Unavailable (full); then nothing of the session is kept.
        """

    @abstractmethod
    def push(self, session: str, inputs: Values, last: bool) -> None:
        """Upstream output that arrived meanwhile; `last` ends the input. Unknown session: ignored."""

    @abstractmethod
    def step(self) -> list[Delta]:
        """Do one bounded piece of work for the sessions that have any, and say what came out."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """False while every session waits for upstream input (the host then sleeps)."""

    @abstractmethod
    def abort(self, session: str) -> None:
        """Forget a session at once. Unknown session: ignored."""

    @abstractmethod
    def stats(self) -> dict[str, int | float]:
        """Figures for ping and metrics; `active` (live sessions) is always among them."""


@dataclass(frozen=True)
class Chunk:
    """One stream's share of a batch."""

    session: str
    inputs: Values  # by input port of the stage, without the batch dimension
    start: bool  # first chunk of the stream
    end: bool  # last chunk of the stream: its state is freed after this batch
    settings: Mapping[str, Any] = field(default_factory=dict)  # on the first chunk, e.g. {"seed": 7}


class BatchEngine(Planned, ABC):
    """A stage that Triton batches; per-stream state is keyed by session and freed at `end` or `abort`."""

    Options: ClassVar[type]

    @abstractmethod
    def __init__(self, placement: Placement, options: Any) -> None: ...

    @abstractmethod
    def run(self, chunks: Sequence[Chunk]) -> list[Values | TritoneError]:
        """Answer each chunk in order: outputs by port, or the error of that stream alone.

        A chunk that does not start a stream and has no state gets `InvalidRequest`.
        """

    @abstractmethod
    def abort(self, session: str) -> None:
        """Free a stream's state. Unknown session: ignored."""

    @abstractmethod
    def stats(self) -> dict[str, int | float]:
        """`active` is the number of streams that hold state."""


def in_turns(
    chunks: Sequence[Chunk],
    take_turn: Callable[[list[tuple[int, Chunk]]], Mapping[int, Values | TritoneError]],
) -> list[Values | TritoneError]:
    """What `take_turn` answers to each chunk of a batch, in order.

    take_turn: is given chunks of different streams with their numbers in the batch, and answers by number. A
    stream's next chunk comes a turn later: it needs the state that the one before leaves.
    """
    answers: dict[int, Values | TritoneError] = {}
    waiting = list(enumerate(chunks))
    while waiting:
        turn = {chunk.session: number for number, chunk in reversed(waiting)}
        now = [(number, chunk) for number, chunk in waiting if turn[chunk.session] == number]
        waiting = [(number, chunk) for number, chunk in waiting if turn[chunk.session] != number]
        answers |= take_turn(now)
    return [answers[number] for number in range(len(chunks))]
