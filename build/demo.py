"""Serve a pipeline, ask it one question, stop the server: what `make demo` runs.

python build/demo.py [--prompt TEXT] [--audio FILE] [--out reply.wav]
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PIPELINE = "smoltalk"
PROMPT = "Why is the sky blue?"
STOP_TIMEOUT_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve a pipeline and ask it one question.")
    parser.add_argument("--pipeline", default=PIPELINE, help=f"default: {PIPELINE}")
    parser.add_argument("--prompt", default="", help=f"default: {PROMPT!r}, or nothing beside --audio")
    parser.add_argument("--audio", default="", metavar="FILE", help="a spoken question")
    parser.add_argument("--out", default="reply.wav", metavar="FILE.wav", help="default: reply.wav")
    args = parser.parse_args()
    prompt = args.prompt or ("" if args.audio else PROMPT)
    question = [prompt] if prompt else []
    if args.audio:
        question += ["--audio", args.audio]
    with served(args.pipeline) as url:
        if url is None:
            return 1
        print(f"\n> {prompt or args.audio}\n", flush=True)
        chat = ["chat", *question, "--out", args.out, "--pipeline", args.pipeline, "--url", url]
        return subprocess.run([sys.executable, "-m", "tritone", *chat]).returncode


@contextmanager
def served(pipeline: str) -> Iterator[str | None]:
    """Serve `pipeline` on free ports; gives its gRPC address, or None when it did not start."""
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
    folder = Path(tempfile.mkdtemp(prefix="tritone-demo-"))
    command = [sys.executable, "-m", "tritone", "serve", pipeline, *ports, "--run-dir", str(folder)]
    # In a group of its own, so that a Ctrl-C ends the question first and the server then in order.
    server = subprocess.Popen(command, process_group=0)
    try:
        yield _address(server, folder / "ready.json")
    finally:
        server.send_signal(signal.SIGTERM)
        if server.wait(STOP_TIMEOUT_S) == 0:  # else the log in it tells why
            shutil.rmtree(folder)


def _address(server: subprocess.Popen[bytes], ready: Path) -> str | None:
    """Wait until the server is ready; it says itself what it does and why it fails."""
    while not ready.exists():
        if server.poll() is not None:
            return None
        time.sleep(0.1)
    address: str = json.loads(ready.read_text(encoding="utf-8"))["grpc"]
    return address


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)  # the server must not outlive the demo
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
