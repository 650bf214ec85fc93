from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from qwen3_omni_reference import Reference

from tritone.engines.sampler import Draw, Row
from tritone.errors import InvalidRequest, Unavailable
from tritone.networks.weights import Weights
from tritone.pipelines.qwen3_omni.code_predictor import CodePredictor
from tritone.pipelines.qwen3_omni.config import RESERVED_CODEC_IDS, OmniConfig
from tritone.pipelines.qwen3_omni.frame_row import FrameRow
from tritone.pipelines.qwen3_omni.talker import Talker
from tritone.sampling import Sampling

from .conftest import Answer, Answers, run, script

MakeTalker = Callable[..., Talker]
THINKER_HIDDEN = 64


def told(talker: Talker, media: int = 0, words: int = 6, seed: int = 0) -> dict[str, Any]:
    """What a thinker says of a request: a user's turn with `media` rows of sound, and `words` tokens."""
    ids = talker._config.tokens
    chance = np.random.RandomState(seed)
    said = chance.randint(10, 200, 5).tolist()
    sound = [ids.audio_start, *[ids.audio] * media, ids.audio_end] if media else []
    turn = [ids.im_start, ids.user, 198, *sound, *said, ids.im_end, 198]
    outputs: dict[str, Any] = {
        "prompt_ids": np.array(turn, np.int32),
        "token_ids": np.array([ids.im_start, 271, 198, *chance.randint(10, 200, words)], np.int32),
    }
    if media:
        outputs["media_rows"] = chance.standard_normal((media, THINKER_HIDDEN)).astype(np.float32)
    return outputs


def start(talker: Talker, session: str, speaker: str | None = None, **sampling: object) -> Any:
    chosen = {"temperature": 0.0, "max_tokens": 10, "min_tokens": 10, **sampling}
    talker.add_request(session, {}, {"sampling": chosen, "speaker": speaker})
    return talker._sessions[session]


def speak(
    talker: Talker, outputs: Mapping[str, Any], speaker: str | None = None, **sampling: object
) -> Answer:
    start(talker, "x", speaker, **sampling)
    talker.push("x", outputs, last=True)
    return run(talker)["x"]


def assert_nothing_left(talker: Talker) -> None:
    stats = talker.stats()
    assert stats["active"] == stats["running"] == stats["waiting"] == 0
    assert not talker.has_work and talker.step() == []
    talker.check_integrity()


# -- pieces -------------------------------------------------------------------------------------------------


