"""MPS for a run, with a stand-in for NVIDIA's program: started, told to engines, ended, and swept up."""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from pathlib import Path

import pytest
from fake_machine import FAKE_MPS, write_deploy, write_file

from tritone import cli, commands, deploy_reader, guard, mps, serve
from tritone.engine_process import EngineSpec
from tritone.errors import ConfigError
from tritone.guard import Run


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = write_file(tmp_path / "bin" / guard.MPS_PROGRAM, FAKE_MPS.encode(), executable=True)
    monkeypatch.setenv("PATH", f"{file.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(guard, "LEAVE_S", 1.0)
    return file


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def daemon_pid(run: Path) -> int:
    return int((run / "mps" / "pipe" / "pid").read_text())


def wait_gone(pid: int) -> None:
    end_s = time.monotonic() + 15
    while guard.is_running(pid):
        assert time.monotonic() < end_s, "the daemon lives on"
        time.sleep(0.02)


def test_a_private_daemon_lives_as_long_as_its_run(
    program: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with mps.daemon(run) as environ:
        pid = daemon_pid(run)
        assert guard.is_running(pid)
        log = str(run / "mps" / "log")
        assert environ == {
            "CUDA_MPS_PIPE_DIRECTORY": str(run / "mps" / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": log,
        }
        started = (run / "mps" / "pipe" / "started").read_text()
        assert started == f"{log} all PCI_BUS_ID\n", "engines name GPUs as nvidia-smi counts them"
    wait_gone(pid)
    assert (run / "mps" / "pipe" / "orders").read_text() == "quit\n"


def test_one_that_does_not_heed_is_killed(program: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPS_STUBBORN", "1")
    with mps.daemon(run):
        pid = daemon_pid(run)
    wait_gone(pid)


def test_one_that_does_not_start_says_why(program: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPS_FAULT", "1")
    with (
        pytest.raises(ConfigError, match="An instance of this daemon is already running"),
        mps.daemon(run),
    ):
        pass


def test_a_run_that_was_killed_leaves_none(program: Path, run: Path) -> None:
    """The guard ends it after the server, and the next run in the folder if the guard is gone as well."""
    for sweep in (
        lambda: guard.end(Run(2**22, "tritone_test_nothing_", 0.1, mps=str(run / "mps"))),
        lambda: serve._clear(run),
    ):
        environ = mps.environment(run / "mps")
        for folder in environ.values():
            Path(folder).mkdir(parents=True, exist_ok=True)
        subprocess.run([program, "-d"], env={**os.environ, **environ}, check=True)
        pid = daemon_pid(run)
        assert guard.is_running(pid)
        sweep()
        wait_gone(pid)
    assert list(run.iterdir()) == []


def test_the_daemon_of_another_run_is_left_alone(program: Path, run: Path, tmp_path: Path) -> None:
    with mps.daemon(tmp_path / "other"):
        with mps.daemon(run):
            pass
        assert guard.is_running(daemon_pid(tmp_path / "other"))


def test_it_is_refused_without_a_gpu_or_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="mps is true, and no stage is on a GPU"):
        deploy_reader.load(write_deploy(tmp_path / "a", mps=True) / "deploy.yaml")
    stages = {"singer": {"device": "gpu:0"}}
    deploy = deploy_reader.load(write_deploy(tmp_path / "b", mps=True, stages=stages) / "deploy.yaml")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="nvidia-cuda-mps-control is not on PATH"):
        mps.is_wanted([deploy])
    assert not mps.is_wanted([deploy_reader.load(write_deploy(tmp_path / "c") / "deploy.yaml")])


@pytest.mark.parametrize("wanted", [True, False])
def test_what_is_rendered_says_who_heeds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wanted: bool
) -> None:
    monkeypatch.setattr(commands, "_require_fit", lambda deploy: None)  # wherever this runs
    folder = write_deploy(tmp_path / "a", mps=wanted, stages={"singer": {"device": "gpu:0"}})
    parser = argparse.ArgumentParser()
    cli.add_commands(parser.add_subparsers())
    args = parser.parse_args(["render", str(folder)])
    assert args.run(args) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == wanted
    assert all("mps: true, which `tritone serve` alone heeds" in line for line in warnings)


def test_urgent_stages_go_first(tmp_path: Path) -> None:
    stages = {
        "writer": {"device": "gpu:0"},
        "singer": {"device": "gpu:0", "colocate": "speech", "urgency": 2},
        "wave": {"device": "gpu:0", "colocate": "speech"},
    }
    deploy = deploy_reader.load(write_deploy(tmp_path / "a", mps=True, stages=stages) / "deploy.yaml")
    assert [deploy.mps_priority(name) for name in stages] == [1, 0, 0]
    spec = EngineSpec(tmp_path, ("writer",), "address", (0,), 1, None, 1.0, deploy.mps_priority("writer"))
    assert spec.environment()["CUDA_MPS_CLIENT_PRIORITY"] == "1"
    without = deploy_reader.load(write_deploy(tmp_path / "b", stages=stages) / "deploy.yaml")
    assert without.mps_priority("singer") is None
