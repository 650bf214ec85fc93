"""Thinkers, asked by the names of the reference's cases, and what they answer."""

from __future__ import annotations

import json
import time
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from qwen3_omni_reference import Case, cases

from tritone.engines.base import Placement
from tritone.pipelines.qwen3_omni.vllm_thinker import VllmThinker, VllmThinkerOptions

CASES = cases()
PATIENCE_S = 120  # without anything new
SEEN_ONCE = ("prompt_ids", "prompt_positions", "media_rows")
ROWS_TOLERANCE = 2e-5  # hidden states are of size 1; float32 in another order of sums


@dataclass
class Answer:
    """What an engine said of one session."""

    text: str = ""
    spoken: list[int] = field(default_factory=list)
    handed: dict[str, np.ndarray] = field(default_factory=dict)
    reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None

    @property
    def ended(self) -> bool:
        return self.reason is not None or self.error is not None


class Conversations:
    """An engine, asked by the names of cases."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.answers: dict[str, Answer] = {}

    def ask(self, name: str, case: Case, speaks: bool = True, **sampling: Any) -> None:
        inputs: dict[str, Any] = {"messages": json.dumps(list(case.messages))}
        for kind in ("image", "audio", "video"):
            files = getattr(case, f"{kind}_files")
            if files:
                inputs[kind] = files
        settings = {"temperature": 0.0, "max_tokens": case.thinker_max_tokens, **sampling}
        self.answers[name] = Answer()
        self.engine.add_request(
            name,
            inputs,
            {"sampling": settings, "speaks": speaks, "use_audio_in_video": case.use_audio_in_video},
        )

    def wait_for_media(self) -> None:
        """Until every prompt could begin in the next step."""
        reading = [session.reading for session in self.engine._sessions.values() if session.reading]
        assert not wait(reading, PATIENCE_S).not_done

    def turn(self) -> bool:
        """One step, if there is anything to do; whether anything came of it."""
        if not self.engine.has_work:
            time.sleep(0.002)  # media are being read
            return False
        deltas = self.engine.step()
        for delta in deltas:
            answer = self.answers[delta.session]
            assert not answer.ended, "nothing comes after the last delta"
            answer.text += str(delta.outputs.get("text", ""))
            answer.spoken += np.asarray(delta.outputs.get("token_ids", ())).tolist()
            for port in SEEN_ONCE:
                if port in delta.outputs:
                    assert port not in answer.handed
                    answer.handed[port] = np.asarray(delta.outputs[port])
            answer.reason, answer.usage, answer.error = delta.finish_reason, dict(delta.usage), delta.error
        return bool(deltas)

    def run(self, *names: str) -> dict[str, Answer]:
        """Turn until these have ended, and nothing is left of them."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not all(self.answers[name].ended for name in names):
            assert time.monotonic() < deadline_s, f"{names} never end"
            if self.turn():
                deadline_s = time.monotonic() + PATIENCE_S
        self.engine.check_integrity()
        return {name: self.answers.pop(name) for name in names}

    def one(self, name: str, case: Case, **settings: Any) -> Answer:
        self.ask(name, case, **settings)
        return self.run(name)[name]


def assert_equal(given: Answer, expected: Answer) -> None:
    assert given.error is None
    assert given.text == expected.text
    assert given.spoken == expected.spoken
    assert given.reason == expected.reason
    for count in ("prompt_tokens", "completion_tokens"):
        assert given.usage[count] == expected.usage[count]
    assert given.handed.keys() == expected.handed.keys()
    for port, values in expected.handed.items():
        assert given.handed[port].shape == values.shape
        assert np.abs(given.handed[port] - values).max(initial=0) <= ROWS_TOLERANCE, port


def start(checkpoint: Path, engine_args: dict[str, Any] | None = None, **options: Any) -> VllmThinker:
    """An engine that compiles nothing, for its start to be quick."""
    options = {"max_slots": 12, "max_context_tokens": 1024, "prefill_chunk_tokens": 512, **options}
    more = {"enforce_eager": True, **(engine_args or {})}
    return VllmThinker(Placement(checkpoint), VllmThinkerOptions(engine_args=more, **options))
