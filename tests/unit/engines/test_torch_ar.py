from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tritone.engines.sampler import Row
from tritone.engines.torch_ar import TorchEngine, TorchOptions
from tritone.errors import ConfigError, InvalidRequest, Unavailable

from .conftest import EOS_ID, Answers, ask, run

MakeEngine = Callable[..., TorchEngine]
LONG = "It was a dark and stormy night; the rain fell in torrents. "


def tokens_of(
    engine: TorchEngine, session: str, neighbours: Sequence[str] = (), **sampling: Any
) -> list[int]:
    """The answer of `session` to one prompt, with others in flight."""
    for i, text in enumerate(neighbours):
        ask(engine, f"neighbour {i}", text, seed=100 + i, max_tokens=5 + 4 * i, temperature=i % 3 / 2)
    ask(engine, session, LONG, **sampling)
    asked = engine._sessions[session]
    run(engine)
    return asked.tokens[asked.prompt_tokens :]


def script(engine: TorchEngine, answer: bytes | Sequence[int]) -> None:
    """Make every session answer these bytes, or token ids, and then end the turn."""
    table = {value: token for token, value in enumerate(engine._tokenizer.token_bytes)}
    ids = [table[bytes([byte])] for byte in answer] if isinstance(answer, bytes) else list(answer)

    def sample(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
        prompts = {id(s.tokens): s.prompt_tokens for s in engine._sessions.values()}
        places = [row.position - prompts[id(row.penalised)] for row in rows]
        return torch.tensor([ids[place] if place < len(ids) else EOS_ID for place in places])

    engine._sampler = SimpleNamespace(Row=Row, sample=sample)


# -- a request's tokens are its own ------------------------------------------------------------------------


def test_same_seed_same_tokens_whatever_else_happens(make_engine: MakeEngine) -> None:
    expected = tokens_of(make_engine(max_slots=1), "x")
    assert len(expected) == 20
    others = ["a", "What?", LONG * 2, "Tell me more", LONG[:30], "🙂", "no"]
    assert tokens_of(make_engine(), "x", others) == expected
    assert tokens_of(make_engine(), "x", [text + "!" for text in reversed(others)]) == expected
    for chunk in (1, 5, 64, 200):
        assert tokens_of(make_engine(prefill_chunk_tokens=chunk), "x") == expected
    busy = make_engine()
    for i in range(5):
        assert tokens_of(busy, f"x{i}", others[:i]) == expected
    assert tokens_of(make_engine(), "x", seed=8) != expected


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str
)
def test_filters_do_not_change_that(make_engine: MakeEngine, sampling: dict[str, float]) -> None:
    alone = tokens_of(make_engine(), "x", **sampling)
    assert tokens_of(make_engine(), "x", ["a", "b", LONG], **sampling) == alone


def test_slot_does_not_matter(make_engine: MakeEngine) -> None:
    engine = make_engine(max_slots=4, prefix_cache=False)
    answers, used = [], []
    for i in range(4):
        ask(engine, str(i), LONG)
        run(engine, steps=1)
        session = engine._sessions[str(i)]
        used.append(session.held.index)
        run(engine)
        answers.append(session.tokens)
    assert len(set(used)) == 4 and all(answer == answers[0] for answer in answers)


def test_abort_frees_the_slot_and_leaves_neighbours_alone(make_engine: MakeEngine) -> None:
    expected = tokens_of(make_engine(), "x")
    engine = make_engine(max_slots=3, max_waiting=1)
    for name in ("a", "b"):
        ask(engine, name, LONG[:20], max_tokens=100)
    ask(engine, "x", LONG)
    ask(engine, "late", "Me too", max_tokens=3)
    asked = engine._sessions["x"]
    answers = run(engine, steps=10)
    engine.abort("a")
    engine.check_integrity()
    stats = engine.stats()
    assert stats["running"] == 2 and stats["slots"] == 3
    held = sum(slot.filled for slot in engine._slots.all if slot.owner is not None)
    assert stats["kv_tokens"] == held > 20, "of those that live alone"
    assert stats["kv_capacity_tokens"] == 3 * engine._slot_options.max_context_tokens
    engine.abort("unknown")
    run(engine, answers, steps=3)
    engine.abort("b")
    run(engine, answers)
    assert asked.tokens[asked.prompt_tokens :] == expected
    assert answers.last.keys() == {"x", "late"}
    assert engine.stats()["active"] == engine.stats()["kv_tokens"] == 0


