"""Deploy profiles: laid over deploy.yaml, found by name or path; those in the box fit what they are for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import qwen3_omni_real_size
import yaml

from tritone import deploy_reader, gpus, memory_plan, pbtxt, pipelines
from tritone.deploy import Deploy
from tritone.engines.memory import Term
from tritone.errors import ConfigError
from tritone.finding import Level
from tritone.memory_plan import GIB, Place
from tritone.profile_file import read_profile
from tritone.room import check_memory
from tritone.serve import load_pipelines

ECHO = Path(__file__).parents[2] / "pipelines" / "echo.py"
OMNI = Path(__file__).parents[3] / "model_repository" / "qwen3_omni" / "deploy.yaml"
H200 = gpus.Gpu("H200", int(139.8 * GIB), int(139.8 * GIB))
RAM = Place("cpu", "RAM", 128 * GIB, 120 * GIB)


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    folder = tmp_path / "echo"
    folder.mkdir()
    (folder / "deploy.yaml").write_text(
        yaml.safe_dump({"pipeline": str(ECHO), "max_in_flight": 5, "stages": {"writer": {"threads": 2}}})
    )
    return folder


def write(path: Path, **fields: object) -> str:
    path.write_text(yaml.safe_dump(fields))
    return str(path)


def test_order_is_deploy_then_profile_then_override(echo: Path, tmp_path: Path) -> None:
    profile = write(
        tmp_path / "p.yaml", max_in_flight=6, stages={"writer": {"lease_s": 700}, "singer": {"threads": 3}}
    )
    deploy = deploy_reader.load(echo / "deploy.yaml", ["stage.singer.threads=4"], profile)
    assert (deploy.max_in_flight, deploy.stage("writer").threads, deploy.stage("writer").lease_s) == (
        6,
        2,
        700,
    )
    assert deploy.stage("singer").threads == 4
    assert deploy.digest != deploy_reader.load(echo / "deploy.yaml").digest


def test_one_over_another(echo: Path, tmp_path: Path) -> None:
    below = write(tmp_path / "below.yaml", max_in_flight=6, max_queued=1)
    above = write(tmp_path / "above.yaml", over=below, max_queued=2)
    deploy = deploy_reader.load(echo / "deploy.yaml", (), above)
    assert (deploy.max_in_flight, deploy.max_queued) == (6, 2)
    ring = tmp_path / "ring.yaml"
    with pytest.raises(ConfigError, match="lies over itself"):
        deploy_reader.load(echo / "deploy.yaml", (), write(ring, over=str(ring)))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("pipeline: echo", "has the key 'pipeline'"),
        ("- 1", "holds no mapping"),
        ("max_in_flihgt: 3", "max_in_flight"),
        (": {", "is not YAML"),
    ],
)
def test_a_bad_one_is_refused(echo: Path, tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        deploy_reader.load(echo / "deploy.yaml", (), str(tmp_path / "bad.yaml"))
    assert what in str(refused.value)


def test_an_unknown_name_gets_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no profile 'one_h100'.*one_h200"):
        read_profile("one_h100", "qwen3_omni")
    with pytest.raises(ConfigError, match="'fake' has no profile 'one_h200'; name a file"):
        read_profile("one_h200", "fake")


def test_a_name_for_one_of_several_pipelines(echo: Path, tmp_path: Path) -> None:
    fake, other = write(tmp_path / "f.yaml", max_in_flight=7), write(tmp_path / "e.yaml", max_in_flight=8)
    served = load_pipelines([str(echo), "fake"], [], [f"fake:{fake}", other])
    assert [deploy.max_in_flight for deploy in served] == [8, 7]
    with pytest.raises(ConfigError, match="'echo' has two profiles"):
        load_pipelines([str(echo)], [], [fake, other])


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    qwen3_omni_real_size.write_config(folder)
    return folder


class TestInTheBox:
    def load(self, name: str, checkpoint: Path, *overrides: str) -> Deploy:
        dummy = [f"stage.{stage}.engine.load_format=dummy" for stage in ("thinker", "talker", "code2wav")]
        return deploy_reader.load(OMNI, [f"checkpoint={checkpoint}", *dummy, *overrides], name)

    def test_names(self) -> None:
        names = ["dummy_one_h200", "one_h200", "one_h200_together", "one_h200_vllm", "two_gpus"]
        assert list(pipelines.profiles("qwen3_omni")) == names
        assert pipelines.profiles("fake") == {}

    @pytest.mark.parametrize("name", list(pipelines.profiles("qwen3_omni")))
    def test_each_renders_and_fits(self, name: str, real: Path) -> None:
        deploy = self.load(name, real)
        assert len(pbtxt.texts(deploy)) == 5
        plan = memory_plan.plan([deploy], [H200, H200], RAM)
        assert plan.too_small() == []
        plan.require_fit()
        # What is estimated may be off. (An H200 held 121.2 GiB of the 128.7 that are planned for one_h200.)
        assert max(plan.needed_bytes(f"gpu:{number}") for number in (0, 1)) < 0.925 * H200.total_bytes

    def test_one_h200_is_all_on_one(self, real: Path) -> None:
        plan = memory_plan.plan([self.load("one_h200", real)], [H200], RAM)
        assert [place.name for place in plan.used()] == ["cpu", "gpu:0"]
        [small] = memory_plan.plan(
            [self.load("one_h200", real, "memory.gpu_gib=80")], [H200], RAM
        ).too_small()
        assert small.name == "gpu:0"
        # Two engines of each stage there are too much.
        twice = self.load("one_h200", real, "stage.thinker.instances=2")
        assert memory_plan.plan([twice], [H200], RAM).too_small() != []

    def test_together_is_two_contexts_less(self, real: Path) -> None:
        apart, together = (self.load(name, real) for name in ("one_h200", "one_h200_together"))
        assert together.hosted_with("code2wav") == ("thinker", "talker", "code2wav")
        needed = [
            memory_plan.plan([deploy], [H200], RAM).needed_bytes("gpu:0") for deploy in (apart, together)
        ]
        assert needed[0] - needed[1] == 2 * memory_plan.CONTEXT_BYTES

    def test_vllm_differs_in_the_thinker_alone(self, real: Path) -> None:
        torch, vllm = (self.load(name, real) for name in ("one_h200", "one_h200_vllm"))
        assert {name for name in torch.stages if torch.stage(name) != vllm.stage(name)} == {"thinker"}
        thinker = vllm.stage("thinker")
        assert thinker.engine == "vllm" and thinker.options.max_slots == torch.max_in_flight
        # It has room for half of all sessions with a full context, beside weights and what passes take.
        [share] = [term for term in self.terms(vllm) if term.holds]
        weights, context = share.holds
        assert weights.num_bytes == 30_532_646_912 * 2 and context.num_bytes == 48 * 2 * 4 * 6144 * 128 * 2
        assert share.num_bytes - weights.num_bytes - 8 * GIB > 32 * context.num_bytes

    def terms(self, deploy: Deploy) -> list[Term]:
        plan = memory_plan.plan([deploy], [H200], RAM)
        return [term for share in plan.shares for term in share.terms]

    @pytest.mark.parametrize(
        ("setting", "needed"),
        [
            ("gpu_memory_utilization=0.4", "57.4 GiB .* 56.9 GiB of weights and 576 MiB of KV cache of one"),
            ("cpu_offload_gb=20", ""),
        ],
    )
    def test_a_share_in_which_vllm_cannot_start_is_refused(
        self, real: Path, setting: str, needed: str
    ) -> None:
        args = [
            f"stage.thinker.engine.engine_args.{text}" for text in ("gpu_memory_utilization=0.4", setting)
        ]
        plan = memory_plan.plan([self.load("one_h200_vllm", real, *args)], [H200], RAM)
        problems = [finding for finding in check_memory(plan) if finding.level is Level.PROBLEM]
        if not needed:
            assert problems == [], "nothing says what lies on the GPU"
            return
        [problem] = problems
        assert re.search(f"thinker has 55.9 GiB of gpu:0 .* {needed} context$", problem.what)
        assert problem.cure.startswith("raise gpu_memory_utilization, lower max_context_tokens, or name more")
        assert any("- weights" in line for line in problem.detail)
        with pytest.raises(ConfigError, match="must fit into that"):
            plan.require_fit()

    def test_vllm_over_two_gpus_needs_half_on_each(self, real: Path) -> None:
        half = "stage.thinker.engine.engine_args.gpu_memory_utilization=0.3"
        deploy = self.load("one_h200_vllm", real, half, "stage.thinker.device=[gpu:0, gpu:1]")
        plan = memory_plan.plan([deploy], [H200, H200], RAM)
        assert plan.too_narrow() == []
        shares = [term for share in plan.shares for term in share.terms if term.holds]
        assert [term.held_bytes for term in shares] == [30_532_646_912 + 48 * 2 * 4 * 6144 * 128] * 2

    def test_two_gpus_has_speech_on_the_second(self, real: Path) -> None:
        deploy = self.load("two_gpus", real)
        groups = {
            stage: list(pbtxt.render(deploy)[f"qwen3_omni_{stage}"].instance_group[0].gpus)
            for stage in ("thinker", "talker", "code2wav")
        }
        assert groups == {"thinker": [0], "talker": [1], "code2wav": [1]}
        eighty = self.load("two_gpus", real, "memory.gpu_gib=80", "stage.thinker.engine.max_slots=16")
        assert memory_plan.plan([eighty], [], RAM).too_small() == []

    def test_dummy_differs_in_nothing_but_weights(self, real: Path) -> None:
        released = deploy_reader.load(OMNI, (), "one_h200")
        dummy = deploy_reader.load(OMNI, (), "dummy_one_h200")
        assert not any(stage.reads_weights for stage in dummy.stages.values())
        assert all(stage.reads_weights for stage in released.stages.values())
        for name, stage in released.stages.items():
            assert stage.options.dtype == dummy.stage(name).options.dtype == "bfloat16"
            assert stage.placed == dummy.stage(name).placed