def cuts(outputs: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The same outputs in pieces."""
    prompt = {"prompt_ids": outputs["prompt_ids"]}
    tokens, media = outputs["token_ids"], outputs.get("media_rows", np.zeros((0, THINKER_HIDDEN), np.float32))

    def token_pieces(size: int) -> list[dict[str, Any]]:
        return [{"token_ids": tokens[i : i + size]} for i in range(0, len(tokens), size)]

    def media_pieces(size: int) -> list[dict[str, Any]]:
        return [{"media_rows": media[i : i + size]} for i in range(0, len(media), size)]

    empty = {"token_ids": tokens[:0], "media_rows": media[:0]}
    return {
        "token by token": [prompt, *media_pieces(1), *token_pieces(1)],
        "media last": [prompt, *token_pieces(4), *media_pieces(2)],
        "prompt last": [*media_pieces(3), *token_pieces(5), prompt],
        "head with prompt": [
            {**prompt, "token_ids": tokens[:3]},
            {"media_rows": media},
            {"token_ids": tokens[3:]},
        ],
        "head and first token cut": [
            prompt,
            {"token_ids": tokens[:2], "media_rows": media},
            {"token_ids": tokens[2:]},
        ],
        "empty pieces": [empty, prompt, empty, *media_pieces(2), empty, *token_pieces(2), {}, empty],
    }


@pytest.mark.parametrize("media", [0, 7])
@pytest.mark.parametrize("stepping", ["between", "after"])
def test_pieces_of_any_size_give_the_same_codes(make_talker: MakeTalker, media: int, stepping: str) -> None:
    talker = make_talker(prefill_chunk_tokens=5)
    outputs = told(talker, media)
    expected = speak(talker, outputs).frames
    assert len(expected) == 9 and len({tuple(frame) for frame in expected}) > 3
    for name, pieces in cuts(outputs).items():
        start(talker, "x")
        answers = Answers()
        for piece in pieces:
            talker.push("x", piece, last=False)
            if stepping == "between":
                run(talker, answers)
        talker.push("x", {}, last=True)
        assert run(talker, answers)["x"].frames == expected, name
        assert_nothing_left(talker)


def test_tokens_of_all_sessions_become_rows_in_one_pass(make_talker: MakeTalker) -> None:
    talker = make_talker()
    expected = {seed: speak(talker, told(talker, seed=seed)).frames for seed in range(3)}
    passes: list[int] = []
    texts = talker._inputs.spoken

    def counted(tokens: Sequence[int]) -> list[torch.Tensor]:
        passes.append(len(tokens))
        return texts(tokens)

    talker._inputs.spoken = counted  # type: ignore[method-assign]
    for seed in expected:
        start(talker, str(seed))
        outputs = told(talker, seed=seed)
        for token in outputs["token_ids"]:
            talker.push(str(seed), {"token_ids": np.array([token], np.int32)}, last=False)
        talker.push(str(seed), {"prompt_ids": outputs["prompt_ids"]}, last=False)
    start(talker, "gone")
    talker.push("gone", {"token_ids": np.arange(9, dtype=np.int32)}, last=False)
    talker.abort("gone")
    assert passes == [] and talker.has_work
    answers = run(talker)
    assert passes == [3 * 6]
    for seed in expected:
        talker.push(str(seed), {}, last=True)
    answers = run(talker, answers)
    assert {seed: answers[str(seed)].frames for seed in expected} == expected
    assert_nothing_left(talker)


def test_what_came_with_the_request_counts(make_talker: MakeTalker) -> None:
    talker = make_talker()
    outputs = told(talker, 3)
    expected = speak(talker, outputs).frames
    sampling = {"temperature": 0.0, "max_tokens": 10, "min_tokens": 10}
    talker.add_request("x", outputs, {"sampling": sampling})
    talker.push("x", {}, last=True)
    assert run(talker)["x"].frames == expected


def test_a_frame_needs_the_token_after_the_next_and_no_more(make_talker: MakeTalker) -> None:
    talker = make_talker()
    outputs = told(talker, words=5)
    tokens = outputs["token_ids"]
    start(talker, "x", max_tokens=100, min_tokens=100)
    answers = Answers()
    talker.push("x", {**outputs, "token_ids": tokens[:3]}, last=False)
    assert "x" not in run(talker, answers) and talker.stats()["running"] == 1
    for count in range(1, 6):
        talker.push("x", {"token_ids": tokens[2 + count : 3 + count]}, last=False)
        assert talker.has_work
        assert len(run(talker, answers)["x"].frames) == count
        assert not talker.has_work and talker.step() == [], "it waits and takes no time"
    talker.push("x", {}, last=True)
    assert len(run(talker, answers)["x"].frames) == 99


def test_a_prompt_is_read_before_there_is_a_word_to_speak(make_talker: MakeTalker) -> None:
    talker = make_talker()
    outputs = told(talker)
    session = start(talker, "x")
    talker.push("x", {**outputs, "token_ids": outputs["token_ids"][:3]}, last=False)
    run(talker)
    assert session.held.filled == len(outputs["prompt_ids"]) + 8
    talker.push("x", {"token_ids": outputs["token_ids"][3:]}, last=True)
    answer = run(talker)["x"]
    assert answer.last is not None and answer.last.usage["prompt_tokens"] == len(outputs["prompt_ids"]) + 9


def test_short_prompts_are_read_together_and_within_the_limit(make_talker: MakeTalker) -> None:
    talker = make_talker(prefill_chunk_tokens=48)
    expected = speak(talker, told(talker)).frames
    rows = len(told(talker)["prompt_ids"]) + 8  # and the last one, which draws
    assert 2 * rows <= 48 < 3 * rows
    for i in range(5):
        talker.push(start(talker, str(i)).id, told(talker), last=True)
    answers = Answers()
    for step, begun in enumerate((2, 4, 5)):
        run(talker, answers, steps=1)
        assert len(answers) == begun, step
    answers = run(talker, answers)
    assert all(answer.frames == expected for answer in answers.values())
    assert_nothing_left(talker)


def test_running_sessions_keep_their_pace_while_a_prompt_is_read(
    make_talker: MakeTalker, monkeypatch: pytest.MonkeyPatch
) -> None:
    talker = make_talker(prefill_chunk_tokens=8)
    start(talker, "running", max_tokens=100, min_tokens=100)
    talker.push("running", told(talker), last=True)
    answers = run(talker, steps=5)
    spoken = len(answers["running"].frames)
    assert spoken > 0
    pieces: list[tuple[int, int]] = []
    rows = talker._inputs.rows

    def noted(prompt: Any, first: int, end: int) -> torch.Tensor:
        pieces.append((first, end))
        return rows(prompt, first, end)

    monkeypatch.setattr(talker._inputs, "rows", noted)
    start(talker, "long")
    talker.push("long", told(talker, media=200), last=True)
    assert pieces == [], "nothing is computed before its turn"
    steps = 0
    while "long" not in answers:
        run(talker, answers, steps=1)
        steps += 1
    assert steps > 25 and len(answers["running"].frames) == spoken + steps
    ends = [end for _, end in pieces]
    assert [first for first, _ in pieces] == [0, *ends[:-1]]
    assert {end - first for first, end in pieces[:-1]} == {8}


# -- codes are a request's own ------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_frames_in_any_company(make_talker: MakeTalker) -> None:
    sampling = {
        "temperature": 0.9,
        "top_k": 50,
        "repetition_penalty": 1.05,
        "max_tokens": 14,
        "min_tokens": 0,
    }
    talker = make_talker()
    outputs = told(talker, 3)
    alone = speak(talker, outputs, seed=11, **sampling).frames
    assert len(alone) > 3
    assert speak(make_talker(max_slots=1), outputs, seed=11, **sampling).frames == alone
    assert speak(talker, outputs, seed=12, **sampling).frames != alone
    busy = make_talker(prefill_chunk_tokens=3)
    for i in range(7):
        name = f"neighbour {i}"
        start(busy, name, seed=100 + i, temperature=i % 3 / 2, max_tokens=4 + 3 * i, min_tokens=2)
        busy.push(name, told(busy, 2 * i, words=2 + i, seed=i + 1), last=True)
        if i == 3:
            start(busy, "x", seed=11, **sampling)
            busy.push("x", outputs, last=True)
    answers = run(busy)
    assert answers["x"].frames == alone
    assert len({str(answer.frames) for answer in answers.values()}) == 8
    assert_nothing_left(busy)


def test_the_codes_after_the_first_are_drawn_too(make_talker: MakeTalker) -> None:
    talker = make_talker()
    outputs = told(talker)
    hot = {"temperature": 1.0, "top_k": 1, "max_tokens": 6}  # code 0 is the likeliest one
    sampled = speak(talker, outputs, seed=1, **hot).frames
    other = speak(talker, outputs, seed=2, **hot).frames
    assert sampled[0][0] == other[0][0] and sampled[0][1:] != other[0][1:]
    likeliest = make_talker(residual_top_k=1)
    assert (
        speak(likeliest, outputs, seed=1, **hot).frames
        == speak(talker, outputs, temperature=0.0, max_tokens=6).frames
    )


def test_speakers(make_talker: MakeTalker) -> None:
    talker = make_talker()
    outputs = told(talker)
    by_name = {name: speak(talker, outputs, name).frames for name in talker._config.speakers}
    assert len({str(frames) for frames in by_name.values()}) == len(by_name) == 3
    assert speak(talker, outputs, None).frames == by_name["ethan"]
    for wrong, cure in (("etan", "did you mean 'ethan'?"), ("nobody at all", "known: aiden, chelsie, ethan")):
        with pytest.raises(InvalidRequest, match=f"speaker is '{wrong}'") as refusal:
            start(talker, "y", wrong)
        assert refusal.value.cure == cure
    assert_nothing_left(talker)


# -- how speech ends ----------------------------------------------------------------------------------------


def test_the_end_sign_ends_speech(make_talker: MakeTalker) -> None:
    talker = make_talker()
    script(talker, [3, 4, 5], talker._config.codec.eos)
    answer = speak(talker, told(talker), max_tokens=50, min_tokens=0)
    assert answer.reason == "stop" and [frame[0] for frame in answer.frames] == [3, 4, 5]
    assert answer.last is not None
    assert answer.last.usage["codec_frames"] == 3 and answer.last.usage["completion_tokens"] == 4
    assert_nothing_left(talker)


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_the_token_at_the_limit_gets_no_frame(make_talker: MakeTalker, limit: int) -> None:
    talker = make_talker()
    answer = speak(talker, told(talker), max_tokens=limit, min_tokens=limit)
    assert answer.reason == "length" and len(answer.frames) == limit - 1
    assert_nothing_left(talker)


def test_the_context_ends_speech(make_talker: MakeTalker) -> None:
    talker = make_talker(max_context_tokens=40)
    outputs = told(talker)
    rows = len(outputs["prompt_ids"]) + 9
    answer = speak(talker, outputs, max_tokens=500, min_tokens=500)
    assert answer.reason == "length" and len(answer.frames) == 40 - rows
    exact = make_talker(max_context_tokens=rows + 1)
    assert len(speak(exact, outputs, max_tokens=500, min_tokens=500).frames) == 1
    full = speak(make_talker(max_context_tokens=rows), outputs).last
    assert full is not None and isinstance(full.error, InvalidRequest)


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_prompt_longer_than_the_context_is_refused(make_talker: MakeTalker, pieces: int) -> None:
    talker = make_talker(max_context_tokens=30)
    outputs = told(talker, 30)
    rows = len(outputs["prompt_ids"]) + 9
    start(talker, "x")
    for piece in [outputs] if pieces == 1 else [{"token_ids": outputs["token_ids"]}, outputs]:
        talker.push("x", piece, last=False)
    talker.push("x", {}, last=True)
    last = run(talker)["x"].last
    assert last is not None and isinstance(last.error, InvalidRequest)
    assert f"messages fills {rows} positions of the talker" in str(last.error) and "30" in str(last.error)
    assert_nothing_left(talker)


def test_a_prompt_that_leaves_no_room_comes_back_from_the_call(make_talker: MakeTalker) -> None:
    talker = make_talker(max_context_tokens=30)
    with pytest.raises(InvalidRequest, match="positions of the talker"):
        talker.add_request("x", told(talker, 30), {"sampling": {}})
    assert_nothing_left(talker)


@pytest.mark.parametrize("known", ["nothing", "prompt", "prompt and head"])
def test_an_answer_without_a_word_ends_at_once(make_talker: MakeTalker, known: str) -> None:
    talker = make_talker()
    outputs = told(talker, words=0)
    pieces = {
        "nothing": {},
        "prompt": {"prompt_ids": outputs["prompt_ids"]},
        "prompt and head": outputs,
    }[known]
    start(talker, "x")
    talker.push("x", pieces, last=False)
    answers = run(talker)
    talker.push("x", {}, last=True)
    assert talker.has_work
    answer = run(talker, answers)["x"]
    assert answer.reason == "stop" and answer.frames == []
    assert answer.last is not None and answer.last.usage["codec_frames"] == 0
    assert min(answer.last.usage.values()) >= 0
    assert_nothing_left(talker)


def test_a_conversation_without_a_users_turn_is_spoken_too(make_talker: MakeTalker) -> None:
    talker = make_talker()
    answer = speak(talker, {**told(talker), "prompt_ids": np.zeros(0, np.int32)})
    assert answer.reason == "length" and len(answer.frames) == 9
    assert_nothing_left(talker)


def test_only_codes_and_the_end_sign_are_ever_drawn(make_talker: MakeTalker) -> None:
    talker = make_talker()
    codec, size = talker._config.codec, talker._decoder.config.vocab_size
    logits = talker._decoder.logits

    def against(hidden: torch.Tensor) -> torch.Tensor:
        scores = logits(hidden)
        scores[:, size - RESERVED_CODEC_IDS :] += 500.0  # signs and speakers, the end sign among them
        return scores

    talker._decoder.logits = against
    ended = speak(talker, told(talker), temperature=5.0, max_tokens=30, min_tokens=6)
    assert ended.reason == "stop" and len(ended.frames) == 6
    codes = [frame[0] for frame in ended.frames]
    assert max(codes) < size - RESERVED_CODEC_IDS and codec.eos not in codes
    endless = speak(talker, told(talker), max_tokens=8, min_tokens=0, ignore_eos=True)
    assert endless.reason == "length" and len(endless.frames) == 7
    assert max(frame[0] for frame in endless.frames) < size - RESERVED_CODEC_IDS


# -- the repetition guard -----------------------------------------------------------------------------------


class Constant:
    """A predictor that always says the same, so that code 0 alone tells frames apart."""

    num_residuals = 15

    def __init__(self, predictor: CodePredictor) -> None:
        self.vocab_size = predictor.vocab_size

    def __call__(
        self, hidden: torch.Tensor, embedded: torch.Tensor, draw: Draw, codebooks: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(len(hidden), len(codebooks), dtype=torch.int64), embedded


@pytest.mark.parametrize("most", [5, 0])
def test_a_loop_is_cut_after_so_many_repeated_frames(make_talker: MakeTalker, most: int) -> None:
    talker = make_talker(max_looped_frames=most)
    talker._frames._predictor = Constant(talker._frames._predictor)
    before, loop = [40, 41, 42, 43, 41, 40, 50], [0, 1, 2] * 7
    script(talker, before + loop, talker._config.codec.eos)
    answer = speak(talker, told(talker), max_tokens=400, min_tokens=0)
    assert answer.reason == ("repetition" if most else "stop")
    assert [frame[0] for frame in answer.frames] == before + loop[: 3 + most if most else None]
    assert_nothing_left(talker)


def test_after_the_last_word_comes_one_end_and_then_padding(make_talker: MakeTalker) -> None:
    talker = make_talker()

    class Silent(Constant):
        """Its frames add nothing to their text."""

        def __call__(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
            codes, embedded = super().__call__(*arguments)
            return codes, torch.zeros_like(embedded)

    talker._frames._predictor = Silent(talker._frames._predictor)
    script(talker, range(8), talker._config.codec.eos)
    rows: list[torch.Tensor] = []
    launch = talker._frames.launch

    def noted(frames: Sequence[FrameRow]) -> Any:
        rows.extend(frame.text for frame in frames)
        return launch(frames)

    talker._frames.launch = noted
    outputs = told(talker, words=4)
    speak(talker, outputs, max_tokens=50, min_tokens=0)
    words = talker._inputs.texts(outputs["token_ids"][3:].tolist())
    end, padding = talker._inputs.text_end, talker._inputs.padding
    expected = torch.stack([*words[1:], end, padding, padding, padding, padding])
    assert not torch.equal(end, padding)
    torch.testing.assert_close(torch.stack(rows)[1:], expected)


def test_frames_that_differ_in_one_residual_are_no_loop(make_talker: MakeTalker) -> None:
    talker = make_talker(max_looped_frames=5)
    numbers = itertools.count()

    class Counting(Constant):
        def __call__(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
            codes, embedded = super().__call__(*arguments)
            codes[:, -1] = next(numbers) % 50
            return codes, embedded

    talker._frames._predictor = Counting(talker._frames._predictor)
    script(talker, [7] * 40, talker._config.codec.eos)
    answer = speak(talker, told(talker), max_tokens=400, min_tokens=0)
    assert answer.reason == "stop" and len(answer.frames) == 40


# -- sessions that leave ------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["new", "waiting", "prompt", "stalled", "running", "refused", "ended"])
def test_abort_leaves_nothing(make_talker: MakeTalker, phase: str) -> None:
    talker = make_talker(max_slots=1, prefill_chunk_tokens=4, max_context_tokens=60)
    outputs = told(talker, 3)
    expected = speak(talker, outputs).frames
    neighbour = Answers()
    if phase == "waiting":
        start(talker, "before")
        talker.push("before", outputs, last=True)
        run(talker, neighbour, steps=2)
    start(talker, "x", max_tokens=100, min_tokens=100)
    if phase == "refused":
        talker.push("x", told(talker, 60), last=False)
    elif phase == "ended":
        talker.push("x", {}, last=True)
    elif phase != "new":
        tokens = outputs["token_ids"][: 5 if phase == "stalled" else None]
        talker.push("x", {**outputs, "token_ids": tokens}, last=phase == "running")
        run(talker, neighbour, steps={"waiting": 1, "prompt": 2, "stalled": None, "running": 9}[phase])
        where = {"waiting": "waiting"}.get(phase, "running")
        assert talker.stats()[where] == 1 and talker.has_work == (phase != "stalled")
    talker.abort("x")
    talker.check_integrity()
    talker.push("x", outputs, last=True)  # what was on its way
    if phase == "waiting":
        assert run(talker, neighbour)["before"].frames == expected
        assert "x" not in neighbour
    assert_nothing_left(talker)
    assert speak(talker, outputs).frames == expected


def test_too_many_sessions_are_refused(make_talker: MakeTalker) -> None:
    talker = make_talker(max_slots=1, max_waiting=1)
    start(talker, "a")
    start(talker, "b")
    with pytest.raises(Unavailable, match="2 sessions are open"):
        start(talker, "c")
    for name in ("a", "b"):
        talker.push(name, told(talker), last=True)
    assert {answer.reason for answer in run(talker).values()} == {"length"}
    assert_nothing_left(talker)


# -- the codes after the first ------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 5])
def test_the_predictor_equals_the_reference(checkpoint: Any, reference: Reference, batch: int) -> None:
    config = OmniConfig.read(checkpoint)
    predictor = CodePredictor(
        config.talker["code_predictor_config"],
        Weights(checkpoint),
        rows=5,
        device="cpu",
        dtype=torch.float32,
    )
    module = reference.model.talker.code_predictor
    chance = torch.Generator().manual_seed(batch)
    width = config.talker["text_config"]["hidden_size"]
    hidden, embedded = torch.randn((2, batch, width), generator=chance).unbind()
    rows = [Row(Sampling(temperature=0.0), 0)] * batch
    draw = Draw(rows, predictor.vocab_size, torch.device("cpu"))
    codes, total = predictor(hidden, embedded, draw, range(2, 17))
    with torch.no_grad():
        expected = module.generate(
            inputs_embeds=torch.stack((hidden, embedded), dim=1), max_new_tokens=15, do_sample=False
        )
        assert torch.equal(codes, expected)
        parts = [table(codes[:, i]) for i, table in enumerate(module.get_input_embeddings())]
    torch.testing.assert_close(total, embedded + torch.stack(parts).sum(0), atol=1e-5, rtol=1e-5)
