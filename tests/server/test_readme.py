"""Every command in README.md, and on two of the pages that it leads to, does what the page says."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import qwen3_omni_oracle
import qwen3_omni_reference
import soundfile
from PIL import Image

pytestmark = [pytest.mark.server, pytest.mark.weights]

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ENGINES = (ROOT / "backends" / "tritone" / "pipelines" / "qwen3_omni" / "README.md").read_text()
MEMORY = (ROOT / "model_repository" / "MEMORY.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", README + ENGINES + MEMORY, re.MULTILINE | re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]


@pytest.fixture(scope="module")
def desk(serve, tmp_path_factory):
    """run(command) runs a README line against a running server, in a folder that looks like the checkout."""
    short = "smoltalk:stage.thinker.sampling.max_tokens=8"  # the page's questions leave it open
    server = serve("smoltalk", "qwen3_omni", overrides=("smoltalk:profiling=true", short))
    folder = tmp_path_factory.mktemp("desk")
    lay_out_media(folder)
    for name in ("client", "model_repository"):
        (folder / name).symlink_to(ROOT / name)

    def run(command):
        line = adapted(command, server, folder)
        env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(
            line, shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    run.folder = folder
    return run


def lay_out_media(folder):
    """The files that the page asks about."""
    case = qwen3_omni_reference.cases()["video_audio"]
    (folder / "talk.mp4").write_bytes(case.video_files[0])
    picture = Image.fromarray(qwen3_omni_reference.noise(1, (64, 64, 3)))
    for name in ("a.png", "b.jpg"):
        picture.save(folder / name)
    (folder / "question.wav").write_bytes(qwen3_omni_reference.wav(qwen3_omni_reference.sound(1.0, 300, 900)))


def adapted(command, server, folder):
    """The command for the test's server; what cannot be repeated here is replaced by its nearest check."""
    words = shlex.split(command, comments=True)
    match words[0]:
        case ".":
            return "true"  # the tests run inside the environment already
        case "make" if words[1] in ("test", "perf", "plans"):
            return f"make -C {ROOT} -n {words[1]}"  # this is `make test`; tests of their own do the others
        case "make" if words[1] == "demo" and not any(word.startswith("AUDIO=") for word in words):
            # The same with a spoken question follows; each is a server of its own.
            return f"make -C {ROOT} -n {shlex.join(words[1:])}"
        case "make" if words[1] == "serve":
            return "tritone serve smoltalk --check --http-port 0 --grpc-port 0 --metrics-port 0"
        case "make":
            out = shlex.quote(str(folder / "demo.wav"))
            given = [f"AUDIO={folder / 'reply.wav'}" if w.startswith("AUDIO=") else w for w in words[2:]]
            given = [word for word in given if not word.startswith("OUT=")]
            venv = Path(sys.executable).parents[1]
            return f"make -C {ROOT} VENV={venv} {words[1]} {shlex.join(given)} OUT={out}"
        case "tritone" if words[1] == "backends":
            return command
        case "tritone" if words[1] == "profile":
            return f"{command} --pid {server.process.pid}"
        case "tritone" if words[1] == "plan":
            return command.replace("/models/Qwen3-Omni-30B-A3B-Instruct", str(qwen3_omni_oracle.checkpoint()))
        case "tritone" if words[1] == "serve":
            folder = qwen3_omni_oracle.checkpoint()
            ports = "--http-port 0 --grpc-port 0 --metrics-port 0"
            return f"{command.replace('/models/Qwen3-Omni-30B-A3B-Instruct', str(folder))} --check {ports}"
        case "python" if words[1] == "build/plans.py":
            return f"python {ROOT}/build/plans.py --help"
        case "tritone" | "python":
            shorter = command.replace("--max-tokens 12", "--max-tokens 4")
            return f"{shorter} --url {server.grpc_url}"
        case "curl":
            return command.replace("curl -s", "curl -s --fail-with-body", 1).replace(
                "localhost:8000", server.http_url
            )
    pytest.fail(f"README says `{command}`, and this test does not know how to run it")


def assert_heard(path, command):
    """There is sound in the file; of the tiny random model's there can be little."""
    samples, rate_hz = soundfile.read(path)
    assert rate_hz == 24000 and abs(samples).max() > 0.02, f"{path} is silent"
    is_random = "qwen3_omni" in command or "see_and_hear" in command
    assert len(samples) > rate_hz * (0.05 if is_random else 1)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c[:60])
def test_a_readme_command_works(desk, command):
    needs_question = "AUDIO=" in command or "reply.wav" in command.partition("--out")[0]
    if needs_question and not (desk.folder / "reply.wav").exists():
        desk('tritone say "What is the capital of France?" --out reply.wav')
    for file in re.findall(r"(?<!--json )\b\w+\.json\b(?!\.)", command):
        if not (desk.folder / file).exists():  # tests may run in another order, or alone
            desk(next(line for line in COMMANDS if f"--json {file}" in line))
    output = desk(command)
    if command.startswith("tritone profile"):
        assert (desk.folder / command.partition("--out ")[2].split()[0]).stat().st_size > 100
    elif "--out" in command:
        assert_heard(desk.folder / command.partition("--out ")[2].split()[0], command)
    if command.startswith("make demo AUDIO="):
        assert_heard(desk.folder / "demo.wav", command)
    if command.startswith("curl"):
        assert "text_output" in output or "data" in output


def test_the_page_has_the_two_commands_first():
    assert COMMANDS[:2] == ["make demo", "make test"]
    assert shutil.which("make") and (ROOT / "Makefile").exists()


def test_the_table_of_places_is_true():
    table = README.partition("## Where do I change X?")[2].partition("\n## ")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ") and not row.startswith("| I want")]
    assert len(rows) >= 10
    for row in rows:
        for place in re.findall(r"`([\w<>*/.]*[/.][\w<>*/.]*)`", row.split("|")[2]):
            pattern = re.sub(r"<\w+>", "*", place).rstrip("/")
            homes = [ROOT, ROOT / "backends" / "tritone"]
            assert any(list(home.glob(pattern)) for home in homes), f"{place} in `{row}` does not exist"


def test_the_way_of_a_prompt_names_existing_files():
    way = README.partition("One prompt's way through the code:")[2].partition("\n## ")[0]
    for place in re.findall(r"`([\w/.]+\.py)`", way):
        homes = [ROOT / "backends", ROOT / "backends" / "tritone"]
        assert any((home / place).exists() for home in homes), place
