"""The commands as a user types them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from fake_machine import write_deploy, write_file

from tritone import allocator, commands, doctor, finding, pipelines
from tritone import server as servers
from tritone.cli import add_commands
from tritone.server import Interpreter, Server
from tritone_client.cli import main

Output = pytest.CaptureFixture[str]


def tritone(*words: object) -> int:
    parser = argparse.ArgumentParser(prog="tritone")
    add_commands(parser.add_subparsers(dest="command"))
    args = parser.parse_args([str(word) for word in words])
    return int(args.run(args))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class TestRender:
    def test_in_place_then_check_is_content(self, echo_folder: Path, capsys: Output) -> None:
        assert tritone("check", "echo") == 1
        assert "not rendered from this file" in capsys.readouterr().out
        assert tritone("render", "echo") == 0
        assert str(Path("model_repository/echo/echo_writer/config.pbtxt")) in capsys.readouterr().out
        assert tritone("check") == 0  # of every pipeline here

    def test_out_with_override(self, echo_folder: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        assert tritone("render", echo_folder, "--out", out, "--set", "max_in_flight=3") == 0
        assert "max_in_flight: 3" in (out / "deploy.yaml").read_text()
        assert not (echo_folder / "echo").exists()
        assert tritone("check", out) == 0

    def test_override_needs_out(self, echo_folder: Path, capsys: Output) -> None:
        assert tritone("render", "echo", "--set", "max_in_flight=3") == 1
        assert "edit deploy.yaml, or give --out" in capsys.readouterr().err

    def test_another_deploy_is_kept(self, echo_folder: Path, tmp_path: Path, capsys: Output) -> None:
        out = write_deploy(tmp_path / "out", max_in_flight=9)
        assert tritone("render", "echo", "--out", out) == 1
        assert "has other settings; give --overwrite" in capsys.readouterr().err
        assert tritone("render", "echo", "--out", out, "--overwrite") == 0
        assert tritone("check", out) == 0

    def test_again_into_the_same_folder(self, echo_folder: Path, tmp_path: Path) -> None:
        for _ in range(2):
            assert tritone("render", "echo", "--out", tmp_path / "out") == 0

    def test_warns_of_strangers(self, echo_folder: Path, capsys: Output) -> None:
        write_file(echo_folder / "old_stage" / "config.pbtxt")
        assert tritone("render", "echo") == 0
        assert "old_stage is no model of the pipeline" in capsys.readouterr().out


class TestCheck:
    def test_prints_the_chain(self, echo_folder: Path, capsys: Output) -> None:
        tritone("check", "echo")
        out = capsys.readouterr().out
        assert "echo_writer/config.pbtxt -> tritone_engine   -> stage writer (llm_ar)" in out
        assert "python = echo:Writer, 1 x cpu" in out
        assert "edge        writer.text -> singer.text" in out
        assert "final       audio <- wave.pcm" in out

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("pipeline: ecko\n", "unknown pipeline 'ecko'"),
            ("max_in_flight: 3\n", "has no `pipeline:`"),
            ("pipeline: [", "is not YAML"),
        ],
    )
    def test_one_sentence_for_a_bad_file(
        self, echo_folder: Path, text: str, complaint: str, capsys: Output
    ) -> None:
        (echo_folder / "deploy.yaml").write_text(text)
        assert tritone("check", "echo") == 1
        error = capsys.readouterr().err
        assert error.startswith("tritone: ") and error.count("\n") == 1
        assert complaint in error

    def test_nothing_here(self, capsys: Output) -> None:
        assert tritone("check") == 1
        assert "there are no pipelines in 'model_repository'" in capsys.readouterr().err


class TestServe:
    def test_arguments_arrive(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        from tritone import serve

        seen = []
        monkeypatch.setattr(serve, "serve", lambda options, say, asked: seen.append(options) or 0)
        monkeypatch.setattr(serve.Asked, "listen", lambda self: None)
        listen = ["--host", "0.0.0.0", "--grpc-port", "0"]
        words = ["echo", "other", *listen, "--set", "a=1", "--run-dir", tmp_path, "--log", "stderr"]
        assert tritone("serve", *words, "--", "--log-verbose=1", "--id=x") == 0
        [options] = seen
        assert options.targets == ("echo", "other")
        assert options.extra == ("--log-verbose=1", "--id=x")
        assert (options.listen.host, options.listen.http, options.listen.grpc) == ("0.0.0.0", 8000, 0)
        assert (options.overrides, options.run_folder, options.log) == (("a=1",), tmp_path, "stderr")
        assert (options.drain_s, options.open_admin) == (30.0, False)

    @pytest.mark.parametrize(("own", "times"), [(["serve", "echo"], 1), (["tests"], 0)])
    def test_only_a_process_of_its_own_starts_again(
        self, monkeypatch: pytest.MonkeyPatch, own: list[str], times: int
    ) -> None:
        from tritone import serve

        started: list[None] = []
        monkeypatch.setattr(serve, "serve", lambda options, say, asked: 0)
        monkeypatch.setattr(serve.Asked, "listen", lambda self: None)
        monkeypatch.setattr(allocator, "start_again", lambda: started.append(None))
        monkeypatch.setattr("sys.argv", ["tritone", *own])
        assert main(["serve", "echo"]) == 0
        assert len(started) == times

    @pytest.mark.parametrize(
        ("words", "port"),
        [
            ([], 8003),
            (["--metrics-port", "9000"], 9001),
            (["--metrics-port", "0"], 0),
            (["--metrics-port", "0", "--health-port", "7"], 7),
        ],
    )
    def test_the_health_port_comes_after_that_of_metrics(
        self, monkeypatch: pytest.MonkeyPatch, words: list[str], port: int
    ) -> None:
        from tritone import serve

        seen = []
        monkeypatch.setattr(serve, "serve", lambda options, say, asked: seen.append(options) or 0)
        monkeypatch.setattr(serve.Asked, "listen", lambda self: None)
        assert tritone("serve", "echo", *words, "--drain-s", "0", "--open-admin") == 0
        assert (seen[0].listen.health, seen[0].drain_s, seen[0].open_admin) == (port, 0.0, True)

    @pytest.mark.parametrize("drain", ["-1", "nan", "inf", "long"])
    def test_bad_drain(self, drain: str) -> None:
        with pytest.raises(SystemExit, match="2"):
            tritone("serve", "echo", f"--drain-s={drain}")

    def test_check(
        self, echo_folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: Output
    ) -> None:
        monkeypatch.setattr(doctor, "machine", lambda python: (server, [finding.ok("server", "fake")]))
        ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
        assert tritone("serve", "echo", "--check", *ports) == 0
        out = capsys.readouterr().out
        for subject in ("server", "shm", "memory", "ports", "threads", "checkpoint"):
            assert f"ok       {subject}" in out

    def test_a_pipeline_must_be_named(self, capsys: Output) -> None:
        with pytest.raises(SystemExit, match="2"):
            tritone("serve", "--", "--log-verbose=1")

    def test_unknown_pipeline(self, capsys: Output) -> None:
        assert tritone("serve", "ecko") == 1
        assert "'ecko' is neither a pipeline nor a folder" in capsys.readouterr().err

    @pytest.mark.parametrize("port", ["-1", "65536", "http"])
    def test_bad_port(self, port: str) -> None:
        with pytest.raises(SystemExit, match="2"):
            tritone("serve", "echo", "--http-port", port)


class TestDoctor:
    def test_exit_status_follows_the_worst(self, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
        findings = [finding.ok("a", "b"), finding.warning("c", "d", "e")]
        monkeypatch.setattr(commands, "examine", lambda repositories, listen: iter(findings))
        assert tritone("doctor") == 0
        findings.append(finding.problem("f", "g", "h"))
        assert tritone("doctor") == 1
        assert capsys.readouterr().out.endswith("problem  f           g; h\n")

    def test_this_machine(self, echo_folder: Path, capsys: Output) -> None:
        status = tritone("doctor", "--model-repository", echo_folder.parent, "--http-port", "0")
        out = capsys.readouterr().out
        assert status == 1
        assert "use 'model_repository/echo'" in out or f"use '{echo_folder}'" in out
        for subject in (
            "python",
            "numpy",
            "libpython",
            "server",
            "shm",
            "memory",
            "cores",
            "torch",
            "checkpoints",
        ):
            assert subject in out


def test_models_lists_every_pipeline(capsys: Output) -> None:
    assert tritone("models") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == pipelines.names()


def test_backends_prints_a_command_that_needs_nothing_of_ours(
    echo_folder: Path,
    server: Server,
    interpreter: Interpreter,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Output,
) -> None:
    monkeypatch.setattr(servers, "find", lambda python: server)
    monkeypatch.setattr(Interpreter, "current", lambda: interpreter)
    assert tritone("backends", "composed", "echo") == 0
    line = capsys.readouterr().out
    assert Path("composed/tritone_engine/model.py").exists()
    assert f"--backend-directory={Path('composed').resolve()}" in line
    assert f"--model-repository={echo_folder.resolve()}" in line
    assert line.startswith("LD_LIBRARY_PATH=")
