"""The Talker's turns, ends and limits, with a voice that needs no weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tritone.engines.base import Placement
from tritone.errors import ConfigError, InvalidRequest, Unavailable
from tritone.pipelines.smoltalk import talker
from tritone.pipelines.smoltalk.talker import Talker, TalkerOptions

WIDTH = 131


class SilentVoice:
    """Reads letters only; speaks one frame a character."""

    speakers = ("heart",)
    frame_rate_hz = 80.0

    def __init__(self, *_):
        self.read_texts = []

    def read(self, text):
        self.read_texts.append(text)
        words = "".join(c for c in text if c.isascii()).strip()
        return [words] if any(map(str.isalnum, words)) else []

    def speak(self, phonemes):
        return np.zeros((len(phonemes), WIDTH), np.float32)

    def num_unreadable(self, text):
        return sum(not c.isascii() for c in text)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Talker:
    monkeypatch.setattr(talker, "_Voice", SilentVoice)
    (tmp_path / "config.json").write_text(json.dumps({}))
    return Talker(Placement(tmp_path), TalkerOptions(max_sessions=4, max_characters=1000))


def run(engine):
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    return deltas


def say(engine, session, text):
    engine.add_request(session, {"text": text}, {})
    engine.push(session, {}, last=True)
    return run(engine)


def test_a_text_is_spoken_clause_by_clause_and_ends_once(engine):
    deltas = say(engine, "a", "Hello there. I hope that you are well today.")
    assert [delta.outputs["frames"].shape[0] for delta in deltas] == [12, 31]
    assert all(delta.outputs["segment_end"] is True for delta in deltas)
    assert [delta.finish_reason for delta in deltas] == [None, "stop"]
    assert deltas[-1].usage == {"codec_frames": 43, "clauses": 2, "skipped_characters": 0}
    assert engine.stats()["active"] == 0


def test_the_first_clause_is_spoken_while_text_still_comes(engine):
    engine.add_request("a", {}, {})
    assert not engine.has_work
    for word in ("one", "two", "three", "four", "five", "six", "seven"):
        engine.push("a", {"text": f"{word} "}, last=False)
    (delta,) = engine.step()
    assert len(delta.outputs["frames"]) and delta.finish_reason is None
    assert not engine.has_work


def test_an_end_after_everything_was_spoken_still_comes(engine):
    engine.add_request("a", {"text": "Well done.\n"}, {})
    assert [delta.finish_reason for delta in run(engine)] == [None]
    engine.push("a", {}, last=True)
    (end,) = run(engine)
    assert end.finish_reason == "stop" and not end.outputs and end.usage["clauses"] == 1


@pytest.mark.parametrize(
    ("text", "skipped"), [("", 0), ("   ", 0), ("...", 0), ("😀", 1), ("聪明", 2), ("!?\n—", 1)]
)
def test_what_cannot_be_spoken_ends_at_once(engine, text, skipped):
    (end,) = say(engine, "a", text)
    assert end.finish_reason == "stop" and not end.outputs
    assert end.usage == {"codec_frames": 0, "clauses": 0, "skipped_characters": skipped}


def test_new_sessions_speak_before_old_ones_go_on(engine):
    sentence = "This is a sentence here. "
    for session in ("a", "b"):
        engine.add_request(session, {"text": sentence * 4}, {})
        engine.push(session, {}, last=True)
    order = [engine.step()[0].session for _ in range(3)]
    engine.add_request("c", {"text": sentence * 4}, {})
    engine.push("c", {}, last=True)
    order += [delta.session for delta in run(engine)]
    assert "".join(order) == "aba" + "c" + "bacbacbc"


def test_abort_forgets_at_once(engine):
    engine.add_request("a", {"text": "One sentence is here. Another one is here."}, {})
    engine.step()
    engine.abort("a")
    assert engine.stats()["active"] == 0 and not engine.has_work
    engine.push("a", {"text": "more"}, last=True)
    engine.abort("a")
    assert engine.step() == []


def test_sessions_are_bounded(engine):
    for number in range(4):
        engine.add_request(str(number), {}, {})
    with pytest.raises(Unavailable, match="4 sessions"):
        engine.add_request("5", {}, {})
    assert engine.stats()["active"] == 4


@pytest.mark.parametrize("speaker", [None, "heart", "Heart", " HEART "])
def test_known_speakers(engine, speaker):
    engine.add_request("a", {}, {"speaker": speaker})


def test_an_unknown_speaker_is_refused_with_the_known(engine):
    with pytest.raises(InvalidRequest, match="unknown speaker 'bob'; known: heart"):
        engine.add_request("a", {"text": "Hello."}, {"speaker": "bob"})
    assert engine.stats()["active"] == 0


def test_too_long_a_text_is_refused_or_cut(engine):
    with pytest.raises(InvalidRequest, match="text has 1001 characters, more than 1000"):
        engine.add_request("a", {"text": "x" * 1001}, {})
    engine.add_request("a", {"text": "word " * 200}, {})
    engine.push("a", {"text": "and more"}, last=False)
    deltas = run(engine)
    assert deltas[-1].finish_reason == "length"
    assert deltas[-1].usage["clauses"] == len(deltas) and engine.stats()["active"] == 0


def test_text_of_another_type_is_refused(engine):
    with pytest.raises(InvalidRequest, match="text is of type bytes"):
        engine.add_request("a", {"text": b"Hello."}, {})


def test_a_checkpoint_without_its_facts_is_refused(tmp_path):
    pytest.importorskip("hibari")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no 'speakers'"):
        Talker(Placement(tmp_path), TalkerOptions())


def test_a_device_that_it_cannot_use_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cuda:0"):
        Talker(Placement(tmp_path, device="cuda:0"), TalkerOptions())
