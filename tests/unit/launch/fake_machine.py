"""A machine made of files: what the fixtures are built from."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from tritone.server import BACKEND_FILES

PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
ECHO = Path(__file__).parents[2] / "pipelines" / "echo.py"

# Says that it is ready, logs like Triton, ends on SIGTERM. FAKE_TRITON chooses how it fails.
FAKE_TRITONSERVER = f"""#!{sys.executable}
import http.server, os, signal, sys
options = dict(word.partition("=")[::2] for word in sys.argv[1:])
if "--help" in options:
    sys.exit("  --http-port <integer>")
mode = os.environ.get("FAKE_TRITON", "")
print("I1129 22:40:00.000001 7 model_lifecycle.cc:838] successfully loaded 'echo'", flush=True)
if mode == "fail":
    print("E1129 22:40:00.2 7 model_lifecycle.cc:642] failed to load 'echo_writer': no weights", flush=True)
    sys.exit(1)
if mode == "crash":
    os.abort()
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if mode == "slow" else 200)
        self.end_headers()
    def log_message(self, *_):
        pass

http.server.HTTPServer((options["--http-address"], int(options["--http-port"])), Handler).serve_forever()
"""

# NVIDIA's program: `-d` leaves a daemon behind, and notes how it was started; without, it takes an order.
FAKE_MPS = """#!/bin/sh
pipe=$CUDA_MPS_PIPE_DIRECTORY
case "$1" in
-d)
    if [ "$MPS_FAULT" ]; then echo "An instance of this daemon"; echo "is already running"; exit 1; fi
    echo "$CUDA_MPS_LOG_DIRECTORY ${CUDA_VISIBLE_DEVICES-all} $CUDA_DEVICE_ORDER" > "$pipe/started"
    rm -f "$pipe/up"
    "$0" daemon &
    echo $! > "$pipe/pid"
    until [ -e "$pipe/up" ]; do sleep 0.01; done  # it is there when this returns, as NVIDIA's is
    ;;
daemon)
    if [ "$MPS_STUBBORN" ]; then trap '' TERM; fi
    echo > "$pipe/up"
    for _ in $(seq 60); do sleep 1; done
    ;;
*)
    cat >> "$pipe/orders"
    kill "$(cat "$pipe/pid")"
    ;;
esac
"""


def write_file(path: Path, content: bytes = b"", executable: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    if executable:
        path.chmod(0o755)
    return path


def write_backend(folder: Path) -> None:
    for name in BACKEND_FILES:
        write_file(folder / "python" / name, name.encode())


def write_deploy(folder: Path, **fields: object) -> Path:
    """A folder with a deploy.yaml of the echo pipeline, not rendered."""
    folder.mkdir(parents=True)
    (folder / "deploy.yaml").write_text(yaml.safe_dump({"pipeline": str(ECHO), **fields}))
    return folder
