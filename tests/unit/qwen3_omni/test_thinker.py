from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import numpy as np
import pytest
from qwen3_omni_oracle import CASES

from tritone.errors import ConfigError, InvalidRequest, TritoneError, Unavailable
from tritone.pipelines.qwen3_omni import attachments
from tritone.pipelines.qwen3_omni import thinking as module
from tritone.pipelines.qwen3_omni.thinker import Thinker
from tritone.pipelines.qwen3_omni.thinking import MEDIA_THREADS

from .conftest import PATIENCE_S, Answer, Answers, ask, picture, recording, run, user
from .conftest import script as script_tokens

MakeThinker = Callable[..., Thinker]
LONG = "It was a dark and stormy night, and the rain fell in torrents on the roofs of the town. "


def ids_of(thinker: Thinker, text: str) -> list[int]:
    """A token for each byte."""
    table = {value: token for token, value in reversed(list(enumerate(thinker._tokenizer.token_bytes)))}
    return [table[bytes([byte])] for byte in text.encode()]


def end_of(thinker: Thinker) -> int:
    return min(thinker._tokenizer.eos_ids)


def script(thinker: Thinker, text: str) -> list[int]:
    """Let every session answer with `text` and end its turn; the tokens, without the end."""
    tokens = ids_of(thinker, text)
    script_tokens(thinker, tokens, end_of(thinker))
    return tokens


