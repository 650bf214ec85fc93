"""The command `tritone`, in this process where possible, in a child where signals or terminals matter."""

import json
import os
import pty
import signal
import subprocess
import sys
import types
from pathlib import Path

import grpc
import numpy as np
import pytest
import soundfile
from fake_triton import Audio, Done, Fail, Hang, Text, counting_samples

import tritone_client
from tritone_client.cli import SERVER_COMMANDS, main
from tritone_client.display import split_lines
from waiting import PATIENCE_S

CHILD = [sys.executable, "-m", "tritone_client"]
CHILD_ENV = {
    **os.environ,
    "PYTHONPATH": str(Path(tritone_client.__file__).parents[1]),
    "PYTHONUNBUFFERED": "",  # the command itself must flush what it shows
    "COLUMNS": "60",
    "TERM": "xterm",
}


def json_lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def read_terminal(descriptor: int) -> str:
    """All that is written to the other end of a terminal, which is then closed."""
    shown = b""
    while True:
        try:
            shown += os.read(descriptor, 4096)
        except OSError:  # Linux reports the end of a terminal as an error
            break
    os.close(descriptor)
    return shown.decode()


def test_chat_prints_text_writes_audio_and_sums_up(triton, tmp_path, capsys):
    out = tmp_path / "reply.wav"
    assert main(["chat", "hi", "--url", triton.url, "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out == "Hello\n"
    assert (
        "TTFT" in printed.err and "TTFP" in printed.err and "RTF" in printed.err and str(out) in printed.err
    )
    samples, rate_hz = soundfile.read(out, dtype="int16")
    assert rate_hz == 24_000
    np.testing.assert_array_equal(samples, counting_samples(0, 1000))


def test_chat_sends_what_was_asked(triton, tmp_path):
    question = tmp_path / "question.wav"
    question.write_bytes(b"RIFF")
    options = ["--audio", str(question), "--modalities", "text", "--speaker", "Ethan", "--max-tokens", "9"]
    options += ["--temperature", "0", "--seed", "3", "--deadline-s", "20"]
    assert main(["chat", "hi", "--url", triton.url, *options]) == 0
    [request] = triton.requests
    assert request.text("text_input") == "hi"
    assert request.inputs["audio"].tolist() == [b"RIFF"]
    assert request.text("modalities") == "text"
    assert request.text("speaker") == "Ethan"
    sampling = json.loads(request.text("sampling_parameters"))
    assert sampling == {"max_tokens": 9, "temperature": 0.0, "seed": 3}
    assert request.parameters == {"deadline_ms": 20_000}


def test_chat_system_text_goes_first(triton, tmp_path):
    assert main(["chat", "hi", "--system", "be brief", "--url", triton.url]) == 0
    question = tmp_path / "question.wav"
    question.write_bytes(b"RIFF")
    assert main(["chat", "--audio", str(question), "--system", "be brief", "--url", triton.url]) == 0
    system = {"role": "system", "content": "be brief"}
    assert json.loads(triton.requests[0].text("messages")) == [system, {"role": "user", "content": "hi"}]
    spoken = {"role": "user", "content": [{"type": "audio"}]}
    assert json.loads(triton.requests[1].text("messages")) == [system, spoken]
    assert "text_input" not in triton.requests[0].inputs


def test_chat_attaches_files_of_any_kind_in_any_number_and_order(triton, tmp_path):
    paths = {name: tmp_path / name for name in ("a.png", "b.png", "c.wav", "d.mp4")}
    for name, path in paths.items():
        path.write_bytes(name.encode() + b"\x00")
    options = ["--video", str(paths["d.mp4"]), "--image", str(paths["a.png"]), "--audio", str(paths["c.wav"])]
    options += ["--image", str(paths["b.png"]), "--use-audio-in-video", "--codec-chunk-growth", "1.5"]
    options += ["--initial-codec-chunk-frames", "2", "--codec-chunk-frames", "9", "--system", "be brief"]
    assert main(["chat", *options, "what is this?", "--url", triton.url]) == 0
    [request] = triton.requests
    assert request.inputs["image"].tolist() == [b"a.png\x00", b"b.png\x00"]
    assert request.inputs["audio"].tolist() == [b"c.wav\x00"]
    assert request.inputs["video"].tolist() == [b"d.mp4\x00"]
    kinds = ["image", "image", "audio", "video"]
    content = [*({"type": kind} for kind in kinds), {"type": "text", "text": "what is this?"}]
    assert json.loads(request.text("messages")) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": content},
    ]
    assert request.parameters == {
        "use_audio_in_video": True,
        "initial_codec_chunk_frames": 2,
        "codec_chunk_frames": 9,
        "codec_chunk_growth": "1.5",
    }


def test_chat_json_is_one_object_per_event_and_a_summary(triton, tmp_path, capsys):
    out = tmp_path / "reply.wav"
    assert main(["chat", "hi", "--json", "--url", triton.url, "--out", str(out)]) == 0
    printed = capsys.readouterr()
    lines = json_lines(printed.out)
    assert [line["event"] for line in lines] == ["text", "audio", "text", "audio", "done", "summary"]
    assert lines[0] == {"event": "text", "index": 0, "text": "Hel"}
    assert lines[3] == {
        "event": "audio",
        "index": 3,
        "num_samples": 600,
        "sample_rate_hz": 24_000,
        "sample_offset": 400,
    }
    assert lines[4]["stage_timings"] == {"thinker": {"busy_s": 0.1}}
    assert triton.requests[0].inputs["return_timings"].tolist() == [True]
    assert lines[4]["finish_reasons"] == {"text": "stop", "audio": "stop"}
    summary = lines[5]
    assert summary["text"] == "Hello" and summary["seed"] == 7 and summary["out"] == str(out)
    assert summary["audio_s"] == pytest.approx(1000 / 24_000)
    assert summary["ttft_s"] > 0 and summary["rtf"] > 0
    assert printed.err == ""


def test_chat_names_an_answer_that_was_cut_short(triton, capsys):
    triton.script = [Text("a"), Done({"text": "length", "audio": "stop"})]
    assert main(["chat", "hi", "--url", triton.url]) == 0
    assert "text ended by length" in capsys.readouterr().err


def test_say(triton, tmp_path):
    triton.script = [Audio(1000), Done()]
    out = tmp_path / "x.wav"
    assert main(["say", "Good night", "--out", str(out), "--url", triton.url, "--pipeline", "other"]) == 0
    [request] = triton.requests
    assert request.model == "other"
    assert json.loads(request.text("messages")) == [{"role": "assistant", "content": "Good night"}]
    assert request.text("modalities") == "audio"
    assert soundfile.info(out).frames == 1000


def test_say_without_audio_fails_and_leaves_no_file(triton, tmp_path, capsys):
    triton.script = [Text("a"), Done()]
    out = tmp_path / "x.wav"
    assert main(["say", "Good night", "--out", str(out), "--url", triton.url]) == 1
    assert f"none of the characters can be spoken, so {out} was not written" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("finish_reasons", "options", "why"),
    [
        ({"text": "stop"}, ["--modalities", "text"], "no audio was asked for"),
        ({"text": "stop", "audio": "stop"}, [], "the answer has no audio"),
        ({"text": "stop", "audio": "deadline"}, [], "was ended by deadline before any audio came"),
    ],
)
def test_an_answer_without_audio_says_why(triton, tmp_path, capsys, finish_reasons, options, why):
    triton.script = [Text("a"), Done(finish_reasons)]
    out = tmp_path / "x.wav"
    assert main(["chat", "hi", *options, "--out", str(out), "--url", triton.url]) == 1
    error = capsys.readouterr().err
    assert why in error and "--modalities audio" not in error


