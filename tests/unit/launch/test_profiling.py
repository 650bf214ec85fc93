"""`tritone profile` finds the process that is meant, and takes one profile of it at a time."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tritone import deploy_reader, profiling, wire
from tritone.deploy import Deploy
from tritone.errors import (
    ConfigError,
    InvalidRequest,
    NotFound,
    TritoneError,
    Unavailable,
    Unsupported,
)
from tritone.profiling import Profiler
from tritone.stubs import Stubs

SERVER_PID = 4_000_000 + os.getpid()  # above every real one
ECHO = Path(__file__).parents[2] / "pipelines" / "echo.py"
BUSY = "import time\ndef spin():\n    while True: sum(range(1000))\nprint('up', flush=True)\nspin()"

Reply = Callable[[wire.TraceTorch, wire.Channel], None]
Serve = Callable[[str, Reply], None]


def deploy(profiling: bool = True, **stages: dict[str, object]) -> Deploy:
    return deploy_reader.from_mapping(
        {"pipeline": str(ECHO), "profiling": profiling, "stages": stages}, "test"
    )


def order(stage: str = "writer", kind: str = "torch", form: str = "json.gz", **more: object) -> wire.Profile:
    return wire.Profile("echo", stage, kind, form, **{"seconds": 1, **more})  # type: ignore[arg-type]


def take(
    asked: wire.Profile, profiler: Profiler | None = None, served: Deploy | None = None
) -> wire.Profiled:
    return (profiler or Profiler()).take(asked, served or deploy(), SERVER_PID, Stubs("none"))


@pytest.fixture
def engine() -> Iterator[Serve]:
    """Serve an engine's socket, by the end of its name."""
    listening, channels = [], []

    def serve(name: str, reply: Reply) -> None:
        sock = wire.listen(f"tritone/{SERVER_PID}-1/{name}")
        listening.append(sock)

        def attend() -> None:
            try:
                channel = wire.accept(sock)
            except OSError:
                return  # nobody came
            channels.append(channel)
            channel.send(wire.Ready(0.1))
            asked = channel.receive()
            assert isinstance(asked, wire.TraceTorch)
            reply(asked, channel)

        threading.Thread(target=attend, daemon=True).start()

    yield serve
    for sock in listening:
        sock.shutdown(socket.SHUT_RDWR)  # wakes who waits for a peer
        sock.close()
    for channel in channels:
        channel.close()


def tell(data: bytes) -> Reply:
    return lambda asked, channel: channel.send(wire.Profiled(data, f"{asked.seconds:g} s"))


@pytest.fixture
def busy() -> Iterator[int]:
    """A process that works."""
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    yield process.pid
    process.kill()
    process.communicate()


