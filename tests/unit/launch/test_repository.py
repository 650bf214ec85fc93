"""Finding the folder of a pipeline, and saying which one was meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_machine import write_deploy, write_file

from tritone import deploy_reader, pbtxt, repository
from tritone.errors import ConfigError


def test_by_name_and_by_path(echo_folder: Path) -> None:
    places = [echo_folder.parent]
    for target in ("echo", str(echo_folder), str(echo_folder / "deploy.yaml")):
        assert repository.find(target, places) == echo_folder


def test_places_are_searched_in_order(tmp_path: Path) -> None:
    folders = [write_deploy(tmp_path / place / "echo") for place in ("first", "second")]
    assert repository.find("echo", [tmp_path / "none", *(folder.parent for folder in folders)]) == folders[0]


def test_unknown_name_gets_a_suggestion(echo_folder: Path) -> None:
    with pytest.raises(ConfigError, match="'ecko' is neither a pipeline nor a folder; did you mean 'echo'"):
        repository.find("ecko", [echo_folder.parent])


def test_known_pipeline_without_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pipeline 'smoltalk' has no folder in"):
        repository.find("smoltalk", [tmp_path])


def test_one_folder_too_high(echo_folder: Path) -> None:
    with pytest.raises(ConfigError, match=rf"holds the folders of pipelines.*use '{echo_folder}'"):
        repository.find(str(echo_folder.parent), [])


@pytest.mark.parametrize("inside", ["echo_writer", "echo_writer/1"])
def test_too_low(echo_folder: Path, inside: str) -> None:
    (echo_folder / inside).mkdir(parents=True)
    with pytest.raises(ConfigError, match=rf"lies inside the folder of a pipeline; use '{echo_folder}'"):
        repository.find(str(echo_folder / inside), [])


def test_some_other_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no deploy\.yaml"):
        repository.find(str(tmp_path), [])


def test_stale_and_stranger_models(echo_folder: Path) -> None:
    deploy = deploy_reader.load(echo_folder / "deploy.yaml")
    assert "echo_writer" in repository.stale(deploy, echo_folder)
    pbtxt.write(deploy, echo_folder)
    assert repository.stale(deploy, echo_folder) == []
    assert repository.strangers(deploy, echo_folder) == []
    write_file(echo_folder / "echo_wave" / "config.pbtxt", b"edited by hand")
    write_file(echo_folder / "leftover" / "config.pbtxt")
    assert repository.stale(deploy, echo_folder) == ["echo_wave"]
    assert repository.strangers(deploy, echo_folder) == ["leftover"]
