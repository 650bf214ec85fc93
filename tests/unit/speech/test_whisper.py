"""The speech recogniser's queue, limits and errors, with a model that needs no weights."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

soundfile = pytest.importorskip("soundfile")

from tritone.engines.base import Placement  # noqa: E402
from tritone.engines.whisper import WhisperEngine, WhisperOptions  # noqa: E402
from tritone.errors import ConfigError, InvalidRequest, Unavailable  # noqa: E402

RATE_HZ = 16000


class SecondsModel:
    """Hears one segment a second of sound that is not silent, numbered."""

    def __init__(self, *_, **__):
        self.feature_extractor = SimpleNamespace(sampling_rate=RATE_HZ)

    def transcribe(self, samples, **_):
        seconds = len(samples) // RATE_HZ if np.abs(samples).max() > 0.2 else 0
        return (SimpleNamespace(text=f" {number} ") for number in range(seconds)), None


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WhisperEngine:
    library = ModuleType("faster_whisper")
    library.WhisperModel = SecondsModel
    monkeypatch.setitem(sys.modules, "faster_whisper", library)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for name in ("model.bin", "config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    return WhisperEngine(Placement(tmp_path), WhisperOptions(max_waiting=2))


def tone(seconds, level=0.5):
    return (level * np.sin(np.arange(seconds * RATE_HZ) * 0.1)).astype(np.float32)


def wav(seconds, level=0.5):
    file = io.BytesIO()
    soundfile.write(file, tone(seconds, level), RATE_HZ, format="WAV")
    return file.getvalue()


def raw(seconds, level=0.5):
    return {"audio_input": tone(seconds, level), "audio_input_rate": RATE_HZ}


def run(engine):
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    return deltas


@pytest.mark.parametrize(
    "inputs", [raw(3), {"audio": wav(3)}, {"audio": [wav(3)]}], ids=["raw", "file", "files"]
)
def test_one_recording(engine, inputs):
    engine.add_request("a", inputs, {})
    (delta,) = run(engine)
    assert delta.outputs == {"transcript": "0 1 2"}
    assert delta.finish_reason == "stop" and delta.usage == {"audio_seconds": 3.0}
    assert engine.stats() == {"active": 0, "audio_seconds": 3.0}


def test_several_recordings_give_a_delta_each(engine):
    engine.add_request("a", {"audio": np.array([wav(2), wav(1), wav(3)], dtype=object)}, {})
    deltas = run(engine)
    assert [delta.outputs["transcript"] for delta in deltas] == ["0 1", "0", "0 1 2"]
    assert [delta.finish_reason for delta in deltas] == [None, None, "stop"]
    assert deltas[-1].usage == {"audio_seconds": 6.0}


def test_the_phases_of_a_session_are_its_wait_and_each_recording(engine):
    told = []
    engine.note_phase = lambda session, phase: told.append((session, phase))
    engine.add_request("a", {"audio": np.array([wav(1), wav(1)], dtype=object)}, {})
    engine.add_request("b", raw(1), {})
    run(engine)
    assert told == [("a", "queued"), ("b", "queued"), ("a", "listen"), ("a", "listen"), ("b", "listen")]


def test_other_rates_are_resampled(engine):
    engine.add_request("a", {"audio_input": np.repeat(tone(2), 3), "audio_input_rate": 3 * RATE_HZ}, {})
    assert run(engine)[0].outputs == {"transcript": "0 1"}


def test_recordings_without_speech_are_an_error(engine):
    engine.add_request("a", raw(2, level=0.01), {})
    (delta,) = run(engine)
    assert isinstance(delta.error, InvalidRequest)
    assert str(delta.error) == "no speech was recognised in the audio; speak louder, or send text"
    assert engine.stats()["active"] == 0


def test_one_silent_recording_among_others_is_empty(engine):
    engine.add_request("a", {"audio": [wav(2), wav(2, level=0.01)]}, {})
    deltas = run(engine)
    assert [delta.outputs["transcript"] for delta in deltas] == ["0 1", ""] and deltas[-1].error is None


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "audio is missing"),
        ({"audio": b"no recording at all"}, "audio is not a recording"),
        ({"audio": [wav(1), b""]}, r"audio\[1\] is empty"),
        ({"audio": wav(11)}, "audio lasts 11.0 s; send at most 10 s"),
        ({"audio": [wav(6), wav(6)]}, "audio lasts more than 10 s in all"),
        (raw(11), "audio_input lasts 11.0 s"),
        ({"audio_input": tone(1), "audio_input_rate": 1}, "audio_input_rate is 1 Hz"),
        ({"audio_input": tone(1)}, "audio_input_rate is None"),
    ],
)
def test_bad_input_is_refused_and_nothing_kept(engine, inputs, words):
    with pytest.raises(InvalidRequest, match=words):
        engine.add_request("a", inputs, {"max_audio_s": 10})
    assert engine.stats()["active"] == 0


def test_waiting_requests_are_bounded(engine):
    for session in "ab":
        engine.add_request(session, raw(1), {})
    with pytest.raises(Unavailable):
        engine.add_request("c", raw(1), {})


@pytest.mark.parametrize("begun", [False, True])
def test_abort_takes_effect_between_segments(engine, begun):
    engine.add_request("a", raw(9), {})
    engine.add_request("b", raw(1), {})
    if begun:
        assert engine.step() == []
    engine.abort("a")
    engine.abort("unknown")
    assert [delta.session for delta in run(engine)] == ["b"]


def test_a_folder_without_its_files_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no model.bin"):
        WhisperEngine(Placement(tmp_path), WhisperOptions())
