"""What both servers are asked: prompts, texts and speech of fixed lengths.

    prompt of 108 tokens ─► text of exactly 100 tokens ─► speech of exactly 250 codec frames

Prompts are made of bytes that no tokeniser of a made-up checkpoint joins, so that each is one token.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tritone_bench.request_set import Ask, RequestSet

SINGLE_BYTES = "bcdfghjkpqvwxz"  # no two of them begin a word that is a token
TEMPLATE_TOKENS = 8  # around the text of a single user message: signs, roles, line feeds
DIFFERENT = 64  # prompts


@dataclass(frozen=True)
class Workload:
    """Lengths of every request."""

    prompt_tokens: int = 108
    text_tokens: int = 100
    frames: int = 250

    @property
    def name(self) -> str:
        return (
            f"{self.prompt_tokens} prompt tokens, {self.text_tokens} text tokens, {self.frames} codec frames"
        )

    @property
    def sampling(self) -> dict[str, Any]:
        """As our pipeline takes it; N tokens of the talker give N - 1 frames."""

        def exactly(tokens: int) -> dict[str, int]:
            return {"min_tokens": tokens, "max_tokens": tokens}

        return {**exactly(self.text_tokens), "talker": exactly(self.frames + 1)}

    def requests(self, count: int | None) -> RequestSet:
        """The first `count` requests; None: without end."""
        asks = tuple(
            Ask(self._prompt(number), {"sampling": self.sampling, "modalities": "text,audio"})
            for number in range(DIFFERENT)
        )
        return RequestSet(self.name, asks, count)

    def _prompt(self, number: int) -> str:
        chance = random.Random(number)
        return "".join(chance.choices(SINGLE_BYTES, k=self.prompt_tokens - TEMPLATE_TOKENS))


TINY = Workload(prompt_tokens=40, text_tokens=12, frames=24)
"""For a try on a CPU."""
