"""What a watch does about dead and silent doors, and how it changes a deploy, on a server that is made up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_machine import write_deploy

from tritone import deploy_reader, pipeline_watch
from tritone.deploy import Deploy
from tritone.errors import ConfigError, TritoneError, Unavailable
from tritone.health import SERVING, Board
from tritone.pipeline_watch import PipelineWatch
from waiting import PATIENCE_S, wait_until

MODELS = ["echo_singer", "echo_wave", "echo_writer", "echo", "echo_sync"]
UNHEALTHY = "stage singer is not ready: stage echo_singer cannot be called: Stub process is not healthy"
SILENT = "stage singer is not ready: its door did not answer within 2.5 s"


class FakeRun:
    """Notes what it is told; `faults` by model is what pings answer, `dead` what stubs have died."""

    pool_threads = 32

    def __init__(self) -> None:
        self.faults: dict[str, str] = {}
        self.dead: set[str] = set()
        self.incurable = False
        self.refused: set[str] = set()  # digests that do not load
        self.calls: list[Any] = []
        self.stubs = self

    def lost(self, models: Sequence[str]) -> list[str]:
        return [model for model in models if model in self.dead]

    def ping(self, model: str) -> str | None:
        return self.faults.get(model)

    def hang_up(self) -> int:
        self.calls.append("hang up")
        return 3

    def load_again(self, models: Sequence[str], timeout_s: float) -> None:
        self.calls.append(list(models))
        if not self.incurable:
            self.dead.clear()
            self.faults.clear()

    def load_timeout_s(self, pipelines: Sequence[Deploy]) -> float:
        return 20.0

    def drain(self, deploy: Deploy, why: str) -> bool:
        self.calls.append(why)
        return True

    def exchange(self, old: Deploy, new: Deploy, timeout_s: float) -> None:
        self.calls.append((old.max_in_flight, new.max_in_flight))
        if new.digest in self.refused:
            raise TritoneError("the server refuses models/echo/load: no weights")

    def check_alive(self, when: str) -> None:
        pass


def load(folder: Path, **fields: object) -> Deploy:
    return deploy_reader.load(write_deploy(folder, **fields) / "deploy.yaml")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    monkeypatch.setattr(pipeline_watch, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(pipeline_watch, "HANG_S", 0.2)
    monkeypatch.setattr(pipeline_watch, "HANG_MARGIN_S", 0.1)
    return FakeRun()


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def board() -> Board:
    board = Board({"echo": ["writer", "singer", "wave"]})
    board.beat(SERVING)
    return board


@pytest.fixture
def watch(run: FakeRun, lines: list[str], board: Board, tmp_path: Path) -> Iterator[PipelineWatch]:
    deploy = load(tmp_path / "old", max_in_flight=1, stages={"singer": {"call_timeout_s": 0.1}})
    watch = PipelineWatch(run, deploy, board, lines.append)  # type: ignore[arg-type]
    watch.start()
    yield watch
    watch.stop()
    watch.join()


def until(condition: Callable[[], object]) -> None:
    wait_until(condition)


def test_a_dead_door_is_loaded_again(
    watch: PipelineWatch, run: FakeRun, lines: list[str], board: Board
) -> None:
    run.dead = {"echo_singer"}
    until(lambda: len(lines) == 4)
    assert run.calls == [["echo_singer"]]
    assert lines[0] == "echo is not ready: stage singer is not ready: its door died"
    assert lines[1] == "echo loads echo_singer again, since echo_singer died"
    assert lines[2].startswith("echo loaded echo_singer again in") and lines[3].startswith("echo is ready")
    assert board.ready()[0] == 200 and watch.verdict is None


def test_with_an_orchestrator_go_the_stages_whose_sequences_it_held(
    watch: PipelineWatch, run: FakeRun
) -> None:
    run.dead = {"echo"}
    until(lambda: len(run.calls) > 1)
    assert run.calls == ["hang up", ["echo_wave", "echo"]], "clients hear of it at once"


@pytest.mark.parametrize(
    ("model", "fault", "loaded"),
    [
        ("echo", SILENT, ["echo_singer"]),
        ("echo", UNHEALTHY, ["echo_singer"]),
        ("echo_sync", SILENT, ["echo_singer"]),
        ("echo", "the deadline of 3.5 s passed", ["echo_wave", "echo"]),
        ("echo_sync", "the deadline of 3.5 s passed", ["echo_wave", "echo_sync"]),
    ],
)
def test_a_door_that_is_silent_for_long_is_loaded_again(
    watch: PipelineWatch, run: FakeRun, model: str, fault: str, loaded: list[str]
) -> None:
    run.faults = {model: fault}
    until(lambda: loaded in run.calls)
    assert run.calls == [loaded] if fault in (SILENT, UNHEALTHY) else ["hang up", loaded]


def test_an_engine_that_restarts_is_left_to_its_door(
    watch: PipelineWatch, run: FakeRun, lines: list[str]
) -> None:
    run.faults = {"echo": "stage singer is not ready: its engine is restarting"}
    until(lambda: lines)
    time.sleep(0.5)
    assert run.calls == [] and watch.verdict is None


def test_what_does_not_help_is_not_done_for_ever(watch: PipelineWatch, run: FakeRun) -> None:
    run.dead, run.incurable = {"echo_singer"}, True
    until(lambda: watch.verdict)
    assert len(run.calls) == pipeline_watch.MAX_MENDS
    assert "had to be loaded again 5 times" in str(watch.verdict)


class TestChange:
    def test_drains_and_exchanges(self, watch: PipelineWatch, run: FakeRun, tmp_path: Path) -> None:
        new = load(tmp_path / "new", max_in_flight=2)
        assert new.digest in watch.change(new).result(PATIENCE_S)
        assert run.calls == ["pipeline echo is being reloaded", (1, 2)]
        assert watch.deploy is new

    def test_the_same_deploy_is_nothing_to_do(self, watch: PipelineWatch, run: FakeRun) -> None:
        assert "nothing to do" in watch.change(watch.deploy).result(PATIENCE_S)
        assert run.calls == []

    def test_more_threads_than_the_server_has_are_refused(
        self, watch: PipelineWatch, run: FakeRun, tmp_path: Path
    ) -> None:
        with pytest.raises(ConfigError, match="bls_threads is 60, and the server has 32 threads; restart"):
            watch.change(load(tmp_path / "new", bls_threads=60)).result(PATIENCE_S)
        assert run.calls == []

    def test_what_does_not_load_is_taken_back(
        self, watch: PipelineWatch, run: FakeRun, lines: list[str], tmp_path: Path
    ) -> None:
        old, new = watch.deploy, load(tmp_path / "new", max_in_flight=2)
        run.refused = {new.digest}
        with pytest.raises(TritoneError, match="did not load as its deploy file says, and is as before"):
            watch.change(new).result(PATIENCE_S)
        assert run.calls[1:] == [(1, 2), (2, 1)]
        assert watch.deploy is old and watch.verdict is None

    def test_when_not_even_that_works_the_server_must_start_again(
        self, watch: PipelineWatch, run: FakeRun, tmp_path: Path
    ) -> None:
        new = load(tmp_path / "new", max_in_flight=2)
        run.refused = {new.digest, watch.deploy.digest}
        with pytest.raises(TritoneError, match="no weights"):
            watch.change(new).result(PATIENCE_S)
        until(lambda: watch.verdict)

    def test_who_waits_for_a_server_that_ends_is_told(self, watch: PipelineWatch, tmp_path: Path) -> None:
        new = load(tmp_path / "new", max_in_flight=2)
        watch.stop()
        with pytest.raises(Unavailable, match="echo was not reloaded, since its server has ended; try again"):
            watch.change(new).result(PATIENCE_S)
