"""Serve a pipeline, ask it one question, stop the server: what `make demo` runs.

python build/demo.py [--prompt TEXT] [--audio FILE] [--out reply.wav]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tritone_client import InvalidRequest, WavWriter

PIPELINE = "smoltalk"
PROMPT = "Why is the sky blue?"
STOP_TIMEOUT_S = 60.0
CHAT_STOP_TIMEOUT_S = 5.0
FOR_LATER = ("log ", "gRPC ", "try: ")  # what the server says of its addresses, which end with the demo


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve a pipeline and ask it one question.")
    parser.add_argument("--pipeline", default=PIPELINE, help=f"default: {PIPELINE}")
    parser.add_argument("--prompt", default="", help=f"default: {PROMPT!r}, or nothing beside --audio")
    parser.add_argument("--audio", default="", metavar="FILE", help="a spoken question")
    parser.add_argument("--out", default="reply.wav", metavar="FILE.wav", help="default: reply.wav")
    args = parser.parse_args()
    prompt = args.prompt.strip() or ("" if args.audio else PROMPT)
    question = [prompt] if prompt else []
    if args.audio:
        question += ["--audio", args.audio]
    fault = fault_of_files(args.audio, args.out)
    if fault is not None:
        print(f"demo: {fault}", file=sys.stderr)
        return 1
    with served(args.pipeline) as addresses:
        if addresses is None:
            return 1
        print(f"\n> {prompt or args.audio}\n", flush=True)
        where = ["--pipeline", args.pipeline, "--url", addresses["grpc"]]
        status = ask([*question, "--out", args.out, *where])
    if status == 0:
        serve = "make serve" if args.pipeline == PIPELINE else f"make serve PIPELINE={args.pipeline}"
        print(f"\nlisten to {args.out}; to go on: {serve}")
    return status


def fault_of_files(audio: str, out: str) -> str | None:
    """Why the question cannot be read or the answer cannot be written; None if both can be."""
    try:
        if audio:
            Path(audio).open("rb").close()
        WavWriter(out).close()
    except InvalidRequest as error:
        return str(error)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return None


def ask(words: Sequence[str]) -> int:
    """Run `tritone chat`; returns its status. An interrupt lets it keep what was heard, and goes on."""
    chat = subprocess.Popen([sys.executable, "-m", "tritone", "chat", *words])
    try:
        return chat.wait()
    except KeyboardInterrupt as interrupt:
        if isinstance(interrupt, _Ended):
            chat.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            chat.wait(CHAT_STOP_TIMEOUT_S)
        chat.kill()
        raise


@contextlib.contextmanager
def served(pipeline: str) -> Iterator[dict[str, str] | None]:
    """Serve `pipeline` on free ports; gives its addresses by protocol, or None when it did not start."""
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
    folder = Path(tempfile.mkdtemp(prefix="tritone-demo-"))
    command = [sys.executable, "-m", "tritone", "serve", pipeline, *ports, "--run-dir", str(folder)]
    # In a group of its own, so that a Ctrl-C ends the question first and the server then in order.
    server = subprocess.Popen(command, process_group=0, stdout=subprocess.PIPE, text=True, errors="replace")
    assert server.stdout is not None
    listener = threading.Thread(target=_repeat, args=(server.stdout,), daemon=True)
    listener.start()
    try:
        yield _addresses(server, folder / "ready.json")
    finally:
        server.send_signal(signal.SIGTERM)
        status = server.wait(STOP_TIMEOUT_S)
        listener.join(1.0)
        if status == 0 or not any(folder.glob("*.log")):  # a log tells why
            shutil.rmtree(folder)


def _repeat(lines: Iterable[str]) -> None:
    """Print what the server says, without what is of use only to somebody who keeps it running."""
    for line in lines:
        if not line.startswith(FOR_LATER):
            with contextlib.suppress(OSError):  # it must not be held up when nobody reads
                print(line, end="", flush=True)


def _addresses(server: subprocess.Popen[str], ready: Path) -> dict[str, str] | None:
    """Wait until the server is ready; it says itself what it does and why it fails."""
    while not ready.exists():
        if server.poll() is not None:
            return None
        time.sleep(0.1)
    facts: dict[str, str] = json.loads(ready.read_text(encoding="utf-8"))
    return facts


class _Ended(KeyboardInterrupt):
    """Somebody ended this process alone; a Ctrl-C reaches the question too."""


def interrupt(*_: object) -> None:
    raise _Ended


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)  # the server must not outlive the demo
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
