"""Finding a server, composing its backend directory, its environment and command line."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fake_machine import PYTHON_VERSION, write_deploy, write_file

import tritone
from tritone import deploy_reader
from tritone import server as servers
from tritone.errors import ConfigError
from tritone.server import DOORS, STUB, Interpreter, Listen, Server


class TestFind:
    def test_packaged(self, package: Path, interpreter: Interpreter, tmp_path: Path) -> None:
        server = servers.find(tmp_path / "nowhere", package, interpreter)
        assert str(server) == "Triton 2.51.0 (nvidia-pytriton 0.7.0)"
        assert server.stub.parent.name == PYTHON_VERSION
        assert server.libraries == (package / "nvidia_pytriton.libs",)

    def test_container_comes_first(self, container: Path, package: Path, interpreter: Interpreter) -> None:
        server = servers.find(container, package, interpreter)
        assert server.version == "2.71.0"
        assert server.binary == container / "bin" / "tritonserver"

    def test_none_says_what_to_install(
        self, tmp_path: Path, interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(servers, "_site_packages", lambda: None)
        with pytest.raises(ConfigError, match=r"no tritonserver.*pip install 'tritone\[server\]'"):
            servers.find(tmp_path, None, interpreter)

    def test_container_of_another_python(self, container: Path, interpreter: Interpreter) -> None:
        write_file(container / "backends" / "python" / STUB, b"libpython3.14.so.1.0")
        with pytest.raises(ConfigError, match=rf"embeds Python 3.14, and this is Python {PYTHON_VERSION}"):
            servers.find(container, None, interpreter)

    def test_container_without_python_backend(self, container: Path, interpreter: Interpreter) -> None:
        (container / "backends" / "python" / STUB).unlink()
        with pytest.raises(ConfigError, match="no python backend; use an image"):
            servers.find(container, None, interpreter)

    def test_packaged_without_stub_for_this_python(
        self, package: Path, interpreter: Interpreter, tmp_path: Path
    ) -> None:
        with pytest.raises(ConfigError, match=r"no stub for Python 3\.99; use one of Python 3\.9, 3\.10"):
            servers.find(tmp_path, package, replace(interpreter, version="3.99"))

    def test_the_installed_one(self) -> None:
        pytest.importorskip("pytriton")
        server = servers.find()
        assert server.version == "2.51.0"
        assert {"exit-timeout-secs", "disable-auto-complete-config", "model-control-mode"} <= server.options()


def test_libpython_is_looked_for_in_order(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    for folder in folders[1:]:
        write_file(folder / "libpython3.11.so.1.0")
    assert servers.find_libpython("3.11", folders) == tmp_path / "b" / "libpython3.11.so.1.0"
    assert servers.find_libpython("3.12", folders) is None


def test_options_of_a_server_that_cannot_run(server: Server, tmp_path: Path) -> None:
    script = b"#!/bin/sh\necho 'cannot open shared object file: libfoo.so' >&2; exit 127\n"
    broken = replace(server, binary=write_file(tmp_path / "broken", script, executable=True))
    with pytest.raises(
        ConfigError, match=r"does not run: cannot open shared object file: libfoo\.so; install"
    ):
        broken.options()


@pytest.mark.parametrize(
    ("version", "count"), [("2.51.0", 0), ("2.50.1", 1), ("2.55.0", 1), ("2.69.0", 1), ("2.71.0", 0), ("", 0)]
)
def test_known_faults(version: str, count: int) -> None:
    assert len(servers.known_faults(version)) == count


class TestCompose:
    def test_backend_is_copied_and_doors_are_linked(self, server: Server, tmp_path: Path) -> None:
        folder = servers.compose(server, tmp_path / "backends")
        for name in (*servers.BACKEND_FILES, STUB):
            file = folder / "python" / name
            assert file.is_file() and not file.is_symlink()  # the server refuses a library outside the folder
        assert (folder / "python" / STUB).stat().st_mode & 0o111
        for door in DOORS:
            assert (folder / door).is_symlink()
            assert (folder / door / "model.py").is_file()

    def test_a_checkout_that_is_not_installed_reaches_the_stubs(self, server: Server, tmp_path: Path) -> None:
        folder = servers.compose(server, tmp_path / "backends")
        code = "import tritone; print(tritone.__file__)"
        found = subprocess.run(
            [sys.executable, "-Sc", code],
            env={"PYTHONPATH": str(folder / "python")},
            capture_output=True,
            text=True,
        )
        assert Path(found.stdout.strip()).resolve() == Path(tritone.__file__).resolve()

    def test_again_replaces_files_that_a_server_maps(self, server: Server, tmp_path: Path) -> None:
        library = servers.compose(server, tmp_path / "backends") / "python" / "libtriton_python.so"
        before = library.stat().st_ino
        with library.open("rb"):
            servers.compose(server, tmp_path / "backends")
            assert library.stat().st_ino != before
        left = sorted(file.name for file in library.parent.iterdir())
        assert left == sorted((*servers.BACKEND_FILES, STUB, "tritone"))

    def test_leaves_a_users_folder_alone(self, server: Server, tmp_path: Path) -> None:
        write_file(tmp_path / "backends" / "tritone_batch" / "model.py")
        with pytest.raises(ConfigError, match="not a link made by tritone"):
            servers.compose(server, tmp_path / "backends")

    def test_incomplete_server(self, server: Server, tmp_path: Path) -> None:
        (server.backends / "python" / "libtriton_python.so").unlink()
        with pytest.raises(ConfigError, match="the python backend lacks"):
            servers.compose(server, tmp_path / "backends")


class TestEnvironment:
    def test_paths_go_in_front(self, server: Server, interpreter: Interpreter) -> None:
        base = {
            "PATH": "/usr/bin",
            "LD_LIBRARY_PATH": "/cuda",
            "PYTHONHOME": "/elsewhere",
            "HOME": "/home/me",
        }
        env = servers.environment(server, interpreter, base)
        assert interpreter.library is not None
        expected = f"{server.libraries[0]}:{interpreter.library.parent}:/cuda"
        assert env["LD_LIBRARY_PATH"] == expected
        assert env["PATH"] == f"{interpreter.bin}:/usr/bin"
        assert env["HOME"] == "/home/me"
        assert "PYTHONHOME" not in env

    def test_shell_line_does_the_same(self, tmp_path: Path) -> None:
        paths = {"A_PATH": ["/with space", "/b"], "B_PATH": ["/c"]}
        line = servers.shell_line(paths, ["bash", "-c", 'echo "$A_PATH|$B_PATH|$0"', "an $option"])
        result = subprocess.run(
            ["bash", "-c", line], env={"PATH": "/usr/bin:/bin", "B_PATH": "/d"}, capture_output=True
        )
        assert result.stdout.decode().strip() == "/with space:/b|/c:/d|an $option"


class TestCommand:
    def words(self, server: Server, tmp_path: Path, **more: object) -> list[str]:
        listen = Listen(http=1, grpc=2, metrics=3)
        return servers.command(server, [tmp_path / "a", tmp_path / "b"], tmp_path, listen, **more)  # type: ignore[arg-type]

    def test_listens_only_here_by_default(self, server: Server, tmp_path: Path) -> None:
        words = self.words(server, tmp_path)
        for name in ("http", "grpc", "metrics"):
            assert f"--{name}-address=127.0.0.1" in words
        assert {"--http-port=1", "--grpc-port=2", "--metrics-port=3"} <= set(words)
        assert [word for word in words if word.startswith("--model-repository")] == [
            f"--model-repository={tmp_path / name}" for name in "ab"
        ]
        assert {"--disable-auto-complete-config", "--model-control-mode=none"} <= set(words)

    def test_thread_pool_is_left_alone_unless_needed(self, server: Server, tmp_path: Path) -> None:
        assert not any("thread-pool-size" in word for word in self.words(server, tmp_path))
        assert "--backend-config=python,thread-pool-size=72" in self.words(server, tmp_path, threads=72)

    def test_shm_prefix(self, server: Server, tmp_path: Path) -> None:
        words = self.words(server, tmp_path, shm_prefix="mine_")
        assert "--backend-config=python,shm-region-prefix-name=mine_" in words

    def test_users_options_come_last(self, server: Server, tmp_path: Path) -> None:
        assert self.words(server, tmp_path, extra=["--log-verbose=1"])[-1] == "--log-verbose=1"


@pytest.mark.parametrize(("bls_threads", "expected"), [(24, None), (25, 33), (64, 72)])
def test_pool_threads(tmp_path: Path, bls_threads: int, expected: int | None) -> None:
    folder = write_deploy(tmp_path / "echo", bls_threads=bls_threads)
    assert servers.pool_threads([deploy_reader.load(folder / "deploy.yaml")]) == expected


def test_an_open_host_is_near_at_loopback() -> None:
    assert Listen("0.0.0.0").grpc_url == "127.0.0.1:8001"
    assert Listen("10.0.0.7").http_url == "http://10.0.0.7:8000"
