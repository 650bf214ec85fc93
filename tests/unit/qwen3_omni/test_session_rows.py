from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tritone.pipelines.qwen3_omni.session_rows import SessionRows, project

HEAD, TOKENS = [1, 2, 3], [11, 12, 13]
PROMPT = np.array([5, 0, 0, 6], np.int32)  # 0: media
MEDIA = np.ones((2, 4), np.float32)


class Inputs:
    """Rows are what they are made of."""

    num_head_rows = 9
    text_end, padding = "end", "padding"

    def __init__(self) -> None:
        self.passes: list[list[int]] = []

    def spoken(self, tokens: list[int]) -> list[str]:
        self.passes.append(tokens)
        return [f"text of {token}" for token in tokens]

    def prompt(self, ids: Any, media: list[Any], head: list[int], speaker: int) -> Any:
        if sum(map(len, media)) < (ids == 0).sum():
            return None
        return SimpleNamespace(tokens=[*ids, *head, *[speaker] * 5])

    def rows(self, prompt: Any, start: int, end: int) -> list[int]:
        return prompt.tokens[start:end]

    def first(self, text: str) -> str:
        return f"{text}, and bos"

    def positions(self, table: Any) -> list[list[float]]:
        return table.tolist()


def session(*pieces: dict[str, Any]) -> Any:
    rows: Any = SessionRows(Inputs(), speaker=7)  # type: ignore[arg-type]
    for piece in pieces:
        rows.take_in(piece)
    return rows


def tokens(*ids: int) -> dict[str, Any]:
    return {"token_ids": np.array(ids, np.int32)}


PIECES = {
    "user's turns": {"prompt_ids": PROMPT},
    "media": {"media_rows": MEDIA},
    "head": tokens(*HEAD),
}


@pytest.mark.parametrize("last", PIECES)
def test_a_prompt_begins_with_the_last_piece_of_it(last: str) -> None:
    rows = session(*(piece for name, piece in PIECES.items() if name != last))
    assert rows.begin_prompt() == 0 and rows.prompt is None
    rows.take_in(PIECES[last])
    assert rows.begin_prompt() == len(PROMPT) + 8 == rows.num_prompt_rows - 1
    assert rows.of_prompt(3, 9) == [6, *HEAD, 7, 7]
    assert rows.media_rows == [], "they are the prompt's"


def test_a_prompt_without_turns_has_its_head() -> None:
    rows = session(tokens(*HEAD))
    assert rows.num_prompt_rows == 0 == rows.begin_prompt()
    rows.take_in({"prompt_ids": PROMPT[:0]})
    assert rows.num_prompt_rows == 9 and rows.begin_prompt() == 8


@pytest.mark.parametrize("cut", range(7))
def test_the_first_tokens_are_the_head_and_the_rest_is_spoken(cut: int) -> None:
    ids = HEAD + TOKENS
    rows = session(tokens(*ids[:cut]), {}, tokens(), tokens(*ids[cut:]))
    assert (rows.head, rows.told) == (HEAD, TOKENS)


def test_positions_are_kept_for_whoever_asks() -> None:
    assert session().positions is None
    assert session({"prompt_positions": np.full((3, 2), 0.5, np.float32)}).positions == [[0.5, 0.5]] * 3


def test_texts_are_followed_by_one_end_and_then_padding() -> None:
    rows = session(tokens(*HEAD, 11))
    assert rows.last_of_prompt() is None and rows.text(0) is None, "told, and not projected"
    project(rows.inputs, [rows])
    assert rows.last_of_prompt() == "text of 11, and bos" and rows.text(1) is None
    rows.take_in(tokens(12))
    project(rows.inputs, [rows])
    assert [rows.text(number) for number in range(3)] == ["text of 11", "text of 12", None]
    rows.text_ended = True
    assert [rows.text(number) for number in range(1, 5)] == ["text of 12", "end", "padding", "padding"]


def test_all_that_was_told_is_projected_in_one_pass() -> None:
    one, silent, other = session(tokens(*HEAD, 11, 12)), session(tokens(*HEAD)), session(tokens(*HEAD, 13))
    project(one.inputs, [one, silent, other])
    assert one.inputs.passes == [[11, 12, 13]]
    assert [rows.texts for rows in (one, silent, other)] == [["text of 11", "text of 12"], [], ["text of 13"]]
    assert not (one.told or other.told)
