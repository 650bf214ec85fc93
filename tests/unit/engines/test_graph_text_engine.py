"""Steps as graphs, on a CPU, where a graph is a call: the same answers as operation by operation."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tritone.engines import graph_text_engine, prompt_graph, token_draw
from tritone.engines.base import Placement
from tritone.engines.memory import Ground
from tritone.engines.prompt_graph import PlainPrompts
from tritone.engines.token_graph import PlainTokens
from tritone.engines.torch_ar import TorchEngine, TorchOptions
from tritone.errors import TritoneError

from .conftest import CONFIG, EOS_ID, Answers, ask, build_tokenizer, random_weights, run

MakeEngine = Callable[..., TorchEngine]
LONG = "It was a dark and stormy night; the rain fell in torrents. "
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "penalised": {"temperature": 0.0, "repetition_penalty": 1.5},
    "free": {},
    "limited": {"top_k": 5, "repetition_penalty": 1.2},
    "nucleus": {"top_p": 0.7, "repetition_penalty": 1.4},
    "unlikely": {"min_p": 0.05, "temperature": 1.3},
    "ends": {"temperature": 1.5, "top_p": 0.9, "ignore_eos": False, "min_tokens": 3, "max_tokens": 40},
    "stops": {"temperature": 0.0, "stop": ["\x00"]},
    "short": {"max_tokens": 1},
    "two": {"max_tokens": 2, "top_k": 9},
}


class _Graphs(TorchEngine):
    @staticmethod
    def _has_graphs(placement: Placement, options: Any) -> bool:
        return bool(options.cuda_graphs)


def make(folder: Path, **options: object) -> TorchEngine:
    defaults: dict[str, Any] = {
        "max_slots": 5,
        "max_context_tokens": 256,
        "prefill_chunk_tokens": 16,
        "kernels": False,
    }
    return _Graphs(Placement(folder), TorchOptions(**{**defaults, **options}))


@pytest.fixture
def make_graphs(checkpoint: Path) -> MakeEngine:
    return partial(make, checkpoint)


def crowd(engine: TorchEngine) -> dict[str, tuple[list[int], Any]]:
    """Tokens of all settings, with prompts of different lengths that begin in turn, and how they ended."""
    sessions, answers = {}, Answers()
    for i, (name, settings) in enumerate(SETTINGS.items()):
        asked = {"seed": (5 << 40) + i, "max_tokens": 12, **settings}
        ask(engine, name, LONG[:20] + "so " * i, **asked)
        sessions[name] = engine._sessions[name]
        run(engine, answers, steps=i % 3)
    run(engine, answers)
    assert engine.stats()["active"] == 0 and not engine._on_their_way
    ends = {name: answers.last[name] for name in sessions}
    return {
        name: (session.tokens, ends[name].finish_reason, ends[name].usage["completion_tokens"])
        for name, session in sessions.items()
    }


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, Any]:
    """Of a crowd, operation by operation."""
    return crowd(make(checkpoint, cuda_graphs=False))


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_every_setting_gives_the_answers_of_the_eager_way(
    make_graphs: MakeEngine, expected: dict[str, Any], overlap: bool
) -> None:
    assert crowd(make_graphs(overlap=overlap)) == expected


def test_tokens_that_the_device_could_not_tell_are_drawn_by_the_host(
    make_graphs: MakeEngine, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_draw, "NUCLEUS_WIDTH", 2)
    engine = make_graphs()
    redrawn: list[int] = []
    redraw = engine._steps._draw.redraw

    def noted(*given: Any) -> list[int]:
        tokens = redraw(*given)
        redrawn.extend(tokens)
        return tokens

    monkeypatch.setattr(engine._steps._draw, "redraw", noted)
    assert crowd(engine) == expected
    assert len(redrawn) > 5


def test_other_shapes_run_in_plain_torch(tmp_path: Path) -> None:
    """No norms of heads, biases: kernels compute no such decoder."""
    tokenizer = build_tokenizer()
    config = {**CONFIG, "model_type": "qwen2", "vocab_size": tokenizer.get_vocab_size()}
    weights = {name: weight for name, weight in random_weights(config).items() if "_norm" not in name[-16:]}
    weights |= {"model.norm.weight": torch.ones(32)}
    for i in range(2):
        for norm in ("input", "post_attention"):
            weights[f"model.layers.{i}.{norm}_layernorm.weight"] = torch.ones(32)
        for name, width in (("q", 32), ("k", 16), ("v", 16)):
            weights[f"model.layers.{i}.self_attn.{name}_proj.bias"] = torch.linspace(-1, 1, width)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_ID]}))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    engine = make(tmp_path, kernels=True)
    assert isinstance(engine._steps._program, PlainTokens)
    assert crowd(engine) == crowd(make(tmp_path, cuda_graphs=False))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no NVIDIA GPU")
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_on_a_gpu_the_answers_are_those_of_a_cpu(
    checkpoint: Path, expected: dict[str, Any], overlap: bool
) -> None:
    options = {"max_slots": 5, "max_context_tokens": 256, "prefill_chunk_tokens": 16}
    engine = TorchEngine(Placement(checkpoint, "cuda:0"), TorchOptions(**options, overlap=overlap))
    assert crowd(engine) == expected


# -- steps that overlap -------------------------------------------------------------------------------------


def noted(engine: TorchEngine) -> list[str]:
    """L: a step is launched, t: one is told."""
    order: list[str] = []
    launch, landed = engine._launch, engine._landed

    def noted_launch(*given: Any) -> None:
        order.append("L")
        launch(*given)

    def noted_landing(*given: Any) -> Any:
        order.append("t")
        return landed(*given)

    engine._launch, engine._landed = noted_launch, noted_landing  # type: ignore[method-assign]
    return order


def test_a_step_is_launched_before_the_last_one_is_told(make_graphs: MakeEngine) -> None:
    engine = make_graphs(prefill_chunk_tokens=200)
    order = noted(engine)
    ask(engine, "x", max_tokens=4)
    run(engine)
    assert "".join(order) == "LLtLtLtt"
    engine = make_graphs(prefill_chunk_tokens=200, overlap=False)
    order = noted(engine)
    ask(engine, "x", max_tokens=4)
    run(engine)
    assert "".join(order) == "LtLtLtLt"


def test_an_end_that_is_found_late_wastes_one_row_and_tells_nothing_twice(make_graphs: MakeEngine) -> None:
    eager, engine = make_graphs(cuda_graphs=False), make_graphs(prefill_chunk_tokens=200, max_slots=1)
    ask(eager, "x", LONG, temperature=0.0)
    whole = run(eager).text("x")
    stop = whole[6:8]
    order = noted(engine)
    ask(engine, "x", LONG, temperature=0.0, stop=[stop])
    ask(engine, "next", LONG, temperature=0.0)
    answers = run(engine)
    assert answers.text("x") == whole[: whole.index(stop)] and answers.last["x"].finish_reason == "stop"
    tokens = answers.last["x"].usage["completion_tokens"]
    assert order.count("L") == order.count("t") == tokens + 1 + 20
    assert answers.text("next") == whole, "the row that was wasted is nobody's"


def test_what_follows_in_a_slot_is_not_touched_by_who_left_it(make_graphs: MakeEngine) -> None:
    engine = make_graphs(max_slots=1, prefix_cache=False)
    ask(engine, "x", LONG, top_k=20)
    expected = run(engine).text("x")
    for steps in (1, 3, 4, 6):
        ask(engine, "left", "Never mind that" * 3)
        run(engine, steps=steps)
        engine.abort("left")
        engine.check_integrity()
        ask(engine, "x", LONG, top_k=20)
        answers = run(engine)
        assert answers.text("x") == expected and answers.last.keys() == {"x"}


def test_the_context_is_filled_to_its_last_place(make_graphs: MakeEngine) -> None:
    results = []
    for options in ({"cuda_graphs": False}, {"overlap": False}, {}):
        engine = make_graphs(max_context_tokens=60, **options)
        ask(engine, "x", "Hi", max_tokens=1000)
        session = engine._sessions["x"]
        assert run(engine).last["x"].finish_reason == "length"
        results.append(session.tokens)
    assert len(results[0]) == 60 and results[1:] == results[:1] * 2


# -- prompts ------------------------------------------------------------------------------------------------


def test_short_prompts_are_read_together_and_long_ones_in_pieces(make_graphs: MakeEngine) -> None:
    engine = make_graphs(prefill_chunk_tokens=256, max_slots=4, prefix_cache=False)
    for i in range(3):
        ask(engine, str(i), "Hello", max_tokens=50)
    run(engine, steps=1)
    assert [s.draws for s in engine._running.values()] == [1, 1, 0], "each counts as 128 rows"
    run(engine, steps=1)
    assert [s.draws for s in engine._running.values()] == [2, 2, 1]
    engine = make_graphs(prefill_chunk_tokens=16)
    ask(engine, "running", "Hello", max_tokens=100)
    run(engine, steps=5)
    ask(engine, "long", LONG, max_tokens=5)
    before = engine._running["running"].draws
    run(engine, steps=3)
    assert engine._running["running"].draws == before + 3, "a stream goes on while a prompt is read"
    assert engine._running["long"].held.filled == engine._running["long"].cached_tokens + 48


def test_a_prompt_begins_with_what_another_has_just_read(make_graphs: MakeEngine) -> None:
    engine = make_graphs(prefill_chunk_tokens=256)
    for name in ("first", "second"):
        ask(engine, name, LONG + name, temperature=0.0)
    answers = run(engine)
    assert answers.last["second"].usage["cached_tokens"] > len(LONG)
    eager = make_graphs(cuda_graphs=False)
    ask(eager, "second", LONG + "second", temperature=0.0)
    assert answers.text("second") == run(eager).text("second")


class _Together(PlainPrompts):
    """Takes the spans of many prompts, as kernels do."""

    takes_many = True
    least_piece = 1

    def __init__(self, decoder: Any, most_rows: int, **_: Any) -> None:
        super().__init__(decoder, most_rows)
        self.passes: list[list[int]] = []  # rows of each span, by pass

    def read(self, rows: Any, spans: Any, positions: Any) -> None:
        self.passes.append([span.count for span in spans])
        super().read(rows, spans, positions)


@pytest.fixture
def make_together(make_graphs: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    monkeypatch.setattr(prompt_graph, "prompt_graphs", _Together)
    return make_graphs


def test_prompts_that_are_read_together_give_the_same_answers(
    make_together: MakeEngine, expected: dict[str, Any]
) -> None:
    assert crowd(make_together(prefill_chunk_tokens=64)) == expected


def test_as_many_prompts_as_fit_are_read_in_one_pass(make_together: MakeEngine) -> None:
    engine = make_together(prefill_chunk_tokens=128, prefix_cache=False)
    del engine._prompts.passes[:]
    for name, prompt in {"long": "x" * 140, "a": "Hello", "b": "Hi you", "c": "y" * 90}.items():
        ask(engine, name, prompt, max_tokens=3)
    rows = {name: len(session.tokens) - 1 for name, session in engine._sessions.items()}
    run(engine)
    assert engine._prompts.passes[:2] == [[128], [rows["long"] - 128, rows["a"], rows["b"]]]
    assert engine._prompts.passes[2:] == [[rows["c"]]]


def test_a_prompt_waits_for_one_that_begins_alike_if_that_saves_enough(
    make_together: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for worth, cached in ((20, len(LONG)), (100, 0)):
        monkeypatch.setattr(graph_text_engine, "WORTH_WAITING", worth)
        engine = make_together(prefill_chunk_tokens=256)
        for name in ("first", "second", "other"):
            ask(engine, name, (LONG if name != "other" else "") + name, temperature=0.0, max_tokens=2)
        answers = run(engine)
        assert answers.last["second"].usage["cached_tokens"] >= cached
        assert (answers.last["second"].usage["cached_tokens"] > 20) == bool(cached)


# -- one launch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_p": 0.9}], ids=str)
def test_what_is_not_a_number_ends_its_session_and_no_other(
    make_graphs: MakeEngine, graphs: bool, sampling: dict[str, Any]
) -> None:
    engine = make_graphs(cuda_graphs=graphs, max_slots=2)
    ask(engine, "bad", "Hello", **sampling)
    once = run(engine).text("bad")
    ask(engine, "good", LONG)
    expected = run(engine).text("good")
    ask(engine, "bad", "Hello", **sampling)
    ask(engine, "good", LONG)
    answers = run(engine, steps=4)
    with torch.inference_mode():
        engine._decoder.cache[:, :, engine._running["bad"].held.index] = float("nan")
    run(engine, answers)
    error = answers.last["bad"].error
    assert isinstance(error, TritoneError) and "of the answer are not numbers" in str(error)
    assert answers.text("good") == expected
    for name, prompt, text in (("bad", "Hello", once), ("good", LONG, expected)):
        ask(engine, name, prompt, **(sampling if name == "bad" else {}))
        assert run(engine).text(name) == text, "nothing is left in a slot that a prompt could begin with"


def test_one_bucket_draws_every_token(make_graphs: MakeEngine, expected: dict[str, Any]) -> None:
    engine = make_graphs(batch_invariant=True)
    assert list(engine._steps._replays) == [8]
    assert crowd(engine) == expected
    assert list(make_graphs()._steps._replays) == [8, 4, 2, 1]


def test_static_buffers_take_what_is_planned(make_graphs: MakeEngine, checkpoint: Path) -> None:
    engine = make_graphs(prefill_chunk_tokens=50)
    terms = TorchEngine.memory(Ground("thinker", checkpoint, on_gpu=True), engine._options)
    planned = {term.name: term.num_bytes for term in terms if term.is_exact}
    prompts = engine._prompts
    tensors = [*vars(engine._steps._buffers).values(), prompts._rows, prompts._where, prompts._positions]
    assert planned["static buffers"] == sum(tensor.nbytes for tensor in tensors)
    assert planned["KV cache"] == engine._decoder.cache.nbytes
    on_cpu = TorchEngine.memory(Ground("thinker", checkpoint), engine._options)
    assert {term.name for term in on_cpu} == {"weights", "KV cache", "activations"}


def test_a_step_waits_for_one_copy(make_graphs: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch needs no value of a tensor: on a device each such look waits for all that was launched."""
    engine = make_graphs()
    for name in ("free", "limited", "nucleus", "penalised", "greedy"):
        ask(engine, name, **SETTINGS[name])
    run(engine, steps=20)
    looks = ("item", "tolist", "nonzero", "__bool__", "__int__", "__float__", "cpu")

    def seen(tensor: torch.Tensor, *_: Any) -> None:
        pytest.fail("the host looked at a value")

    launch = engine._launch

    def watched(*given: Any) -> None:
        with monkeypatch.context() as patch:
            for look in looks:
                patch.setattr(torch.Tensor, look, seen)
            launch(*given)

    engine._launch = watched  # type: ignore[method-assign]
    assert run(engine, steps=3)
