"""Clauses: the same however the text arrives, nothing lost, cut where a speaker would breathe."""

from __future__ import annotations

import random

import pytest

from tritone.clauses import ClauseCutter, ClauseLimits

TINY = ClauseLimits(first_words=3, sentence_words=2, clause_words=3, max_words=7, max_characters=30)
ALPHABET = [
    *(
        "a",
        "the",
        "word",
        "Dr.",
        "e.g.",
        "U.S.",
        "3.14",
        "1,000",
        "1.",
        "etc.",
        "https://a.b/c,d",
        "😀",
        "聪明",
        "x" * 20,
    ),
    *(
        " ",
        " ",
        " ",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        ".",
        ",",
        "!",
        "?",
        "…",
        "...",
        "—",
        "——",
        "-",
        "–",
        '"',
        ")",
        "(",
    ),
]


def cut(deltas, limits=None):
    cutter = ClauseCutter(limits)
    clauses = [clause for delta in deltas for clause in cutter.push(delta)]
    return clauses + cutter.finish()


def spoken(text, limits=None):
    return [clause.strip() for clause in cut([text], limits)]


@pytest.mark.parametrize("limits", [None, TINY], ids=["default", "tiny"])
def test_any_split_of_a_text_gives_the_same_clauses(limits):
    rng = random.Random(20)
    for _ in range(4000):
        text = "".join(rng.choices(ALPHABET, k=rng.randint(0, 50)))
        whole = cut([text], limits)
        deltas, rest = [], text
        longest = rng.choice([1, 3, 40])
        while rest:
            size = rng.randint(1, longest)
            deltas.append(rest[:size])
            rest = rest[size:]
        assert cut(deltas, limits) == whole, text
        assert "".join(whole) == text


def test_clauses_stay_below_the_limits():
    rng = random.Random(21)
    for _ in range(500):
        text = "".join(rng.choices(ALPHABET, k=200))
        for clause in cut([text], TINY):
            words = [word for word in clause.replace("—", " ").split() if any(map(str.isalnum, word))]
            assert len(clause) <= TINY.max_characters
            assert len(words) <= TINY.max_words


@pytest.mark.parametrize(
    "text",
    [
        "We paid 3.14 dollars for it.",
        "It costs 1,000 yen.",
        "Ask Dr. Smith about it.",
        "Fruit, e.g. apples, is here.",
        "The U.S. is large.",
        "J. K. Rowling wrote it.",
        "See https://a.b/c,d.html?x=1;y for more.",
        "He left at 9 p.m. sharp.",
    ],
)
def test_marks_inside_words_end_nothing(text):
    limits = ClauseLimits(first_words=20, first_clause_words=20)
    assert spoken(text, limits) == [text]


@pytest.mark.parametrize(
    ("text", "clauses"),
    [
        ("Hello there. How are you doing?", ["Hello there.", "How are you doing?"]),
        ("Sure, here we go now!", ["Sure, here we go now!"]),
        ("Well, I think so. You are right.", ["Well, I think so.", "You are right."]),
        ('He said "stop." Then he left us.', ['He said "stop."', "Then he left us."]),
        ("Stop (really?) It is late now.", ["Stop (really?)", "It is late now."]),
        ("Wait… I see it now.", ["Wait…", "I see it now."]),
        ("One moment—I am on my way.", ["One moment—", "I am on my way."]),
        (
            "Here it is:\nMilk and eggs\nBread and butter",
            ["Here it is:", "Milk and eggs", "Bread and butter"],
        ),
        ("First this. Yes. I agree with you.", ["First this.", "Yes. I agree with you."]),
        ("Do so:\n1. Mix it well.\n2. Bake it now.", ["Do so:", "1. Mix it well.", "2. Bake it now."]),
        ("**Bold words.** Then more text here.", ["**Bold words.**", "Then more text here."]),
    ],
)
def test_clauses_end_at_marks(text, clauses):
    assert spoken(text) == clauses


def test_the_first_clause_comes_early_and_not_after_a_leaning_word():
    cutter = ClauseCutter()
    assert cutter.push("The quick brown fox jumps over") == []
    assert cutter.push(" the") == ["The quick brown fox jumps"]


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("Rice is often served in round bowls.", "Rice is often served"),
        ("Glue the sheet to the dark blue background.", "Glue the sheet"),
        ("The juice of lemons makes fine punch.", "The juice of lemons makes"),
    ],
)
def test_a_clause_without_marks_ends_where_a_phrase_begins_and_leaves_no_word_alone(text, first):
    assert spoken(text)[0] == first


def test_the_first_clause_waits_for_no_more_than_its_words():
    words = [f"word{number} " for number in range(30)]
    cutter = ClauseCutter()
    needed = next(number for number, word in enumerate(words, 1) if cutter.push(word))
    assert needed <= ClauseLimits().first_words + 1


def test_later_clauses_reach_for_the_end_of_the_sentence():
    text = "Right. I see it. I went to the market, and then I came back home with a large bag of apples."
    assert spoken(text)[2] == "I went to the market, and then I came back home with a large bag of apples."


def test_a_long_later_clause_may_end_at_a_comma():
    text = "Right. I went to the old market in the middle of town, and then I came back home."
    assert spoken(text)[1] == "I went to the old market in the middle of town,"


def test_text_without_marks_is_still_spoken():
    clauses = cut(["so " * 100])
    assert len(clauses) >= 4 and max(len(clause.split()) for clause in clauses) <= ClauseLimits().max_words


def test_text_without_blanks_is_cut_by_characters():
    assert list(map(len, cut(["聪" * 500]))) == [240, 240, 20]


@pytest.mark.parametrize("text", ["", " ", "\n\n", "...", "—", "😀"])
def test_texts_without_words(text):
    assert "".join(cut([text])) == text


def test_a_large_text_takes_linear_time():
    text = "Hello my dear world, this is it. " * 20_000
    assert "".join(cut([text])) == text


def test_each_clause_may_be_twice_as_long_as_the_one_before():
    clauses = ClauseCutter().push("word " * 200)
    sizes = [len(clause.split()) for clause in clauses]
    # One word fewer than the limit: the last one is kept for the next clause.
    assert sizes[:3] == [5, 11, 23] and set(sizes[3:-1]) == {ClauseLimits().max_words - 1}
