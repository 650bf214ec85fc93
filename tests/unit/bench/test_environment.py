"""Where a run was made: GPUs, the versions that the engines have, and the very sources."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tritone_bench import environment
from tritone_bench.environment import GpuFacts


def program(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_gpus_are_those_of_nvidia_smi(tmp_path):
    rows = "NVIDIA H200, 143771, 570.86.15\\nAn odd, old one, 81559, 570.86.15\\nMIG, [N/A], 570.86.15"
    smi = program(tmp_path / "smi", f"printf '{rows}'")
    found = (GpuFacts("NVIDIA H200", 143771 << 20), GpuFacts("An odd, old one", 81559 << 20))
    assert environment._gpus([smi]) == (found, "570.86.15")
    assert environment._gpus([program(tmp_path / "broken", "echo no driver; exit 9")]) == ((), None)
    assert environment._gpus([str(tmp_path / "none")]) == ((), None)


def test_versions_are_those_of_the_engines_interpreter(tmp_path):
    here = environment.environment(["bench"])
    assert here.torch and here.torch == environment._engine_versions(sys.executable)[0]
    other = program(tmp_path / "python", '[ "$3" = torch ] || exit 1; echo 2.11.0+cu129')
    there = environment.environment(["bench"], other)
    assert (there.torch, there.triton) == ("2.11.0+cu129", None)


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_a_commit_is_that_of_the_file_and_marked_when_it_is_changed(tmp_path):
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.check_output(["git", "-C", tmp_path, *who, *words], text=True).strip()

    source = tmp_path / "source.py"
    source.write_text("1")
    git("init", "-q")
    assert environment._commit(source) is None, "git does not know it"
    git("add", "."), git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD")
    (tmp_path / "installed.py").write_text("1")
    assert environment._commit(source) == commit, "a file of no commit changes nothing"
    assert environment._commit(tmp_path / "installed.py") is None, "it only lies there"
    source.write_text("2")
    assert environment._commit(source) == f"{commit}+changed"
