"""The stages of Qwen3-Omni on the tiny checkpoint, driven without a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

for package in ("torch", "transformers", "torchvision", "av", "PIL"):
    pytest.importorskip(package)

import qwen3_omni_oracle as oracle  # noqa: E402
import torch  # noqa: E402
from qwen3_omni_reference import Reference, png, sound, wav  # noqa: E402

from tritone.engines.base import Delta, Placement  # noqa: E402
from tritone.engines.sampler import Row  # noqa: E402
from tritone.pipelines.qwen3_omni.talker import Talker, TalkerOptions  # noqa: E402
from tritone.pipelines.qwen3_omni.thinker import Thinker, ThinkerOptions  # noqa: E402

HANDED_OVER = ("prompt_ids", "prompt_positions", "media_rows", "token_ids")
PATIENCE_S = 60  # for the thread that reads media


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    torch.set_num_threads(1)
    return oracle.checkpoint()


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture
def make_thinker(checkpoint: Path) -> Callable[..., Thinker]:
    def make(**options: object) -> Thinker:
        defaults = {"max_slots": 8, "max_context_tokens": 512, "prefill_chunk_tokens": 32}
        return Thinker(Placement(checkpoint), ThinkerOptions(**{**defaults, **options}))

    return make


@pytest.fixture
def make_talker(checkpoint: Path) -> Callable[..., Talker]:
    def make(**options: object) -> Talker:
        defaults = {"max_slots": 8, "max_context_tokens": 512, "prefill_chunk_tokens": 32}
        return Talker(Placement(checkpoint), TalkerOptions(**{**defaults, **options}))

    return make


@dataclass
class Answer:
    """What an engine said of one session."""

    text: str = ""
    handed: list[dict[str, Any]] = field(default_factory=list)  # for the talker
    frames: list[list[int]] = field(default_factory=list)
    last: Delta | None = None

    @property
    def spoken(self) -> list[int]:
        """Tokens that the talker was told, without the head of the turn."""
        ids = [
            token for outputs in self.handed for token in np.asarray(outputs.get("token_ids", ())).tolist()
        ]
        return ids[3:]

    @property
    def reason(self) -> str | None:
        return None if self.last is None else self.last.finish_reason


class Answers(dict[str, Answer]):
    """What an engine said, by session."""

    def take(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            known = self.setdefault(delta.session, Answer())
            assert known.last is None, "nothing comes after the last delta"
            known.text += str(delta.outputs.get("text", ""))
            handed = {name: delta.outputs[name] for name in HANDED_OVER if name in delta.outputs}
            if handed:
                known.handed.append(handed)
            if "frames" in delta.outputs:
                known.frames += np.asarray(delta.outputs["frames"]).tolist()
            if delta.finish_reason is not None or delta.error is not None:
                known.last = delta


def run(engine: Thinker | Talker, answers: Answers | None = None, steps: int | None = None) -> Answers:
    """Step until every session waits for its caller, or `steps` times, checking the engine at every step."""
    answers = Answers() if answers is None else answers
    while steps != 0:
        if not engine.has_work:
            reading = [s.reading for s in engine._sessions.values() if getattr(s, "reading", None)]
            if not reading:
                break
            wait(reading, PATIENCE_S, "FIRST_COMPLETED")
            assert engine.has_work, "media take too long to read"
        answers.take(engine.step())
        engine.check_integrity()
        steps = None if steps is None else steps - 1
    return answers


def user(*parts: str) -> list[dict[str, Any]]:
    """A conversation of one turn; `<image>`, `<audio>` and `<video>` stand for media."""
    content = [{"type": p[1:-1]} if p in MEDIA else {"type": "text", "text": p} for p in parts]
    return [{"role": "user", "content": content}]


MEDIA = ("<image>", "<audio>", "<video>")


def ask(
    thinker: Thinker,
    session: str,
    *parts: str,
    media: Mapping[str, Any] | None = None,
    messages: list[dict[str, Any]] | None = None,
    speaks: bool = True,
    settings: Mapping[str, Any] | None = None,
    **sampling: object,
) -> Any:
    """The new session."""
    given = {"messages": json.dumps(messages or user(*parts)), **(media or {})}
    chosen = {"temperature": 0.0, "max_tokens": 8, **sampling}
    thinker.add_request(session, given, {"sampling": chosen, "speaks": speaks, **(settings or {})})
    return thinker._sessions[session]


def script(engine: Thinker | Talker, tokens: Sequence[int], after: int) -> None:
    """Let every session draw these tokens, and `after` from then on."""

    def sample(logits: torch.Tensor, rows: Sequence[Row], codebook: int = 0) -> torch.Tensor:
        places = []
        for row in rows:
            session = next(
                s
                for s in engine._sessions.values()
                if row.penalised is (s.tokens if isinstance(engine, Thinker) else s.codes)
            )
            places.append(row.position - (session.prompt_tokens if isinstance(engine, Thinker) else 0))
        return torch.tensor([tokens[place] if place < len(tokens) else after for place in places])

    drawing = engine if isinstance(engine, Thinker) else engine._frames
    drawing._sampler = SimpleNamespace(Row=Row, sample=sample, Draw=drawing._sampler.Draw)


def picture(seed: int = 1, height: int = 64, width: int = 64) -> bytes:
    values = np.random.RandomState(seed).randint(0, 255, (height, width, 3), np.uint8)
    return png(values)


def recording(seconds: float = 1.0, hz: float = 300) -> bytes:
    return wav(sound(seconds, hz, 2 * hz))