def test_abort_in_the_middle_of_a_prompt_and_in_the_queue(make_engine: MakeEngine) -> None:
    engine = make_engine(max_slots=1)
    ask(engine, "reading", LONG * 2)
    ask(engine, "queued", "Hi")
    ask(engine, "next", LONG * 2)
    run(engine, steps=2)
    for name in ("reading", "queued"):
        engine.abort(name)
        engine.check_integrity()
    answers = run(engine)
    assert answers.last.keys() == {"next"}
    # What the aborted session had read is not lost: it is a beginning like any other.
    assert answers.last["next"].usage["cached_tokens"] >= 32


# -- prefix cache -------------------------------------------------------------------------------------------


def test_cached_prompt_answers_like_a_computed_one(make_engine: MakeEngine) -> None:
    def talk(engine: TorchEngine) -> tuple[list[list[int]], list[float]]:
        tokens, cached = [], []
        for i, text in enumerate(["Hello", LONG, LONG + "And then?", "Hello", LONG]):
            ask(engine, str(i), text, temperature=0.0)
            session = engine._sessions[str(i)]
            cached.append(run(engine).last[str(i)].usage["cached_tokens"])
            tokens.append(session.tokens)
        return tokens, cached

    prompt = "You are a helpful voice assistant. Answer in one short sentence."
    computed, none_cached = talk(make_engine(system_prompt=prompt, prefix_cache=False))
    copied, some_cached = talk(make_engine(system_prompt=prompt))
    assert copied == computed
    assert none_cached == [0] * 5
    assert min(some_cached) >= len(
        prompt
    )  # a byte a token: the whole system prompt, from the first request on


def test_cached_keys_and_values_equal_computed_ones(make_engine: MakeEngine) -> None:
    engine, fresh = make_engine(), make_engine(prefix_cache=False)
    sessions = []
    for one in (engine, fresh):
        ask(one, "first", LONG, max_tokens=1)
        run(one)
        ask(one, "second", LONG + "More.", max_tokens=4)
        sessions.append(one._sessions["second"])
        run(one)
    ours, theirs = sessions
    assert ours.cached_tokens > len(LONG) and theirs.cached_tokens == 0
    filled = ours.held.filled
    assert theirs.held.filled == filled == len(ours.tokens) - 1
    torch.testing.assert_close(
        engine._decoder.cache[:, :, ours.held.index, :, :filled],
        fresh._decoder.cache[:, :, theirs.held.index, :, :filled],
        atol=1e-5,
        rtol=1e-5,
    )


