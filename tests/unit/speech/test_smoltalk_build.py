"""The build script: pins are kept, a build is whole or absent, two at once do the work once."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from pathlib import Path

import pytest

from tritone.checkpoint import MANIFEST, checkpoint_dir, require_checkpoint

SCRIPT = Path(__file__).parents[3] / "build" / "smoltalk.py"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The script as a module, building into a folder of the test with a stand-in for the conversion."""
    spec = importlib.util.spec_from_file_location("smoltalk_build", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "smoltalk_build", module)
    spec.loader.exec_module(module)
    monkeypatch.setenv("TRITONE_CACHE", str(tmp_path / "cache"))
    module.builds = []

    def build(folder, wheels, scratch):
        module.builds.append(folder)
        time.sleep(0.2)
        for stage in module.STAGES:
            (folder / stage).mkdir()
            (folder / stage / "config.json").write_text("{}")
        module.write_manifest(folder)

    module.real_build = module.build
    monkeypatch.setattr(module, "build", build)
    return module


def test_a_second_run_does_nothing(script, capsys):
    assert script.main([]) == 0 and script.main([]) == 0
    assert len(script.builds) == 1
    assert "complete in" in capsys.readouterr().out
    for stage in script.STAGES:
        assert require_checkpoint(checkpoint_dir("smoltalk"), stage).is_dir()


def test_two_runs_at_once_build_once(script):
    runs = [threading.Thread(target=script.main, args=([],)) for _ in range(3)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert len(script.builds) == 1 and script.is_complete(checkpoint_dir("smoltalk"))


def test_a_build_that_fails_leaves_nothing(script, monkeypatch):
    monkeypatch.setattr(script, "write_manifest", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        script.main([])
    assert [path.name for path in checkpoint_dir("smoltalk").parent.iterdir()] == [".lock"]


@pytest.mark.parametrize("harm", ["no manifest", "a lost file", "other pins"])
def test_what_is_not_whole_is_built_anew(script, harm):
    script.main([])
    target = checkpoint_dir("smoltalk")
    if harm == "no manifest":
        (target / MANIFEST).unlink()
    elif harm == "a lost file":
        (target / "ears" / "config.json").unlink()
    else:
        text = (target / MANIFEST).read_text()
        (target / MANIFEST).write_text(text.replace(script.HIBARI.version, "0.0.1"))
    script.main([])
    assert len(script.builds) == 2 and script.is_complete(target)
    assert sorted(path.name for path in target.parent.iterdir()) == [".lock", target.name]


def test_wheels_are_checked_before_anything_is_made(script, tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with pytest.raises(SystemExit, match=f"there is no .*{script.PINS[0].wheel}; leave out --from"):
        script.real_build(tmp_path, wheels, tmp_path)
    (wheels / script.PINS[0].wheel).write_bytes(b"something else")
    with pytest.raises(SystemExit, match="is not the pinned file: its sha256 is"):
        script.real_build(tmp_path, wheels, tmp_path)


def test_a_failed_fetch_says_why_and_what_to_do(script, tmp_path, monkeypatch):
    done = script.subprocess.CompletedProcess([], 1, stdout="", stderr="WARNING: x\nERROR: no network\n")
    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(
        SystemExit, match=r"cannot fetch hibari-tts 0.2.1 \(ERROR: no network\); .* --from DIR"
    ):
        script.fetch(script.HIBARI, tmp_path)
