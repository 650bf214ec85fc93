"""What doors, engines, orchestrators and commands say to each other.

door ──Open, Run, Cancel, Ping──► engine        engine ──Opened, Ran, Pong, Refused──► door
engine ──Piece──► engine (the next stage)       engine ──Credit──► engine (the stage before)
engine ──Piece, Pieces, Finished, Delivered, Failed──► orchestrator's inbox
`tritone serve` ──Drain──► orchestrator's inbox    `tritone reload` ──Reload──► `tritone serve`
`tritone profile` ──Profile──► `tritone serve` ──TraceTorch──► engine    both ◄──Profiled, Refused──
"""

from __future__ import annotations

from typing import Any

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of everything that crosses a process border."""


class Hello(Message, frozen=True):
    """First message of a connection: who speaks."""

    address: str  # where the speaker itself listens, "" if nowhere


class Route(msgspec.Struct, frozen=True, array_like=True):
    """Where some output ports of a session go: one consumer."""

    address: str  # socket of the consumer
    stage: str  # consuming stage's Triton model, "" for the orchestrator
    ports: dict[str, str]  # output port of the producer to input port of the consumer
    frame_sizes: tuple[int, ...] = ()  # of the chunks that its one port, frames, is cut into; see FrameGate


class Open(Message, frozen=True):
    """Start a session on a stage."""

    call: int  # echoed in the answer
    stage: str  # Triton model name of the stage
    session: str
    inbox: str  # address of the orchestrator's inbox
    inputs: dict[str, Any]
    sources: int  # how many upstream stages will send pieces; 0: `inputs` is everything
    settings: dict[str, Any]
    routes: list[Route]
    whole: bool = False  # the engine gets nothing of its upstream stages before all of them have ended
    trace: dict[str, str] = {}  # carrier of the span above, see tracing; {}: none is recorded


class Opened(Message, frozen=True):
    call: int


class Refused(Message, frozen=True):
    """The answer to an Open or Run that failed as a whole."""

    call: int
    code: str  # TritoneError.code
    what: str
    cure: str


class Cancel(Message, frozen=True):
    """Forget a session on every stage of this engine process."""

    session: str


class Drain(Message, frozen=True):
    """To an orchestrator: take no more requests, end those that run; it hangs up when that is done."""

    grace_s: float = 0.0  # how long those that run may go on
    why: str = "the server is shutting down"  # what the refused are told


class Reload(Message, frozen=True):
    """To a `tritone serve`: read the deploy file of a pipeline again, and serve what it says."""

    pipeline: str  # "": every one


class Reloaded(Message, frozen=True):
    """What came of a Reload."""

    what: str
    cure: str = ""
    code: str = ""  # TritoneError.code; "": it was done


class Profile(Message, frozen=True):
    """To a `tritone serve`: take a profile of a process while it serves; answered Profiled or Refused."""

    pipeline: str
    stage: str  # or "orchestrator"
    kind: str  # a key of profiling.FORMS
    form: str  # of the file: one of these
    seconds: int
    instance: int = 0
    door: bool = False  # the stub of the stage, not its engine


class TraceTorch(Message, frozen=True):
    """To an engine process: record what torch does in it; answered Profiled or Refused."""

    call: int  # echoed in a Refused
    seconds: float


class Profiled(Message, frozen=True):
    data: bytes  # the file
    said: str  # what it holds, in a few words


class Ping(Message, frozen=True):
    call: int


class Pong(Message, frozen=True):
    call: int
    stats: dict[str, dict[str, Any]]  # by Triton model; "beat_age_s": since its loop last turned


class StreamChunk(msgspec.Struct, frozen=True, array_like=True):
    """One stream's share of a Run; see engines.base.Chunk."""

    session: str
    inputs: dict[str, Any]
    start: bool
    end: bool
    settings: dict[str, Any]
    trace: dict[str, str] = {}  # as for Open


class Run(Message, frozen=True):
    """One batch for a Triton-batched stage."""

    call: int
    stage: str
    chunks: list[StreamChunk]


class StreamResult(msgspec.Struct, frozen=True, array_like=True):
    """Outputs by port, or an error code with its two sentences."""

    outputs: dict[str, Any]
    code: str = ""
    what: str = ""
    cure: str = ""
    busy: tuple[float, float] = (0.0, 0.0)  # when the batch was computed, time.monotonic()
    batch: int = 1  # chunks of the batch


class Ran(Message, frozen=True):
    call: int
    results: list[StreamResult]


class Loading(Message, frozen=True):
    """The engine process lives but serves nothing yet."""


class Ready(Message, frozen=True):
    """Every stage of the engine process is loaded and warm."""

    load_s: float


class LoadFailed(Message, frozen=True):
    what: str
    cure: str


class Piece(Message, frozen=True):
    """What one step of a stage gave one session, on its way to one consumer."""

    session: str
    source: str  # Triton model name of the producing stage
    stage: str  # consuming stage's Triton model, "" for the orchestrator
    number: int  # counts the pieces of this session on this route from 0
    values: dict[str, Any]  # by input port of the consumer
    last: bool  # the producer ends
    made_s: float = 0.0  # time.monotonic(), which all processes of a machine share


class Pieces(Message, frozen=True):
    """What one step of a stage gave several sessions of one orchestrator: a packet, not one for each."""

    pieces: list[Piece]


class Credit(Message, frozen=True):
    """To the producer of a session's pieces: they were taken, so that more may be sent."""

    session: str
    source: str  # Triton model name of the producing stage
    stage: str  # consuming stage's Triton model
    number: int  # of the last piece that was taken, -1: none
    closed: bool = False  # the consumer wants no more pieces of this session


class StageTimes(msgspec.Struct, frozen=True, array_like=True):
    """When a stage had a session; moments by time.monotonic(), which all processes of a machine share."""

    opened_s: float
    ended_s: float
    first_output_s: float | None = None  # None: it gave nothing
    last_output_s: float | None = None
    queued_s: float | None = None  # how long it waited in the engine's own queue; None: there is none
    steps: int = 0  # of the engine that gave it something
    batch: float | None = None  # mean number of sessions that such a step gave something


class Finished(Message, frozen=True):
    """A session ended on a stage."""

    session: str
    source: str
    reason: str  # stop, length, repetition
    usage: dict[str, Any]
    times: StageTimes
    busy: Any = ()  # float64 [n, 2]: when the stage computed while it had the session, time.monotonic()
    is_delivered: bool = True  # the stages after it have taken all of it; else Delivered or Failed follows


class Delivered(Message, frozen=True):
    """The stages after a stage have taken all that it gave to a session, which had Finished there."""

    session: str
    source: str


class Failed(Message, frozen=True):
    """A session failed on a stage; nothing more comes from it."""

    session: str
    source: str
    code: str
    what: str
    cure: str


AnyMessage = (
    Hello
    | Open
    | Opened
    | Refused
    | Cancel
    | Drain
    | Reload
    | Reloaded
    | Profile
    | TraceTorch
    | Profiled
    | Ping
    | Pong
    | Run
    | Ran
    | Loading
    | Ready
    | LoadFailed
    | Piece
    | Pieces
    | Credit
    | Finished
    | Delivered
    | Failed
)