def test_the_answer_may_go_where_the_question_lies(triton, tmp_path):
    path = tmp_path / "x.wav"
    tritone_client.write_wav(path, counting_samples(0, 4000), 16_000)
    question = path.read_bytes()
    assert main(["chat", "--audio", str(path), "--out", str(path), "--url", triton.url]) == 0
    assert triton.requests[0].inputs["audio"].tolist() == [question]
    assert soundfile.info(path).frames == 1000


@pytest.mark.parametrize(
    "script",
    [
        [Fail(grpc.StatusCode.INVALID_ARGUMENT, "TRITONE_INVALID_ARG: no")],
        [Text("a"), Audio(400), Fail(grpc.StatusCode.INTERNAL, "TRITONE_INTERNAL: no")],
        [Text("a"), Audio(400)],
        [Text("a"), Done()],
    ],
    ids=["refused", "failed", "broken", "text alone"],
)
def test_without_an_answer_the_question_stays_as_it_was(triton, tmp_path, script):
    triton.script = script
    path = tmp_path / "x.wav"
    path.write_bytes(b"RIFF")
    assert main(["chat", "--audio", str(path), "--out", str(path), "--url", triton.url]) == 1
    assert path.read_bytes() == b"RIFF" and list(tmp_path.iterdir()) == [path]