class Gate:
    """Holds the media threads in the decoder until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        decode = module.decode

        def held(*arguments: Any) -> Any:
            self.entered.set()
            assert self.opened.wait(PATIENCE_S)
            return decode(*arguments)

        monkeypatch.setattr(module, "decode", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


# -- what the talker is told --------------------------------------------------------------------------------


def test_an_answer_that_ends_itself_is_spoken_whole(make_thinker: MakeThinker) -> None:
    thinker = make_thinker()
    tokens = script(thinker, "So it is 🙂.")
    ask(thinker, "x", "Hi", max_tokens=100)
    answer = run(thinker)["x"]
    assert answer.text == "So it is 🙂." and answer.reason == "stop"
    assert answer.spoken == tokens


def test_the_token_at_the_limit_is_not_spoken(make_thinker: MakeThinker) -> None:
    thinker = make_thinker()
    tokens = script(thinker, "So it is.")
    ask(thinker, "x", "Hi", max_tokens=5)
    answer = run(thinker)["x"]
    assert answer.text == "So it" and answer.reason == "length"
    assert answer.spoken == tokens[:4]
    assert answer.last is not None and answer.last.usage["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        (["is now"], "So it "),
        ([" is", "zzz"], "So it"),
        (["S"], ""),
        (["never so", "it is now and"], "So "),
        (["é"], "So it is now and caf"),  # two tokens: the first of them must not be spoken either
        (["!"], "So it is now and café"),
    ],
)
def test_no_token_of_a_stop_string_is_spoken(make_thinker: MakeThinker, stop: list[str], shown: str) -> None:
    thinker = make_thinker()
    tokens = script(thinker, "So it is now and café!")
    ask(thinker, "x", "Hi", stop=stop, max_tokens=100)
    answer = run(thinker)["x"]
    assert answer.text == shown and answer.reason == "stop"
    assert answer.spoken == tokens[: len(shown.encode())]


def test_a_stop_string_that_does_not_come_holds_nothing_back_for_good(make_thinker: MakeThinker) -> None:
    thinker = make_thinker()
    tokens = script(thinker, "abcab")
    ask(thinker, "ends", "Hi", stop=["abx"], max_tokens=100)
    ask(thinker, "cut", "Hi", stop=["abx"], max_tokens=5)
    answers = run(thinker)
    assert answers["ends"].text == answers["cut"].text == "abcab"
    assert answers["ends"].spoken == tokens
    assert answers["cut"].spoken == tokens[:4]


def test_an_unfinished_character_is_spoken_if_the_answer_ends_itself(make_thinker: MakeThinker) -> None:
    thinker = make_thinker()
    tokens = ids_of(thinker, "ab🙂")[:-1]
    script_tokens(thinker, tokens, end_of(thinker))
    ask(thinker, "x", "Hi", max_tokens=100)
    answer = run(thinker)["x"]
    assert answer.text == "ab" and answer.spoken == tokens


def test_tokens_are_told_as_soon_as_their_text_is_certain(make_thinker: MakeThinker) -> None:
    thinker = make_thinker(prefill_chunk_tokens=64)
    script(thinker, "ab<x<end>")
    ask(thinker, "x", "Hi", stop=["<end>"], max_tokens=100)
    told = [len(run(thinker, answers, steps=1)["x"].spoken) for answers in [Answers()] for _ in range(9)]
    assert told == [1, 2, 2, 4, 4, 4, 4, 4, 4]


def test_nothing_is_told_of_an_answer_that_is_only_written(make_thinker: MakeThinker) -> None:
    thinker = make_thinker()
    ask(thinker, "x", "<image>", "Hi", media={"image": [picture()]}, speaks=False)
    answer = run(thinker)["x"]
    assert answer.reason and answer.handed == []


def test_the_talker_is_told_of_the_prompt_first_and_of_media_once(make_thinker: MakeThinker) -> None:
    thinker = make_thinker()
    media = {"image": [picture()], "audio": [recording()]}
    session = ask(thinker, "x", "<image>", "<audio>", "Hi", media=media, ignore_eos=True)
    answer = run(thinker)["x"]
    first, second, *rest = answer.handed
    assert first.keys() == {"prompt_ids", "prompt_positions", "token_ids"}
    assert first["prompt_positions"].shape == (3, len(first["prompt_ids"]) + 9)
    assert first["token_ids"].tolist() == session.tokens[session.prompt_tokens - 3 : session.prompt_tokens]
    assert second.keys() == {"media_rows", "token_ids"}
    media_tokens = np.isin(first["prompt_ids"], list(thinker._config.tokens.media)).sum()
    assert second["media_rows"].shape == (media_tokens, 64) and second["media_rows"].dtype == np.float32
    assert all(outputs.keys() == {"token_ids"} for outputs in rest)


@pytest.mark.parametrize("chunk", [1, 7, 300])
def test_media_rows_do_not_depend_on_how_the_prompt_is_cut(make_thinker: MakeThinker, chunk: int) -> None:
    def heard(**options: int) -> np.ndarray:
        thinker = make_thinker(**options)
        media = {"image": [picture()], "audio": [recording()]}
        ask(thinker, "x", "<audio>", "so", "<image>", "Hi", media=media)
        [rows] = [outputs["media_rows"] for outputs in run(thinker)["x"].handed if "media_rows" in outputs]
        return rows

    np.testing.assert_allclose(heard(prefill_chunk_tokens=chunk), heard(), atol=2e-5)


# -- media are read on the side -----------------------------------------------------------------------------


def test_text_goes_on_while_media_are_read(make_thinker: MakeThinker, gate: Gate) -> None:
    thinker = make_thinker()
    slow = ask(thinker, "slow", "<image>", "Hi", media={"image": [picture()]})
    assert gate.entered.wait(PATIENCE_S)
    assert not thinker.has_work and thinker.stats()["reading_media"] == 1
    ask(thinker, "text", "Hello", ignore_eos=True)
    answers = Answers()
    while thinker.has_work:
        answers.take(thinker.step())
        thinker.check_integrity()
    assert answers["text"].reason == "length" and "slow" not in answers
    gate.opened.set()
    wait([slow.reading], PATIENCE_S)
    assert run(thinker, answers)["slow"].reason and thinker.stats()["active"] == 0


def test_the_loop_is_woken_when_media_are_read(make_thinker: MakeThinker) -> None:
    thinker = make_thinker()
    woken = threading.Event()
    thinker.wake = woken.set
    ask(thinker, "x", "<image>", "Hi", media={"image": [picture()]})
    assert woken.wait(PATIENCE_S) and thinker.has_work


def test_abort_while_media_are_read(
    make_thinker: MakeThinker, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    thinker = make_thinker()
    looks: list[Any] = []
    monkeypatch.setattr(thinker._reader._towers, "see", lambda *rows: looks.append(rows))
    running = [
        ask(thinker, f"running {i}", "<image>", "Hi", media={"image": [picture()]}).reading
        for i in range(MEDIA_THREADS)
    ]
    queued = ask(thinker, "queued", "<image>", "Hi", media={"image": [picture()]}).reading
    assert gate.entered.wait(PATIENCE_S)
    for session in [*thinker._sessions]:
        thinker.abort(session)
        thinker.check_integrity()
    assert thinker.stats()["active"] == thinker.stats()["reading_media"] == 0
    assert queued.cancelled()
    decoded: list[Any] = []
    monkeypatch.setattr(attachments, "decode_image", lambda *given: decoded.append(given))
    gate.opened.set()
    wait(running, PATIENCE_S)
    assert all(work.exception() is None for work in running)
    assert not thinker.has_work and thinker.step() == []
    assert thinker._media_threads._work_queue.empty() and decoded == looks == []


def test_what_was_read_for_an_aborted_session_is_not_for_the_next_of_that_name(
    make_thinker: MakeThinker, gate: Gate
) -> None:
    thinker = make_thinker()
    first = ask(thinker, "x", "<image>", "First", media={"image": [picture(1)]}).reading
    assert gate.entered.wait(PATIENCE_S)
    thinker.abort("x")
    second = ask(thinker, "x", "<image>", "The second one", media={"image": [picture(2)]})
    gate.opened.set()
    wait([first], PATIENCE_S)
    run(thinker)
    prompt = second.tokens[: second.prompt_tokens]
    text = b"".join(thinker._tokenizer.token_bytes[token] for token in prompt)
    assert b"The second one" in text


def test_a_medium_that_cannot_be_read_ends_its_session_alone(make_thinker: MakeThinker) -> None:
    thinker = make_thinker()
    ask(thinker, "text", "Hello there", ignore_eos=True)
    expected = run(thinker)["text"].text
    thinker = make_thinker()
    ask(thinker, "text", "Hello there", ignore_eos=True)
    files = {"image": [picture(), b"no picture"]}
    ask(thinker, "broken", "<image>", "<image>", "Hi", media=files)
    ask(thinker, "fine", "<image>", "Hi", media={"image": [picture()]})
    answers = run(thinker)
    error = answers["broken"].last.error if answers["broken"].last else None
    assert isinstance(error, InvalidRequest) and str(error).startswith("image[1] is not a picture; send PNG")
    assert answers["text"].text == expected and answers["fine"].reason
    assert thinker.stats()["active"] == 0 and not thinker.has_work


def test_limits_of_the_request_hold(make_thinker: MakeThinker) -> None:
    thinker = make_thinker()
    limits = {"limits": {"audio_s": 0.5, "image_pixels": 64 * 63, "video_s": 1}}
    ask(thinker, "a", "<audio>", media={"audio": [recording(1.0)]}, settings=limits)
    ask(thinker, "i", "<image>", media={"image": [picture()]}, settings=limits)
    errors = {name: str(answer.last.error) for name, answer in run(thinker).items() if answer.last}
    assert "audio lasts 1.0 s; send at most 0.5 s" in errors["a"]
    assert "image has 64 x 64 pixels; send at most 4032" in errors["i"]


def test_a_shape_that_the_model_cannot_take_is_refused(make_thinker: MakeThinker) -> None:
    thinker = make_thinker()
    ask(thinker, "x", "<image>", "Hi", media={"image": [picture(height=2, width=900)]})
    last = run(thinker)["x"].last
    assert last is not None and isinstance(last.error, InvalidRequest)
    assert "image has a shape that the model cannot take" in str(last.error)


@pytest.mark.parametrize("count", [1, 200, 201])
def test_a_click_is_too_short_to_be_heard(make_thinker: MakeThinker, count: int) -> None:
    thinker = make_thinker()
    raw = {"audio_input": np.full(count, 0.1, np.float32), "audio_input_rate": 16000}
    ask(thinker, "x", "<audio>", "Hi", media=raw)
    last = run(thinker)["x"].last
    assert last is not None
    if count == 201:
        assert last.error is None
    else:
        assert isinstance(last.error, InvalidRequest)
        assert f"audio has {count} samples at 16000 Hz; send at least 201" in str(last.error)


def test_a_fault_of_ours_is_told_as_one(
    make_thinker: MakeThinker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    thinker = make_thinker()
    monkeypatch.setattr(thinker._reader, "_look", lambda *_: 1 // 0)
    ask(thinker, "x", "<image>", "Hi", media={"image": [picture()]})
    last = run(thinker)["x"].last
    assert last is not None and type(last.error) is TritoneError and thinker.stats()["active"] == 0
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    ("media", "rows"),
    [
        ({"audio": [recording(4.0)]}, 52),
        ({"image": [picture(height=128, width=128)] * 3}, 48),
        ({"video": [CASES["video"].video_files[0]] * 4}, 1120),
    ],
    ids=["audio", "image", "video"],
)
def test_media_that_fill_the_context_are_refused_unseen(
    make_thinker: MakeThinker, monkeypatch: pytest.MonkeyPatch, media: dict[str, list[bytes]], rows: int
) -> None:
    thinker = make_thinker(max_context_tokens=40)
    for sense in ("see", "hear"):
        monkeypatch.setattr(thinker._reader._towers, sense, lambda *_: pytest.fail("a tower worked"))
    [(kind, files)] = media.items()
    ask(thinker, "x", *[f"<{kind}>"] * len(files), "Hi", media=media)
    last = run(thinker)["x"].last
    assert last is not None and isinstance(last.error, InvalidRequest)
    assert f"fill {rows} tokens, and prompt and answer together may have 40" in str(last.error)
    thinker.check_integrity()
    assert thinker.stats()["active"] == 0


def test_media_and_words_that_fill_the_context_are_refused(make_thinker: MakeThinker) -> None:
    thinker = make_thinker(max_context_tokens=60)
    ask(thinker, "x", "<audio>", "Hi there, what is it?", media={"audio": [recording(4.0)]})
    last = run(thinker)["x"].last
    assert last is not None and isinstance(last.error, InvalidRequest)
    assert "prompt and answer together may have 60" in str(last.error)
    thinker.check_integrity()
    assert thinker.stats()["active"] == 0


# -- prefixes -----------------------------------------------------------------------------------------------


def test_a_picture_that_was_seen_is_not_looked_at_again(make_thinker: MakeThinker) -> None:
    def tokens(thinker: Thinker, name: str, seed: int, words: str, **options: Any) -> tuple[list[int], int]:
        session = ask(
            thinker,
            name,
            LONG,
            "<image>",
            words,
            media={"image": [picture(seed)]},
            ignore_eos=True,
            **options,
        )
        last = run(thinker)[name].last
        assert last is not None
        return session.tokens, int(last.usage["cached_tokens"])

    thinker, fresh = make_thinker(), make_thinker(prefix_cache=False)
    media = thinker._config.tokens.media

    def place(tokens: list[int]) -> int:
        return next(i for i, token in enumerate(tokens) if token in media)

    for i, (seed, words) in enumerate([(1, "What?"), (1, "Where?"), (2, "Where?"), (1, "What?")]):
        for speaks in (False, True):
            name = f"{i}{speaks}"
            ours, cached = tokens(thinker, name, seed, words, speaks=speaks)
            theirs, none = tokens(fresh, name, seed, words, speaks=speaks)
            assert ours == theirs and none == 0
            first = place(ours)
            if name == "0False":
                assert cached < first
            elif speaks:
                assert cached == first, "the hidden states behind media are not remembered"
            elif seed == 2:
                assert cached == first, "another picture is another beginning"
            else:
                assert cached > first + 4


def test_speech_with_remembered_text_hears_the_same(make_thinker: MakeThinker) -> None:
    thinker = make_thinker()
    handed = []
    for name in ("a", "b"):
        ask(thinker, name, LONG, "<image>", "What?", media={"image": [picture()]})
        answer = run(thinker)[name]
        [rows] = [outputs["media_rows"] for outputs in answer.handed if "media_rows" in outputs]
        handed.append((rows, answer.spoken))
    np.testing.assert_allclose(handed[0][0], handed[1][0], atol=2e-5)
    assert handed[0][1] == handed[1][1]


# -- neighbours, sampling, limits ---------------------------------------------------------------------------


def test_answers_do_not_depend_on_neighbours(make_thinker: MakeThinker) -> None:
    requests: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
        "text": ((LONG,), {}),
        "image": (("<image>", "What?"), {"image": [picture(1)]}),
        "wide": (("<image>", "and", "<image>", "Which?"), {"image": [picture(2, 64, 160), picture(3)]}),
        "audio": (("<audio>", "What?"), {"audio": [recording(1.3)]}),
        "both": (("<image>", "<audio>", "So?"), {"image": [picture(4)], "audio": [recording(0.7, 500)]}),
        "hot": (("Tell me.",), {}),
    }

    def start(thinker: Thinker, name: str) -> Any:
        parts, media = requests[name]
        return ask(
            thinker,
            name,
            *parts,
            media=media,
            temperature=0.9 if name == "hot" else 0.0,
            seed=3,
            ignore_eos=True,
        )

    def media_rows(answer: Answer) -> np.ndarray:
        given = [outputs["media_rows"] for outputs in answer.handed if "media_rows" in outputs]
        return np.concatenate([np.zeros((0, 64), np.float32), *given])

    tokens, rows = {}, {}
    for name in requests:
        thinker = make_thinker()
        session = start(thinker, name)
        rows[name] = media_rows(run(thinker)[name])
        tokens[name] = session.tokens
    thinker = make_thinker(max_slots=4, prefill_chunk_tokens=9)
    together = {name: start(thinker, name) for name in requests}
    answers = run(thinker)
    assert {name: session.tokens for name, session in together.items()} == tokens
    for name in requests:
        np.testing.assert_allclose(media_rows(answers[name]), rows[name], atol=2e-5)


def test_min_tokens_and_ignored_ends(make_thinker: MakeThinker) -> None:
    thinker = make_thinker()
    end = end_of(thinker)
    logits = thinker._decoder.logits

    def eager(hidden: Any) -> Any:
        scores = logits(hidden)
        scores[:, end] = 1000.0
        return scores

    thinker._decoder.logits = eager
    plain = ask(thinker, "plain", "Hi")
    late = ask(thinker, "late", "Hi", min_tokens=4)
    never = ask(thinker, "never", "Hi", ignore_eos=True, max_tokens=5)
    answers = run(thinker)
    assert plain.tokens[plain.prompt_tokens :] == [end] and answers["plain"].reason == "stop"
    assert answers["plain"].spoken == []
    drawn = late.tokens[late.prompt_tokens :]
    assert len(drawn) == 5 and drawn[-1] == end and not set(drawn[:4]) & thinker._tokenizer.eos_ids
    assert answers["late"].spoken == drawn[:4]
    assert never.tokens[never.prompt_tokens :] == [end] * 5 and answers["never"].reason == "length"


def test_the_end_of_a_turn_ends_an_answer_whatever_the_checkpoint_lists(make_thinker: MakeThinker) -> None:
    thinker = make_thinker()
    del thinker._tokenizer._ids["eos_token_id"]
    assert not thinker._tokenizer.eos_ids
    script_tokens(thinker, ids_of(thinker, "Yes"), thinker._config.tokens.im_end)
    ask(thinker, "x", "Hi", max_tokens=20)
    answer = run(thinker)["x"]
    assert (answer.text, answer.reason) == ("Yes", "stop")


def test_the_repetition_penalty_looks_at_prompt_and_answer(make_thinker: MakeThinker) -> None:
    thinker = make_thinker()
    plain = ask(thinker, "plain", "Hi", ignore_eos=True, max_tokens=30)
    run(thinker)
    strict = ask(thinker, "strict", "Hi", ignore_eos=True, max_tokens=30, repetition_penalty=10.0)
    run(thinker)
    drawn = strict.tokens[strict.prompt_tokens :]
    assert len(set(strict.tokens)) > len(set(plain.tokens))
    assert drawn != plain.tokens[plain.prompt_tokens :]


def test_a_prompt_at_the_limit_of_the_context_has_room_for_a_token(make_thinker: MakeThinker) -> None:
    thinker = make_thinker()
    session = ask(thinker, "x", "Hi there")
    run(thinker)
    full = make_thinker(max_context_tokens=session.prompt_tokens + 1)
    ask(full, "x", "Hi there", ignore_eos=True)
    answer = run(full)["x"]
    assert answer.reason == "length" and answer.spoken == []
    assert answer.last is not None and answer.last.usage["completion_tokens"] == 1
    tight = make_thinker(max_context_tokens=session.prompt_tokens)
    with pytest.raises(InvalidRequest, match=rf"messages has {session.prompt_tokens} tokens"):
        ask(tight, "x", "Hi there")
    assert tight.stats()["active"] == 0 and not tight.has_work


def test_sessions_that_read_media_count_against_the_queue(make_thinker: MakeThinker, gate: Gate) -> None:
    thinker = make_thinker(max_slots=1, max_waiting=1)
    ask(thinker, "a", "<image>", "Hi", media={"image": [picture()]})
    ask(thinker, "b", "Hi")
    with pytest.raises(Unavailable, match="2 sessions are open"):
        ask(thinker, "c", "Hi")
    gate.opened.set()
    assert {name for name, answer in run(thinker).items() if answer.reason} == {"a", "b"}


def test_a_session_is_opened_once(make_thinker: MakeThinker) -> None:
    thinker = make_thinker()
    ask(thinker, "a", "Hi")
    with pytest.raises(InvalidRequest, match="session 'a' is open already"):
        ask(thinker, "a", "Hi")
    assert run(thinker)["a"].reason and thinker.stats()["active"] == 0


def test_abort_in_the_middle_of_a_prompt_of_media(make_thinker: MakeThinker) -> None:
    thinker = make_thinker(prefill_chunk_tokens=4)
    ask(thinker, "x", "<audio>", "Hi", media={"audio": [recording(2.0)]})
    run(thinker, steps=3)
    assert thinker.stats()["running"] == 1
    thinker.abort("x")
    thinker.check_integrity()
    assert thinker.stats()["active"] == 0 and not thinker.has_work
    again = ask(thinker, "y", "<audio>", "Hi", media={"audio": [recording(2.0)]}, ignore_eos=True)
    run(thinker)
    fresh = make_thinker()
    expected = ask(fresh, "y", "<audio>", "Hi", media={"audio": [recording(2.0)]}, ignore_eos=True)
    run(fresh)
    assert again.tokens == expected.tokens


def test_raw_samples_are_a_recording(make_thinker: MakeThinker) -> None:
    thinker = make_thinker()
    samples = np.sin(np.arange(16000) * 0.1).astype(np.float32)
    raw = {"audio_input": samples, "audio_input_rate": 16000}
    session = ask(thinker, "x", "<audio>", "Hi", media=raw)
    assert run(thinker)["x"].reason
    assert session.tokens.count(thinker._config.tokens.audio) == 13  # rows a second


def test_the_system_prompt_is_for_conversations_without_one(make_thinker: MakeThinker) -> None:
    thinker = make_thinker(system_prompt="Be kind.")
    bytes_of = thinker._tokenizer.token_bytes

    def prompt(messages: list[dict[str, Any]]) -> bytes:
        session = ask(thinker, "x", messages=messages)
        run(thinker)
        return b"".join(bytes_of[token] for token in session.tokens[: session.prompt_tokens])

    assert b"Be kind." in prompt(user("Hi"))
    own = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, *user("Hi")]
    assert b"Be kind." not in prompt(own) and b"Be brief." in prompt(own)


def test_a_context_too_small_for_a_greeting_is_refused(make_thinker: MakeThinker) -> None:
    with pytest.raises(ConfigError, match="max_context_tokens is 4, too few for a greeting"):
        make_thinker(max_context_tokens=4)


def test_options_are_checked(make_thinker: MakeThinker) -> None:
    with pytest.raises(ConfigError, match="max_context_tokens is 9999999"):
        make_thinker(max_context_tokens=9999999)
    with pytest.raises(InvalidRequest, match="messages is missing"):
        make_thinker().add_request("x", {}, {})
