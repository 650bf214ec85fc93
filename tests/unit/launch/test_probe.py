"""Which way a pipeline model is asked, and what its answers over HTTP mean."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tritone import probe
from tritone.errors import TritoneError, Unavailable
from tritone.probe import HttpProbe
from tritone.server import Listen


@pytest.mark.parametrize(
    ("extra", "tls"),
    [
        ([], False),
        (["--grpc-use-ssl=0", "--log-verbose=1"], False),
        (["--grpc-use-ssl=1"], True),
        (["--grpc-use-ssl-mutual=true"], True),
    ],
)
def test_tls_is_told_from_the_options(extra: list[str], tls: bool) -> None:
    assert probe.wants_tls(extra) is tls
    with ExitStack() as clients:
        asked = probe.make("echo", Listen(), extra, clients)
        assert isinstance(asked, HttpProbe) is tls


class Handler(http.server.BaseHTTPRequestHandler):
    status, body = 200, ""

    def do_POST(self) -> None:
        assert json.loads(self.rfile.read(int(self.headers["Content-Length"]))) == {"op": "ping"}
        assert self.path == "/v2/models/echo/generate"
        self.send_response(Handler.status)
        self.end_headers()
        self.wfile.write(Handler.body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def asked() -> Iterator[HttpProbe]:
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield HttpProbe("echo", f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()


def test_answers(asked: HttpProbe) -> None:
    Handler.status, Handler.body = 200, json.dumps({"info": json.dumps({"stages": {"writer": {}}})})
    assert asked.ping(5) == {"writer": {}}
    Handler.body = "{}"
    with pytest.raises(TritoneError, match="without its stages"):
        asked.ping(5)
    Handler.status, Handler.body = 503, json.dumps({"error": "TRITONE_UNAVAILABLE: stage a is not ready: x"})
    with pytest.raises(Unavailable, match="stage a is not ready: x"):
        asked.ping(5)


def test_nobody_there() -> None:
    with pytest.raises(Unavailable, match="did not answer"):
        HttpProbe("echo", "http://127.0.0.1:9").ping(1)
