"""Engine processes without Triton: open, push, batch, cancel, lease, death and restart, over real sockets."""

import contextlib
import json
import os
import queue
import re
import signal
import sys
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
import yaml

from tritone import engine_link, wire
from tritone.engine_link import EngineLink
from tritone.engine_process import EngineSpec
from tritone.errors import ConfigError, EngineLost, InvalidRequest, Unavailable, Unsupported
from waiting import PATIENCE_S, wait_until

ECHO = Path(__file__).parents[2] / "pipelines" / "echo.py"


class Inbox:
    """The orchestrator's end: collects what engines push."""

    def __init__(self):
        self.address = f"tritone-test/{uuid.uuid4().hex}"
        self._server = wire.listen(self.address)
        self.mail = queue.Queue()
        self._channels = queue.Queue()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                channel = wire.accept(self._server)
            except OSError:
                return
            self._channels.put(channel)
            threading.Thread(target=self._read, args=(channel,), daemon=True).start()

    def _read(self, channel):
        try:
            while True:
                message = channel.receive()
                match message:
                    case wire.Hello():
                        pass
                    case wire.Pieces(pieces):
                        for piece in pieces:
                            self.mail.put(piece)
                    case _:
                        self.mail.put(message)
        except wire.Disconnected:
            self.mail.put(None)

    def until_end(self, timeout_s=PATIENCE_S):
        """The pieces up to Finished or Failed, and that message."""
        pieces, end = [], time.monotonic() + timeout_s
        while True:
            message = self.mail.get(timeout=max(end - time.monotonic(), 0.01))
            if not isinstance(message, wire.Piece):
                return pieces, message
            pieces.append(message)

    def hang_up(self):
        """End the first connection, once it is there."""
        self._channels.get(timeout=PATIENCE_S).close()

    def close(self):
        self._server.close()


@pytest.fixture
def inbox():
    box = Inbox()
    yield box
    box.close()


@pytest.fixture
def make_link(tmp_path):
    links = []

    def make(stages=("writer",), call_timeout_s=PATIENCE_S, python=None, **stage_settings):
        path = tmp_path / f"deploy-{len(links)}.yaml"
        path.write_text(yaml.safe_dump({"pipeline": str(ECHO), "stages": stage_settings}))
        address = f"tritone-test/{uuid.uuid4().hex}"
        spec = EngineSpec(path, tuple(stages), address, (), 1, python, 2 * PATIENCE_S)
        link = EngineLink("under test", address, spec, call_timeout_s)
        links.append(link)
        return link

    yield make
    for link in links:
        link.close()


def open_writer(link, inbox, text, session="s1", routes=None, max_tokens=99):
    messages = json.dumps([{"role": "user", "content": [{"type": "text", "text": text}]}])
    to_us = [wire.Route(inbox.address, "", {"text": "text"})] if routes is None else routes
    return link.call(
        lambda call: wire.Open(
            call=call,
            stage="echo_writer",
            session=session,
            inbox=inbox.address,
            inputs={"messages": messages},
            sources=0,
            settings={"sampling": {"max_tokens": max_tokens}},
            routes=to_us,
        )
    )


def open_endless(link, inbox, **more):
    """A session of many words, which at 10 ms a step ends long after every patience."""
    num_words = round(10 * PATIENCE_S / 0.01)
    open_writer(link, inbox, "w " * num_words, max_tokens=num_words, **more).result(PATIENCE_S)


def pid_of(link):
    return link.process.pid


def stop(pid):
    """SIGSTOP, and wait until the process stands still."""
    os.kill(pid, signal.SIGSTOP)

    def stands_still():
        states = []
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that ends meanwhile
                states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
        return set(states) == {"T"}

    wait_until(stands_still)


def sessions(link, model="echo_writer"):
    return link.call(wire.Ping).result(PATIENCE_S).stats[model]["sessions"]


def test_an_engine_refuses_a_profile_that_its_deploy_file_does_not_allow(make_link):
    link = make_link()
    link.wait_ready(PATIENCE_S)
    with pytest.raises(Unsupported, match="profiling is off for this pipeline; set `profiling: true`"):
        link.call(lambda call: wire.TraceTorch(call, 1.0)).result(PATIENCE_S)


