"""`device:` in a deploy file: what it means, how it is rendered, and which GPUs an engine is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tritone import deploy_reader, pbtxt
from tritone.deploy import Deploy
from tritone.device import Device, visible
from tritone.engine_process import EngineSpec
from tritone.engines.base import Engine
from tritone.errors import ConfigError

ECHO = Path(__file__).parents[2] / "pipelines" / "echo.py"


@pytest.mark.parametrize(
    ("value", "device", "shown"),
    [
        ("cpu", Device(False), "cpu"),
        ("gpu", Device(True), "gpu"),
        ("gpu:1", Device(True, (1,)), "gpu:1"),
        (["gpu:2"], Device(True, (2,)), "gpu:2"),
        (["gpu:0", "gpu:1"], Device(True, (0, 1)), "gpu:0+gpu:1"),
    ],
)
def test_forms(value: str | list[str], device: Device, shown: str) -> None:
    assert Device.parse(value, "device") == device
    assert str(device) == shown and device.is_spread is (len(device.gpus) > 1)


@pytest.mark.parametrize("value", ["tpu", "gpu:", "gpu:-1", "cuda:0", [], ["gpu"], ["cpu"], ["gpu:0", "cpu"]])
def test_others_are_refused(value: str | list[str]) -> None:
    with pytest.raises(ConfigError, match=r"stages\.a\.device is") as refused:
        Device.parse(value, "stages.a.device")
    assert "gpu:<number>" in refused.value.cure


def test_a_gpu_is_named_once() -> None:
    with pytest.raises(ConfigError, match=r"is \[gpu:0, gpu:0\]; name each GPU once"):
        Device.parse(["gpu:0", "gpu:0"], "device")


def load(tmp_path: Path, device: object, *overrides: str) -> Deploy:
    path = tmp_path / "deploy.yaml"
    path.write_text(yaml.safe_dump({"pipeline": str(ECHO), "stages": {"writer": {"device": device}}}))
    return deploy_reader.load(path, overrides)


class TestRendered:
    def group(self, deploy: Deploy) -> tuple[str, int, list[int]]:
        [group] = pbtxt.render(deploy)["echo_writer"].instance_group
        return group.Kind.Name(group.kind), group.count, list(group.gpus)

    def test_groups(self, tmp_path: Path) -> None:
        assert self.group(load(tmp_path, "cpu")) == ("KIND_CPU", 1, [])
        assert self.group(load(tmp_path, "gpu", "stage.writer.instances=2")) == ("KIND_GPU", 2, [])
        assert self.group(load(tmp_path, "gpu:1")) == ("KIND_GPU", 1, [1])

    def test_an_engine_over_several(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ConfigError, match=r"is gpu:0\+gpu:1, and engine 'python' runs on one GPU"):
            load(tmp_path, ["gpu:0", "gpu:1"])
        monkeypatch.setattr(Engine, "spans_gpus", True)
        assert self.group(load(tmp_path, ["gpu:0", "gpu:1"])) == ("KIND_MODEL", 1, [])
        overridden = load(tmp_path, "cpu", "stage.writer.device=[gpu:0, gpu:1]")
        assert overridden.stage("writer").placed.gpus == (0, 1)


class TestShown:
    def test_numbers_count_among_those_of_the_server(self) -> None:
        assert visible((1,), {}) == "1"
        assert visible((0, 1), {"CUDA_VISIBLE_DEVICES": "4, GPU-ab,7"}) == "4,GPU-ab"
        with pytest.raises(ConfigError, match="no gpu:2 among CUDA_VISIBLE_DEVICES=4,7"):
            visible((2,), {"CUDA_VISIBLE_DEVICES": "4,7"})

    def test_an_engine_sees_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")

        def spec(*gpus: int) -> EngineSpec:
            return EngineSpec(tmp_path, ("a",), "x", gpus, 1, None, 1.0)

        assert spec(1).environment()["CUDA_VISIBLE_DEVICES"] == "7"
        assert spec(1).environment()["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert {"--device=cuda:0", "--num-gpus=1"} <= set(spec(1).command(3))
        assert "--num-gpus=2" in spec(0, 1).command(3)
        assert spec().environment()["CUDA_VISIBLE_DEVICES"] == "4,7" and "--device=cpu" in spec().command(3)