class TestTorch:
    def test_by_instance_and_group(self, engine: Serve) -> None:
        for index in (10, 0, 2):
            engine(f"echo_writer/cpu/{index}", tell(f"writer {index}".encode()))
        engine("echo+speech/cpu/0", tell(b"speech"))
        engine("inbox/echo/7", tell(b"nobody"))
        assert take(order(seconds=3)) == wire.Profiled(b"writer 0", "3 s")
        assert [take(order(instance=number)).data for number in (1, 2)] == [b"writer 2", b"writer 10"]
        together = deploy(singer={"colocate": "speech"})
        assert take(order("singer"), served=together).data == b"speech"

    def test_large_ones_come_whole(self, engine: Serve) -> None:
        data = os.urandom(3 << 20)
        engine("echo_writer/cpu/0", tell(data))
        assert take(order()).data == data

    def test_what_the_engine_refuses(self, engine: Serve) -> None:
        engine("echo_writer/cpu/0", lambda a, c: c.send(wire.Refused(a.call, "UNSUPPORTED", "no", "do so")))
        with pytest.raises(Unsupported, match="no; do so"):
            take(order())

    def test_an_engine_that_dies(self, engine: Serve) -> None:
        engine("echo_writer/cpu/0", lambda _, channel: channel.close())
        with pytest.raises(Unavailable, match="the engine of stage writer ended"):
            take(order())

    def test_an_engine_that_never_answers(self, engine: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(profiling, "MARGIN_S", -0.8)
        engine("echo_writer/cpu/0", lambda asked, channel: None)
        with pytest.raises(Unavailable, match=r"gave no profile within 0.2 s; give --kind py-spy"):
            take(order())

    def test_two_at_once(self, engine: Serve) -> None:
        profiler, begun, go_on = Profiler(), threading.Event(), threading.Event()

        def slowly(asked: wire.TraceTorch, channel: wire.Channel) -> None:
            begun.set()
            assert go_on.wait(10)
            tell(b"first")(asked, channel)

        engine("echo_writer/cpu/0", slowly)
        done: list[wire.Profiled] = []
        first = threading.Thread(target=lambda: done.append(take(order(), profiler)))
        first.start()
        assert begun.wait(10)
        with pytest.raises(Unavailable, match="is being profiled already"):
            take(order(kind="py-spy", form="txt"), profiler)
        go_on.set()
        first.join(10)
        assert done == [wire.Profiled(b"first", "1 s")]


class TestRefusals:
    def test_where_deploy_does_not_allow_it(self, engine: Serve) -> None:
        engine("echo_writer/cpu/0", tell(b""))
        with pytest.raises(Unsupported, match=r"profiling is off.*profiling: true.*--set profiling=true"):
            take(order(), served=deploy(profiling=False))

    @pytest.mark.parametrize(
        ("asked", "kind", "words"),
        [
            (order("writr"), NotFound, "no stage 'writr'; did you mean 'writer'"),
            (order("singer"), NotFound, "'singer' has no process 0 now; try again"),
            (order(kind="perf"), InvalidRequest, "no kind 'perf'; known: py-spy, torch"),
            (
                order(form="svg"),
                InvalidRequest,
                r"cannot write a .svg file; end --out with .json.gz or .json",
            ),
            (order(kind="py-spy", form="gz"), InvalidRequest, r"end --out with .svg or .json or .txt"),
            (order(seconds=0), InvalidRequest, "--seconds is 0; give 1 to 60"),
            (order(seconds=61), InvalidRequest, "--seconds is 61; give 1 to 60"),
            (order("orchestrator"), Unsupported, "a door runs no torch"),
            (order(door=True), Unsupported, "a door runs no torch"),
            (order("orchestrator", "py-spy", "svg"), NotFound, "'orchestrator' has no process 0 now"),
        ],
    )
    def test_what_cannot_be(self, asked: wire.Profile, kind: type[TritoneError], words: str) -> None:
        with pytest.raises(kind, match=words):
            take(asked)

    def test_an_instance_that_is_not(self, engine: Serve) -> None:
        engine("echo_writer/cpu/0", tell(b""))
        with pytest.raises(NotFound, match="no process 1 now; it has 1, counted from 0"):
            take(order(instance=1))


class TestPySpy:
    @pytest.fixture(autouse=True)
    def allowed(self, busy: int) -> None:
        try:
            profiling.sample(order(kind="py-spy", form="txt"), busy)
        except Unsupported as error:
            pytest.skip(str(error))

    def test_the_stacks_of_this_moment(self, busy: int) -> None:
        seen = profiling.sample(order(kind="py-spy", form="txt"), busy)
        assert b"spin (<string>:3)" in seen.data and seen.said == f"the stacks of process {busy}"

    def test_a_flame_graph(self, busy: int) -> None:
        seen = profiling.sample(order(kind="py-spy", form="svg"), busy)
        assert b"<svg" in seen.data and b"spin" in seen.data and seen.said == f"1 s of process {busy}"

    def test_a_speedscope_file(self, busy: int) -> None:
        seen = json.loads(profiling.sample(order(kind="py-spy", form="json"), busy).data)
        assert "spin" in {frame["name"] for frame in seen["shared"]["frames"]}
        assert sum(map(len, (thread["samples"] for thread in seen["profiles"]))) > 0

    @pytest.mark.parametrize("form", ["svg", "json"])
    def test_a_process_that_sleeps(self, form: str) -> None:
        sleeper = subprocess.Popen(
            [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"],
            stdout=subprocess.PIPE,
        )
        assert sleeper.stdout is not None and sleeper.stdout.readline() == b"up\n"
        with sleeper:
            try:
                with pytest.raises(Unavailable, match="did nothing meanwhile; profile it while it has"):
                    profiling.sample(order(kind="py-spy", form=form), sleeper.pid)
            finally:
                sleeper.kill()

    def test_a_process_that_is_gone(self) -> None:
        with pytest.raises(TritoneError, match=r"py-spy failed: .*; try again"):
            profiling.sample(order(kind="py-spy", form="txt"), SERVER_PID)


class TestWithoutPySpy:
    @pytest.fixture
    def scripts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Where py-spy would be."""
        monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
        monkeypatch.setenv("PATH", str(tmp_path))
        return tmp_path

    def test_not_installed(self, scripts: Path) -> None:
        with pytest.raises(ConfigError, match=r"py-spy is not installed; .*tritone\[profile\]"):
            profiling.sample(order(kind="py-spy", form="txt"), os.getpid())

    @pytest.mark.parametrize(
        ("said", "kind", "words"),
        [
            ("Permission Denied: Try running again with sudo", Unsupported, "CAP_SYS_PTRACE"),
            ("warning\nError: no Python here\nStack backtrace:", TritoneError, "failed: no Python here; try"),
            ("", TritoneError, "py-spy failed: ; try again"),
        ],
    )
    def test_what_it_says(self, scripts: Path, said: str, kind: type[TritoneError], words: str) -> None:
        program = scripts / "py-spy"
        program.write_text(f"#!/bin/sh\nprintf '%s' '{said}' >&2\nexit 1\n")
        program.chmod(0o755)
        with pytest.raises(kind, match=words):
            profiling.sample(order(kind="py-spy", form="svg"), os.getpid())


class TestFile:
    def test_replaces_at_the_end_only(self, tmp_path: Path) -> None:
        path = tmp_path / "a.svg"
        path.write_bytes(b"old")
        with pytest.raises(RuntimeError), profiling.replacing(path) as file:
            file.write(b"half")
            raise RuntimeError
        assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
        with profiling.replacing(path) as file:
            file.write(b"new")
        assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]

    def test_nowhere(self, tmp_path: Path) -> None:
        with (
            pytest.raises(ConfigError, match=r"cannot write .*: No such file.*give another --out"),
            profiling.replacing(tmp_path / "none" / "a.svg"),
        ):
            pass

    def test_its_form(self) -> None:
        names = ("a.svg", "b.x.json.gz", "b.json", "c")
        assert [profiling.form_of(Path(name)) for name in names] == ["svg", "json.gz", "json", ""]