def test_a_session_gives_its_pieces_in_order_and_one_end(make_link, inbox):
    link = make_link()
    link.wait_ready(PATIENCE_S)
    open_writer(link, inbox, "one two three").result(PATIENCE_S)
    pieces, end = inbox.until_end()
    assert [p.values.get("text") for p in pieces] == ["one ", "two ", "three "]
    assert [p.number for p in pieces] == [0, 1, 2] and [p.last for p in pieces] == [False, False, True]
    assert isinstance(end, wire.Finished) and end.reason == "stop"
    times = end.times
    assert times.opened_s < times.first_output_s < times.last_output_s <= times.ended_s <= time.monotonic()
    assert times.steps == 3 and times.batch == 1
    assert sessions(link) == 0


def test_stages_of_one_process_feed_each_other(make_link, inbox):
    link = make_link(("writer", "singer"))
    link.wait_ready(PATIENCE_S)
    sung = [wire.Route(inbox.address, "", {"frames": "frames"})]
    link.call(lambda call: wire.Open(call, "echo_singer", "s1", inbox.address, {}, 1, {}, sung)).result(
        PATIENCE_S
    )
    open_writer(
        link, inbox, "hi you", routes=[wire.Route(link.address, "echo_singer", {"text": "text"})]
    ).result(PATIENCE_S)
    frames, ends = [], 0
    while ends < 2:
        message = inbox.mail.get(timeout=PATIENCE_S)
        if isinstance(message, wire.Piece):
            frames.append(message.values.get("frames", np.zeros((0, 1))))
        ends += isinstance(message, wire.Finished)
    assert "".join(chr(int(code)) for code in np.concatenate(frames)[:, 0]) == "hi you "


@pytest.fixture
def make_chain(make_link, inbox):
    """A slow writer that feeds a singer of another process, with one session between them."""

    def make():
        writer, singer = make_link(writer={"engine": {"step_s": 0.01}}), make_link(("singer",))
        writer.wait_ready(PATIENCE_S)
        singer.wait_ready(PATIENCE_S)
        sung = [wire.Route(inbox.address, "", {"frames": "frames"})]
        opened = singer.call(
            lambda call: wire.Open(call, "echo_singer", "s1", inbox.address, {}, 1, {}, sung)
        )
        opened.result(PATIENCE_S)
        routes = [wire.Route(singer.address, "echo_singer", {"text": "text"})]
        open_endless(writer, inbox, routes=routes)
        inbox.mail.get(timeout=PATIENCE_S)  # the first word was sung
        return writer, singer

    return make


def failure_of(inbox, source):
    """How a stage's session failed, waited for."""
    while True:
        message = inbox.mail.get(timeout=PATIENCE_S)
        if isinstance(message, wire.Failed) and message.source == source:
            return message


def test_a_killed_consumer_fails_the_sessions_that_feed_it(make_chain, inbox):
    writer, singer = make_chain()
    os.kill(pid_of(singer), signal.SIGKILL)
    failure = failure_of(inbox, "echo_singer")
    assert (
        failure.code == "ENGINE_LOST"
        and failure.what == "the engine of stage echo_singer died under the request"
    )
    stats = writer.call(wire.Ping).result(PATIENCE_S).stats["echo_writer"]
    assert stats["sessions"] == stats["connector_in_flight_bytes"] == stats["connector_queued_bytes"] == 0


def test_a_killed_producer_fails_the_sessions_that_wait_for_it(make_chain, inbox):
    writer, singer = make_chain()
    os.kill(pid_of(writer), signal.SIGKILL)
    failure = failure_of(inbox, "echo_singer")
    assert failure.code == "ENGINE_LOST" and "stage echo_writer died before its output ended" in failure.what
    assert sessions(singer, "echo_singer") == 0


def test_bad_input_is_refused_and_leaves_nothing(make_link, inbox):
    link = make_link()
    link.wait_ready(PATIENCE_S)
    with pytest.raises(InvalidRequest, match="refuse"):
        open_writer(link, inbox, "refuse this").result(PATIENCE_S)
    assert sessions(link) == 0


def test_an_exception_in_a_step_fails_its_sessions_and_the_next_one_works(make_link, inbox):
    link = make_link(writer={"engine": {"fail_on": "boom"}})
    link.wait_ready(PATIENCE_S)
    open_writer(link, inbox, "go boom now").result(PATIENCE_S)
    _, end = inbox.until_end()
    assert isinstance(end, wire.Failed) and end.code == "INTERNAL" and "fault that was asked for" in end.what
    open_writer(link, inbox, "fine", session="s2").result(PATIENCE_S)
    assert isinstance(inbox.until_end()[1], wire.Finished)


