"""What a request brings to vLLM's model runner beside its tokens; vLLM carries it without looking at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tritone.ports import Array

EXTRA = "tritone"  # its key in `SamplingParams.extra_args`
POSITION_UNIT = 1 << 16
"""Positions are whole numbers to vLLM, and a video's times are not: they travel in multiples of 1 / UNIT,
which is finer than float32 is from position 128 on."""


@dataclass(frozen=True)
class RunnerRequest:
    """Picklable: with tensor parallelism the runner is another process."""

    session: str
    positions: Array | None  # int64 [3, P]: of the prompt's rows, in units; None: of each row its place
    shift: int  # position of a later row less its place, in units
    wanted: Array  # int64 [W], rising: rows of the prompt whose hidden states are wanted

    def __deepcopy__(self, _: Any) -> RunnerRequest:
        """vLLM copies the settings of a request, and this never changes."""
        return self


@dataclass(frozen=True)
class TappedRows:
    """Hidden states of a piece of a prompt."""

    session: str
    first: int  # which of the wanted rows comes first
    rows: Array  # float32 [n, H]


def of_sampling(params: Any) -> RunnerRequest | None:
    """What came with the `SamplingParams` of a request; None: it is none of ours."""
    extra = getattr(params, "extra_args", None)
    return extra.get(EXTRA) if extra else None