def test_without_a_server_the_question_stays_as_it_was(tmp_path):
    path = tmp_path / "x.wav"
    path.write_bytes(b"RIFF")
    assert main(["chat", "--audio", str(path), "--out", str(path), "--url", "127.0.0.1:1"]) == 1
    assert path.read_bytes() == b"RIFF" and list(tmp_path.iterdir()) == [path]


def test_what_a_server_says_of_the_sound_comes_with_the_files_name(triton, tmp_path, capsys):
    path = tmp_path / "bad.txt"
    path.write_bytes(b"no sound")
    for message in ("audio cannot be read; send a WAV file", "audio_format is 'x'; use one of s16"):
        triton.script = [Fail(grpc.StatusCode.INVALID_ARGUMENT, f"TRITONE_INVALID_ARG: {message}")]
        assert main(["chat", "--audio", str(path), "--url", triton.url]) == 1
    about_file, about_request = capsys.readouterr().err.splitlines()
    assert about_file == f"tritone: {path}: audio cannot be read; send a WAV file"
    assert about_request == "tritone: audio_format is 'x'; use one of s16"


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("image[1] is no picture; send a PNG", "b.png"),
        ("image[0] is no picture; send a PNG", "a.png"),
        ("video has 9 bytes; send less", "c.mp4"),
        ("image is missing; send it", None),  # of two: it does not say which
        ("image[7] is no picture; send a PNG", None),
        ("audio is empty; send a recording", None),  # there is none
        ("video_fps is 0; send more", None),
    ],
)
def test_of_several_files_the_one_that_is_meant_is_named(triton, tmp_path, capsys, message, named):
    options = []
    for kind, name in (("image", "a.png"), ("image", "b.png"), ("video", "c.mp4")):
        (tmp_path / name).write_bytes(b"x")
        options += [f"--{kind}", str(tmp_path / name)]
    triton.script = [Fail(grpc.StatusCode.INVALID_ARGUMENT, f"TRITONE_INVALID_ARG: {message}")]
    assert main(["chat", *options, "--url", triton.url]) == 1
    path = f"{tmp_path / named}: " if named else ""
    assert capsys.readouterr().err == f"tritone: {path}{message}\n"


def test_ping(triton, capsys):
    stages = {"thinker": {"engines": [{"beat_age_s": 0.1}]}, "talker": {"engines": []}}
    triton.script = [Done({}, {"stages": stages})]
    assert main(["ping", "--url", triton.url]) == 0
    assert capsys.readouterr().out == f"smoltalk at {triton.url} is ready: thinker, talker\n"


def test_ping_fails_if_a_stage_is_not_ready(triton, capsys):
    triton.script = [Done({}, {"stages": {"thinker": {}, "talker": {"error": "gone"}}})]
    assert main(["ping", "--url", triton.url]) == 1
    assert "is not ready: talker (gone)" in capsys.readouterr().err


