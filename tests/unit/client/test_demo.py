"""What `make demo` runs, around a server that only says what `tritone serve` says."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile
from fake_triton import Audio, Hang, Text

import tritone_client

DEMO = Path(tritone_client.__file__).parents[2] / "build" / "demo.py"
SERVER = """
import json, os, pathlib, signal, sys, tritone_client.cli

if sys.argv[1] != "serve":
    sys.exit(tritone_client.cli.main())
if sys.argv[2] != "smoltalk":
    sys.exit("tritone: no such pipeline")
folder = pathlib.Path(sys.argv[sys.argv.index("--run-dir") + 1])
pathlib.Path(os.environ["SERVED"]).touch()
(folder / "server.log").touch()
print(f"server Triton\\nlog    {folder}/server.log\\nstart  pid 1\\nloaded thinker after 1.0 s", flush=True)
signal.signal(signal.SIGTERM, lambda *_: print("stop   ending the server", flush=True) or sys.exit(0))
print("ready  smoltalk after 1.1 s\\ngRPC a   HTTP b   metrics c\\ntry: tritone chat", flush=True)
(folder / "ready.new").write_text(json.dumps({"grpc": os.environ["URL"]}))
(folder / "ready.new").rename(folder / "ready.json")
signal.pause()
"""


@pytest.fixture
def demo(triton, tmp_path):
    """demo(arguments) starts it in `demo.folder`; temporary files that it leaves are in `demo.left`."""
    modules = tmp_path / "modules"
    (modules / "tritone").mkdir(parents=True)
    (modules / "tritone" / "__init__.py").touch()
    (modules / "tritone" / "__main__.py").write_text(SERVER)

    def start(*arguments: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, DEMO, *arguments],
            cwd=start.folder,
            env={
                **os.environ,
                "PYTHONPATH": f"{modules}:{Path(tritone_client.__file__).parents[1]}",
                "URL": triton.url,
                "SERVED": str(start.served),
                "TMPDIR": str(start.left),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    start.folder, start.left, start.served = tmp_path / "desk", tmp_path / "left", tmp_path / "served"
    start.folder.mkdir()
    start.left.mkdir()
    return start


def test_demo_shows_progress_answer_and_what_comes_next(demo):
    run = demo()
    out, error = run.communicate(timeout=120)
    assert run.returncode == 0, error
    lines = [line for line in out.splitlines() if line]
    assert lines == [
        "server Triton",
        "start  pid 1",
        "loaded thinker after 1.0 s",
        "ready  smoltalk after 1.1 s",
        "> Why is the sky blue?",
        "Hello",
        "stop   ending the server",
        "listen to reply.wav; to go on: make serve",
    ]
    assert soundfile.info(demo.folder / "reply.wav").frames == 1000
    assert list(demo.left.iterdir()) == []


def test_demo_may_answer_into_the_file_of_the_question(demo, triton):
    reply = demo.folder / "reply.wav"
    reply.write_bytes(b"RIFF")
    run = demo("--audio", "reply.wav")
    _, error = run.communicate(timeout=120)
    assert run.returncode == 0, error
    assert triton.requests[0].inputs["audio"].tolist() == [b"RIFF"]
    assert soundfile.info(reply).frames == 1000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--audio", "no.wav"], "demo: no.wav: No such file or directory\n"),
        (["--out", "no/reply.wav"], "demo: no/reply.wav: No such file or directory\n"),
        (["--out", "reply.mp3"], "demo: 'reply.mp3' does not end in .wav; only WAV files are written\n"),
    ],
)
def test_demo_checks_its_files_before_it_serves(demo, arguments, sentence):
    run = demo(*arguments)
    assert run.communicate(timeout=120) == ("", sentence)
    assert run.returncode == 1 and not demo.served.exists()
    assert list(demo.folder.iterdir()) == [] == list(demo.left.iterdir())


def test_demo_of_a_pipeline_that_is_not_there_leaves_nothing(demo):
    run = demo("--pipeline", "smaltalk")
    assert run.communicate(timeout=120) == ("", "tritone: no such pipeline\n")
    assert run.returncode == 1 and list(demo.left.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_ended_keeps_what_was_heard(demo, triton, number):
    triton.script = [Text("Hel"), Audio(400), Text("lo\n"), Hang()]
    run = demo()
    while run.stdout.readline() != "Hello\n":
        assert run.poll() is None
    if number == signal.SIGINT:  # a terminal gives it to the question too
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        os.kill(int(children[-1]), number)
    run.send_signal(number)
    out, error = run.communicate(timeout=120)
    assert (run.returncode, error) == (130, "")
    assert "stop   ending the server" in out
    assert soundfile.info(demo.folder / "reply.wav").frames == 400
    assert list(demo.left.iterdir()) == []