def test_cancel_frees_the_session_within_a_step(make_link, inbox):
    link = make_link(writer={"engine": {"step_s": 0.02}})
    link.wait_ready(PATIENCE_S)
    open_endless(link, inbox)
    assert sessions(link) == 1
    link.tell(wire.Cancel("s1"))
    wait_until(lambda: sessions(link) == 0)


def test_a_lost_orchestrator_frees_its_sessions(make_link, inbox):
    link = make_link(writer={"engine": {"step_s": 0.02}})
    link.wait_ready(PATIENCE_S)
    open_endless(link, inbox)
    inbox.hang_up()
    wait_until(lambda: sessions(link) == 0)


def test_a_session_that_nobody_feeds_ends_with_its_lease(make_link, inbox):
    link = make_link(("singer",), singer={"lease_s": 0.5})
    link.wait_ready(PATIENCE_S)
    routes = [wire.Route(inbox.address, "", {"frames": "frames"})]
    link.call(lambda call: wire.Open(call, "echo_singer", "s1", inbox.address, {}, 1, {}, routes)).result(
        PATIENCE_S
    )
    _, end = inbox.until_end()
    assert isinstance(end, wire.Failed) and "was given nothing" in end.what
    assert sessions(link, "echo_singer") == 0


def test_batches_answer_each_stream_and_end_frees_its_state(make_link):
    link = make_link(("wave",))
    link.wait_ready(PATIENCE_S)

    def run(*chunks):
        return link.call(lambda call: wire.Run(call, "echo_wave", list(chunks))).result(PATIENCE_S).results

    frames = np.full((3, 1), 65.0, np.float32)
    first = run(
        wire.StreamChunk("a", {"frames": frames}, True, False, {}),
        wire.StreamChunk("ghost", {}, False, False, {}),
    )
    assert first[0].outputs["pcm"].shape == (240,) and first[1].code == "ENGINE_LOST"
    run(wire.StreamChunk("a", {"frames": frames}, False, True, {}))
    assert link.call(wire.Ping).result(PATIENCE_S).stats["echo_wave"]["active"] == 0


def test_kill_9_fails_the_call_at_once_and_the_process_comes_back(make_link, inbox):
    link = make_link(writer={"engine": {"step_s": 0.02}})
    link.wait_ready(PATIENCE_S)
    open_endless(link, inbox)
    first = pid_of(link)
    stop(first)  # so that the call is certainly unanswered
    call = link.call(wire.Ping)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(EngineLost):
        call.result(PATIENCE_S)
    assert None in iter(lambda: inbox.mail.get(timeout=PATIENCE_S), "never"), "the inbox saw no end"
    wait_until(lambda: link.is_ready)
    open_writer(link, inbox, "again", session="s2").result(PATIENCE_S)
    assert isinstance(inbox.until_end()[1], wire.Finished) and pid_of(link) != first


@pytest.fixture
def long_pause(monkeypatch):
    """Seconds after which a process that had loaded is started again: longer than any look at it takes."""
    monkeypatch.setattr(engine_link, "BACKOFF_S", (600.0,))
    monkeypatch.setattr(engine_link, "LOADED_BACKOFF_S", 300.0)
    return 300


def test_calls_while_it_restarts_are_refused_with_a_time(make_link, long_pause):
    link = make_link()
    link.wait_ready(PATIENCE_S)
    os.kill(pid_of(link), signal.SIGKILL)
    wait_until(lambda: not link.is_ready)
    with pytest.raises(Unavailable, match="restarting") as refusal:
        link.call(wire.Ping).result(PATIENCE_S)
    assert "try again in about" in refusal.value.cure


def test_an_engine_that_is_killed_again_and_again_is_soon_back_each_time(make_link, monkeypatch):
    monkeypatch.setattr(engine_link, "BACKOFF_S", (60.0,))  # that of engines which do not load
    link = make_link()
    link.wait_ready(PATIENCE_S)
    for _ in range(3):
        pid = pid_of(link)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: link.is_ready and pid_of(link) != pid)


def test_the_time_told_covers_the_pause_and_the_load(make_link, long_pause):
    link = make_link()
    link.wait_ready(PATIENCE_S)
    link._load_s = 40.0
    lost_s = time.monotonic()
    os.kill(pid_of(link), signal.SIGKILL)
    wait_until(lambda: link._due_s > lost_s + long_pause)
    with pytest.raises(Unavailable) as refusal:
        link.call(wire.Ping).result(PATIENCE_S)
    [told_s] = re.findall(r"about (\d+) s", refusal.value.cure)
    passed_s = time.monotonic() - lost_s
    assert long_pause + 40 - passed_s - 1 <= int(told_s) <= long_pause + 40 + passed_s + 1


