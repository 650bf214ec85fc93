"""How perf_analyzer is asked, and what comes of a run that fails."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from perf_analyzer import recipe as recipes
from perf_analyzer.__main__ import main
from perf_analyzer.recipe import INPUTS, Load, PerfAnalyzer, Target, adapted, inputs_of
from tritone_client.errors import InvalidRequest, ServerFault

ROOT = Path(__file__).parents[3]
READY = sorted(file.stem for file in INPUTS.glob("*.json"))
EXPORT = {
    "experiments": [
        {
            "experiment": {"mode": "concurrency", "value": 1},
            "requests": [
                {
                    "timestamp": 1_000_000,
                    "response_timestamps": [6_000_000],
                    "response_outputs": [{"event": "done", "text_output": "all"}],
                }
            ],
        }
    ]
}
QUESTION = {"text_input": ["hello"], "image": {"content": ["aGk="], "shape": [1]}, "stream": [True]}

Make = Callable[[str], PerfAnalyzer]


@pytest.fixture
def analyzer(tmp_path: Path) -> Make:
    """A program that does what a line of shell says; $OUT is the file that it is to write."""

    def make(script: str) -> PerfAnalyzer:
        program = tmp_path / "program"
        find = 'for word in "$@"; do case "$word" in --profile-export-file=*) OUT="${word#*=}";; esac; done'
        program.write_text(f"#!/bin/sh\n{find}\n{script}\n")
        program.chmod(0o755)
        return PerfAnalyzer(program, "fake", Target("127.0.0.1:1", "127.0.0.1:2"), [QUESTION])

    return make


class TestInputs:
    @pytest.mark.parametrize("pipeline", READY)
    def test_ready_ones_name_tensors_of_the_model(self, pipeline: str) -> None:
        config = (ROOT / "model_repository" / pipeline / pipeline / "config.pbtxt").read_text()
        known = set(re.findall(r'input \{\n  name: "(\w+)"', config))
        questions = inputs_of(pipeline)
        assert len(questions) >= 4 and all(set(question) <= known for question in questions)
        for question in questions:
            for media in ("image", "audio"):
                if media in question:
                    base64.b64decode(question[media]["content"][0], validate=True)

    def test_ready_ones_cover_the_pipelines(self) -> None:
        assert READY == ["fake", "qwen3_omni", "smoltalk"]
        assert {"image", "audio"} <= {name for question in inputs_of("qwen3_omni") for name in question}
        assert "audio" in {name for question in inputs_of("smoltalk") for name in question}

    def test_for_each_recipe(self) -> None:
        assert adapted([QUESTION], "grpc") == {"data": [QUESTION]}
        assert adapted([QUESTION], "http") == {
            "data": [{name: QUESTION[name] for name in ("text_input", "image")}]
        }
        body = {"text_input": "hello", "image": "aGk=", "stream": True, "audio_format": "s16_base64"}
        assert adapted([QUESTION], "sse") == {"data": [{"payload": [body]}]}

    def test_none_there(self) -> None:
        with pytest.raises(InvalidRequest, match="ready inputs are for fake, qwen3_omni, smoltalk"):
            inputs_of("echo")

    @pytest.mark.parametrize("content", ["", "[]", '{"data"', '{"other": []}'])
    def test_no_inputs(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "mine.json").write_text(content)
        with pytest.raises(InvalidRequest, match=r'mine\.json is not {"data": '):
            inputs_of("fake", tmp_path / "mine.json")


class TestRun:
    def test_the_words(self, analyzer: Make, tmp_path: Path) -> None:
        made, inputs, export = analyzer(""), tmp_path / "in", tmp_path / "out"
        level, rate = Load(4, num_requests=9), Load(None, 2.5, "poisson")
        words = " ".join(made.command("grpc", level, inputs, export))
        assert "-m fake -i grpc -u 127.0.0.1:1 --streaming --async" in words
        assert f"--concurrency-range=4 --request-count=9 --input-data={inputs}" in words
        words = " ".join(made.command("http", rate, inputs, export))
        assert "-m fake_sync -i http -u 127.0.0.1:2" in words and "--streaming" not in words
        assert "--request-rate-range=2.5 --request-distribution=poisson --request-count=20" in words
        words = " ".join(made.command("sse", rate, inputs, export))
        assert "--service-kind=openai --endpoint=v2/models/fake/generate_stream" in words

    def test_its_export_is_read_and_kept(self, analyzer: Make, tmp_path: Path) -> None:
        export = tmp_path / "e.json"
        export.write_text("of an earlier run")
        made = analyzer(f"test ! -e $OUT && echo measured && echo '{json.dumps(EXPORT)}' > $OUT")
        run = made.run("grpc", Load(1), export)
        assert run.said == "measured\n" and run.levels[0].answers[0].end_s == pytest.approx(0.005)
        assert json.loads(export.read_text()) == EXPORT
        assert json.loads((tmp_path / "e.input.json").read_text()) == {"data": [QUESTION]}

    def test_an_export_that_breaks_off_is_made_again(self, analyzer: Make, tmp_path: Path) -> None:
        once = f"if mkdir {tmp_path}/once 2>/dev/null; then : > $OUT; "
        made = analyzer(f"{once} else echo '{json.dumps(EXPORT)}' > $OUT; fi")
        assert len(made.run("grpc", Load(1), tmp_path / "e.json").levels) == 1

    def test_but_not_for_ever(self, analyzer: Make, tmp_path: Path) -> None:
        made = analyzer(f"echo x >> {tmp_path}/count; : > $OUT")
        with pytest.raises(InvalidRequest, match="not a complete export"):
            made.run("grpc", Load(1), tmp_path / "e.json")
        assert (tmp_path / "count").read_text() == "x\n" * recipes.TRIES

    @pytest.mark.parametrize(
        ("said", "reason"),
        [
            ("Thread [0] had error: it broke\n\nThread [1] had error: it broke\n\n", "gave up: it broke$"),
            ("error: no such model\nUsage: a page\nof options", "gave up: error: no such model$"),
            ("", "gave up: it did not say why"),
        ],
    )
    def test_a_request_that_fails(self, analyzer: Make, tmp_path: Path, said: str, reason: str) -> None:
        made = analyzer(f"printf '{said}' >&2; exit 99")
        with pytest.raises(ServerFault, match=reason):
            made.run("grpc", Load(1), tmp_path / "e.json")

    def test_one_that_never_ends(
        self, analyzer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(recipes, "TIMEOUT_S", 0.2)
        with pytest.raises(ServerFault, match=r"not done after 0.2 s"):
            analyzer("exec sleep 30").run("grpc", Load(1), tmp_path / "e.json")

    def test_an_unknown_recipe(self, analyzer: Make, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequest, match="no recipe 'rest'; there are grpc, http, sse"):
            analyzer("").run("rest", Load(1), tmp_path / "e.json")


class TestCommand:
    def test_every_recipe_at_every_load(
        self, analyzer: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        program = analyzer(f"echo its table; echo '{json.dumps(EXPORT)}' > $OUT").program
        out = tmp_path / "kept"
        words = ["run", "fake", f"--program={program}", "--concurrency=1,2", "--rate=3", f"--out={out}"]
        assert main([*words, "--json"]) == 0
        printed = capsys.readouterr()
        levels = [json.loads(line) for line in printed.out.splitlines()]
        assert [level["recipe"] for level in levels] == [
            *["gRPC stream"] * 3,
            *["HTTP infer"] * 3,
            *["HTTP generate_stream"] * 3,
        ]
        assert printed.err.count("its table") == 9
        assert {file.name for file in out.glob("fake-grpc-*")} == {
            f"fake-grpc-{load}.{kind}"
            for load in ("concurrency-1", "concurrency-2", "rate-3")
            for kind in ("json", "input.json")
        }

    def test_shows_exports(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "mine.json").write_text(json.dumps(EXPORT))
        assert main(["show", str(tmp_path / "mine.json")]) == 0
        assert "mine" in capsys.readouterr().out

    def test_a_failed_request_is_a_failure(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        export = json.loads(json.dumps(EXPORT).replace('"done"', '"text"'))
        (tmp_path / "mine.json").write_text(json.dumps(export))
        assert main(["show", str(tmp_path / "mine.json")]) == 1
        assert "1 requests failed, with the answer ended without" in capsys.readouterr().err

    def test_files_that_are_not_there(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["show", "no.json"]) == 1
        assert capsys.readouterr().err == "perf_analyzer: no.json: No such file or directory\n"

    def test_no_program(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setenv("PATH", "/nowhere")
        assert main(["run", "fake"]) == 1
        assert "no perf_analyzer on PATH; `make perf` fetches one" in capsys.readouterr().err
