"""`tritone serve` against a fake tritonserver: a script that answers the health check."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_machine import FAKE_MPS, FAKE_TRITONSERVER, write_deploy, write_file

from tritone import asked, doctor, guard, pipeline_watch, running_server, serve, server_log, supervisor
from tritone.asked import Asked, ServeOptions
from tritone.errors import ConfigError, TritoneError
from tritone.finding import ok, problem
from tritone.pipeline_watch import State
from tritone.server import Interpreter, Listen, Server
from waiting import PATIENCE_S, wait_until

FREE = Listen(http=0, grpc=0, metrics=0, health=0)


class TestTargets:
    def test_overrides_for_all_and_for_one(self, tmp_path: Path) -> None:
        folder = write_deploy(tmp_path / "echo")
        [deploy] = serve.load_pipelines([str(folder)], ["stage.writer.threads=3", "echo:max_in_flight=4"])
        assert (deploy.stage("writer").threads, deploy.max_in_flight) == (3, 4)

    def test_a_colon_in_a_value_names_no_pipeline(self, tmp_path: Path) -> None:
        folder = write_deploy(tmp_path / "echo")
        [deploy] = serve.load_pipelines([str(folder)], ["checkpoint='/a:b'"])
        assert deploy.checkpoint == Path("/a:b")

    def test_override_for_a_pipeline_that_is_not_served(self, tmp_path: Path) -> None:
        folder = write_deploy(tmp_path / "echo")
        with pytest.raises(ConfigError, match="is for pipeline 'other'; served are echo"):
            serve.load_pipelines([str(folder)], ["other:max_in_flight=4"])

    def test_twice(self, tmp_path: Path) -> None:
        folders = [str(write_deploy(tmp_path / name)) for name in ("a", "b")]
        with pytest.raises(ConfigError, match="'echo' is named twice"):
            serve.load_pipelines(folders, [])


def test_zero_takes_free_ports() -> None:
    chosen = serve.choose_ports(Listen(http=0, grpc=0, metrics=7))
    assert chosen.metrics == 7
    assert len({chosen.http, chosen.grpc, 0}) == 3


def test_ports_that_the_system_gives_to_connections_are_left_to_them(monkeypatch, tmp_path) -> None:
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if given > doctor.FREE_PORTS_FROM:
        chosen = serve.choose_ports(Listen(http=0, grpc=0, metrics=0))
        assert all(doctor.FREE_PORTS_FROM <= port < given for port in (chosen.http, chosen.grpc))
    all_given = write_file(tmp_path / "range", b"1024\t65535\n")
    monkeypatch.setattr(doctor, "GIVEN_PORTS", all_given)
    assert serve.choose_ports(Listen(http=0, grpc=0, metrics=0)).http > 0


def test_a_free_port_is_nobody_elses(monkeypatch, tmp_path) -> None:
    with doctor.bind_free("127.0.0.1") as first:
        port = first.getsockname()[1]
        monkeypatch.setattr(doctor, "FREE_PORTS_FROM", port)
        monkeypatch.setattr(
            doctor, "GIVEN_PORTS", write_file(tmp_path / "range", f"{port + 1} 65535".encode())
        )
        with doctor.bind_free("127.0.0.1") as second:
            assert second.getsockname()[1] != port


class TestRunFolder:
    def test_temporary_is_removed(self) -> None:
        with serve.run_folder(None) as (folder, _):
            write_file(folder / "models" / "x")
        assert not folder.exists()

    def test_log_outlives_a_failure(self) -> None:
        with serve.run_folder(None) as (folder, keep):
            write_file(folder / "models" / "x")
            log = write_file(folder / "server.log")
            keep(log)
        assert list(folder.iterdir()) == [log]
        log.unlink()
        folder.rmdir()

    def test_given_is_cleared_of_an_earlier_run(self, tmp_path: Path) -> None:
        write_file(tmp_path / "models" / "old" / "deploy.yaml")
        write_file(tmp_path / "ready.json")
        with serve.run_folder(tmp_path) as (folder, _):
            assert list(folder.iterdir()) == []

    def test_given_with_other_files_is_refused(self, tmp_path: Path) -> None:
        kept = write_file(tmp_path / "thesis.tex")
        with (
            pytest.raises(ConfigError, match=r"holds 'thesis\.tex', which is not of a run"),
            serve.run_folder(tmp_path),
        ):
            pass
        assert kept.exists()


class TestLog:
    def test_progress_reads_only_what_is_new_and_complete(self, tmp_path: Path) -> None:
        log = tmp_path / "server.log"
        progress = server_log.Progress(log)
        assert progress.news() == []
        with log.open("w") as file:
            file.write("I1129 successfully loaded 'a'\nI1129 successfully loaded 'b")
            file.flush()
            assert progress.news() == ["a"]
            file.write("c'\n")
            file.flush()
            assert progress.news() == ["bc"]
        assert progress.news() == []

    def test_last_errors_are_those_of_models(self, tmp_path: Path) -> None:
        lines = [
            'E1129 22:54:59.726561 18166 server.cc:241] "CudaDriverHelper has not been initialized."',
            "I1129 22:54:59.726561 18166 server.cc:241] fine",
            "E1129 22:55:01.000000 18166 model_lifecycle.cc:642] \"failed to load 'echo': no weights\"",
            "E1129 22:55:01.000000 18166 model_lifecycle.cc:642] "
            "\"failed to load 'echo': no weights\\n\\nAt:\\n  /a/model.py(7): initialize\\n\"",
            'E1129 22:55:02.000000 18166 model_repository_manager.cc:703] "a consequence"',
        ]
        log = write_file(tmp_path / "log", "\n".join(lines).encode())
        assert server_log.last_errors(log) == ["failed to load 'echo': no weights"]

    def test_only_a_server_that_never_spoke_is_quoted_without_errors(self, tmp_path: Path) -> None:
        log = write_file(
            tmp_path / "log",
            b"a\n\nerror while loading shared libraries: libfoo.so\n",
        )
        assert server_log.last_errors(log, 1) == ["error while loading shared libraries: libfoo.so"]
        write_file(log, b"I1129 22:54:59.7 7 server.cc:1] fine\nan engine is ready\n")
        assert server_log.last_errors(log) == []
        assert server_log.last_errors(None) == []


def test_state_speaks_only_of_changes() -> None:
    state = State()
    assert state.note(None) is None
    assert state.note("gone") == "is not ready: gone"
    assert state.note("gone") is None
    assert state.down_s() > 0
    assert state.note("gone for good") == "is not ready: gone for good"
    assert state.note(None) == "is ready again after 0.0 s"
    assert state.down_s() == 0


class Stage:
    """A place to run `serve` on: a fake server, pings that the test decides on, and what was said."""

    def __init__(self, folder: Path, run: Path) -> None:
        self.options = ServeOptions((str(folder),), listen=FREE, run_folder=run, load_timeout_s=PATIENCE_S)
        self.run = run
        self.lines: list[str] = []
        self.asked = Asked()
        self.fault: str | None = None  # what a ping answers
        self.failed: list[BaseException] = []  # what went wrong beside it
        self.num_pings = 0

    def start(self, **changes: Any) -> int:
        status = serve.serve(replace(self.options, **changes), self.lines.append, self.asked)
        for error in self.failed:
            raise error
        return status

    def once(self, line: str, act: Callable[[], None]) -> None:
        """Do `act` when a line that begins with `line` was said."""

        def wait() -> None:
            try:
                wait_until(lambda: any(said.startswith(line) for said in self.lines), what=str(self.lines))
                act()
            except BaseException as error:
                self.failed.append(error)
                self.asked.note()

        threading.Thread(target=wait, daemon=True).start()

    def until(self, line: str) -> None:
        """Wait until a line that holds `line` was said."""
        wait_until(lambda: any(line in said for said in self.lines), what=str(self.lines))

    def ping(self) -> str | None:
        self.num_pings += 1
        return self.fault

    def look(self, times: int) -> None:
        """Wait until the server was asked so many times more."""
        enough = self.num_pings + times
        wait_until(lambda: self.num_pings >= enough)

    def stamped(self) -> list[str]:
        """What was said with the time."""
        return [line.split(" ", 1)[1] for line in self.lines if line[2:3] == ":"]

    @property
    def server_pid(self) -> int:
        pid: int = json.loads((self.run / "ready.json").read_text())["pid"]
        return pid


@pytest.fixture
def stage(
    server: Server,
    interpreter: Interpreter,
    echo_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Stage:
    fake = write_file(tmp_path / "tritonserver", FAKE_TRITONSERVER.encode(), executable=True)
    stage = Stage(echo_folder, tmp_path / "run")
    monkeypatch.setattr(
        serve.doctor, "machine", lambda python: (replace(server, binary=fake), [ok("a", "b")])
    )
    real = replace(interpreter, library=None)  # the fake server is a Python that needs the real library
    monkeypatch.setattr(serve.Interpreter, "current", lambda: real)
    monkeypatch.setattr(running_server.RunningServer, "ping", lambda self, name: stage.ping())
    monkeypatch.setattr(pipeline_watch, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(supervisor, "BACKOFF_S", (0.05,))
    monkeypatch.setattr(guard, "LEAVE_S", 0.5)
    return stage


class TestServe:
    def test_check_starts_nothing(self, stage: Stage) -> None:
        assert stage.start(check_only=True) == 0
        assert stage.lines[-1] == "all checks passed"
        assert not stage.run.exists()

    def test_a_problem_stops_it(self, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        trouble = [problem("numpy", "2.4", "run x")]
        monkeypatch.setattr(serve.doctor, "machine", lambda python: (None, trouble))
        with pytest.raises(ConfigError, match=r"1 problem\(s\) in the way"):
            stage.start()
        assert stage.lines == [str(trouble[0])]

    def test_serves_until_asked(self, stage: Stage) -> None:
        told = []

        def read() -> None:
            told.append(json.loads((stage.run / "ready.json").read_text()))
            stage.asked.note()

        stage.once("try:", read)
        assert stage.start() == 0
        said = "\n".join(stage.lines)
        assert "loaded echo after" in said
        assert "ready  echo after" in said
        assert "tritone chat" in said
        [ready] = told
        assert ready["pipelines"] == ["echo"]
        assert ready["grpc"] in said and ready["health"] in said
        assert not (stage.run / "ready.json").exists(), "it tells what is ready now"
        assert (stage.run / "models" / "echo" / "echo_writer" / "config.pbtxt").exists()

    def test_mps_lives_as_long_as_the_run(
        self, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        program = write_file(tmp_path / "bin" / guard.MPS_PROGRAM, FAKE_MPS.encode(), executable=True)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        monkeypatch.setattr(serve.doctor, "for_pipelines", lambda *_: [])  # it would miss the GPU
        told: list[Any] = []

        def read() -> None:
            environ = Path(f"/proc/{stage.server_pid}/environ").read_text().split("\0")
            told.append([word for word in environ if word.startswith("CUDA_MPS_PIPE")])
            told.append(guard.is_running(daemon := int((pipe / "pid").read_text())))
            told.append(daemon)
            stage.asked.note()

        pipe = stage.run / "mps" / "pipe"
        stage.once("try:", read)
        assert stage.start(overrides=("mps=true", "stage.writer.device=gpu:0")) == 0
        assert told[:2] == [[f"CUDA_MPS_PIPE_DIRECTORY={pipe}"], True]
        assert not guard.is_running(told[2])

    def test_asked_while_loading(self, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FAKE_TRITON", "slow")
        stage.once("loaded", stage.asked.note)
        assert stage.start() == 0
        assert not any(line.startswith("ready") for line in stage.lines)

    def test_failed_load_shows_the_servers_reason(
        self, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FAKE_TRITON", "fail")
        with pytest.raises(TritoneError, match="ended with status 1 while loading") as caught:
            stage.start()
        assert "failed to load 'echo_writer': no weights" in str(caught.value)
        assert str(stage.run / "server.log") in str(caught.value)

    def test_a_crash_while_loading_is_tried_again(
        self, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FAKE_TRITON", "crash")

        def recover() -> None:
            monkeypatch.setenv("FAKE_TRITON", "")
            stage.until("try:")
            stage.asked.note()

        stage.once("start", recover)
        assert stage.start() == 0
        assert "server: the server ended by SIGABRT while loading" in stage.stamped()

    def test_load_deadline_says_what_is_missing(self, stage: Stage) -> None:
        stage.fault = "stage writer is not ready: loading"
        with pytest.raises(TritoneError, match=r"not ready within 4 s \(echo: stage writer is not ready"):
            stage.start(load_timeout_s=4)

    def test_killed_server_starts_again(self, stage: Stage) -> None:
        pids = []

        def kill() -> None:
            pids.append(stage.server_pid)
            os.kill(pids[0], signal.SIGKILL)
            stage.until("server is ready again")
            pids.append(stage.server_pid)
            stage.asked.note()

        stage.once("try:", kill)
        assert stage.start() == 0
        assert len(set(pids)) == 2
        said = stage.stamped()
        assert said[0].startswith("server: the server ended by SIGKILL while serving")
        assert said[1].startswith("server is cleaned away") and said[2] == "server starts again in 0.05 s"
        logged = (stage.run / "server.log").read_text()
        assert all(f" {line.splitlines()[0]}" in logged for line in said)
        assert logged.count("successfully loaded 'echo'") == 2

    def test_a_server_that_keeps_dying_is_given_up(
        self, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(supervisor, "MAX_FAILURES", 2)

        def break_for_good() -> None:
            monkeypatch.setenv("FAKE_TRITON", "fail")
            os.kill(stage.server_pid, signal.SIGKILL)

        stage.once("try:", break_for_good)
        with pytest.raises(TritoneError, match="failed 3 times within 10 minutes, last: the server ended"):
            stage.start()
        assert not (stage.run / "ready.json").exists()

    def test_state_changes_are_said_once(self, stage: Stage) -> None:
        def down_and_up() -> None:
            stage.fault = "stage writer is not ready"
            stage.until("echo is not ready")
            stage.look(3)
            stage.fault = None
            stage.until("echo is ready again")
            stage.look(3)
            stage.asked.note()

        stage.once("try:", down_and_up)
        assert stage.start() == 0
        down, up = stage.stamped()
        assert down == "echo is not ready: stage writer is not ready"
        assert re.fullmatch(r"echo is ready again after \d+\.\d s", up)

    def test_health_follows_the_pipeline(self, stage: Stage) -> None:
        seen = []

        def look() -> None:
            url = json.loads((stage.run / "ready.json").read_text())["health"]
            seen.append(health(url, "/ready"))
            stage.fault = "stage writer is not ready: it is gone"
            stage.until("echo is not ready")
            seen.append(health(url, "/ready/echo"))
            seen.append(health(url, "/live"))
            stage.asked.note()

        stage.once("try:", look)
        assert stage.start() == 0
        assert [status for status, _ in seen] == [200, 503, 200]
        stages = seen[1][1]["pipelines"]["echo"]["stages"]
        assert stages["writer"] == {"ready": False, "fault": "it is gone"} and stages["singer"]["ready"]

    def test_asked_to_reload_it_serves_what_the_file_says(
        self, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        changes = []
        run = running_server.RunningServer
        monkeypatch.setattr(run, "drain", lambda self, deploy, why: True)
        monkeypatch.setattr(
            run, "exchange", lambda self, old, new, _: changes.append((old.max_in_flight, new.max_in_flight))
        )
        file = Path(stage.options.targets[0]) / "deploy.yaml"

        def change() -> None:
            good = file.read_text()
            file.write_text(good + "max_in_flite: 3\n")
            stage.asked.note_reload()
            stage.until("did you mean 'max_in_flight'?")
            file.write_text(good + "memory: {ram_gib: 0.5}\n")
            stage.asked.note_reload()
            stage.until("cpu is too small: 1.3 GiB planned, 512 MiB in all")
            file.write_text(good + "max_in_flight: 3\n")
            stage.asked.note_reload()
            stage.until("was loaded with digest")
            stage.asked.note()

        stage.once("try:", change)
        assert stage.start() == 0
        assert changes == [(32, 3)]

    def test_stubborn_server_is_killed(self, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FAKE_TRITON", "stubborn")
        monkeypatch.setattr(running_server, "GRACE_S", 0.5)
        stage.once("try:", stage.asked.note)
        assert stage.start() == 0
        assert "1 processes killed" in stage.lines[-1]

    def test_log_file_of_ones_own(self, stage: Stage, tmp_path: Path) -> None:
        stage.once("try:", stage.asked.note)
        assert stage.start(log=str(tmp_path / "my.log")) == 0
        assert "successfully loaded" in (tmp_path / "my.log").read_text()
        with pytest.raises(ConfigError, match="cannot write the log"):
            stage.start(log=str(tmp_path / "no" / "my.log"))


@pytest.mark.parametrize(("terminal", "ends", "reloads"), [(True, 2, False), (False, 1, True)])
def test_signals_are_counted(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, ends: int, reloads: bool
) -> None:
    """A hang-up ends what has a terminal, and has a daemon read its files again."""
    monkeypatch.setattr(asked, "has_terminal", lambda: terminal)
    heard = Asked()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        heard.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        assert heard.wait(PATIENCE_S)
        assert (heard.times, heard.take_reload(), heard.take_reload()) == (ends, reloads, False)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_is_ready_of_nothing() -> None:
    assert not running_server.is_ready("http://127.0.0.1:9")


def health(url: str, page: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url + page, timeout=PATIENCE_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