def test_an_engine_that_hangs_is_refused_by_the_call_deadline(make_link):
    link = make_link(call_timeout_s=0.5)
    link.wait_ready(PATIENCE_S)
    stop(pid_of(link))
    try:
        with pytest.raises(Unavailable, match=r"did not answer within 0\.5 s"):
            link.call(wire.Ping).result(PATIENCE_S)
    finally:
        os.kill(pid_of(link), signal.SIGCONT)


def test_a_second_door_joins_the_process_instead_of_starting_one(make_link):
    link = make_link()
    link.wait_ready(PATIENCE_S)
    second = EngineLink("under test", link.address, link.process.spec, PATIENCE_S)
    try:
        second.wait_ready(PATIENCE_S)
        assert second.process.pid is None and second.call(wire.Ping).result(PATIENCE_S).stats
    finally:
        second.close()
    assert link.call(wire.Ping).result(PATIENCE_S).stats, "closing the joiner must not end the process"


def test_an_engine_ends_with_its_door(make_link):
    link = make_link()
    link.wait_ready(PATIENCE_S)
    pid = pid_of(link)
    os.close(link.process._life_line)  # what the kernel does when the door is killed
    link.process._life_line = None
    wait_until(lambda: pid_of(link) != pid)  # until the link starts another


def test_an_engine_that_cannot_load_says_why(make_link):
    link = make_link(writer={"engine": {"fail_load": True}})
    with pytest.raises(ConfigError, match="fail_load"):
        link.wait_ready(PATIENCE_S)


def test_an_engine_may_have_an_interpreter_of_its_own(make_link, inbox, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ntouch "{tmp_path}/used"\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    link = make_link(python=str(python))
    link.wait_ready(PATIENCE_S)
    assert (tmp_path / "used").exists()
    open_writer(link, inbox, "hi").result(PATIENCE_S)
    assert isinstance(inbox.until_end()[1], wire.Finished)


@pytest.mark.parametrize("python", ["/no/such/python", "/bin/false"])
def test_an_interpreter_that_does_not_start_is_a_clear_failure(make_link, python):
    link = make_link(python=python)
    with pytest.raises(ConfigError, match=r"No such file|ended with status 1"):
        link.wait_ready(PATIENCE_S)


def test_a_step_that_always_fails_ends_the_process_for_a_new_one(make_link, inbox):
    link = make_link(writer={"engine": {"fail_on": "boom"}})
    link.wait_ready(PATIENCE_S)
    first = pid_of(link)
    for number in range(3):
        open_writer(link, inbox, "boom", session=f"s{number}").result(PATIENCE_S)
        assert isinstance(inbox.until_end()[1], wire.Failed)
    wait_until(lambda: pid_of(link) not in (first, None) and link.is_ready)


def test_an_engine_whose_loop_hangs_is_ended_and_started_again(make_link, inbox, monkeypatch):
    monkeypatch.setattr(engine_link, "MIN_TURN_LIMIT_S", 1.5)
    link = make_link(call_timeout_s=1.5, writer={"engine": {"step_s": 600}})
    link.wait_ready(PATIENCE_S)
    hung = pid_of(link)
    open_writer(link, inbox, "one").result(PATIENCE_S)  # the step that follows does not return
    wait_until(lambda: pid_of(link) not in (hung, None) and link.is_ready, what="nobody noticed")
    assert link.call(wire.Ping).result(PATIENCE_S).stats["echo_writer"]["sessions"] == 0


def test_an_engine_that_does_not_answer_at_all_is_ended_and_started_again(make_link, monkeypatch):
    monkeypatch.setattr(engine_link, "MIN_TURN_LIMIT_S", 0.5)
    monkeypatch.setattr(engine_link, "BEAT_TIMEOUT_S", 0.5)
    link = make_link(call_timeout_s=0.5)
    link.wait_ready(PATIENCE_S)
    hung = pid_of(link)
    stop(hung)
    wait_until(lambda: pid_of(link) not in (hung, None) and link.is_ready, what="nobody noticed")


def test_an_idle_engine_is_never_taken_for_hung(make_link):
    link = make_link(call_timeout_s=0.1)
    link.wait_ready(PATIENCE_S)
    pid = pid_of(link)
    time.sleep(3.5)  # several times the limit of a call, and several beats
    assert pid_of(link) == pid and link.is_ready
