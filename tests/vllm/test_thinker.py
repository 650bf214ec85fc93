"""The Thinker on vLLM against the torch Thinker: the same tokens, text, and rows for the talker."""

from __future__ import annotations

import dataclasses

import pytest

from thinkers import CASES, assert_equal
from tritone.engines.vllm.row_memory import RowMemory
from tritone.engines.vllm.worker import TappedRunner
from tritone.errors import InvalidRequest, TritoneError
from tritone.pipelines.qwen3_omni.vllm_model import ThinkerOnVllm

TEXT, MEDIA = "stops", "image_audio"
TOGETHER = ("cut", "image_audio", "video_audio", "turns")


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_that_of_torch(roomy, expected, name):
    assert_equal(roomy.one(name, CASES[name]), expected[name])


def test_all_answers_at_once_are_those_of_torch(roomy, expected):
    for name, case in CASES.items():
        roomy.ask(name, case)
    for name, answer in roomy.run(*CASES).items():
        assert_equal(answer, expected[name])


@pytest.mark.parametrize("name", CASES)
def test_how_a_prompt_is_cut_changes_nothing(tight, expected, name):
    assert_equal(tight.one(name, CASES[name]), expected[name])


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.3, "max_tokens": 40},
        {"min_tokens": 20, "max_tokens": 24},
        {"ignore_eos": True, "max_tokens": 40},
        {"stop": ["e"], "max_tokens": 40},
        {"stop": ["e"], "min_tokens": 8, "max_tokens": 40},
        {"max_tokens": 1},
    ],
    ids=str,
)
def test_settings_mean_the_same(roomy, torch_thinker, settings):
    for name in (TEXT, MEDIA):
        ours = roomy.one(name, CASES[name], **settings)
        assert_equal(ours, torch_thinker.one(name, CASES[name], **settings))


def test_an_answer_fills_the_context_and_no_more(tight):
    answer = tight.one("long", CASES[TEXT], ignore_eos=True, max_tokens=2000)
    assert answer.reason == "length"
    assert answer.usage["prompt_tokens"] + answer.usage["completion_tokens"] == 448


def test_what_is_not_a_number_ends_its_session_and_no_other(roomy, expected, monkeypatch):
    """In the scores alone: keys that are not numbers would stay in vLLM's cache for the next tests."""
    compute, passes = ThinkerOnVllm.compute_logits, []

    def spoilt(*given):
        logits = compute(*given)
        passes.append(len(logits))
        if len(passes) == 4:
            logits[0, 7] = float("nan")
        return logits

    monkeypatch.setattr(ThinkerOnVllm, "compute_logits", spoilt)
    for name in ("bad", "good"):
        roomy.ask(name, CASES[TEXT])
    answers = roomy.run("bad", "good")
    assert passes[:5] == [2, 2, 2, 2, 1]
    assert_equal(answers["good"], expected[TEXT])
    error, told = answers["bad"].error, answers["bad"].text
    assert isinstance(error, TritoneError) and "token 3 of the answer are not numbers" in str(error)
    assert told and expected[TEXT].text.startswith(told) and told != expected[TEXT].text


# -- the cache -----------------------------------------------------------------------------------------------


def test_a_prompt_seen_before_is_not_computed_again(roomy, expected):
    long = longer(CASES[TEXT])
    first, again = roomy.one("first", long), roomy.one("again", long)
    assert first.usage["cached_tokens"] < again.usage["cached_tokens"] < again.usage["prompt_tokens"]
    assert_equal(again, first)


def test_media_seen_before_are_not_computed_again_for_text(roomy, expected):
    case = longer(CASES[MEDIA])
    first, again = (roomy.one(name, case, speaks=False) for name in ("first", "again"))
    assert again.usage["cached_tokens"] > first.usage["cached_tokens"]
    assert again.text == first.text and again.handed == {}


def test_a_talker_gets_its_rows_whatever_the_cache_holds(roomy, torch_thinker, monkeypatch):
    case = longer(CASES["turns"])
    monkeypatch.setattr(roomy.engine, "_memory", RowMemory(1 << 20))
    wanted = torch_thinker.one("speaks", case)
    roomy.one("silent", case, speaks=False)
    afresh = roomy.one("afresh", case)
    assert afresh.usage["cached_tokens"] == 0, "the rows of media have to be computed for the talker"
    remembered = roomy.one("remembered", case)
    assert remembered.usage["cached_tokens"] > 0
    monkeypatch.setattr(roomy.engine, "_memory", RowMemory(0))
    forgotten = roomy.one("forgotten", case)
    assert forgotten.usage["cached_tokens"] == 0
    for answer in (afresh, remembered, forgotten):
        assert_equal(answer, wanted)