def test_a_copy_that_fails_leaves_nothing_that_looks_cached(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens_of(make_engine(prefix_cache=False), "x")
    engine = make_engine(max_slots=2)
    ask(engine, "known", LONG, max_tokens=20)
    while not engine._sessions["known"].completion_tokens:
        engine.step()

    def fail(*_: int) -> None:
        raise MemoryError("no room for a copy")

    with monkeypatch.context() as patch:
        patch.setattr(engine._decoder, "copy_prefix", fail)
        ask(engine, "copied", LONG)
        with pytest.raises(MemoryError):
            engine.step()
    for name in ("known", "copied"):
        engine.abort(name)
    engine.check_integrity()
    assert tokens_of(engine, "x") == expected


def test_a_burst_with_one_system_prompt_reads_it_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for i in range(6):
        messages = [{"role": "system", "content": LONG}, {"role": "user", "content": f"{i}?"}]
        engine.add_request(str(i), {"messages": json.dumps(messages)}, {"sampling": {"max_tokens": 8}})
    cached = [delta.usage["cached_tokens"] for _, delta in sorted(run(engine).last.items())]
    assert cached[0] < len(LONG) and min(cached[1:]) > len(LONG)


# -- batching -----------------------------------------------------------------------------------------------


def test_running_streams_keep_their_pace_while_a_prompt_is_read(make_engine: MakeEngine) -> None:
    engine = make_engine(prefill_chunk_tokens=8)
    script(engine, b"abcdefghijklmnopqrstuvwxyz" * 3)
    ask(engine, "running", max_tokens=60)
    answers = run(engine, steps=10)
    spoken = len(answers.text("running"))
    ask(engine, "long", LONG * 3, max_tokens=1)
    steps = 0
    while "long" not in answers.last:
        run(engine, answers, steps=1)
        steps += 1
    assert steps > 20
    assert len(answers.text("running")) == spoken + steps


def test_a_step_that_fails_leaves_no_wrong_memory_behind(make_engine: MakeEngine) -> None:
    expected = tokens_of(make_engine(), "x")
    engine = make_engine()
    forward = engine._decoder.forward
    ask(engine, "x", LONG)
    run(engine, steps=2)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    engine._decoder.forward = fail
    with pytest.raises(RuntimeError):
        engine.step()
    engine._decoder.forward = forward
    engine.abort("x")
    assert tokens_of(engine, "y") == expected


def test_has_work_only_while_there_is_some(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert not engine.has_work and engine.step() == []
    ask(engine, "x", max_tokens=1)
    assert engine.has_work
    run(engine)
    assert not engine.has_work
    stats = engine.stats()
    assert stats["active"] == stats["waiting"] == 0 and stats["slots"] == 8 and stats["generated_tokens"] == 1


def test_a_session_says_which_phase_it_enters(make_engine: MakeEngine) -> None:
    """The second waits for the only slot until the first is done."""
    engine = make_engine(max_slots=1)
    told: list[tuple[str, str]] = []
    engine.note_phase = lambda session, phase: told.append((session, phase))
    ask(engine, "a")
    ask(engine, "b")
    run(engine)
    phases = ["queued", "prefill", "decode"]
    assert [phase for session, phase in told if session == "b"] == phases
    assert [session for session, _ in told] == ["a", "b", "a", "a", "b", "b"]


# -- text and the ends of it --------------------------------------------------------------------------------


def test_characters_come_whole(make_engine: MakeEngine) -> None:
    engine = make_engine()
    answer = "聪明的🙂 é👩‍👧!"
    script(engine, answer.encode())
    ask(engine, "x", max_tokens=100, ignore_eos=False)
    answers = run(engine)
    assert answers.text("x") == answer
    assert all("\ufffd" not in piece for piece in answers.pieces["x"])
    assert answers.tokens["x"] == [len(character.encode()) for character in answer]
    last = answers.last["x"]
    assert last.finish_reason == "stop"
    assert last.usage["completion_tokens"] == len(answer.encode()) + 1  # the end of turn is a token too


def test_an_unfinished_character_at_the_limit_is_left_out(make_engine: MakeEngine) -> None:
    engine = make_engine()
    script(engine, "ab🙂".encode())
    ask(engine, "x", max_tokens=4)
    answers = run(engine)
    assert answers.text("x") == "ab" and answers.last["x"].finish_reason == "length"


@pytest.mark.parametrize(
    ("stop", "shown", "reason"),
    [
        (["\nUser:"], "One.\nUs ", "stop"),
        (["two", "Us"], "One.\n", "stop"),
        (["never", "User: b!"], "One.\nUs \nUser: b", "stop"),  # held back until the end, then shown
        (["O"], "", "stop"),
    ],
)
def test_stop_strings_across_deltas(
    make_engine: MakeEngine, stop: list[str], shown: str, reason: str
) -> None:
    engine = make_engine()
    script(engine, b"One.\nUs \nUser: b")
    ask(engine, "x", stop=stop, max_tokens=100, ignore_eos=False)
    answers = run(engine)
    assert answers.text("x") == shown and answers.last["x"].finish_reason == reason


def test_held_back_text_comes_at_the_length_limit(make_engine: MakeEngine) -> None:
    engine = make_engine()
    script(engine, b"abcde")
    ask(engine, "x", stop=["cdef"], max_tokens=4)
    answers = run(engine)
    assert answers.text("x") == "abcd" and answers.last["x"].finish_reason == "length"


def test_min_tokens_holds_off_every_stop(make_engine: MakeEngine) -> None:
    engine = make_engine()
    letter = engine._tokenizer.token_bytes.index(b"a")

    def sample(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
        return torch.tensor([letter if EOS_ID in row.banned else EOS_ID for row in rows])

    engine._sampler = SimpleNamespace(Row=Row, sample=sample)
    ask(engine, "eager", min_tokens=5, ignore_eos=False)
    answers = run(engine)
    assert answers.text("eager") == "aaaaa" and answers.last["eager"].finish_reason == "stop"
    script(engine, b"a.b.c.d")
    ask(engine, "x", stop=["."], min_tokens=3, max_tokens=10)
    answers = run(engine)
    assert answers.text("x") == "a.b"


def test_eos_is_a_token_like_any_other_if_ignored(make_engine: MakeEngine) -> None:
    engine = make_engine()
    token = engine._tokenizer.token_bytes.index(b"a")
    script(engine, [token, EOS_ID, token])
    ask(engine, "x", max_tokens=3)
    answers = run(engine)
    assert answers.text("x") == "aa" and answers.last["x"].finish_reason == "length"


def test_context_ends_an_answer(make_engine: MakeEngine) -> None:
    engine = make_engine(max_context_tokens=64)
    ask(engine, "x", "Hi", max_tokens=1000)
    session = engine._sessions["x"]
    last = run(engine).last["x"]
    assert last.finish_reason == "length" and len(session.tokens) == 64
    assert last.usage["prompt_tokens"] + last.usage["completion_tokens"] == 64


# -- what is refused ----------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_context_names_both(make_engine: MakeEngine) -> None:
    engine = make_engine(max_context_tokens=64)
    with pytest.raises(InvalidRequest, match=r"messages has 1\d\d tokens, .* have 64; send a shorter"):
        ask(engine, "x", LONG * 2)
    assert engine.stats()["active"] == 0 and not engine.has_work
    engine.check_integrity()


def test_bad_requests_leave_nothing_behind(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for inputs, settings, wrong in (
        ({}, {}, "messages is missing"),
        ({"messages": "["}, {}, "messages is not JSON"),
        ({"messages": '[{"role": "cat", "content": "miaow"}]'}, {}, "role is 'cat'"),
        (
            {"messages": '[{"role": "user", "content": "x"}]'},
            {"sampling": {"top_q": 1}},
            "unknown key 'top_q'",
        ),
    ):
        with pytest.raises(InvalidRequest, match=wrong):
            engine.add_request("x", inputs, settings)
    assert engine.stats()["active"] == 0
    ask(engine, "x")
    with pytest.raises(InvalidRequest, match="session 'x' is open already"):
        ask(engine, "x")


def test_a_full_queue_names_its_limit(make_engine: MakeEngine) -> None:
    engine = make_engine(max_slots=2, max_waiting=1)
    for i in range(3):
        ask(engine, str(i), max_tokens=2)
    with pytest.raises(
        Unavailable, match="3 sessions are open, as many as max_slots 2 and max_waiting 1 allow"
    ):
        ask(engine, "3")
    assert run(engine).last.keys() == {"0", "1", "2"}
    ask(engine, "3")


# -- audio --------------------------------------------------------------------------------------------------

SPOKEN = [{"role": "user", "content": [{"type": "audio"}]}]


def open_spoken(engine: TorchEngine, parts: int = 1) -> None:
    messages = [{"role": "user", "content": [{"type": "audio"}] * parts}]
    settings = {"sampling": {"temperature": 1.0, "seed": 7, "max_tokens": 20, "ignore_eos": True}}
    engine.add_request("x", {"messages": json.dumps(messages)}, settings)


def test_a_spoken_prompt_is_answered_like_the_written_one(make_engine: MakeEngine) -> None:
    expected = tokens_of(make_engine(), "x")
    engine = make_engine()
    open_spoken(engine)
    assert not engine.has_work
    engine.push("x", {"transcript": LONG.strip()}, last=True)
    session = engine._sessions["x"]
    run(engine)
    ask(engine, "y", LONG.strip())
    written = engine._sessions["y"]
    run(engine)
    assert session.tokens == written.tokens and len(expected) == 20


def test_generation_waits_for_every_transcript(make_engine: MakeEngine) -> None:
    engine = make_engine()
    open_spoken(engine, parts=2)
    engine.push("x", {"transcript": "one"}, last=False)
    engine.push("unknown", {"transcript": "?"}, last=True)
    assert not engine.has_work
    engine.push("x", {"transcript": "two"}, last=True)
    assert run(engine).last["x"].finish_reason == "length"


@pytest.mark.parametrize(
    ("pushes", "wrong"),
    [
        ([("one", True)], "1 transcripts came for the 2 audio parts"),
        ([(None, True)], "0 transcripts came for the 2 audio parts"),
        ([("one", False), ("two", False), ("three", True)], "beyond the 2 audio parts"),
        ([("", False), (" ", True)], "no speech was heard"),
        ([("one", False), (LONG * 5, True)], "send a shorter conversation"),
    ],
)
def test_a_fault_in_the_transcripts_ends_the_session(
    make_engine: MakeEngine, pushes: list[tuple[str | None, bool]], wrong: str
) -> None:
    engine = make_engine()
    open_spoken(engine, parts=2)
    for transcript, last in pushes:
        engine.push("x", {} if transcript is None else {"transcript": transcript}, last)
    assert engine.stats()["active"] == 0 and engine.has_work
    answers = Answers()
    answers.take(engine.step())
    error = answers.last["x"].error
    assert isinstance(error, InvalidRequest) and wrong in str(error)
    assert not engine.has_work


# -- options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"max_slots": 0}, "max_slots is 0; give at least 1"),
        ({"max_waiting": -1}, "max_waiting is -1"),
        ({"dtype": "int3"}, "dtype is 'int3'; use one of float32"),
    ],
)
def test_options_are_checked(options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        TorchOptions(**options)


def test_the_context_must_fit_the_model_and_a_greeting(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="max_context_tokens is 5000; the model was made for 1024"):
        make_engine(max_context_tokens=5000)
    with pytest.raises(ConfigError, match="too few for a greeting"):
        make_engine(max_context_tokens=64, system_prompt=LONG)


def test_options_need_no_torch() -> None:
    code = "import sys; from tritone.engines.torch_ar import TorchEngine; TorchEngine.Options(); "
    code += "assert not {'torch', 'tokenizers', 'jinja2', 'safetensors'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
