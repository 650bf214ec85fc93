"""Where a checkpoint lies and what is said when it is not whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tritone.checkpoint import FORMAT, MANIFEST, checkpoint_dir, read_config, require_checkpoint
from tritone.errors import ConfigError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A whole checkpoint of a pipeline `demo` with two stages."""
    folder = tmp_path / "demo" / FORMAT
    files = {"ears/config.json": "{}", "ears/model.bin": "weights", "talker/config.json": '{"rate": 3}'}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    sizes = {name: {"bytes": len(text)} for name, text in files.items()}
    (folder / MANIFEST).write_text(json.dumps({"files": sizes}))
    return folder


def test_the_folder_follows_the_environment():
    assert checkpoint_dir("demo", {"TRITONE_CACHE": "/data/cache"}) == Path("/data/cache/demo") / FORMAT
    assert checkpoint_dir("demo", {}) == Path.home() / ".cache/tritone/demo" / FORMAT


def test_a_whole_checkpoint_gives_the_stage_folder(checkpoint: Path):
    assert require_checkpoint(checkpoint, "ears") == checkpoint / "ears"


def _without_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def _with_broken_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("{")


def _without_a_file(folder: Path) -> None:
    (folder / "ears" / "model.bin").unlink()


def _with_a_short_file(folder: Path) -> None:
    (folder / "ears" / "model.bin").write_text("wei")


@pytest.mark.parametrize(
    "harm", [_without_manifest, _with_broken_manifest, _without_a_file, _with_a_short_file]
)
def test_what_is_not_whole_names_the_folder_and_the_command(checkpoint: Path, harm):
    harm(checkpoint)
    with pytest.raises(ConfigError) as refused:
        require_checkpoint(checkpoint, "ears")
    assert str(checkpoint) in str(refused.value)
    assert "python build/demo.py" in refused.value.cure


def test_harm_to_one_stage_leaves_the_others_usable(checkpoint: Path):
    _without_a_file(checkpoint)
    assert require_checkpoint(checkpoint, "talker") == checkpoint / "talker"


def test_a_stage_that_the_checkpoint_lacks(checkpoint: Path):
    with pytest.raises(ConfigError, match="no stage 'thinker'"):
        require_checkpoint(checkpoint, "thinker")


def test_config_is_read_or_refused(checkpoint: Path):
    assert read_config(checkpoint / "talker") == {"rate": 3}
    with pytest.raises(ConfigError, match=r"no config.json"):
        read_config(checkpoint / "thinker")
    (checkpoint / "talker" / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="JSON object"):
        read_config(checkpoint / "talker")
