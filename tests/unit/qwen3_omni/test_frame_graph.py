"""Frames as graphs, on a CPU, where a graph is a call: buffers, buckets, padding, overlap, seeds."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tritone.engines.base import Placement
from tritone.engines.graph_memory import buckets
from tritone.errors import TritoneError
from tritone.networks.weights import Weights
from tritone.pipelines.qwen3_omni.code_predictor import CodePredictor
from tritone.pipelines.qwen3_omni.frame_graph import GraphFrames, PlainProgram
from tritone.pipelines.qwen3_omni.talker import Talker, TalkerOptions

from .conftest import Answer, run
from .test_talker import assert_nothing_left, speak, start, told

MakeTalker = Callable[..., Talker]
SAMPLED = {"temperature": 0.9, "top_k": 50, "repetition_penalty": 1.3, "max_tokens": 9, "min_tokens": 9}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalised": {"repetition_penalty": 2.0},
    "sampled": SAMPLED,
    "nucleus": {"temperature": 1.2, "top_p": 0.6, "min_p": 0.02},
    "free": {"temperature": 3.0, "min_tokens": 0},
    "endless": {"temperature": 1.0, "top_k": 7, "ignore_eos": True},
    "short": {"temperature": 0.8, "max_tokens": 2},
}


class _Graphs(Talker):
    @staticmethod
    def _has_graphs(placement: Placement, options: TalkerOptions) -> bool:
        return options.cuda_graphs


@pytest.fixture
def make_graphs(checkpoint: Path) -> MakeTalker:
    def make(**options: object) -> Talker:
        defaults: dict[str, Any] = {
            "max_slots": 8,
            "max_context_tokens": 96,
            "prefill_chunk_tokens": 32,
            "kernels": False,
        }
        return _Graphs(Placement(checkpoint), TalkerOptions(**{**defaults, **options}))

    return make


def crowd(talker: Talker, names: tuple[str, ...] = tuple(SETTINGS)) -> dict[str, Answer]:
    """All settings at once, with prompts of different lengths, of which some begin later."""
    for i, name in enumerate(names):
        start(talker, name, seed=(5 << 40) + i, **SETTINGS[name])
        talker.push(name, told(talker, 2 * (i % 3), words=2 + i, seed=i), last=True)
        if i == 2:
            answers = run(talker, steps=3)
    answers = run(talker, answers)
    assert_nothing_left(talker)
    return answers


def test_buckets() -> None:
    assert buckets(1, 1) == [1]
    assert buckets(1, 5) == [1, 2, 4, 8]
    assert buckets(1, 64) == [1, 2, 4, 8, 16, 32, 64]


def test_every_setting_gives_the_codes_of_the_eager_way(make_graphs: MakeTalker) -> None:
    expected = crowd(make_graphs(cuda_graphs=False))
    assert len({str(answer.frames) for answer in expected.values()}) == len(SETTINGS)
    for overlap in (False, True):
        answers = crowd(make_graphs(overlap=overlap))
        for name, answer in expected.items():
            assert answers[name].frames == answer.frames, (name, overlap)
            assert answers[name].reason == answer.reason
            assert answer.last is not None and answers[name].last is not None
            counts = ("prompt_tokens", "completion_tokens", "codec_frames")
            for count in counts:
                assert answers[name].last.usage[count] == answer.last.usage[count]


def test_codes_do_not_depend_on_the_bucket(make_graphs: MakeTalker) -> None:
    talker = make_graphs()
    outputs = told(talker, 3)
    alone = speak(talker, outputs, seed=4, **SAMPLED).frames
    for neighbours in (1, 3, 6):
        for i in range(neighbours):
            start(talker, f"n{i}", seed=i, temperature=1.0)
            talker.push(f"n{i}", told(talker, seed=i), last=True)
        start(talker, "x", seed=4, **SAMPLED)
        talker.push("x", outputs, last=True)
        assert run(talker)["x"].frames == alone


def test_a_frame_is_launched_before_the_last_one_is_told(make_graphs: MakeTalker) -> None:
    talker = make_graphs(overlap=True)
    order: list[str] = []
    launch, landed = talker._frames.launch, talker._landed

    def noted_launch(rows: Any) -> Any:
        order.append("L")
        return launch(rows)

    def noted_landing(launched: Any) -> Any:
        order.append("t")
        return landed(launched)

    talker._frames.launch, talker._landed = noted_launch, noted_landing  # type: ignore[method-assign]
    assert len(speak(talker, told(talker), max_tokens=5, min_tokens=5).frames) == 4
    assert "".join(order) == "LLtLtLtLtt"


def test_a_step_waits_for_one_copy(make_graphs: MakeTalker, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step looks at a value, or sends one from ordinary memory: each would wait for all before it."""
    talker = make_graphs(prefill_chunk_tokens=8)
    talker.push(start(talker, "running", max_tokens=50, min_tokens=50).id, told(talker), last=True)
    answers = run(talker, steps=5)
    told_before = len(answers["running"].frames)
    for graphs in (talker._frames, talker._prompts):
        graphs._replays = dict.fromkeys(graphs._replays, lambda: None)  # what is launched is the device's
    start(talker, "long")

    def seen(tensor: torch.Tensor, *_: Any) -> None:
        pytest.fail("the host looked at a value")

    to = torch.Tensor.to

    def sent(tensor: torch.Tensor, *given: Any, non_blocking: bool = False, **more: Any) -> torch.Tensor:
        assert non_blocking or not any(
            isinstance(what, torch.device | str) for what in (*given, *more.values())
        )
        return to(tensor, *given, non_blocking=non_blocking, **more)

    with monkeypatch.context() as patch:
        for look in ("item", "tolist", "nonzero", "__bool__", "__int__", "__float__", "cpu"):
            patch.setattr(torch.Tensor, look, seen)
        patch.setattr(torch.Tensor, "to", sent)
        talker.push("long", told(talker, media=20), last=True)
        run(talker, answers, steps=10)
    assert answers["long"].frames and len(answers["running"].frames) == told_before + 10