def test_ping_fails_in_one_line(triton, capsys):
    triton.script = [Hang()]
    assert main(["ping", "--url", triton.url, "--deadline-s", "0.2"]) == 1
    assert main(["ping", "--url", "127.0.0.1:1"]) == 1
    late, unreachable = capsys.readouterr().err.splitlines()
    assert "within 0.2 s" in late and "tritone serve smoltalk" in unreachable


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["chat", "hi", "--url", "127.0.0.1:1"], "could not reach a Triton server at 127.0.0.1:1"),
        (["chat", "hi", "--url", "http://127.0.0.1:8000"], "without a scheme"),
        (["chat", "--audio", "/no/such.wav"], "cannot read the audio file '/no/such.wav': No such file"),
        (["chat", "--image", "/no/such.png"], "cannot read the image file '/no/such.png': No such file"),
        (["chat", "hi", "--video", "/tmp"], "cannot read the video file '/tmp': Is a directory"),
        (["chat", "hi", "--use-audio-in-video"], "use_audio_in_video is true but there is no video"),
        (["say", "hi", "--out", "/no/such/folder/x.wav"], "/no/such/folder/x.wav: No such file"),
        (["bench", "--prompts", "/no/such.txt"], "/no/such.txt: No such file"),
        (["bench", "--url", "127.0.0.1:1"], "could not reach"),
        (["say", " ", "--out", "x.wav"], "the text is empty; give some words"),
        (["chat", ""], "the question is empty; give some words"),
        (["chat", "hi", "--system", ""], "the system text is empty; give some words"),
        (["chat", "caf\udce9"], r"the argument 'caf\xe9' is not UTF-8 text"),
        (["say", "hi", "--out", "caf\udce9.wav"], r"the argument 'caf\xe9.wav' is not UTF-8 text"),
    ],
)
def test_errors_are_one_sentence(arguments, sentence, capsys):
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.err.count("\n") == 1 and printed.err.startswith("tritone: ")


def test_a_server_error_after_some_text(triton, tmp_path, capsys):
    triton.script = [Text("Hel"), Audio(400), Fail(grpc.StatusCode.INTERNAL, "TRITONE_INTERNAL: talker died")]
    out = tmp_path / "x.wav"
    assert main(["chat", "hi", "--url", triton.url, "--out", str(out)]) == 1
    printed = capsys.readouterr()
    assert printed.out == "Hel\n" and printed.err == "tritone: talker died\n"
    assert soundfile.info(out).frames == 400  # what was heard is kept


def test_a_bug_is_one_sentence_too(triton, monkeypatch, capsys):
    monkeypatch.setattr("tritone_client.cli.choose_display", lambda as_json: 1 / 0)
    assert main(["chat", "hi", "--url", triton.url]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["chat"],
        ["say", "hi"],
        ["say", "hi", "--out", "x.mp3"],
        ["bench", "--concurrency", "1,x"],
        ["bench", "--concurrency", "0"],
        ["chat", "hi", "--no-such-option"],
        ["chat", "hi", "--codec-chunk-frames", "0"],
        ["chat", "--system", "be brief"],
        ["no-such-command"],
    ],
)
def test_wrong_usage_exits_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: tritone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "guess"), [("server", "did you mean 'serve'?"), ("pong", "did you mean 'ping'?"), ("x", "")]
)
def test_a_wrong_command_lists_all_and_the_closest(monkeypatch, capsys, command, guess):
    monkeypatch.setitem(sys.modules, "tritone", None)
    with pytest.raises(SystemExit) as exit_:
        main([command, "smoltalk"])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert guess in error and ("did you mean" in error) == bool(guess)
    assert f"{', '.join(['chat', 'say', 'bench', 'ping', *SERVER_COMMANDS])}." in error


