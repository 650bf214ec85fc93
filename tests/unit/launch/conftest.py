"""A machine made of files: a packaged server, a container, a pipeline folder. Nothing here starts Triton."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the fake machine is no installed package

from fake_machine import PYTHON_VERSION, write_backend, write_deploy, write_file

from tritone import server as servers
from tritone.server import STUB, Interpreter, Server


@pytest.fixture
def interpreter(tmp_path: Path) -> Interpreter:
    library = write_file(tmp_path / "pylib" / f"libpython{PYTHON_VERSION}.so.1.0")
    return Interpreter(PYTHON_VERSION, Path(sys.prefix) / "bin", library)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A site-packages folder that holds nvidia-pytriton 0.7.0."""
    site = tmp_path / "site"
    root = site / "pytriton" / "tritonserver"
    write_file(root / "bin" / "tritonserver", b"#!/bin/sh\necho '  --grpc-port <integer>'\n", executable=True)
    write_backend(root / "backends")
    (root / "caches").mkdir()
    for version in ("3.9", "3.10", PYTHON_VERSION):
        content = f"..libpython{version}.so.1.0..".encode()
        write_file(root / "python_backend_stubs" / version / STUB, content, executable=True)
    metadata = b"Metadata-Version: 2.1\nName: nvidia-pytriton\nVersion: 0.7.0\n"
    write_file(site / "nvidia_pytriton-0.7.0.dist-info" / "METADATA", metadata)
    return site


@pytest.fixture
def container(tmp_path: Path) -> Path:
    """The /opt/tritonserver of an image."""
    root = tmp_path / "opt" / "tritonserver"
    write_file(
        root / "bin" / "tritonserver",
        b"#!/bin/sh\necho '  --exit-timeout-secs <integer>'\n",
        executable=True,
    )
    write_file(root / "TRITON_VERSION", b"2.71.0\n")
    write_backend(root / "backends")
    write_file(
        root / "backends" / "python" / STUB, f"libpython{PYTHON_VERSION}.so.1.0".encode(), executable=True
    )
    return root


@pytest.fixture
def server(package: Path, interpreter: Interpreter, tmp_path: Path) -> Server:
    return servers.find(container=tmp_path / "nowhere", package=package, python=interpreter)


@pytest.fixture
def echo_folder(tmp_path: Path) -> Path:
    """A folder with the deploy.yaml of the echo pipeline, not rendered."""
    return write_deploy(tmp_path / "model_repository" / "echo")
