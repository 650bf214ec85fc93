"""Writer, singer and wave: what they give, how fast, and each of their faults."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tritone.engines.base import Chunk, Placement
from tritone.errors import InvalidRequest, TritoneError, Unavailable
from tritone.pipelines.fake.engines import PacedOptions, Singer, Writer
from tritone.pipelines.fake.signal import decode
from tritone.pipelines.fake.wave import Wave, WaveOptions
from waiting import PATIENCE_S

NOWHERE = Placement(checkpoint=None)


def writer(**options):
    return Writer(NOWHERE, PacedOptions(**options))


def asked(words=3, voice=9, payload_bytes=0, max_tokens=100, **more):
    sampling = {"max_tokens": max_tokens}
    settings = {"voice": voice, "words": words, "payload_bytes": payload_bytes, "has_faults": "fault" in more}
    return {**settings, "sampling": sampling, **more}


def run(engine, limit_s=PATIENCE_S):
    """Every delta until no session is live."""
    deltas, end = [], time.monotonic() + limit_s
    woken = threading.Event()
    engine.wake = woken.set
    while engine.stats()["active"]:
        assert time.monotonic() < end, "the engine does not come to an end"
        if engine.has_work:
            deltas += engine.step()
        else:
            assert woken.wait(limit_s), "nobody woke an engine that has something to give"
            woken.clear()
    return deltas


def test_a_writer_gives_a_word_a_step_and_ends_once():
    engine = writer()
    engine.add_request("a", {"said": ""}, asked(words=3))
    deltas = run(engine)
    assert [delta.outputs["text"] for delta in deltas] == ["000009.0 ", "000009.1 ", "000009.2"]
    assert [delta.outputs["word"].tolist() for delta in deltas] == [[9, 0], [9, 1], [9, 2]]
    assert [delta.finish_reason for delta in deltas] == [None, None, "stop"]
    assert deltas[-1].usage == {"completion_tokens": 3}


def test_max_tokens_cuts_and_says_length():
    engine = writer()
    engine.add_request("a", {"said": "one two three"}, asked(words=3, max_tokens=2))
    deltas = run(engine)
    assert [delta.outputs["text"] for delta in deltas] == ["one ", "two "]
    assert deltas[-1].finish_reason == "length"


def test_a_pace_is_kept_by_each_session_and_no_step_is_idle():
    engine = writer(pace_ms=1)
    began = time.monotonic()
    for name in "abc":
        engine.add_request(name, {}, asked(words=6, pace_ms=40))
    given, step = [], engine.step

    def counted():
        deltas = step()
        given.append(len(deltas))
        return deltas

    engine.step = counted
    deltas = run(engine)
    assert len(deltas) == 18 and time.monotonic() - began >= 5 * 0.040 - 0.02
    assert min(given) >= 1, "a step had nothing to give"


def test_an_aborted_session_gives_nothing_more():
    engine = writer()
    engine.add_request("a", {}, asked(words=50))
    engine.step()
    engine.abort("a")
    engine.abort("a")
    assert not engine.has_work and engine.step() == [] and engine.stats()["active"] == 0


def test_a_full_engine_says_its_limit():
    engine = writer(max_sessions=1)
    engine.add_request("a", {}, asked())
    with pytest.raises(Unavailable, match="max_sessions of the engine is 1"):
        engine.add_request("b", {}, asked())


def test_faults_may_be_forbidden():
    with pytest.raises(InvalidRequest, match="allow_faults is off"):
        writer(allow_faults=False).add_request("a", {}, asked(fault=["kill", 0]))


def sung(engine, words, payload_bytes=0, **settings):
    settings = {"frames_per_word": 2, "payload_bytes": payload_bytes, **settings}
    engine.add_request("a", {}, settings)
    for number, payload in enumerate(words):
        word = {"word": np.array([9, number], np.int32)}
        engine.push("a", word | ({} if payload is None else {"payload": payload}), number == len(words) - 1)
    return run(engine)


def test_a_singer_numbers_frames_by_their_word():
    deltas = sung(Singer(NOWHERE, PacedOptions()), [None, None])
    frames = [delta.outputs["frames"].tolist() for delta in deltas]
    assert frames == [[[9, 0], [9, 1]], [[9, 2], [9, 3]]]
    assert deltas[-1].finish_reason == "stop" and deltas[-1].usage == {"codec_frames": 4}


@pytest.mark.parametrize("payload", [None, np.zeros(3, np.uint8), np.full(4, 7, np.uint8)])
def test_a_singer_notices_a_wrong_payload(payload):
    engine = Singer(NOWHERE, PacedOptions())
    right = np.zeros(4, np.uint8)
    engine.add_request("a", {}, {"frames_per_word": 1, "payload_bytes": 4})
    engine.push("a", {"word": np.array([9, 0], np.int32), "payload": right}, False)
    assert engine.step()[0].error is None
    engine.push("a", {"word": np.array([9, 1], np.int32), "payload": payload}, True)
    [delta] = engine.step()
    assert isinstance(delta.error, TritoneError) and "payload of word 1" in str(delta.error)


def chunk(numbers, start=False, end=False, session="a", **settings):
    frames = np.array([[9, number] for number in numbers], np.int32).reshape(-1, 2)
    return Chunk(session, {"frames": frames} if len(frames) else {}, start, end, settings)


def test_a_wave_sounds_what_it_is_given_and_forgets_at_the_end():
    engine = Wave(NOWHERE, WaveOptions())
    pcm = [engine.run([chunk(range(3), start=True)]), engine.run([chunk(range(3, 5))])]
    assert engine.stats()["active"] == 1
    pcm.append(engine.run([chunk([], end=True)]))
    assert decode(np.concatenate([result["pcm"] for [result] in pcm])).faults(9, 5) == {}
    assert engine.stats()["active"] == 0
    [error] = engine.run([chunk([6])])
    assert isinstance(error, InvalidRequest)


def test_a_failing_stream_fails_alone():
    engine = Wave(NOWHERE, WaveOptions())
    first = [chunk([0], start=True), chunk([0], start=True, session="b", fault=["fail", 1])]
    assert all("pcm" in result for result in engine.run(first))
    good, bad = engine.run([chunk([1]), chunk([1], session="b")])
    assert "pcm" in good and "fail@1 was ordered" in str(bad)


def test_each_fault_strikes_at_its_word_and_not_before():
    engine = writer()
    engine.add_request("a", {}, asked(fault=["fail", 1]))
    engine.add_request("b", {}, asked())
    assert [delta.error for delta in engine.step()] == [None, None]
    by_session = {delta.session: delta for delta in engine.step()}
    assert "fail@1 was ordered" in str(by_session["a"].error) and by_session["b"].error is None


@pytest.mark.parametrize(("kind", "error"), [("raise", RuntimeError), ("oom", MemoryError)])
def test_a_raising_step(kind, error):
    for make, options in ((writer, {"fault": f"{kind}@1"}), (writer, {})):
        engine = make(**options)
        engine.add_request("a", {}, asked() if options else asked(fault=[kind, 1]))
        engine.step()
        with pytest.raises(error, match=f"{kind}@1 was ordered"):
            engine.step()


def test_a_stalled_session_gives_nothing_more_and_keeps_its_place():
    engine = writer()
    engine.add_request("a", {}, asked(fault=["stall", 1]))
    engine.step()
    assert engine.step() == [] and not engine.has_work and engine.stats()["active"] == 1


SCRIPT = """
from tritone.pipelines.fake.faults import strike
from tritone.pipelines.fake.orders import Fault
print("alive", flush=True)
strike(Fault("{kind}"))
"""


def test_a_kill_ends_the_process_as_the_kernel_does():
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(kind="kill")], capture_output=True, timeout=30)
    assert done.returncode == -9 and done.stdout == b"alive\n"


def test_a_hang_never_returns():
    process = subprocess.Popen([sys.executable, "-c", SCRIPT.format(kind="hang")], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"alive\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
    finally:
        process.kill()
        process.wait()
