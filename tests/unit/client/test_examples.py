"""Every example runs and writes what it says."""

import base64
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import soundfile
from fake_triton import Audio, Done, Fail, Hang, Text, counting_samples

import tritone_client
from tritone_client import write_wav
from waiting import PATIENCE_S, wait_until

EXAMPLES = Path(tritone_client.__file__).parents[1] / "examples"


def run_example(monkeypatch, name: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def files_of(tmp_path: Path, name: str) -> list[str]:
    """The files that an example asks for, made where nothing else lies."""
    picture, question = tmp_path / "picture.png", tmp_path / "question.wav"
    wanted = {
        "plain_shared_memory.py": [question],
        "see_and_hear.py": [picture, question],
        "plain_messages.py": [picture],
    }.get(name, [])
    if picture in wanted:
        picture.write_bytes(b"\x89PNG\x00")
    if question in wanted:
        write_wav(question, counting_samples(0, 4000), 16_000)
    return [str(path) for path in wanted]


def assert_reply(path: Path) -> None:
    samples, rate_hz = soundfile.read(path, dtype="int16")
    assert rate_hz == 24_000
    np.testing.assert_array_equal(samples, counting_samples(0, 1000))


@pytest.mark.parametrize(
    "name", ["chat_async.py", "chat_sync.py", "plain_grpc_sync.py", "plain_grpc_aio.py", "see_and_hear.py"]
)
def test_streaming_examples(triton, monkeypatch, tmp_path, capsys, name):
    out = tmp_path / "reply.wav"
    run_example(monkeypatch, name, *files_of(tmp_path, name), "--url", triton.url, "--out", str(out))
    assert "Hello" in capsys.readouterr().out
    assert_reply(out)


@pytest.mark.parametrize("name", ["plain_grpc_sync.py", "plain_grpc_aio.py"])
def test_plain_examples_report_errors(triton, monkeypatch, name):
    import grpc

    triton.script = [Text("a"), Fail(grpc.StatusCode.UNAVAILABLE, "TRITONE_UNAVAILABLE: busy; later")]
    with pytest.raises(SystemExit, match=r"^TRITONE_UNAVAILABLE: busy; later"):
        run_example(monkeypatch, name, "--url", triton.url)


def test_plain_aio_example_can_stop(triton, monkeypatch, tmp_path, capsys):
    triton.script = [Text("a"), Hang()]
    out = tmp_path / "reply.wav"
    arguments = ["--url", triton.url, "--out", str(out), "--stop-after-s", "0.3"]
    run_example(monkeypatch, "plain_grpc_aio.py", *arguments)
    assert "stopped after 0.3 s" in capsys.readouterr().out
    assert triton.cancelled.wait(2.0)


def test_see_and_hear_asks_about_both_files(triton, monkeypatch, tmp_path):
    picture, question = files_of(tmp_path, "see_and_hear.py")
    arguments = [picture, question, "Well?", "--url", triton.url, "--out", str(tmp_path / "reply.wav")]
    run_example(monkeypatch, "see_and_hear.py", *arguments)
    [request] = triton.requests
    assert request.model == "qwen3_omni"
    assert request.inputs["image"].tolist() == [Path(picture).read_bytes()]
    assert request.inputs["audio"].tolist() == [Path(question).read_bytes()]
    system, user = json.loads(request.text("messages"))
    assert system["role"] == "system"
    assert user["content"] == [{"type": "image"}, {"type": "audio"}, {"type": "text", "text": "Well?"}]


def test_plain_messages_refer_to_their_picture(triton, monkeypatch, tmp_path, capsys):
    [picture] = files_of(tmp_path, "plain_messages.py")
    run_example(monkeypatch, "plain_messages.py", picture, "Well?", "--url", triton.url)
    [request] = triton.requests
    assert request.model == "qwen3_omni_sync"
    assert request.inputs["image"].tolist() == [Path(picture).read_bytes()]
    content = [{"type": "image"}, {"type": "text", "text": "Well?"}]
    assert json.loads(request.text("messages"))[-1] == {"role": "user", "content": content}
    assert request.text("modalities") == "text"
    assert capsys.readouterr().out == "Hello\n5 tokens of prompt, 2 of answer\n"


@pytest.mark.parametrize(
    "name", ["plain_grpc_sync.py", "plain_grpc_aio.py", "plain_shared_memory.py", "plain_messages.py"]
)
def test_plain_examples_use_tritonclient_alone(name):
    source = (EXAMPLES / name).read_text(encoding="utf-8")
    assert "tritone_client" not in source and "soundfile" not in source


def test_shared_memory_example(triton, monkeypatch, tmp_path, capsys):
    triton.script = [Text("Hello"), Audio(1000), Done()]
    question, out = tmp_path / "question.wav", tmp_path / "reply.wav"
    write_wav(question, counting_samples(0, 4000), 16_000)
    run_example(monkeypatch, "plain_shared_memory.py", str(question), "--url", triton.url, "--out", str(out))
    [request] = triton.requests
    assert request.model == "smoltalk_sync"
    expected = counting_samples(0, 4000).astype(np.float32) / 32768
    np.testing.assert_allclose(request.inputs["audio_input"], expected)
    assert request.inputs["audio_input_rate"].tolist() == [16_000]
    assert "Hello" in capsys.readouterr().out
    assert_reply(out)
    assert not Path(f"/dev/shm/question_{os.getpid()}").exists()


def test_shared_memory_answer_may_go_where_the_question_lies(triton, monkeypatch, tmp_path):
    path = tmp_path / "x.wav"
    write_wav(path, counting_samples(0, 4000), 16_000)
    arguments = [str(path), "--url", triton.url, "--out", str(path)]
    run_example(monkeypatch, "plain_shared_memory.py", *arguments)
    assert triton.requests[0].inputs["audio_input"].size == 4000
    assert_reply(path)


def test_sync_example_asks_the_question(triton, monkeypatch, tmp_path):
    out = tmp_path / "reply.wav"
    run_example(monkeypatch, "chat_sync.py", "How are you?", "--url", triton.url, "--out", str(out))
    assert triton.requests[0].text("text_input") == "How are you?"
    assert "modalities" not in triton.requests[0].inputs  # its answer is the one that is kept
    assert_reply(out)


@pytest.mark.parametrize("name", [path.name for path in sorted(EXAMPLES.glob("*.py"))])
def test_examples_without_a_server_say_so(monkeypatch, tmp_path, name):
    files = files_of(tmp_path, name)
    out = [] if name == "plain_messages.py" else ["--out", str(tmp_path / "reply.wav")]
    with pytest.raises(SystemExit, match=r"127\.0\.0\.1:1") as exit_:
        run_example(monkeypatch, name, *files, "--url", "127.0.0.1:1", *out)
    assert "\n" not in exit_.value.code
    assert sorted(map(str, tmp_path.iterdir())) == sorted(files)


def rests(pid: int) -> bool:
    """Whether a process sleeps, and worked no hundredth of a second in the last two tenths."""

    def look() -> list[str]:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()

    before = look()
    time.sleep(0.2)
    after = look()
    return before[0] == after[0] == "S" and before[11:13] == after[11:13]


@pytest.mark.parametrize("name", ["chat_async.py", "chat_sync.py", "plain_grpc_aio.py", "plain_grpc_sync.py"])
def test_ctrl_c_ends_an_example_quietly(triton, tmp_path, name):
    triton.script = [Text("Hel"), Audio(400), Text("lo"), Hang()]
    child = subprocess.Popen(
        [sys.executable, EXAMPLES / name, "--url", triton.url, "--out", tmp_path / "reply.wav"],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    if name == "chat_sync.py":  # waits for the whole answer first
        wait_until(lambda: triton.requests)
    else:
        assert child.stdout.read(5) == b"Hello"
    # asyncio.run sleeps through an interrupt that comes just as its loop goes to sleep.
    wait_until(lambda: rests(child.pid))
    child.send_signal(signal.SIGINT)
    _, error = child.communicate(timeout=3 * PATIENCE_S)
    assert (child.returncode, error) == (130, b"")
    assert triton.cancelled.wait(PATIENCE_S)


def test_plain_sync_example_shows_what_broke_the_stream(monkeypatch):
    """A stream that is broken before the request is put into it says only that it is."""
    from tritonclient.grpc._infer_stream import _InferStream

    enqueue = _InferStream._enqueue_request

    def enqueue_late(stream, request):
        stream._handler.join()
        enqueue(stream, request)

    monkeypatch.setattr(_InferStream, "_enqueue_request", enqueue_late)
    with pytest.raises(SystemExit, match="Connection refused"):
        run_example(monkeypatch, "plain_grpc_sync.py", "--url", "127.0.0.1:1")


@pytest.mark.parametrize("content", [b"", b"text", b"RIFF"])
def test_shared_memory_example_refuses_other_files(monkeypatch, tmp_path, content):
    question = tmp_path / "question.wav"
    question.write_bytes(content)
    with pytest.raises(SystemExit, match="is not a PCM WAV file"):
        run_example(monkeypatch, "plain_shared_memory.py", str(question))


class Generate(BaseHTTPRequestHandler):
    """Triton's generate extension, for one fixed answer: two events, or one object."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.seen.append((self.path, body))
        if body["text_input"] == "fail":
            self._reply(400, json.dumps({"error": "TRITONE_INVALID_ARG: no"}))
            return
        pieces = [(0, 1000)] if self.path.endswith("/generate") else [(0, 401), (401, 599)]
        events = [
            {
                "event": "audio",
                "text_output": 'Hello "you"',
                "sample_rate": 24_000,
                "audio_encoded": base64.b64encode(counting_samples(*piece).tobytes()).decode(),
            }
            for piece in pieces
        ]
        if self.path.endswith("/generate"):
            self._reply(200, json.dumps(events[0]))
        else:
            done = {"event": "done", "text_output": ""}
            self._reply(200, "".join(f"data: {json.dumps(event)}\n\n" for event in [*events, done]))

    def _reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def http_triton():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Generate)
    server.seen = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("name", "streams"), [("generate.sh", False), ("generate_stream.sh", True)])
def test_curl_examples(http_triton, tmp_path, name, streams):
    url = f"http://127.0.0.1:{http_triton.server_port}"
    command = [EXAMPLES / name, 'say "hi"', "--url", url, "--out", tmp_path / "reply.wav"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert 'Hello "you"' in run.stdout
    assert_reply(tmp_path / "reply.wav")
    [(path, body)] = http_triton.seen
    assert path == f"/v2/models/smoltalk/{name.removesuffix('.sh')}"
    assert body == {"text_input": 'say "hi"', "stream": streams, "audio_format": "s16_base64"}


@pytest.mark.parametrize("name", ["generate.sh", "generate_stream.sh"])
def test_curl_examples_report_errors(http_triton, name):
    url = f"http://127.0.0.1:{http_triton.server_port}"
    run = subprocess.run([EXAMPLES / name, "fail", "--url", url], capture_output=True, text=True)
    assert run.returncode != 0
    assert "TRITONE_INVALID_ARG: no" in run.stderr


@pytest.mark.parametrize("name", ["generate.sh", "generate_stream.sh"])
def test_curl_examples_without_a_server_say_so(name):
    run = subprocess.run([EXAMPLES / name, "--url", "http://127.0.0.1:1"], capture_output=True, text=True)
    assert run.returncode != 0
    assert "curl: (7)" in run.stderr and "Traceback" not in run.stderr