def test_no_command_prints_help(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tritone", None)
    assert main([]) == 2
    printed = capsys.readouterr().err
    assert all(command in printed for command in ["chat", "say", "bench", "ping", *SERVER_COMMANDS])


def test_server_commands_without_the_server_part(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tritone", None)
    monkeypatch.setitem(sys.modules, "tritone.cli", None)
    for command in SERVER_COMMANDS:
        assert main([command, "--some-option", "x"]) == 1
        error = capsys.readouterr().err
        assert "pip install '.[server,smoltalk]' in a checkout" in error
        assert "'tritone[server]' from a package" in error and error.count("\n") == 1


def test_server_commands_come_from_the_server_part(monkeypatch):
    seen = []
    server_cli = types.ModuleType("tritone.cli")

    def add_commands(commands) -> None:
        serve = commands.add_parser("serve")
        serve.add_argument("pipeline")
        serve.set_defaults(run=lambda args: seen.append(args.pipeline) or 7)

    server_cli.add_commands = add_commands
    monkeypatch.setitem(sys.modules, "tritone", types.ModuleType("tritone"))
    monkeypatch.setitem(sys.modules, "tritone.cli", server_cli)
    assert main(["serve", "smoltalk"]) == 7
    assert seen == ["smoltalk"]


def test_ctrl_c_cancels_on_the_server(triton):
    triton.script = [Text("Hel"), Hang()]
    child = subprocess.Popen(
        [*CHILD, "chat", "hi", "--url", triton.url],
        env=CHILD_ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout.read(3) == b"Hel"
    child.send_signal(signal.SIGINT)
    _, error = child.communicate(timeout=3 * PATIENCE_S)
    assert child.returncode == 130
    assert b"Traceback" not in error
    assert triton.cancelled.wait(PATIENCE_S)


def test_ctrl_c_keeps_what_was_heard(triton, tmp_path):
    triton.script = [Text("Hel"), Audio(400), Text("lo"), Hang()]
    out = tmp_path / "x.wav"
    out.write_bytes(b"RIFF")
    child = subprocess.Popen(
        [*CHILD, "chat", "--audio", str(out), "--url", triton.url, "--out", str(out)],
        env=CHILD_ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout.read(5) == b"Hello"
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=3 * PATIENCE_S)
    assert child.returncode == 130
    assert soundfile.info(out).frames == 400 and list(tmp_path.iterdir()) == [out]


def test_a_reader_who_goes_away_ends_the_command_quietly(triton):
    triton.script = [*(Text("word " * 100) for _ in range(2000)), Done()]
    child = subprocess.Popen(
        [*CHILD, "chat", "hi", "--url", triton.url],
        env=CHILD_ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    child.stdout.read(4)
    child.stdout.close()
    error = child.stderr.read()
    child.stderr.close()
    assert child.wait(timeout=3 * PATIENCE_S) == 1
    assert error == b""


def test_on_a_terminal_text_streams_above_a_live_line(triton, tmp_path):
    triton.script = [Text("Hello wo"), Audio(24_000), Text("rld.\nNext"), Audio(12_000), Done()]
    ours, terminal = pty.openpty()
    out = tmp_path / "reply.wav"
    child = subprocess.Popen(
        [*CHILD, "chat", "hi", "--url", triton.url, "--out", str(out)],
        env=CHILD_ENV,
        stdout=terminal,
        stderr=subprocess.PIPE,
    )
    os.close(terminal)
    text = read_terminal(ours)
    _, error = child.communicate(timeout=3 * PATIENCE_S)
    assert child.returncode == 0, error
    assert "Hello world." in text and "Next" in text
    assert "1.5 s of audio" in text
    assert "TTFT" in text and "RTF" in text


@pytest.mark.parametrize(
    ("text", "full", "rest"),
    [
        ("short", [], "short"),
        ("one\ntwo", ["one"], "two"),
        ("alpha beta gamma", ["alpha"], "beta gamma"),
        ("abcdefghijklm", ["abcdefghij"], "klm"),
        ("你好世界你好", ["你好世界你"], "好"),
        ("ends\n", ["ends"], ""),
    ],
)
def test_lines_are_cut_at_the_width_of_the_terminal(text, full, rest):
    assert split_lines(text, 10) == (full, rest)
