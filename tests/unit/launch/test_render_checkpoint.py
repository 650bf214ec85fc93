"""`--checkpoint`: a folder in the Hugging Face layout is checked, then written into deploy.yaml."""

from __future__ import annotations

import argparse
import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tritone import cli, deploy_reader, doctor, memory_plan, pipelines
from tritone import serve as serving
from tritone.checkpoint import released_bytes, require_released
from tritone.deploy_file import set_value
from tritone.errors import ConfigError
from tritone.finding import Level
from tritone.pipeline import Checkpoint
from tritone.ram import ram

DEPLOY = "# how we serve\npipeline: demo\n\nmax_in_flight: 4 # enough\n"


def write_weights(file: Path, tensors: dict[str, int]) -> None:
    """A safetensors file of byte tensors of the given lengths."""
    head, place = {"__metadata__": {"format": "pt"}}, 0
    for name, length in tensors.items():
        head[name] = {"dtype": "U8", "shape": [length], "data_offsets": [place, place + length]}
        place += length
    text = json.dumps(head).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(place))


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """A checkpoint of two shards."""
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    shards = {
        "model-00001-of-00002.safetensors": {"writer.a": 30, "singer.a": 5},
        "model-00002-of-00002.safetensors": {"writer.b": 7},
    }
    names = {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    for shard, tensors in shards.items():
        write_weights(folder / shard, tensors)
    return folder


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a pipeline `demo` whose stages all read one released folder."""
    echo = pipelines.get(str(Path(__file__).parents[2] / "pipelines" / "echo.py"))
    pipeline = replace(echo, name="demo", checkpoint=Checkpoint.RELEASED)
    monkeypatch.setattr(pipelines, "get", lambda name: pipeline)
    monkeypatch.setenv("TRITONE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model_repository" / "demo"
    folder.mkdir(parents=True)
    (folder / "deploy.yaml").write_text(DEPLOY)
    monkeypatch.chdir(tmp_path)
    return folder


def tritone(*words: object) -> int:
    parser = argparse.ArgumentParser(prog="tritone")
    cli.add_commands(parser.add_subparsers(dest="command"))
    args = parser.parse_args([str(word) for word in words])
    return int(args.run(args))


class TestReleased:
    def test_a_whole_one_passes(self, released: Path):
        assert require_released(released, "demo") == released

    def test_one_file_without_an_index_passes(self, tmp_path: Path):
        (tmp_path / "config.json").write_text("{}")
        write_weights(tmp_path / "model.safetensors", {"writer.a": 3})
        assert require_released(tmp_path, "demo") == tmp_path

    @pytest.mark.parametrize(
        ("missing", "complaint"),
        [
            ("config.json", "it has no config.json"),
            ("model.safetensors.index.json", "neither model.safetensors.index"),
            ("model-00002-of-00002.safetensors", "lacks 'model-00002-of-00002.safetensors'"),
        ],
    )
    def test_what_is_missing_is_named_with_the_cure(self, released: Path, missing: str, complaint: str):
        (released / missing).unlink()
        with pytest.raises(ConfigError, match=complaint) as refused:
            require_released(released, "demo")
        assert str(released) in refused.value.what
        assert "--checkpoint DIR" in refused.value.cure
        assert "python build/demo_tiny.py" in refused.value.cure

    @pytest.mark.parametrize("keep", [0, 4, 40, -1])
    def test_a_shard_that_was_cut_off_is_named(self, released: Path, keep: int):
        shard = released / "model-00001-of-00002.safetensors"
        shard.write_bytes(shard.read_bytes()[:keep])
        with pytest.raises(ConfigError, match=r"damaged at 'model-00001"):
            require_released(released, "demo")

    @pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}'])
    def test_a_broken_index_is_named(self, released: Path, text: str):
        (released / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ConfigError, match=r"model.safetensors.index.json' cannot be read"):
            require_released(released, "demo")

    def test_bytes_by_stage(self, released: Path, tmp_path: Path):
        assert released_bytes(released) == {"writer": 37, "singer": 5}
        assert released_bytes(tmp_path / "nowhere") == {}


class TestDeploy:
    def test_all_stages_read_the_one_folder(self, demo: Path, released: Path):
        deploy = deploy_reader.load(demo / "deploy.yaml", [f"checkpoint={released}"])
        assert deploy.stage_folder("writer") == deploy.stage_folder("wave") == released
        assert deploy.require_checkpoint("writer") == released
        (released / "config.json").unlink()
        with pytest.raises(ConfigError, match=r"no config.json"):
            deploy.require_checkpoint("writer")

    def test_made_up_weights_need_no_files(self, released: Path):
        for file in released.glob("model*"):
            file.unlink()
        assert require_released(released, "demo", with_weights=False) == released
        with pytest.raises(ConfigError, match="no weights"):
            require_released(released, "demo")

    def test_a_built_one_has_a_folder_a_stage(self, demo: Path, tmp_path: Path):
        deploy = deploy_reader.load(demo / "deploy.yaml", [f"checkpoint={tmp_path}"])
        deploy = replace(deploy, pipeline=replace(deploy.pipeline, checkpoint=Checkpoint.BUILT))
        assert deploy.stage_folder("writer") == tmp_path / "writer"
        with pytest.raises(ConfigError, match="no complete checkpoint"):
            deploy.require_checkpoint("writer")

    def test_none_needs_nothing(self, demo: Path, tmp_path: Path):
        deploy = deploy_reader.load(demo / "deploy.yaml", [f"checkpoint={tmp_path}"])
        deploy = replace(deploy, pipeline=replace(deploy.pipeline, checkpoint=Checkpoint.NONE))
        assert deploy.require_checkpoint("writer") == tmp_path / "writer"


class TestDoctor:
    def test_a_process_needs_memory_for_its_own_tensors(self, demo: Path, released: Path):
        write_weights(
            released / "model-00002-of-00002.safetensors", {"writer.b": 20 << 20, "wave.a": 4 << 20}
        )
        deploy = deploy_reader.load(demo / "deploy.yaml", [f"checkpoint={released}"])

        def needed() -> int:
            return memory_plan.plan([deploy], [], ram()).needed_bytes("cpu")

        alone = needed()
        write_weights(released / "model-00002-of-00002.safetensors", {"writer.b": 0, "wave.a": 4 << 20})
        assert abs(alone - needed() - 1.3 * (20 << 20)) <= 1

    def test_released_checkpoints_in_the_cache_are_seen(self, demo: Path, released: Path, tmp_path: Path):
        assert doctor.checkpoints_present().level is Level.WARNING
        (tmp_path / "cache" / "demo").mkdir(parents=True)
        released.rename(tmp_path / "cache" / "demo" / "1")
        assert doctor.checkpoints_present().what.startswith("demo in ")

    def test_a_broken_one_is_one_finding(self, demo: Path, tmp_path: Path):
        deploy = deploy_reader.load(demo / "deploy.yaml", [f"checkpoint={tmp_path}"])
        [finding] = doctor.check_checkpoint(deploy)
        assert finding.level is Level.PROBLEM and "no config.json" in finding.what


class TestRender:
    def test_in_place_changes_one_line(self, demo: Path, released: Path, capsys):
        assert tritone("render", "demo", "--checkpoint", released) == 0
        lines = (demo / "deploy.yaml").read_text().splitlines()
        assert lines == [*DEPLOY.splitlines()[:2], f"checkpoint: {released}", *DEPLOY.splitlines()[2:]]
        assert (demo / "demo" / "config.pbtxt").exists()
        assert tritone("check", "demo") == 0  # what was rendered belongs to the changed file
        assert f"checkpoint  {released}" in capsys.readouterr().out

    def test_a_relative_folder_is_written_whole(self, demo: Path, released: Path):
        assert tritone("render", "demo", "--checkpoint", "weights") == 0
        assert yaml.safe_load((demo / "deploy.yaml").read_text())["checkpoint"] == str(released)

    def test_out_leaves_the_source_alone(self, demo: Path, released: Path, tmp_path: Path):
        out = tmp_path / "out"
        assert tritone("render", "demo", "--checkpoint", released, "--out", out) == 0
        assert (demo / "deploy.yaml").read_text() == DEPLOY
        assert deploy_reader.load(out / "deploy.yaml").checkpoint == released

    def test_a_folder_that_does_not_fit_changes_nothing(self, demo: Path, tmp_path: Path, capsys):
        assert tritone("render", "demo", "--checkpoint", tmp_path / "nowhere") == 1
        error = capsys.readouterr().err
        assert "it has no config.json; give the folder" in error and error.count("\n") == 1
        assert (demo / "deploy.yaml").read_text() == DEPLOY and not (demo / "demo").exists()

    def test_a_pipeline_without_weights(self, demo: Path, released: Path, monkeypatch, capsys):
        pipeline = replace(pipelines.get("demo"), checkpoint=Checkpoint.NONE)
        monkeypatch.setattr(pipelines, "get", lambda name: pipeline)
        assert tritone("render", "demo", "--checkpoint", released) == 1
        assert "pipeline 'demo' has no checkpoint; leave out --checkpoint" in capsys.readouterr().err


class TestServe:
    @pytest.fixture
    def asked(self, monkeypatch) -> list[serving.ServeOptions]:
        seen: list[serving.ServeOptions] = []
        monkeypatch.setattr(serving, "serve", lambda options, say, asked: seen.append(options) or 0)
        monkeypatch.setattr(serving.Asked, "listen", lambda self: None)
        return seen

    def test_is_an_override(self, demo: Path, tmp_path: Path, asked):
        odd = tmp_path / "a: b #1"
        assert tritone("serve", "demo", "--set", "max_in_flight=2", "--checkpoint", odd) == 0
        deploy = deploy_reader.load(demo / "deploy.yaml", asked[0].overrides)
        assert deploy.checkpoint == odd and deploy.max_in_flight == 2

    def test_is_for_one_pipeline(self, demo: Path, released: Path, asked, capsys):
        assert tritone("serve", "demo", "demo", "--checkpoint", released) == 1
        assert "--checkpoint is given for 2 pipelines; give --set" in capsys.readouterr().err
        assert not asked


class TestSetValue:
    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ("pipeline: p\ncheckpoint: /old # ours\nb: 1\n", "pipeline: p\ncheckpoint: /new # ours\nb: 1\n"),
            ("checkpoint: '/o # d'\n", "checkpoint: /new\n"),
            ("checkpoint:\nb: 1", "checkpoint: /new\nb: 1"),
            ("# top\npipeline: p", "# top\npipeline: p\ncheckpoint: /new"),
            ("stages: {}\n", "checkpoint: /new\nstages: {}\n"),
            (
                "s:\n  checkpoint: 1\npipeline: p # x\n",
                "s:\n  checkpoint: 1\npipeline: p # x\ncheckpoint: /new\n",
            ),
        ],
    )
    def test_only_that_line(self, tmp_path: Path, before: str, after: str):
        file = tmp_path / "deploy.yaml"
        file.write_text(before)
        set_value(file, "checkpoint", "/new")
        assert file.read_text() == after
        assert list(tmp_path.iterdir()) == [file]

    def test_a_value_over_lines_is_left_to_the_user(self, tmp_path: Path):
        file = tmp_path / "deploy.yaml"
        file.write_text("pipeline: p\ncheckpoint: >\n  /old\nb: 1\n")
        with pytest.raises(ConfigError, match="cannot change `checkpoint:`"):
            set_value(file, "checkpoint", "/new")
        assert "/old" in file.read_text()
