"""What the doors of a server keep from everybody else: their key, and the shared memory of their stubs."""

import mmap
import os
import stat
import subprocess
import sys
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tritone.errors import ConfigError
from tritone.private_memory import keep_private
from tritone.server_key import forget, server_key

ONE = f"{os.getpid()}-1"  # servers of this test have to live, or their keys are swept away
ANOTHER = f"{os.getpid()}-2"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where temporary files go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_server_has_one_key_and_another_server_another():
    assert len(server_key(ONE)) == 64 and server_key(ONE) == server_key(ONE)
    assert server_key(ANOTHER) != server_key(ONE)


def test_only_this_user_can_read_it(folder):
    server_key(ONE)
    (file,) = files(folder)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_doors_that_start_at_once_find_the_same_key(folder):
    code = f"import sys; from tritone.server_key import server_key; print(server_key({ONE!r}))"
    env = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}

    def door(_):
        return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True).stdout

    with ThreadPoolExecutor(6) as doors:
        assert len(set(doors.map(door, range(6)))) == 1
    assert len(files(folder)) == 1


def test_keys_of_servers_that_ended_are_removed(folder):
    gone = subprocess.Popen(["true"])
    gone.wait()
    server_key(f"{gone.pid}-7")
    server_key(ONE)
    assert [file.name for file in files(folder)] == [f"{ONE}.key"]
    forget(os.getpid())
    assert files(folder) == []


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_is_open_to_others_is_refused(folder, mode):
    server_key(ONE)
    files(folder)[0].parent.chmod(mode)
    with pytest.raises(ConfigError, match="is open to others; remove it"):
        server_key(ONE)


def test_a_link_in_place_of_the_folder_is_refused(folder):
    server_key(ONE)
    place = files(folder)[0].parent
    place.rename(folder / "elsewhere")
    place.symlink_to(folder / "elsewhere")
    with pytest.raises(ConfigError, match="is open to others"):
        server_key(ONE)


def test_a_folder_that_takes_nothing_is_a_fault_with_a_cure(folder):
    (folder / "file").touch()
    tempfile.tempdir = str(folder / "file")
    with pytest.raises(ConfigError, match="point TMPDIR at another folder"):
        server_key(ONE)


def test_shared_memory_of_this_process_is_closed_to_others_and_goes_on():
    region = Path("/dev/shm") / f"tritone-test-{uuid.uuid4().hex}"
    other = region.with_name(f"{region.name}-not-mapped")
    for path in (region, other):
        path.write_bytes(b"before" + bytes(4090))
        path.chmod(0o644)
    try:
        with region.open("r+b") as file, mmap.mmap(file.fileno(), 4096) as memory:
            keep_private()
            memory[:5] = b"after"
        assert stat.S_IMODE(region.stat().st_mode) == 0o600 and region.read_bytes()[:5] == b"after"
        assert stat.S_IMODE(other.stat().st_mode) == 0o644
    finally:
        region.unlink()
        other.unlink()
