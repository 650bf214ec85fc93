"""What is to run against what there is: sums by device, tables, refusals."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest
from fake_machine import write_deploy, write_file

from tritone import cli, deploy_reader, gpus, memory_plan
from tritone.deploy import Deploy
from tritone.engines.base import Engine
from tritone.engines.memory import Ground, Term, gpu_share, product
from tritone.errors import ConfigError
from tritone.gpus import Gpu
from tritone.memory_plan import CONTEXT_BYTES, GIB, GPU_PROCESS_BYTES, MIB, PROCESS_BYTES, STUB_BYTES, Place
from tritone.pipeline import Checkpoint

RAM = Place("cpu", "RAM", 64 * GIB, 60 * GIB)
H200 = Gpu("H200", 140 * GIB, 139 * GIB)


def load(folder: Path, **fields: object) -> Deploy:
    """A deploy of the echo pipeline whose stages say that they have weights."""
    deploy = deploy_reader.load(write_deploy(folder, **fields) / "deploy.yaml")
    object.__setattr__(deploy.pipeline, "checkpoint", Checkpoint.BUILT)
    return deploy


@pytest.fixture(autouse=True)
def restore() -> object:
    from tritone import pipelines

    pipeline = pipelines.get(str(Path(__file__).parents[2] / "pipelines" / "echo.py"))
    yield
    object.__setattr__(pipeline, "checkpoint", Checkpoint.NONE)


class TestSums:
    def test_processes_stubs_and_files(self, tmp_path: Path) -> None:
        write_file(tmp_path / "1" / "writer" / "weights", bytes(10 * MIB))
        stages = {"singer": {"colocate": "speech"}, "wave": {"colocate": "speech"}}
        deploy = load(tmp_path / "echo", checkpoint=str(tmp_path / "1"), stages=stages)
        plan = memory_plan.plan([deploy], [], RAM)
        assert plan.needed_bytes("cpu") == 5 * STUB_BYTES + 2 * PROCESS_BYTES + 13 * MIB
        assert [place.name for place in plan.used()] == ["cpu"] and plan.too_small() == []

    def test_each_instance_holds_its_own(self, tmp_path: Path) -> None:
        write_file(tmp_path / "1" / "writer" / "weights", bytes(10 * MIB))
        deploy = load(tmp_path / "echo", checkpoint=str(tmp_path / "1"), stages={"writer": {"instances": 3}})
        plan = memory_plan.plan([deploy], [], RAM)
        assert plan.needed_bytes("cpu") == 7 * STUB_BYTES + 5 * PROCESS_BYTES + 3 * 13 * MIB

    def test_gpus(self, tmp_path: Path) -> None:
        write_file(tmp_path / "1" / "writer" / "weights", bytes(10 * MIB))
        stages = {"writer": {"device": "gpu:1"}, "singer": {"device": "gpu"}}
        deploy = load(tmp_path / "echo", checkpoint=str(tmp_path / "1"), stages=stages)
        plan = memory_plan.plan([deploy], [H200, H200], RAM)
        assert plan.needed_bytes("gpu:0") == CONTEXT_BYTES
        assert plan.needed_bytes("gpu:1") == 2 * CONTEXT_BYTES + 13 * MIB
        # A plain `gpu` is a process on each of them.
        assert plan.needed_bytes("cpu") == 5 * STUB_BYTES + PROCESS_BYTES + 3 * GPU_PROCESS_BYTES

    def test_an_engine_over_two_gpus(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        grounds: list[Ground] = []

        def memory(cls: type, ground: Ground, options: object) -> list[Term]:
            grounds.append(ground)
            return [gpu_share(ground, 0.5)]

        monkeypatch.setattr(Engine, "memory", classmethod(memory))
        monkeypatch.setattr(Engine, "spans_gpus", True)
        deploy = load(tmp_path / "echo", stages={"writer": {"device": ["gpu:0", "gpu:1"]}})
        plan = memory_plan.plan([deploy], [H200], RAM)  # the second is named only
        assert [(ground.num_gpus, ground.gpu_bytes) for ground in grounds[:2]] == [(2, 140 * GIB), (2, None)]
        assert plan.needed_bytes("gpu:0") == 70 * GIB + CONTEXT_BYTES
        assert plan.needed_bytes("gpu:1") == CONTEXT_BYTES
        assert plan.needed_bytes("cpu") == 5 * STUB_BYTES + PROCESS_BYTES + GPU_PROCESS_BYTES + PROCESS_BYTES
        unknown = next(place for place in plan.used() if place.name == "gpu:1")
        assert "not on this machine" in plan.summary(unknown) and plan.too_small() == []


class TestRefusal:
    def plan(self, tmp_path: Path, **fields: object) -> memory_plan.MemoryPlan:
        write_file(tmp_path / "1" / "writer" / "weights", bytes(1000 * MIB))
        deploy = load(tmp_path / "echo", checkpoint=str(tmp_path / "1"), **fields)
        return memory_plan.plan([deploy], [H200], RAM)

    def test_the_arithmetic(self, tmp_path: Path) -> None:
        plan = self.plan(tmp_path, stages={"writer": {"device": "gpu:0"}}, memory={"gpu_gib": 2})
        [small] = plan.too_small()
        assert plan.table(small) == [
            "gpu:0: 2.9 GiB planned, 2.0 GiB in all, 2.0 GiB free (as `memory.gpu_gib` says)",
            "  echo writer  weights        1.3 GiB ~ 1,048,576,000 B of files × 1.3",
            "               context        1.7 GiB ~ of a process, with its kernels",
            "  sum                         2.9 GiB",
        ]
        with pytest.raises(
            ConfigError, match=r"gpu:0 is too small: 2\.9 GiB planned, 2\.0 GiB in all"
        ) as refused:
            plan.require_fit()
        assert refused.value.cure == "lower instances, or move a stage to another device"

    def test_what_to_lower_is_named_by_size(self) -> None:
        terms = (
            Term("weights", 4 * GIB, "", lower=""),
            Term("KV cache", 3 * GIB, "", lower="max_slots"),
            Term("graphs", GIB, "", lower="prefill_chunk_tokens"),
        )
        place = Place("gpu:0", "small", 6 * GIB, 5 * GIB)
        plan = memory_plan.MemoryPlan((place,), (memory_plan.Share("gpu:0", "a b", 1, terms),))
        assert plan.cure(place).startswith("lower max_slots of a b (3.0 GiB), prefill_chunk_tokens of a b")

    def test_free_counts_before_a_start_and_all_when_rendered(self, tmp_path: Path) -> None:
        place = Place("gpu:0", "busy", 4 * GIB, GIB)
        share = memory_plan.Share("gpu:0", "a b", 2, (Term("weights", GIB, ""),))
        plan = memory_plan.MemoryPlan((place,), (share,))
        assert plan.too_small() == [place] and plan.too_small(before_start=False) == []

    def test_the_command(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = write_deploy(tmp_path / "echo", stages={"writer": {"device": "gpu:3"}})
        words = ["plan", str(folder), "--ram-gib", "8"]
        assert run(*words) == 0
        assert "gpu:3: 1.7 GiB planned; not on this machine" in capsys.readouterr().out
        assert run(*words, "--gpu-gib", "0.5") == 1
        printed = capsys.readouterr()
        assert "  echo writer  context" in printed.out
        assert "gpu:3 is too small: 1.7 GiB planned, 512 MiB in all" in printed.err

    def test_render_refuses_too(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = write_deploy(
            tmp_path / "echo", stages={"writer": {"device": "gpu:0"}}, memory={"gpu_gib": 0.5}
        )
        assert run("render", str(folder)) == 1
        printed = capsys.readouterr()
        assert "context" in printed.out and "gpu:0 is too small" in printed.err
        assert not (folder / "echo").exists()

    def test_what_is_rendered_for_another_machine_is_not_held_to_this_one(self, tmp_path: Path) -> None:
        stages = {"writer": {"device": "gpu:9"}}
        folder = write_deploy(tmp_path / "echo", stages=stages, memory={"ram_gib": 0.5})
        assert run("render", str(folder)) == 0
        assert (folder / "echo" / "config.pbtxt").exists()


def run(*words: str) -> int:
    import argparse

    parser = argparse.ArgumentParser(prog="tritone")
    cli.add_commands(parser.add_subparsers(dest="command"))
    args = parser.parse_args(list(words))
    return int(args.run(args))


def test_product_tells_its_factors() -> None:
    assert product({"layers": 2, "tokens": 4096}, 2) == (16384, "2 layers × 4,096 tokens × 2 B")


class TestGpus:
    SAID = "0, GPU-aa, NVIDIA H200, 143771, 143000\n1, GPU-bb, NVIDIA H200, 143771, 20000\n"

    def query(self, tmp_path: Path, said: str, status: int = 0) -> tuple[str, ...]:
        script = write_file(tmp_path / "smi", f"#!{sys.executable}\nprint({said!r}, end='')\n".encode())
        if status:
            script.write_text(f"#!{sys.executable}\nraise SystemExit({status})\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        return (str(script),)

    def test_all(self, tmp_path: Path) -> None:
        found = gpus.find({}, self.query(tmp_path, self.SAID))
        assert found == (
            Gpu("NVIDIA H200", 143771 * MIB, 143000 * MIB),
            Gpu("NVIDIA H200", 143771 * MIB, 20000 * MIB),
        )

    @pytest.mark.parametrize(("shown", "free"), [("1", [20000]), ("GPU-bb,0", [20000, 143000]), ("", [])])
    def test_those_that_a_server_would_see(self, tmp_path: Path, shown: str, free: list[int]) -> None:
        found = gpus.find({"CUDA_VISIBLE_DEVICES": shown}, self.query(tmp_path, self.SAID))
        assert [gpu.free_bytes // MIB for gpu in found] == free

    def test_none(self, tmp_path: Path) -> None:
        assert gpus.find({}, ("/nonexistent/nvidia-smi",)) == ()
        assert gpus.find({}, self.query(tmp_path, "", status=9)) == ()
        assert gpus.find({}, self.query(tmp_path, "No devices were found\n")) == ()
