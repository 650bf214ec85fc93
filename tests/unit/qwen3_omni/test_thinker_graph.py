"""The thinker's steps as graphs, on a CPU, where a graph is a call: the same answers, told alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import qwen3_omni_oracle as oracle
import torch
from qwen3_omni_oracle import CASES

from tritone.engines.base import Placement
from tritone.engines.token_buffers import TokenRow
from tritone.networks.spans import Span
from tritone.pipelines.qwen3_omni.positions import positions_of
from tritone.pipelines.qwen3_omni.thinker import Thinker, ThinkerOptions
from tritone.sampling import Sampling

from .conftest import Answers, ask, picture, recording, run

MakeThinker = Callable[..., Thinker]
NEAR = 2e-4  # of logits of some tens


class _Graphs(Thinker):
    @staticmethod
    def _has_graphs(placement: Placement, options: Any) -> bool:
        return bool(options.cuda_graphs)


@pytest.fixture(scope="module")
def thinkers(checkpoint: Path) -> dict[bool, Thinker]:
    """By whether its steps are graphs."""
    slots = {"max_slots": 12, "max_context_tokens": 1024, "prefill_chunk_tokens": 64}
    return {
        graphs: _Graphs(Placement(checkpoint), ThinkerOptions(**slots, cuda_graphs=graphs, kernels=False))
        for graphs in (False, True)
    }


def start_case(thinker: Thinker, name: str, **sampling: Any) -> Any:
    case = CASES[name]
    inputs: dict[str, Any] = {
        kind: files for kind in ("image", "audio", "video") if (files := getattr(case, f"{kind}_files"))
    }
    messages = [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if isinstance(m["content"], str) else m
        for m in case.messages
    ]
    thinker.add_request(
        name,
        {**inputs, "messages": json.dumps(messages)},
        {
            "sampling": {"temperature": 0.0, "max_tokens": case.thinker_max_tokens, **sampling},
            "speaks": True,
            "use_audio_in_video": case.use_audio_in_video,
        },
    )
    return thinker._sessions[name]


def told(answers: Answers, name: str) -> dict[str, Any]:
    """All that the talker was told of a session, joined."""
    parts: dict[str, list[Any]] = {}
    for outputs in answers[name].handed:
        for port, value in outputs.items():
            parts.setdefault(port, []).append(value)
    return {port: np.concatenate(values) for port, values in parts.items()}


def test_every_kind_of_request_at_once_gives_the_references_tokens(thinkers: dict[bool, Thinker]) -> None:
    results = {}
    for graphs, thinker in thinkers.items():
        sessions = {name: start_case(thinker, name) for name in CASES}
        results[graphs] = run(thinker)
        for name, session in sessions.items():
            expected = oracle.answer(name)
            assert session.tokens[: session.prompt_tokens] == expected.prompt_ids.tolist()
            assert session.tokens[session.prompt_tokens :] == expected.text_ids.tolist(), name
    for name in CASES:
        mine, others = told(results[True], name), told(results[False], name)
        assert mine.keys() == others.keys()
        for port, value in mine.items():
            np.testing.assert_allclose(value, others[port], atol=2e-5, err_msg=port)


def test_sampled_tokens_are_those_of_the_eager_way(thinkers: dict[bool, Thinker]) -> None:
    settings: dict[str, dict[str, Any]] = {
        "text": {"temperature": 1.0},
        "image": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2},
        "audio": {"temperature": 1.2, "top_k": 20},
        "stops": {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "min_p": 0.02, "min_tokens": 4},
        "turns": {"repetition_penalty": 1.4},
    }
    results = []
    for thinker in thinkers.values():
        asked = {"max_tokens": 24, "ignore_eos": True}
        sessions = [
            start_case(thinker, name, seed=i, **asked, **settings[name]) for i, name in enumerate(settings)
        ]
        run(thinker)
        results.append([session.tokens for session in sessions])
    assert results[0] == results[1]


def test_a_step_computes_the_logits_of_a_pass(thinkers: dict[bool, Thinker]) -> None:
    """Rows of slots that are filled differently, and turned by other positions than their places."""
    thinker = thinkers[True]
    media = {"image": [picture()], "audio": [recording()]}
    sessions = [
        ask(thinker, "seen", "<image>", "<audio>", "Hi", media=media, max_tokens=100, ignore_eos=True),
        ask(thinker, "text", "Tell me more of it, please", max_tokens=100, ignore_eos=True),
        ask(thinker, "short", "Hi", max_tokens=100, ignore_eos=True),
    ]
    run(thinker, steps=12)
    assert sessions[0].prompt.positions.shift != 0
    places = [session.launched for session in sessions]
    rows = [
        TokenRow(
            session.held.index,
            place,
            thinker._position(session, place),
            token,
            Sampling(),
            place + 1,
            bars_end=False,
        )
        for token, (session, place) in enumerate(zip(sessions, places, strict=True), start=50)
    ]
    decoder, before = thinker._decoder, thinker._decoder.cache.clone()
    drawn = thinker._steps.launch(rows).tokens()
    logits, written = thinker._steps._buffers.logits[:3].clone(), decoder.cache.clone()
    with torch.inference_mode():
        decoder.cache.copy_(before)
    spans = [Span(session.held.index, place) for session, place in zip(sessions, places, strict=True)]
    positions = positions_of([session.prompt.positions for session in sessions], spans)
    passed = decoder.forward(decoder.embed([50, 51, 52]), spans, positions=positions)
    expected = decoder.logits(passed.hidden)
    torch.testing.assert_close(logits, expected, atol=NEAR, rtol=1e-5)
    torch.testing.assert_close(written[:, :, :12], decoder.cache[:, :, :12], atol=NEAR, rtol=1e-5)
    assert [token for token, _ in drawn] == expected.argmax(-1).tolist()
    for session in ("seen", "text", "short"):
        thinker.abort(session)


def test_pieces_with_media_run_eagerly_and_the_others_as_graphs(
    thinkers: dict[bool, Thinker], monkeypatch: pytest.MonkeyPatch
) -> None:
    thinker = thinkers[True]
    read: list[tuple[str, int, int]] = []
    for kind, name in (("graph", "read"), ("eager", "run")):
        ran = getattr(thinker._prompts, name)

        def noted(rows: Any, spans: Any, *rest: Any, kind: str = kind, ran: Any = ran) -> Any:
            read.extend((kind, span.start, span.end) for span in spans)
            return ran(rows, spans, *rest)

        monkeypatch.setattr(thinker._prompts, name, noted)
    read_more = thinker._read_more_than_text

    def watched(*given: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "cpu", lambda tensor: pytest.fail("a step waits for a piece"))
            read_more(*given)

    monkeypatch.setattr(thinker, "_read_more_than_text", watched)
    words = "one two three four five six seven eight nine ten " * 5
    session = ask(thinker, "x", words, "<image>", "Hi", media={"image": [picture(9)]}, max_tokens=2)
    run(thinker)
    index = session.prompt.media.index
    assert {kind for kind, _, _ in read} == {"graph", "eager"}
    for kind, start, end in read:
        assert (kind == "eager") == any(start <= place < end for place in index)
    assert read[-1][2] == session.prompt_tokens - 1, "the last row is drawn from, with those that decode"
