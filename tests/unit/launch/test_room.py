"""What a machine has free, and what of it is enough for pipelines that start, or change while others run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_machine import write_deploy, write_file

from tritone import deploy_reader, gpus
from tritone.deploy import Deploy
from tritone.errors import ConfigError
from tritone.finding import Level
from tritone.gpus import Gpu
from tritone.memory_plan import CONTEXT_BYTES, GIB, MIB, STUB_BYTES, Place
from tritone.ram import ram
from tritone.room import Room, check_planned, require_room

RAM = Place("cpu", "RAM", 64 * GIB, 60 * GIB)


def test_what_is_served_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = deploy_reader.load(write_deploy(tmp_path / "a", memory={"ram_gib": 2}) / "deploy.yaml")
    [finding] = check_planned([roomy], Room.now())
    assert finding.level is Level.OK and "2.0 GiB in all" in finding.what
    tight = deploy_reader.load(write_deploy(tmp_path / "b", memory={"ram_gib": 1}) / "deploy.yaml")
    [finding] = check_planned([tight], Room.now())
    assert finding.level is Level.PROBLEM
    assert "cpu is too small: 1.3 GiB planned, 1.0 GiB in all" in finding.what
    assert finding.cure == "lower instances, or free some"
    far = deploy_reader.load(
        write_deploy(tmp_path / "c", stages={"wave": {"device": "gpu:1"}}) / "deploy.yaml"
    )
    monkeypatch.setattr(gpus, "num_gpus", lambda: 1)
    [ram, gpu, missing] = check_planned([far], Room((), RAM))
    assert (ram.level, gpu.level, missing.level) == (Level.OK, Level.OK, Level.PROBLEM)
    assert missing.what == "gpu:1 is not on this machine, which shows 1"
    assert [line.split()[:2] for line in str(finding).splitlines()[1:]] == [
        ["echo", "writer"],
        ["echo", "singer"],
        ["echo", "wave"],
        ["echo", "server"],
        ["sum", "1.3"],
    ]


class TestReload:
    """Each stage of echo is a process of RAM, or a context of a GPU: there are no weights."""

    @pytest.fixture
    def served(self, tmp_path: Path) -> list[Deploy]:
        return [self.load(tmp_path / "old"), self.renamed(self.load(tmp_path / "other"), "other")]

    def load(self, folder: Path, **stages: object) -> Deploy:
        return deploy_reader.load(write_deploy(folder, stages=stages) / "deploy.yaml")

    def renamed(self, deploy: Deploy, name: str) -> Deploy:
        return replace(deploy, pipeline=replace(deploy.pipeline, name=name))

    def room(self, ram_bytes: int, *gpu_bytes: int) -> Room:
        cards = tuple(Gpu("H200", 140 * GIB, free) for free in gpu_bytes)
        return Room(cards, Place("cpu", "RAM", 64 * GIB, ram_bytes))

    def test_what_was_free_at_the_start_counts_for_all_that_is_served(
        self, served: list[Deploy], tmp_path: Path
    ) -> None:
        new = self.load(tmp_path / "new", writer={"instances": 2})
        enough = Room((), RAM).plan([served[1], new]).needed_bytes("cpu")
        require_room(served, new, self.room(enough), Room((), RAM))
        with pytest.raises(ConfigError) as caught:
            require_room(served, new, self.room(enough - 1), Room((), RAM))
        assert caught.value.what == (
            "echo cannot be loaded as its deploy file says: cpu is too small: 3.0 GiB planned, 64.0 GiB in "
            "all, 3.0 GiB free (RAM), "
            "counting all that is served, and what was free before the server started"
        )
        assert caught.value.cure == "lower instances, or free some"

    def test_what_it_adds_must_be_free_now(self, served: list[Deploy], tmp_path: Path) -> None:
        new = self.load(tmp_path / "new", writer={"instances": 2})
        more = 350 * MIB + STUB_BYTES
        require_room(served, new, Room((), RAM), self.room(more))
        with pytest.raises(ConfigError, match=r"on cpu it would hold 410 MiB more than now, and 409 MiB are"):
            require_room(served, new, Room((), RAM), self.room(more - 1))

    def test_no_more_than_it_holds_needs_nothing_free(self, served: list[Deploy], tmp_path: Path) -> None:
        same = replace(self.load(tmp_path / "new"), max_in_flight=3)
        require_room(served, same, Room((), RAM), self.room(0))

    def test_a_gpu_it_moves_to(
        self, served: list[Deploy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        new = self.load(tmp_path / "new", wave={"device": "gpu:1"})
        start = self.room(60 * GIB, 139 * GIB, 139 * GIB)
        require_room(served, new, start, self.room(60 * GIB, 0, CONTEXT_BYTES))
        with pytest.raises(ConfigError, match=r"on gpu:1 it would hold 1\.7 GiB more than now, and 0 MiB"):
            require_room(served, new, start, self.room(60 * GIB, 139 * GIB, 0))
        monkeypatch.setattr(gpus, "num_gpus", lambda: 1)
        with pytest.raises(ConfigError, match="gpu:1 is not on this machine, which shows 1"):
            require_room(served, new, self.room(60 * GIB, 139 * GIB), self.room(60 * GIB, 139 * GIB))


def test_memory_respects_the_container(tmp_path: Path) -> None:
    def sizes(cgroup: str) -> tuple[int | None, int | None]:
        place = ram(tmp_path / "proc", tmp_path / cgroup)
        return place.total_bytes, place.free_bytes

    write_file(tmp_path / "proc" / "meminfo", b"MemTotal: 9216 kB\nMemAvailable:    4096 kB\n")
    assert sizes("none") == (9 * MIB, 4 * MIB)
    write_file(tmp_path / "cgroup" / "memory.max", b"3145728\n")
    write_file(tmp_path / "cgroup" / "memory.current", b"1048576\n")
    assert sizes("cgroup") == (3 * MIB, 2 * MIB)
    write_file(tmp_path / "cgroup" / "memory.max", b"max\n")
    assert sizes("cgroup") == (9 * MIB, 4 * MIB)


def test_num_gpus(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        write_file(tmp_path / name)
    assert gpus.num_gpus(tmp_path) == 2
