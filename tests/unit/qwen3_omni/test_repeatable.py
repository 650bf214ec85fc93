"""In bfloat16 on a GPU a seed gives the same codes again: beside any neighbours in the same bucket, and with
`batch_invariant` in any bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tritone.engines.base import Placement
from tritone.pipelines.qwen3_omni.talker import Talker, TalkerOptions

from .conftest import run
from .test_talker import assert_nothing_left, speak, start, told

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no NVIDIA GPU")
FRAMES = 24
SAMPLED = {
    "temperature": 0.9,
    "top_k": 50,
    "repetition_penalty": 1.05,
    "max_tokens": FRAMES + 1,
    "min_tokens": FRAMES + 1,
}
OTHERS: list[dict[str, Any]] = [{}, {"temperature": 1.3, "top_p": 0.7}, {"temperature": 3.0}, {"top_k": 3}]


@pytest.fixture
def make_talker(checkpoint: Path, request: pytest.FixtureRequest) -> Any:
    def make(kernels: bool, **options: object) -> Talker:
        given: dict[str, Any] = {"max_slots": 8, "max_context_tokens": 96, "dtype": "bfloat16", **options}
        return Talker(Placement(checkpoint, "cuda:0"), TalkerOptions(kernels=kernels, **given))

    return make


def among(
    talker: Talker, outputs: Mapping[str, Any], neighbours: int, kind: int = 0, words: Sequence[int] = (6,)
) -> list[list[int]]:
    """Frames of `x` beside neighbours that speak from its first frame to its last.

    kind: which neighbours, and where among them `x` stands; words: of each of them.
    """
    place = kind % (neighbours + 1)
    names = [f"{kind}.{i}" for i in range(neighbours)]
    for i, name in enumerate([*names[:place], "x", *names[place:]]):
        settings = {**SAMPLED, **(OTHERS[(i + kind) % len(OTHERS)] if name != "x" else {})}
        start(talker, name, seed=4 if name == "x" else 100 * kind + i, **settings)
        said = told(talker, words=words[i % len(words)], seed=100 * kind + i)
        talker.push(name, outputs if name == "x" else said, last=True)
    frames = run(talker)["x"].frames
    assert len(frames) == FRAMES
    assert_nothing_left(talker)
    return frames


def assert_same_beside_any(talker: Talker) -> None:
    """Three neighbours whose prompts are as long, read in one pass: always the bucket of four."""
    outputs = told(talker, seed=9)
    alone = speak(talker, outputs, seed=4, **SAMPLED).frames
    assert speak(talker, outputs, seed=4, **SAMPLED).frames == alone, "the same request twice"
    assert speak(talker, outputs, seed=5, **SAMPLED).frames != alone, "another seed"
    sizes = set()
    launch = talker._frames.launch

    def noted(rows: Any) -> Any:
        sizes.add(len(rows))
        return launch(rows)

    talker._frames.launch = noted  # type: ignore[method-assign]
    beside = among(talker, outputs, 3)
    for kind in (1, 2, 3):
        assert among(talker, outputs, 3, kind) == beside
    assert sizes == {4}


def assert_same_in_any_bucket(talker: Talker) -> None:
    """1, 3 and 8 sessions, with prompts of any length."""
    outputs = told(talker, seed=9)
    alone = speak(talker, outputs, seed=4, **SAMPLED).frames
    for neighbours in (2, 7):
        for kind in (0, 1):
            assert among(talker, outputs, neighbours, kind, words=(6, 2, 11)) == alone


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "plain"])
def test_codes_repeat_beside_any_neighbours_in_a_bucket(make_talker: Any, kernels: bool) -> None:
    assert_same_beside_any(make_talker(kernels, prefill_chunk_tokens=256))


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "plain"])
def test_batch_invariant_codes_do_not_depend_on_the_load(make_talker: Any, kernels: bool) -> None:
    assert_same_in_any_bucket(make_talker(kernels, batch_invariant=True))
