"""Input rows of one session of the talker, each as soon as what it is made of has come.

    prompt_ids, media_rows ─► the user's turns ─┐
    token_ids ─► head of the assistant's turn ──┴─► rows of the prompt but the last
              └► tokens to speak ─► text 0: the prompt's last row ─► text 1, 2 … ─► "text ended" ─► padding

Tokens become texts when somebody asks for it, those of all sessions in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from tritone.engines.base import Values
from tritone.ports import Array

if TYPE_CHECKING:
    from torch import Tensor

    from tritone.pipelines.qwen3_omni.positions import PromptPositions
    from tritone.pipelines.qwen3_omni.speech_inputs import SpeechInputs, SpeechPrompt

HEAD_TOKENS = 3  # that begin the assistant's turn: sign, role, line break


@dataclass(eq=False)
class SessionRows:
    """What has come of a session, and the rows that it gives."""

    inputs: SpeechInputs
    speaker: int  # id in the talker's vocabulary
    prompt_ids: Array | None = None  # int32 [U]
    positions: PromptPositions | None = None  # None: of each row its place
    media_rows: list[Array] = field(default_factory=list)  # float32 [m, thinker's H], behind media tokens
    head: list[int] = field(default_factory=list)  # tokens
    told: list[int] = field(default_factory=list)  # tokens to speak that are not projected yet
    texts: list[Tensor] = field(default_factory=list)  # [H] each: projected ones, from the first on
    text_ended: bool = False  # no more tokens come
    prompt: SpeechPrompt | None = None  # but its last row; its owner drops it when that has been read

    def take_in(self, piece: Values) -> None:
        """piece: `prompt_ids`, `prompt_positions`, `media_rows` and `token_ids`, or some of them."""
        if "prompt_ids" in piece:
            self.prompt_ids = np.asarray(piece["prompt_ids"])
        if "prompt_positions" in piece:
            self.positions = self.inputs.positions(np.asarray(piece["prompt_positions"]))
        if "media_rows" in piece:
            self.media_rows.append(np.asarray(piece["media_rows"]))
        tokens = np.asarray(piece.get("token_ids", ()), np.int64).tolist()
        missing = HEAD_TOKENS - len(self.head)
        self.head += tokens[:missing]
        self.told += tokens[missing:]

    @property
    def num_prompt_rows(self) -> int:
        """Of the whole prompt; 0 while the user's turns have not come."""
        return 0 if self.prompt_ids is None else len(self.prompt_ids) + self.inputs.num_head_rows

    def begin_prompt(self) -> int:
        """How many rows the prompt has but the last, from now on; 0 while something of them is missing."""
        if self.prompt_ids is None or len(self.head) < HEAD_TOKENS:
            return 0
        self.prompt = self.inputs.prompt(self.prompt_ids, self.media_rows, self.head, self.speaker)
        if self.prompt is None:
            return 0
        self.media_rows.clear()
        return len(self.prompt.tokens)

    def of_prompt(self, start: int, end: int) -> Tensor:
        """Rows [end - start, H] of a prompt that has begun."""
        assert self.prompt is not None
        return self.inputs.rows(self.prompt, start, end)

    def last_of_prompt(self) -> Tensor | None:
        """The row [H] that the first frame is drawn from; None while there is no text."""
        return self.inputs.first(self.texts[0]) if self.texts else None

    def text(self, number: int) -> Tensor | None:
        """What is added [H] to the embeddings of frame `number` - 1; None if it has not come."""
        if number < len(self.texts):
            return self.texts[number]
        if not self.text_ended:
            return None
        return self.inputs.text_end if number == len(self.texts) else self.inputs.padding


def project(inputs: SpeechInputs, sessions: Sequence[SessionRows]) -> None:
    """Make the texts of all tokens that were told, by one pass: its launches cost more than its work."""
    texts = iter(inputs.spoken([token for session in sessions for token in session.told]))
    for session in sessions:
        session.texts += islice(texts, len(session.told))
        session.told.clear()