def test_the_next_turn_of_a_conversation_begins_in_the_cache(roomy, torch_thinker):
    """With a picture more, of which alone the rows are new."""
    first = longer(CASES["image_audio"])
    roomy.one("first", first)
    question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "And this?"}]}
    answered = {"role": "assistant", "content": [{"type": "text", "text": "It is a dog."}]}
    following = dataclasses.replace(
        first,
        messages=(*first.messages, answered, question),
        images=(*first.images, CASES["turns"].images[0]),
    )
    answer = roomy.one("next", following)
    assert answer.usage["cached_tokens"] > 0
    assert_equal(answer, torch_thinker.one("next", following))


def test_other_media_in_the_same_words_are_told_apart(roomy, torch_thinker):
    case = longer(CASES[MEDIA])
    other = dataclasses.replace(case, images=tuple(255 - image for image in case.images))
    sampled = {"temperature": 1.0, "seed": 3, "max_tokens": 40}
    answers = [roomy.one("x", each, speaks=False, **sampled).text for each in (case, other, case)]
    assert answers[0] == answers[2] != answers[1]
    assert_equal(roomy.one("x", other), torch_thinker.one("x", other))


def longer(case):
    """The case with a prompt of more than a block."""
    words = {"type": "text", "text": "Tell me about the sea. " * 40}
    last = {**case.messages[-1], "content": [*case.messages[-1]["content"], words]}
    return dataclasses.replace(case, messages=(*case.messages[:-1], last))


# -- who leaves, and who has to make room --------------------------------------------------------------------


def test_what_is_aborted_leaves_nothing_behind(tight, expected):
    """Running ones in their prompt and in their answer, waiting ones, and one whose media are being read."""
    for name in TOGETHER:
        tight.ask(name, CASES[name])
    for i in range(6):
        tight.ask(f"unwanted {i}", CASES["image" if i == 5 else TEXT], ignore_eos=True, max_tokens=100)
    tight.engine.abort("unwanted 5")
    while tight.engine.stats()["generated_tokens"] == 0:
        tight.turn()
    assert tight.engine.stats()["waiting"] > 0
    for i in range(5):
        tight.engine.abort(f"unwanted {i}")
    tight.engine.abort("never known")
    for name, answer in tight.run(*TOGETHER).items():
        assert_equal(answer, expected[name])
    assert tight.engine.stats()["kv_tokens"] == tight.engine.stats()["active"] == 0


def test_who_has_to_make_room_gives_the_same_answer(tight, torch_thinker, monkeypatch):
    scheduler, preempted = tight.engine._scheduler, []
    preempt = scheduler._preempt_request

    def count(*arguments, **named):
        preempted.append(arguments)
        return preempt(*arguments, **named)

    monkeypatch.setattr(scheduler, "_preempt_request", count)
    settings = {"ignore_eos": True, "max_tokens": 48}
    for name in ("video_audio", "image_audio", "cut", "turns"):  # the order says who has to make room
        tight.ask(name, CASES[name], **settings)
        tight.wait_for_media()
    answers = tight.run(*TOGETHER)
    assert preempted, "the cache held all of them"
    for name, answer in answers.items():
        assert_equal(answer, torch_thinker.one(name, CASES[name], **settings))


def test_media_of_a_remembered_prompt_are_read_again_when_it_is_forgotten(tight, torch_thinker):
    settings = {"ignore_eos": True, "max_tokens": 48}
    tight.one("before", CASES[MEDIA], **settings)
    tight.ask("again", CASES[MEDIA], **settings)
    tight.wait_for_media()
    for _ in range(8):
        tight.turn()
    assert tight.engine._sessions["again"].cached_tokens > 0
    engine = tight.engine._llm
    assert engine.reset_prefix_cache(reset_running_requests=True)
    engine.reset_encoder_cache()
    answer = tight.run("again")["again"]
    assert_equal(answer, torch_thinker.one("expected", CASES[MEDIA], **settings))


