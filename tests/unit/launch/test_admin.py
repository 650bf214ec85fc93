"""The key of the admin APIs, and what a server's model control answers."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tritone import admin
from tritone.admin import Admin
from tritone.errors import TritoneError, Unavailable


@pytest.mark.parametrize(
    ("host", "shared_memory"),
    [("127.0.0.1", False), ("[::1]", False), ("localhost", False), ("0.0.0.0", True), ("10.0.0.7", True)],
)
def test_shared_memory_is_open_to_this_machine_only(host: str, shared_memory: bool) -> None:
    http_option, grpc_option = admin.options("SECRET", host)
    for option, name in ((http_option, "--http-restricted-api"), (grpc_option, "--grpc-restricted-protocol")):
        assert option.startswith(f"{name}=model-repository,trace,logging")
        assert option.endswith(":tritone-admin=SECRET")
        assert ("shared-memory" in option) is shared_memory


def test_keys_differ() -> None:
    assert len({admin.draw_key() for _ in range(10)}) == 10


def test_the_key_is_hidden_from_the_process_list() -> None:
    key = admin.draw_key()
    code = "import sys; print(sys.argv[1], flush=True); sys.stdin.read(); print(sys.argv[1])"
    words = [sys.executable, "-c", code, f"a:b={key}", f"c:d={key}"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == f"a:b={key}\n"
        assert admin.hide(process.pid, key)
        shown = Path(f"/proc/{process.pid}/cmdline").read_text()
        assert key not in shown and shown.count("=" + "*" * len(key)) == 2
        process.stdin.close()
        assert process.stdout.readline() == f"a:b={key}\n", "the process itself lost nothing"


def test_hiding_may_fail() -> None:
    assert not admin.hide(2**22 + 1, "x")


class Handler(http.server.BaseHTTPRequestHandler):
    """A server that has model `a`, unloads `b` slowly, and cannot load `c`."""

    polls = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body: object = {}
        status = 200
        if self.headers[admin.HEADER] != "SECRET":
            status, body = 403, "no JSON"
        elif self.path == "/v2/repository/index":
            Handler.polls += 1
            state = "UNLOADING" if Handler.polls < 3 else "UNAVAILABLE"
            body = [{"name": "a", "state": "READY"}, {"name": "b", "state": state}, {"name": "new"}]
        elif self.path.endswith("c/load"):
            status, body = 400, {"error": "failed to load 'c',\n no weights"}
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Handler.polls = 0
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


class TestAdmin:
    def test_waits_until_a_model_is_gone(self, url: str) -> None:
        control = Admin(url, "SECRET")
        control.unload("b")
        assert control.wait_unloaded(["b"], timeout_s=5) and Handler.polls == 3
        assert control.states() == {"a": "READY", "b": "UNAVAILABLE", "new": "UNAVAILABLE"}
        assert not control.wait_unloaded(["a"], timeout_s=0.1)

    def test_says_why_a_model_does_not_load(self, url: str) -> None:
        Admin(url, "SECRET").load("a", 5)
        with pytest.raises(TritoneError, match="refuses models/c/load: failed to load 'c', no weights"):
            Admin(url, "SECRET").load("c", 5)

    def test_without_the_key(self, url: str) -> None:
        with pytest.raises(TritoneError, match="HTTP status 403"):
            Admin(url).unload("a")

    def test_a_server_that_is_gone(self) -> None:
        with pytest.raises(Unavailable, match="does not answer"):
            Admin("http://127.0.0.1:9", "SECRET").states()
