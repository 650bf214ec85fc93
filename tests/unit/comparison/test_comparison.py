"""The comparison of ours and the peer: the peer's client and server, the searches, the tables."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import end_to_end
from comparison import endurance, goodput_search, levels, memory_used, stage_floors, tables
from comparison.goodput_search import Probe, goodput, next_rate
from comparison.peer_client import PeerClient, body
from comparison.servers import OURS, PEER, KeptServers, OurStart, PeerStart, is_running, peer_server
from comparison.stage_floors import Chip, Floor, Step, floor_of, kernel_share, steps_of
from comparison.workload import Workload
from tritone.pipelines.qwen3_omni.sizes import OmniSizes
from tritone_bench.record import RequestRecord
from tritone_client.errors import ServerFault
from tritone_client.events import AudioChunk, Done, TextDelta

SMALL = Workload(prompt_tokens=30, text_tokens=6, frames=40)


@pytest.fixture
def real(tmp_path: Path) -> Path:
    import qwen3_omni_real_size

    qwen3_omni_real_size.write_config(tmp_path)
    return tmp_path


class TestPeer:
    async def test_events(self, peer_python: str, tmp_path: Path) -> None:
        requests = SMALL.requests(3)
        ask = requests[0]
        with peer_server(PeerStart(tmp_path, peer_python), tmp_path, 120) as served:
            async with served.client() as client:
                assert isinstance(client, PeerClient)
                events = [event async for event in client.stream(ask.prompt, **ask.options)]
                with pytest.raises(ServerFault, match="out of memory"):
                    await client.ask("kkkkk", **ask.options)
        texts = [event.text for event in events if isinstance(event, TextDelta)]
        assert texts == [f"<{number}>" for number in range(6)]
        chunks = [event for event in events if isinstance(event, AudioChunk)]
        assert [len(chunk.samples) // 1920 for chunk in chunks] == [4, 25, 11]
        assert [chunk.sample_offset // 1920 for chunk in chunks] == [0, 4, 29]
        assert chunks[0].sample_rate_hz == 24000
        assert isinstance(events[-1], Done)
        assert events[-1].usage == {"prompt_tokens": 30, "completion_tokens": 6}
        assert events[-1].finish_reasons == {"text": "stop", "audio": "stop"}

    async def test_one_that_refuses(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as held:
            url = f"http://127.0.0.1:{held.getsockname()[1]}"
        async with PeerClient(url) as client:
            with pytest.raises(ServerFault, match="connection broke"):
                await client.ask("b")

    def test_what_is_asked(self) -> None:
        ask = SMALL.requests(1)[0]
        asked = body(ask.prompt or "", ask.options)
        thinker, talker, _ = asked["sampling_params_list"]
        assert thinker["max_tokens"] == 6 and thinker["ignore_eos"] and thinker["temperature"] == 0
        assert talker["max_tokens"] == 40 and talker["ignore_eos"] and talker["top_k"] == 50
        assert ask.options["sampling"]["talker"] == {"min_tokens": 41, "max_tokens": 41}

    def test_one_that_does_not_start_shows_its_log(self, tmp_path: Path) -> None:
        (tmp_path / "liar").write_text(f"#!{sys.executable}\nraise SystemExit('no such module')\n")
        (tmp_path / "liar").chmod(0o755)
        with (
            pytest.raises(RuntimeError, match=r"ended with status 1(.|\n)*no such module"),
            peer_server(PeerStart(tmp_path, str(tmp_path / "liar")), tmp_path, 30),
        ):
            pass

    def test_one_that_is_kept_serves_the_next_commands(
        self, peer_python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["--out", str(tmp_path), "--tiny", "--only", "peer", "--peer-python", peer_python]
        kept = KeptServers(tmp_path / "servers")
        try:
            assert end_to_end.main(["start", *words]) == 0
            served = kept.find(PEER)
            assert served is not None and "peer is ready" in capsys.readouterr().out
            assert end_to_end.main(["endurance", *words, "--concurrency", "1", "--duration-s", "0.3"]) == 0
            assert "is ready" not in capsys.readouterr().out and kept.find(PEER) == served
        finally:
            assert end_to_end.main(["stop", *words]) == 0
        assert kept.find(PEER) is None and not is_running(served.pid)

    def test_the_whole_command(
        self,
        peer_python: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("tritone_bench.page.NEEDED", ("no_such_package",))  # as on a bare GPU machine
        monkeypatch.setattr(
            "tritone_bench.environment._engine_versions", lambda python: [f"of {python}", None]
        )
        words = ["--out", str(tmp_path), "--tiny", "--only", "peer", "--peer-python", peer_python]
        assert end_to_end.main(["levels", *words, "--concurrency", "1,2"]) == 0
        printed = capsys.readouterr().out
        assert "### peer" in printed and "### ours" not in printed
        run = levels.Levels(tmp_path).read(PEER)[2]
        assert run.levels[0].num_requests == 2 and run.levels[0].num_errors == 0
        assert run.levels[0].measure("audio", "ttfp_s") is not None
        assert run.environment.torch == f"of {peer_python}", "its engines' versions count"
        both = {OURS: {2: run}, PEER: {2: run}}
        ratio = tables.pages(both).strip().splitlines()[-1].split("|")[1:-1]
        assert [cell.strip() for cell in ratio] == ["2", "1.00", "1.00", "1.00", "1.00", "1.00"]
        made = json.loads((tmp_path / "peer.json").read_bytes())
        assert [level["num_errors"] for level in made["levels"]] == [0, 0]
        # A second time nothing is measured, only shown.
        assert end_to_end.main(["levels", *words, "--concurrency", "1,2"]) == 0
        assert "is ready" not in capsys.readouterr().out
        assert (
            end_to_end.main(
                ["goodput", *words, "--rate", "50", "--probe-s", "0.2", "--samples", "4", "--probes", "1"]
            )
            == 0
        )
        assert "peer 50.000 requests/s" in capsys.readouterr().out
        short = ["--concurrency", "3", "--duration-s", "1", "--abort-share", "0.5"]
        assert end_to_end.main(["endurance", *words, *short]) == 0
        assert (endured := endurance.read(tmp_path / "endurance-peer.json")) is not None
        assert endured.whole and endured.left and endured.memory


def test_prompts_have_their_tokens() -> None:
    prompts = {SMALL.requests(None)[number].prompt for number in range(64)}
    assert len(prompts) == 64 and {len(prompt or "") for prompt in prompts} == {22}
    assert SMALL.requests(4).digest == SMALL.requests(4).digest != Workload().requests(4).digest


def test_our_command() -> None:
    start = OurStart(Path("/c"), "dummy_one_h200", ("a=1",))
    words = start.words(Path("/r"))
    assert words[1:5] == ["-m", "tritone", "serve", "qwen3_omni"]
    assert {
        "--checkpoint=/c",
        "--run-dir=/r",
        "--profile=dummy_one_h200",
        "--set=a=1",
        "--grpc-port=0",
    } <= set(words)


class TestGoodput:
    def probe(self, rate: float, good: bool) -> Probe:
        return Probe(rate, 100, 0, 0.2 if good else 0.7, 1.0, 0.0)

    @pytest.mark.parametrize(
        "bad",
        [
            {"num_errors": 1},
            {"ttfp_p99_s": 0.51},
            {"ttfp_p99_s": None},
            {"share_clean": 0.98},
            {"share_clean": None},
        ],
    )
    def test_what_is_good(self, bad: dict[str, object]) -> None:
        facts = {
            "rate_per_s": 1.0,
            "num_requests": 100,
            "num_errors": 0,
            "ttfp_p99_s": 0.5,
            "share_clean": 0.99,
            "late_p99_s": 0.0,
        }
        assert Probe(**facts).is_good
        assert not Probe(**{**facts, **bad}).is_good

    @pytest.mark.parametrize("limit", [0.3, 1.0, 5.7, 40.0])
    def test_it_closes_in(self, limit: float) -> None:
        probes: list[Probe] = []
        while (rate := next_rate(probes, 1.0)) is not None:
            probes.append(self.probe(rate, rate <= limit))
            assert len(probes) < 20
        assert limit / goodput_search.PRECISION <= goodput(probes) <= limit

    def test_a_server_that_is_never_good(self) -> None:
        probes: list[Probe] = []
        while (rate := next_rate(probes, 1.0)) is not None:
            probes.append(self.probe(rate, False))
        assert goodput(probes) == 0 and probes[-1].rate_per_s >= goodput_search.LOWEST_PER_S

    def test_a_good_rate_above_a_bad_one_proves_nothing(self) -> None:
        assert goodput([self.probe(1, True), self.probe(2, False), self.probe(4, True)]) == 1


class TestEndurance:
    def endured(self, **changes: object) -> endurance.Endured:
        facts = {"whole": 5, "memory": [(float(i), 1000.0) for i in range(9)], **changes}
        return endurance.Endured("ours", 32, 540.0, **facts)

    def test_verdict(self) -> None:
        assert self.endured().is_good
        assert not self.endured(errors={"INTERNAL": 1}).is_good
        assert not self.endured(wrong_length=1).is_good
        assert not self.endured(whole=0).is_good
        grows = [(float(i), 1000.0 + 100 * i) for i in range(9)]
        assert not self.endured(memory=grows).is_good and "it grows" in self.endured(memory=grows).told()

    def test_a_warm_up_is_no_growth(self) -> None:
        samples = [(float(i), 500.0 if i < 3 else 1000.0) for i in range(9)]
        assert memory_used.is_flat(samples) and memory_used.thirds_mib(samples) == (500, 1000, 1000)

    def test_memory_is_that_of_all_processes(self) -> None:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
            import os

            assert child.pid in set(memory_used.family(os.getpid()))
            child.communicate(b"\n")
        assert memory_used.resident_bytes(os.getpid()) > 10 << 20
        assert memory_used.resident_bytes(child.pid) == 0


class TestFloors:
    def test_a_frame_of_the_talker_reads_what_it_must(self, real: Path) -> None:
        sizes = OmniSizes.read(real)
        floor = floor_of("talker", sizes, Step(0.0026, 1.0), Workload(), 2)
        # 6 of 128 experts and the shared one in 20 layers, then 15 passes of the code predictor.
        assert 3.0e9 < floor.bytes_read < 3.6e9
        assert floor.bound(Chip()) == "bytes"
        assert 0.0006 < floor.seconds(Chip()) < 0.0008
        many = floor_of("talker", sizes, Step(0.006, 64.0), Workload(), 2)
        assert floor.bytes_read < many.bytes_read < 3 * floor.bytes_read
        assert many.operations == pytest.approx(64 * floor.operations)

    def test_a_token_of_the_thinker_reads_three_billion_weights(self, real: Path) -> None:
        floor = floor_of("thinker", OmniSizes.read(real), Step(0.004, 1.0), Workload(), 2)
        assert 5.5e9 < floor.bytes_read < 6.5e9

    def test_code2wav_is_bound_by_operations_in_batches(self, real: Path) -> None:
        step = Step(0.09, 64.0, frames=25.0)
        assert floor_of("code2wav", OmniSizes.read(real), step, Workload(), 2).bound(Chip()) == "operations"

    def test_steps_of_answers(self) -> None:
        stages = {
            "talker": {"steps": 100, "busy_s": 0.5, "batch": 4.0},
            "code2wav": {"calls": 5, "busy_s": 0.1, "batch": 2.0, "frames": 104},
            "open": {"total_s": 1.0},
        }
        record = RequestRecord(0, 0.0, 0.0, 1.0, timings={"stages": stages})
        found = steps_of([record, record])
        assert found == {"talker": Step(0.005, 4.0), "code2wav": Step(0.02, 2.0, frames=20.8)}

    def test_kernels_that_overlap_count_once(self) -> None:
        def span(cat: str, ts: float, dur: float) -> dict[str, object]:
            return {"ph": "X", "cat": cat, "ts": ts, "dur": dur}

        events = [
            span("cpu_op", 0, 100),
            span("kernel", 10, 20),
            span("kernel", 20, 20),
            span("kernel", 60, 10),
        ]
        assert kernel_share({"traceEvents": events}) == pytest.approx(0.4)
        assert kernel_share({"traceEvents": events[:1]}) is None

    def test_the_rest_is_split_where_there_is_a_trace(self, real: Path) -> None:
        sizes = OmniSizes.read(real)
        steps = {"talker": Step(0.0030, 1.0, kernel_s=0.0026), "thinker": Step(0.0050, 1.0)}
        thinker, talker = stage_floors.table(steps, sizes, Workload(), 2, Chip())[2:]
        assert thinker.split("|")[1].strip() == "thinker" and "in all" in thinker
        cells = [cell.strip() for cell in talker.split("|")[1:-1]]
        assert cells[:3] == ["talker", "1.0", "3.00"]
        floor_ms, kernels_ms, gaps_ms = float(cells[3]), float(cells[-2]), float(cells[-1])
        assert floor_ms + kernels_ms == pytest.approx(2.6, abs=0.01) and gaps_ms == pytest.approx(0.4)

    def test_the_larger_bound_counts(self) -> None:
        assert Floor(4.8e12, 0).seconds(Chip()) == 1.0 and Floor(0, 989e12).seconds(Chip()) == 1.0
        assert math.isclose(Floor(2.4e12, 989e12).seconds(Chip()), 1.0)
