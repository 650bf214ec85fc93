"""`tritone bench` against a scripted server: its words, its files, its exit codes."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from fake_triton import Audio, Done, Fail, Text, Wait

import tritone_bench
import tritone_client
from tritone_bench.document import read
from tritone_client.cli import main
from waiting import PATIENCE_S

CHILD = [sys.executable, "-m", "tritone_client", "bench"]
PATHS = [Path(tritone_client.__file__).parents[1], Path(tritone_bench.__file__).parents[1]]
CHILD_ENV = {**os.environ, "PYTHONPATH": ":".join(map(str, PATHS)), "COLUMNS": "90", "TERM": "xterm"}
QUICK = ["--concurrency", "1,2", "--requests", "4", "--warmup", "0"]


def bench(triton, *options):
    return main(["bench", *options, "--url", triton.url])


def words_of(text):
    return [line.split() for line in text.splitlines()]


def test_it_prints_a_table_and_a_sentence_a_level(triton, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo\n")
    assert bench(triton, "smoltalk", *QUICK, "--prompts", str(prompts), "--modalities", "text,audio") == 0
    printed = capsys.readouterr()
    lines = words_of(printed.out)
    assert lines[0][-4:] == ["concurrency", "1", "concurrency", "2"]
    assert ["errors", "0", "0"] in lines and ["thinker:", "busy", "(s)", "0.100", "0.100"] in lines
    one, two = printed.err.splitlines()
    assert re.fullmatch(r"concurrency 1: 4 requests in \d+\.\d s", one) and two.startswith("concurrency 2: 4")
    assert [request.text("text_input") for request in triton.requests[:4]] == ["one", "two", "one", "two"]
    assert {request.text("modalities") for request in triton.requests} == {"text,audio"}


def test_it_writes_everything_that_is_asked_for(triton, tmp_path, capsys):
    triton.config_parameters = {"deploy_digest": "0123", "sample_rate_hz": "24000", "max_in_flight": "8"}
    run, page, plots = tmp_path / "run.json", tmp_path / "run.html", tmp_path / "plots"
    files = ["--json", str(run), "--report", str(page)]
    options = [
        "--goodput",
        "ttfp=90,e2el=90",
        "--repeats",
        "2",
        "--deadline-s",
        "9",
        "--max-tokens",
        "7",
        "--seed",
        "5",
    ]
    assert bench(triton, *QUICK, *options, *files) == 0
    document = read(run)
    assert [(level.load.concurrency, level.repeat) for level in document.levels] == [
        (1, 0),
        (2, 0),
        (1, 1),
        (2, 1),
    ]
    assert all(level.goodput.share == 1.0 for level in document.levels)
    assert document.environment.command.startswith("tritone bench --concurrency 1,2 --requests 4")
    assert document.environment.num_cores >= 1 and document.environment.versions["numpy"]
    assert (document.server.deploy_digest, document.server.limits) == ("0123", {"max_in_flight": 8.0})
    assert document.plan.delivery == {"deadline_s": 9.0} and document.plan.num_repeats == 2
    assert (document.request_set.options, document.request_set.first_seed) == ({"max_tokens": 7}, 5)
    assert page.read_text().startswith("<!DOCTYPE html>")
    capsys.readouterr()
    assert main(["bench", "--read", str(run), "--plots", str(plots)]) == 0
    assert "concurrency 2 #2" in capsys.readouterr().out
    assert {path.name for path in plots.iterdir()} == {
        f"{name}.png" for name in ("latency", "throughput", "ttfp", "timeline")
    }
    assert main(["bench", "--compare", str(run), str(run)]) == 0
    assert ["requests/s"] in [line[:1] for line in words_of(capsys.readouterr().out)]


def test_rates_durations_and_fixed_lengths_reach_the_server(triton, capsys):
    options = ["--request-rate", "20,40", "--arrival", "constant", "--duration-s", "0.2", "--warmup", "0"]
    assert bench(triton, *options, "--fixed-length", "60", "--fixed-length", "talker=9") == 0
    lines = words_of(capsys.readouterr().out)
    assert ["requests", "4", "8"] in lines
    sampling = json.loads(triton.requests[0].text("sampling_parameters"))
    assert sampling == {
        "min_tokens": 60,
        "max_tokens": 60,
        "talker": {"min_tokens": 9, "max_tokens": 9},
        "seed": 0,
    }


def test_a_file_of_requests(triton, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "one", "seed": 9, "deadline_s": 4}\n{"prompt": "two", "speaker": "Ethan"}\n')
    options = ["--concurrency", "1", "--requests", "3", "--warmup", "0", "--speaker", "Chelsie"]
    assert bench(triton, "--input", str(path), *options) == 0
    assert [request.text("text_input") for request in triton.requests] == ["one", "two", "one"]
    assert [request.text("speaker") for request in triton.requests] == ["Chelsie", "Ethan", "Chelsie"]
    seeds = [json.loads(request.text("sampling_parameters"))["seed"] for request in triton.requests]
    assert seeds == [9, 1, 9] and triton.requests[0].parameters == {"deadline_ms": 4000}


def test_failures_are_told_after_everything_is_written(triton, tmp_path, capsys):
    triton.script = [Fail(grpc.StatusCode.UNAVAILABLE, "TRITONE_UNAVAILABLE: busy; try later")]
    run = tmp_path / "run.json"
    options = ["--concurrency", "2", "--requests", "4", "--warmup", "0", "--json", str(run)]
    assert bench(triton, *options) == 1
    printed = capsys.readouterr()
    assert "concurrency 2: 4 failed with UNAVAILABLE, e.g. busy; try later" in printed.out
    level, last = printed.err.splitlines()
    assert level.endswith(", 4 failed")
    assert last == "tritone: 4 requests failed, 4 of them with UNAVAILABLE: busy; try later"
    assert read(run).levels[0].num_errors == 4


def test_without_matplotlib_it_measures_and_says_what_to_install(triton, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tritone_bench.page.NEEDED", ("no_such_library",))
    run, page = tmp_path / "run.json", tmp_path / "run.html"
    assert bench(triton, *QUICK, "--json", str(run), "--report", str(page)) == 1
    printed = capsys.readouterr()
    assert "TTFT (s)" in printed.out and len(read(run).levels) == 2 and not page.exists()
    last = printed.err.splitlines()[-1]
    assert last.startswith("tritone: a report needs no_such_library") and "tritone[bench]" in last


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompts", "/no/such.txt"], "/no/such.txt: No such file"),
        (["--input", "/no/such.jsonl"], "/no/such.jsonl: No such file"),
        (["--url", "127.0.0.1:1"], "could not reach"),
        (["--goodput", "speed=1"], "unknown measure 'speed'"),
        (["--warmup", "-1"], "the warm-up has -1 requests; give 0 or more"),
        (["--duration-s", "0"], "the duration is 0.0; give a positive number of seconds"),
        (["--fixed-length", "9", "--max-tokens", "9"], "--max-tokens and --fixed-length both limit the text"),
        (["--read", "/no/such.json"], "/no/such.json: No such file"),
        (["--read", __file__], "is not JSON; give a file that `tritone bench --json` wrote"),
        (["--compare", "/no/such.json", "/no/such.json"], "/no/such.json: No such file"),
        (["--json", "/no/such/run.json"], "there is no folder '/no/such' to write it into; make it first"),
        (["--report", "/tmp"], "/tmp cannot be written; give another name"),
        (["--plots", __file__], "is a file; give a folder for the pictures"),
    ],
)
def test_errors_are_one_sentence(triton, arguments, sentence, capsys):
    url = [] if "--url" in arguments else ["--url", triton.url]
    assert main(["bench", *arguments, *url]) == 1
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1 and error.startswith("tritone: ")
    assert triton.requests == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--concurrency", "1,x"],
        ["--concurrency", "0"],
        ["--concurrency", "1", "--request-rate", "1"],
        ["--request-rate", "0"],
        ["--request-rate", "nan"],
        ["--request-rate", "fast"],
        ["--arrival", "never"],
        ["--requests", "0"],
        ["--fixed-length", "=9"],
        ["--fixed-length", "talker=x"],
        ["--input", "a", "--prompts", "b"],
        ["--compare", "one"],
    ],
)
def test_wrong_usage_exits_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *arguments])
    assert exit_.value.code == 2 and "usage: tritone bench" in capsys.readouterr().err


def test_a_terminal_shows_how_far_it_is(triton):
    triton.script = [Text("a"), Wait(0.15), Audio(2400), Done()]
    ours, terminal = pty.openpty()
    options = ["--concurrency", "1,2", "--requests", "3", "--url", triton.url]
    child = subprocess.Popen([*CHILD, *options], env=CHILD_ENV, stdout=subprocess.PIPE, stderr=terminal)
    os.close(terminal)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # Linux reports the end of a terminal as an error
            break
    os.close(ours)
    table, _ = child.communicate(timeout=3 * PATIENCE_S)
    assert child.returncode == 0 and b"TTFT (s)" in table
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert "warm-up" in text and re.search(r"concurrency 1\b.*\b[123]/3", text)
    assert re.search(r"concurrency 2: 3 requests in \d+\.\d s", text)


def test_an_interrupted_run_keeps_its_complete_levels(triton, tmp_path):
    run = tmp_path / "run.json"
    options = ["--concurrency", "4,1", "--requests", "4", "--warmup", "0", "--json", str(run)]
    asked = []

    def script(request):
        asked.append(request)
        return [Text("a"), Done()] if len(asked) <= 4 else [Text("a"), Wait(60), Done()]

    triton.script = script
    child = subprocess.Popen([*CHILD, *options, "--url", triton.url], env=CHILD_ENV, stderr=subprocess.PIPE)
    assert child.stderr.readline().startswith(b"concurrency 4: 4 requests")
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=3 * PATIENCE_S)
    assert child.returncode == 130
    assert [level.load.concurrency for level in read(run).levels] == [4]


def test_importing_the_command_draws_nothing():
    heavy = ("matplotlib", "jinja2", "rich", "msgspec", "soundfile")
    code = f"import sys, tritone_bench.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=CHILD_ENV, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
