"""The stream of a stage: what is asked of torch by which thread, and on a GPU what comes of it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from tritone import deploy_reader
from tritone.engines import host
from tritone.engines.base import Placement
from tritone.engines.loop import Loop
from tritone.engines.peers import Peers
from tritone.engines.stage_stream import StageStream

ECHO = Path(__file__).parents[2] / "pipelines" / "echo.py"


@dataclass
class FakeCuda:
    """torch.cuda, as far as a stage's stream asks it."""

    range: tuple[int, int] = (0, -5)
    current: dict[str, Any] = field(default_factory=dict)  # by name of the thread
    synchronised: list[Any] = field(default_factory=list)

    @property
    def torch(self) -> Any:
        return SimpleNamespace(cuda=self)

    @property
    def Stream(self) -> Any:
        def stream(device: str, priority: int) -> Any:
            return SimpleNamespace(device=device, priority=priority)

        stream.priority_range = lambda: self.range  # type: ignore[attr-defined]
        return stream

    def current_stream(self, device: str) -> Any:
        return self.current.get(threading.current_thread().name, "default")

    def set_stream(self, stream: Any) -> None:
        self.current[threading.current_thread().name] = stream

    def synchronize(self, device: str) -> None:
        self.synchronised.append((device, self.current_stream(device)))


def on_thread(name: str, call: Any) -> None:
    thread = threading.Thread(target=call, name=name)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


class TestAsked:
    def test_every_thread_of_a_stage_gets_its_stream_and_the_loading_one_its_own_back(self) -> None:
        cuda, stream = FakeCuda(), StageStream(2)
        stream.open(cuda.torch, "cuda:0")
        mine = cuda.current_stream("cuda:0")
        assert (mine.device, mine.priority) == ("cuda:0", -2)
        stream.leave()
        assert cuda.current_stream("cuda:0") == "default" and cuda.synchronised == [("cuda:0", mine)]
        for name in ("loop", "media"):
            on_thread(name, stream.enter)
        assert cuda.current["loop"] is mine and cuda.current["media"] is mine

    @pytest.mark.parametrize(
        ("urgency", "span", "priority"), [(0, (0, -5), 0), (9, (0, -5), -5), (2, (0, -1), -1), (1, (0, 0), 0)]
    )
    def test_priorities_stay_in_the_range_of_the_gpu(
        self, urgency: int, span: tuple[int, int], priority: int
    ) -> None:
        cuda, stream = FakeCuda(span), StageStream(urgency)
        stream.open(cuda.torch, "cuda:0")
        assert cuda.current_stream("cuda:0").priority == priority

    @pytest.mark.parametrize(("urgency", "device"), [(None, "cuda:0"), (3, "cpu")])
    def test_nothing_is_asked_for_a_stage_alone_or_on_a_cpu(self, urgency: int | None, device: str) -> None:
        cuda, stream = FakeCuda(), StageStream(urgency)
        stream.open(cuda.torch, device)
        stream.enter()
        stream.leave()
        assert cuda.current == {} and cuda.synchronised == []

    def test_a_loop_enters_before_its_first_turn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Ends(BaseException):
            pass

        class Once(Loop):
            def _turn(self) -> None:
                told.append(cuda.current_stream("cuda:0"))
                raise Ends

            def cancel(self, session: str) -> None: ...

            def peer_lost(self, address: str) -> None: ...

        cuda, stream, told = FakeCuda(), StageStream(1), []
        stream.open(cuda.torch, "cuda:0")
        mine = cuda.current_stream("cuda:0")
        stream.leave()
        monkeypatch.setattr("os._exit", lambda status: None)
        on_thread("loop", Once("m", 1.0, stream=stream).run)
        assert told == [mine]


def urgencies(tmp_path: Path, stages: dict[str, Any], together: tuple[str, ...], gpus: int = 1) -> list[Any]:
    """What the streams of engines are given that one process hosts."""
    file = tmp_path / "deploy.yaml"
    file.write_text(yaml.safe_dump({"pipeline": str(ECHO), "stages": stages}))
    deploy = deploy_reader.load(file)
    peers = Peers("tritone-test/nobody", lambda address: None, lambda address: None)
    loops = host.build_loops(deploy, together, "cuda:0", peers, num_gpus=gpus)
    return [loop._stream._urgency for loop in loops.values()]


