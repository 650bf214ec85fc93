"""The findings: each good, warning and problem case from given facts."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest
from fake_machine import write_deploy, write_file

from tritone import deploy_reader, doctor, pbtxt
from tritone.errors import ConfigError
from tritone.finding import Finding, Level, ok, problem, worst
from tritone.memory_plan import GIB, MIB
from tritone.pipeline import Checkpoint
from tritone.server import Interpreter, Listen, Server


def test_a_finding_is_one_line_with_its_cure() -> None:
    assert str(problem("numpy", "2.1", "run x")) == "problem  numpy       2.1; run x"
    assert str(ok("numpy", "1.26")) == "ok       numpy       1.26"


@pytest.mark.parametrize(
    ("finding", "level"),
    [
        (doctor.check_python((3, 11)), Level.OK),
        (doctor.check_python((3, 13)), Level.PROBLEM),
        (doctor.check_numpy("1.26.4"), Level.OK),
        (doctor.check_numpy("2.4.0"), Level.PROBLEM),
        (doctor.check_shm(8 * GIB, 6), Level.OK),
        (doctor.check_shm(64 * MIB, 6), Level.WARNING),
        (doctor.check_shm(16 * MIB, 6), Level.PROBLEM),
        (doctor.check_exposure(Listen()), Level.OK),
        (doctor.check_exposure(Listen("[::1]")), Level.OK),
        (doctor.check_exposure(Listen("0.0.0.0")), Level.WARNING),
        (doctor.check_exposure(Listen("0.0.0.0"), ["--grpc-use-ssl=0"]), Level.WARNING),
        (doctor.check_exposure(Listen("0.0.0.0"), ["--grpc-use-ssl=1"]), Level.OK),
        (doctor.check_exposure(Listen("10.1.2.3"), ["--grpc-use-ssl-mutual=true"]), Level.OK),
        (doctor.check_cores(1), Level.WARNING),
        (doctor.check_cores(2), Level.OK),
        (doctor.check_torch(None, None, 0), Level.WARNING),
        (doctor.check_torch("2.13.0+cpu", None, 0), Level.OK),
        (doctor.check_torch("2.13.0+cpu", None, 1), Level.WARNING),
        (doctor.check_torch("2.13.0", "13.0", 1, needs_gpu=True), Level.OK),
        (doctor.check_torch("2.13.0", "13.0", 0, needs_gpu=True), Level.PROBLEM),
        (doctor.check_torch("2.13.0+cpu", None, 1, needs_gpu=True), Level.PROBLEM),
    ],
)
def test_levels(finding: Finding, level: Level) -> None:
    assert finding.level is level
    assert bool(finding.cure) is (level is not Level.OK)


def test_shm_problem_names_the_numbers_and_the_flag() -> None:
    assert "16 MiB free, 6 model instances may fill 48 MiB" in str(doctor.check_shm(16 * MIB, 6))
    assert "--shm-size" in doctor.check_shm(0, 6).cure


def test_libpython(interpreter: Interpreter) -> None:
    assert doctor.check_libpython(interpreter).level is Level.OK
    missing = doctor.check_libpython(replace(interpreter, library=None))
    assert missing.level is Level.PROBLEM
    assert f"libpython{interpreter.version}.so.1.0" in missing.what


def test_server(server: Server) -> None:
    found, findings = doctor.check_server(lambda: server)
    assert found is server
    assert [finding.level for finding in findings] == [Level.OK]
    _, findings = doctor.check_server(lambda: replace(server, version="2.69.0"))
    assert [finding.level for finding in findings] == [Level.OK, Level.WARNING]


def test_no_server() -> None:
    def find() -> Server:
        raise ConfigError("there is no tritonserver on this machine", "install it")

    assert doctor.check_server(find) == (
        None,
        [problem("server", "there is no tritonserver on this machine", "install it")],
    )


def test_library(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    assert doctor.check_library(None, here).level is Level.OK
    assert doctor.check_library(here, here).level is Level.OK
    assert f"the doors will import the tritone in {there}" in doctor.check_library(there, here).what


def test_backends(server: Server) -> None:
    assert doctor.check_backends(server).level is Level.OK
    (server.backends / "python" / "libtriton_python.so").unlink()
    assert "lacks libtriton_python.so" in doctor.check_backends(server).what


class TestPorts:
    def test_free(self) -> None:
        assert [f.level for f in doctor.check_ports(Listen(http=0, grpc=0, metrics=0, health=0))] == [
            Level.OK
        ]

    def test_taken_names_the_option(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            [finding] = doctor.check_ports(Listen(http=0, grpc=port, metrics=0, health=0))
        assert finding.level is Level.PROBLEM
        assert f"grpc port {port} on 127.0.0.1 is taken" in finding.what
        assert "--grpc-port" in finding.cure

    def test_given_twice(self) -> None:
        assert "port 8000 is given twice" in doctor.check_ports(Listen(http=8000, grpc=8000))[0].what

    def test_address_of_another_machine(self) -> None:
        [finding] = doctor.check_ports(Listen("192.0.2.1", 8000, 0, 0, 0))
        assert "cannot listen on 192.0.2.1, http port 8000" in finding.what


class TestPipeline:
    def test_threads(self, tmp_path: Path) -> None:
        deploy = deploy_reader.load(write_deploy(tmp_path / "echo", bls_threads=40) / "deploy.yaml")
        assert "40 BLS threads of a pool of 48" in doctor.check_threads(deploy).what
        own = doctor.check_threads(deploy, ["--backend-config=python,thread-pool-size=40"])
        assert own.level is Level.PROBLEM

    def test_tracing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
        silent = deploy_reader.load(write_deploy(tmp_path / "silent") / "deploy.yaml")
        assert doctor.check_tracing(silent) == []
        tracing = {"otlp_endpoint": "http://127.0.0.1:4318"}
        deploy = deploy_reader.load(write_deploy(tmp_path / "echo", tracing=tracing) / "deploy.yaml")
        [finding] = doctor.check_tracing(deploy)
        assert finding.level is Level.OK and "http://127.0.0.1:4318" in finding.what
        monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
        [finding] = doctor.check_tracing(deploy)
        assert finding.level is Level.WARNING and "tritone[tracing]" in finding.cure

    def test_checkpoint(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        deploy = deploy_reader.load(
            write_deploy(tmp_path / "echo", checkpoint=str(tmp_path / "1")) / "deploy.yaml"
        )
        assert doctor.check_checkpoint(deploy)[0].what == "echo needs none"
        deploy = replace(deploy, pipeline=replace(deploy.pipeline, checkpoint=Checkpoint.BUILT))
        [finding] = doctor.check_checkpoint(deploy)  # one line, though every stage lacks it
        assert finding.level is Level.PROBLEM
        assert "no complete checkpoint" in finding.what
        monkeypatch.setattr(type(deploy), "require_checkpoint", type(deploy).stage_folder)
        assert doctor.check_checkpoint(deploy)[0].level is Level.OK


class TestRepository:
    def levels(self, folder: Path) -> list[Level]:
        return [finding.level for finding in doctor.check_repository(folder)]

    def test_rendered(self, echo_folder: Path) -> None:
        pbtxt.write(deploy_reader.load(echo_folder / "deploy.yaml"), echo_folder)
        assert set(self.levels(echo_folder)) == {Level.OK}

    def test_not_rendered(self, echo_folder: Path) -> None:
        [finding] = doctor.check_repository(echo_folder)
        assert finding.cure == f"run `tritone render {echo_folder}`"

    def test_too_high_and_too_low_name_the_right_one(self, echo_folder: Path) -> None:
        pbtxt.write(deploy_reader.load(echo_folder / "deploy.yaml"), echo_folder)
        for wrong in (echo_folder.parent, echo_folder / "echo_wave", echo_folder / "echo_wave" / "1"):
            [finding] = doctor.check_repository(wrong)
            assert finding.level is Level.PROBLEM
            assert finding.cure == f"use '{echo_folder}'"

    def test_bad_deploy(self, echo_folder: Path) -> None:
        (echo_folder / "deploy.yaml").write_text("pipeline: nothing\n")
        assert self.levels(echo_folder) == [Level.PROBLEM]

    def test_stranger(self, echo_folder: Path) -> None:
        pbtxt.write(deploy_reader.load(echo_folder / "deploy.yaml"), echo_folder)
        write_file(echo_folder / "leftover" / "config.pbtxt")
        assert Level.PROBLEM in self.levels(echo_folder)

    def test_absent(self, tmp_path: Path) -> None:
        assert "does not exist" in doctor.check_repository(tmp_path / "none")[0].what


def test_worst() -> None:
    good, bad = ok("a", "b"), problem("a", "b", "c")
    assert worst([good, bad]) is Level.PROBLEM
    assert worst([good]) is Level.OK