# -- steps that fail -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "name", "number"),
    [
        (ThinkerOnVllm, "forward", 2),  # of the rows that fill the prompt's first block
        (ThinkerOnVllm, "embed_multimodal", 1),
        (TappedRunner, "_tapped", 2),
        (TappedRunner, "_not_numbers", 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_step_that_fails_leaves_nothing_to_later_ones(
    tight, torch_thinker, monkeypatch, owner, name, number
):
    case = longer(CASES["image"])
    shade = len(name)  # a picture that no cache holds
    case = dataclasses.replace(case, images=tuple(image // 2 + shade for image in case.images))
    done, calls = getattr(owner, name), []

    def fail_once(*given, **named):
        calls.append(name)
        if len(calls) == number:
            raise RuntimeError("out of luck")
        return done(*given, **named)

    monkeypatch.setattr(owner, name, fail_once)
    tight.ask("failed", case)
    tight.wait_for_media()
    with pytest.raises(RuntimeError, match="out of luck"):
        tight.run("failed")
    tight.engine.abort("failed")  # as the loop does
    again = tight.one("failed", case)
    assert again.usage["cached_tokens"] == 0
    assert_equal(again, torch_thinker.one("expected", case))


def test_an_engine_whose_cache_cannot_be_emptied_fails_until_it_is_given_up(tight, expected, monkeypatch):
    engine = tight.engine
    tight.ask("holds on", CASES[TEXT])
    with monkeypatch.context() as patched:
        patched.setattr(ThinkerOnVllm, "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tight.turn()
    for _ in range(2):  # its blocks are those of a session that nobody aborts
        with pytest.raises(TritoneError, match="does not give up the rows of a step that failed"):
            tight.turn()
    engine.abort("holds on")
    assert_equal(tight.one("goes on", CASES[TEXT]), expected[TEXT])


# -- chance --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("filters", [{}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_a_seed_repeats_an_answer_whatever_else_runs(roomy, filters):
    settings = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 30, **filters}
    alone = roomy.one("alone", CASES[TEXT], seed=7, **settings)
    for i, name in enumerate(TOGETHER):
        roomy.ask(name, CASES[name], temperature=0.5 * (i % 3), seed=i)
    roomy.ask("again", CASES[TEXT], seed=7, **settings)
    roomy.ask("other", CASES[TEXT], seed=8, **settings)
    answers = roomy.run(*TOGETHER, "again", "other")
    assert answers["again"].spoken == alone.spoken != answers["other"].spoken


def test_a_seed_draws_the_same_however_the_prompt_is_cut(roomy, tight):
    settings = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 30, "seed": 7}
    whole, cut = (engine.one("drawn", CASES[TEXT], **settings) for engine in (roomy, tight))
    assert whole.error is None
    assert cut.spoken == whole.spoken


def test_a_temperature_that_vllm_would_raise_is_none(roomy, expected):
    for temperature in (1e-9, 0.0099):
        assert_equal(roomy.one("cold", CASES[TEXT], temperature=temperature, seed=1), expected[TEXT])


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["long ", "Hello "])
def test_a_prompt_beyond_the_context_is_refused_in_the_words_of_torch(roomy, torch_thinker, words):
    case = CASES[TEXT]
    message = {"role": "user", "content": [{"type": "text", "text": words * 1500}]}
    case = dataclasses.replace(case, messages=(message,))
    said = []
    for engine in (roomy.engine, torch_thinker.engine):
        with pytest.raises(Exception) as refusal:
            type(roomy)(engine).ask("long", case)
        said.append((type(refusal.value), str(refusal.value)))
    assert said[0] == said[1]
    roomy.engine.check_integrity()


def test_what_vllm_refuses_leaves_nothing_behind(roomy, expected, monkeypatch):
    def refuse(*_):
        raise ValueError("no such thing")

    with monkeypatch.context() as patched:
        patched.setattr(roomy.engine._llm, "add_request", refuse)
        with pytest.raises(InvalidRequest, match="vLLM does not take the request: no such thing"):
            roomy.ask("refused", CASES[TEXT])
        roomy.engine.check_integrity()
        answer = roomy.one("refused later", CASES["image"])
        assert isinstance(answer.error, InvalidRequest)
    assert_equal(roomy.one("taken", CASES[TEXT]), expected[TEXT])


def test_what_vllm_refuses_with_media_fails_nobody_else(roomy, expected):
    """Its prompt becomes known in a step that the others share."""
    refused = "vLLM does not take the request: temperature must be in .0, 2., got 3.0; change its settings"
    with pytest.raises(InvalidRequest, match=refused):
        roomy.ask("hot words", CASES[TEXT], temperature=3.0)
    roomy.ask("other", CASES[TEXT])
    roomy.ask("hot", CASES["image"], temperature=3.0)
    roomy.wait_for_media()
    answers = roomy.run("hot", "other")
    assert isinstance(answers["hot"].error, InvalidRequest)
    assert_equal(answers["other"], expected[TEXT])


def test_a_bad_setting_is_refused_in_the_words_of_torch(roomy, torch_thinker):
    said = []
    for engine in (roomy.engine, torch_thinker.engine):
        with pytest.raises(Exception) as refusal:
            type(roomy)(engine).ask("bad", CASES[TEXT], top_p=0)
        said.append((type(refusal.value), str(refusal.value)))
    assert said[0] == said[1]
