"""What a caller sent comes back in errors short, printable, and with a suggestion that costs nothing."""

import time

from tritone.errors import InvalidRequest, from_code, suggestion


def test_a_message_has_code_sentence_and_cure():
    assert (
        InvalidRequest("speaker is 'x'", "known: heart").message
        == "TRITONE_INVALID_ARG: speaker is 'x'; known: heart"
    )


def test_a_long_value_is_cut_and_control_characters_are_shown():
    message = InvalidRequest("speaker is '" + "é" * 30000 + "'", "known: heart").message
    assert len(message.encode()) < 1000 and message.endswith("known: heart")
    assert InvalidRequest("speaker is 'a\0\n\x1b[2J'").what == r"speaker is 'a\x00\n\x1b[2J'"


def test_a_suggestion_for_a_huge_word_is_quick():
    began_s = time.thread_time()
    assert suggestion("heartx" * 3_000_000, ["heart"]) == "known: heart"
    assert time.thread_time() - began_s < 5, "to compare them letter by letter takes minutes"


def test_an_error_survives_a_process_border():
    error = InvalidRequest("top_k is -1", "give a whole number")
    again = from_code(error.code, error.what, error.cure)
    assert type(again) is InvalidRequest and again.message == error.message