class TestHost:
    def test_streams_are_for_stages_that_share_a_process(self, tmp_path: Path) -> None:
        shared = {"colocate": "all", "urgency": 3}
        stages = {"writer": {**shared, "own_stream": False}, "singer": shared, "wave": {"colocate": "all"}}
        assert urgencies(tmp_path, stages, ("writer", "singer", "wave")) == [None, 3, 0]
        assert urgencies(tmp_path, {}, ("singer",)) == [None]

    def test_a_runtime_that_leaves_the_default_stream_is_given_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = deploy_reader.load(_echo(tmp_path)).engine_class("writer")
        monkeypatch.setattr(engine, "leaves_default_stream", True)
        assert urgencies(tmp_path, {"writer": {"urgency": 1}}, ("writer",)) == [1]
        assert urgencies(tmp_path, {}, ("writer",), gpus=2) == [None], "its kernels are launched elsewhere"

    def test_a_talker_goes_first_and_a_thinker_last(self) -> None:
        deploy = deploy_reader.from_mapping({"pipeline": "qwen3_omni"}, "test")
        assert [deploy.stage(name).urgency for name in ("talker", "code2wav", "thinker")] == [2, 1, 0]


def _echo(tmp_path: Path) -> Path:
    file = tmp_path / "echo.yaml"
    file.write_text(f"pipeline: {ECHO}\n")
    return file


def test_media_are_read_in_the_stream_of_their_stage() -> None:
    pytest.importorskip("torch")
    from tritone.pipelines.qwen3_omni.thinking import Thinking, ThinkingOptions

    cuda, stream = FakeCuda(), StageStream(0)
    reads: Any = SimpleNamespace(_write_with=lambda tokenizer: None)
    stream.open(cuda.torch, "cuda:0")
    mine = cuda.current_stream("cuda:0")
    stream.leave()
    none: Any = None
    Thinking._think_with(reads, ThinkingOptions(), none, none, none, stream)
    assert reads._media_threads.submit(partial(cuda.current_stream, "cuda:0")).result(5) is mine
    reads._media_threads.shutdown()


@pytest.mark.gpu
def test_graphs_of_two_stages_that_run_at_once_are_as_alone() -> None:
    """Products that cuBLAS splits, which needs a workspace, many times over on two threads."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    from tritone.engines.cuda_graphs import CudaGraphs
    from tritone.engines.torch_setup import prepared_torch

    class Stage:
        def __init__(self, seed: int, urgency: int) -> None:
            self.stream = StageStream(urgency)
            prepared_torch(Placement(Path(), "cuda:0", stream=self.stream))
            chance = torch.Generator("cuda").manual_seed(seed)
            self.weights = torch.randn(8192, 256, generator=chance, device="cuda")
            self.inputs = torch.randn(32, 8192, generator=chance, device="cuda")
            self.given, self.made = torch.zeros_like(self.inputs), torch.zeros(32, 256, device="cuda")
            self.launch = CudaGraphs(torch.device("cuda:0"))(self._program)
            self.stream.leave()
            self.alone, self.beside = [], []

        def _program(self) -> None:
            self.made.copy_(self.given @ self.weights)

        def run(self, into: list[np.ndarray]) -> None:
            self.stream.enter()
            for number in range(400):
                self.given.copy_(self.inputs * (1 + number % 7))
                self.launch()
                into.append(self.made.cpu().numpy())

    stages = [Stage(1, 2), Stage(2, 0)]
    for stage in stages:
        on_thread("alone", partial(stage.run, stage.alone))
    threads = [threading.Thread(target=stage.run, args=[stage.beside]) for stage in stages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for stage in stages:
        assert len(stage.beside) == 400
        assert all(np.array_equal(one, other) for one, other in zip(stage.alone, stage.beside, strict=True))