def test_a_frame_still_waits_for_its_word(make_graphs: MakeTalker) -> None:
    talker = make_graphs(overlap=True)
    outputs = told(talker, words=3)
    tokens = outputs["token_ids"]
    start(talker, "x", max_tokens=100, min_tokens=100)
    talker.push("x", {**outputs, "token_ids": tokens[:3]}, last=False)
    assert "x" not in run(talker)
    for count in range(3):
        talker.push("x", {"token_ids": tokens[3 + count : 4 + count]}, last=False)
        assert len(run(talker)["x"].frames) == 1
        assert not talker.has_work and talker.step() == []


def test_a_session_that_leaves_takes_its_frames_along(make_graphs: MakeTalker) -> None:
    talker = make_graphs(max_slots=1)
    outputs = told(talker, 3)
    expected = speak(talker, outputs, seed=1, **SAMPLED).frames
    for steps in range(1, 6):
        start(talker, "left", seed=2, **SAMPLED)
        talker.push("left", outputs, last=True)
        run(talker, steps=steps)
        talker.abort("left")
        assert speak(talker, outputs, seed=1, **SAMPLED).frames == expected
        assert_nothing_left(talker)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graph"])
def test_what_is_not_a_number_ends_its_session_and_no_other(make_graphs: MakeTalker, graphs: bool) -> None:
    talker = make_graphs(cuda_graphs=graphs, max_slots=2)
    outputs = told(talker)
    expected = speak(talker, outputs).frames
    session = start(talker, "bad")
    start(talker, "good")
    for name in ("bad", "good"):
        talker.push(name, outputs, last=True)
    answers = run(talker, steps=3)
    with torch.inference_mode():
        talker._decoder.cache[:, :, session.held.index] = float("nan")
    answers = run(talker, answers)
    assert_not_a_number(answers["bad"])
    assert answers["good"].frames == expected
    assert speak(talker, outputs).frames == expected
    assert_nothing_left(talker)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graph"])
def test_what_is_not_a_number_is_found_in_any_codebook(
    make_graphs: MakeTalker, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Weights.__getitem__

    def spoilt(weights: Weights, name: str) -> torch.Tensor:
        weight = read(weights, name)
        return weight.fill_(float("nan")) if name == "talker.code_predictor.lm_head.9.weight" else weight

    monkeypatch.setattr(Weights, "__getitem__", spoilt)
    talker = make_graphs(cuda_graphs=graphs)
    answer = speak(talker, told(talker))
    assert answer.frames == []
    assert_not_a_number(answer)


def assert_not_a_number(answer: Answer) -> None:
    assert answer.last is not None and isinstance(answer.last.error, TritoneError)
    assert "are not numbers" in str(answer.last.error)


def test_one_bucket_makes_every_frame(make_graphs: MakeTalker) -> None:
    talker = make_graphs(batch_invariant=True, max_slots=5)
    frames = talker._frames
    assert isinstance(frames, GraphFrames)
    sizes: list[int] = []
    replays = {rows: partial(sizes.append, rows) for rows in frames._replays}
    frames._replays = {rows: _both(replays[rows], replay) for rows, replay in frames._replays.items()}
    crowd(talker, ("greedy", "sampled", "short"))
    assert set(sizes) == {8}


def test_what_a_graph_reads_lives_as_long_as_it(make_graphs: MakeTalker) -> None:
    frames = make_graphs()._frames
    gc.collect()
    assert isinstance(frames, GraphFrames) and isinstance(frames._program, PlainProgram)
    assert isinstance(frames._program._predictor, CodePredictor)


def _both(note: Callable[[], None], replay: Callable[[], None]) -> Callable[[], None]:
    def called() -> None:
        note()
        replay()

    return called
