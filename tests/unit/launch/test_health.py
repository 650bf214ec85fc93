"""What the health endpoint tells, and that it stays small whoever asks."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tritone import doctor, health
from tritone.health import ENDING, SERVING, Board, HealthServer, stage_faults
from waiting import PATIENCE_S

STAGES = {"echo": ["writer", "singer"], "other": ["only"]}
FAULT = "stage singer is not ready: its door died, stage wave is not ready: gone; wait"


@pytest.fixture
def board() -> Board:
    board = Board(STAGES)
    board.beat(SERVING)
    for name in STAGES:
        board.note(name, None)
    return board


class TestBoard:
    def test_ready_when_every_pipeline_is(self, board: Board) -> None:
        status, body = board.ready()
        assert status == 200 and body["ready"]
        assert body["pipelines"]["echo"]["stages"]["writer"] == {"ready": True, "fault": ""}

    def test_one_fault_makes_all_but_the_others_not_ready(self, board: Board) -> None:
        board.note("echo", "stage singer is not ready: its engine is restarting")
        assert board.ready()[0] == 503
        assert board.ready("other")[0] == 200
        status, body = board.ready("echo")
        stages = body["pipelines"]["echo"]["stages"]
        assert status == 503 and stages["writer"]["ready"]
        assert stages["singer"] == {"ready": False, "fault": "its engine is restarting"}

    def test_nobody_looked_for_long_is_not_ready(self, board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(health, "LATE_S", -1.0)
        status, body = board.ready("echo")
        assert status == 503 and "nobody has looked for" in body["pipelines"]["echo"]["fault"]

    def test_a_server_that_is_away_takes_every_pipeline_with_it(self, board: Board) -> None:
        board.beat("being restarted")
        status, body = board.ready()
        assert status == 503 and body["pipelines"]["other"]["fault"] == "the server is being restarted"
        assert board.live()[0] == 200, "it needs no help from outside"
        board.beat(SERVING)
        assert board.ready()[1]["pipelines"]["other"]["fault"] == "nobody has looked yet"

    def test_a_server_that_is_away_is_expected_back(self, board: Board) -> None:
        board.beat("being restarted")
        board.expect(41.5)
        assert 42 - PATIENCE_S <= board.ready()[1]["retry_after_s"] <= 42
        board.expect(-3)
        assert board.ready()[1]["retry_after_s"] == 1, "it is late, and may come at any time"
        for doing in (SERVING, ENDING):
            board.beat(doing)
            assert "retry_after_s" not in board.ready()[1]

    def test_a_supervisor_that_stands_still_is_not_live(
        self, board: Board, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(health, "STUCK_S", -1.0)
        status, body = board.live()
        assert status == 503 and "restart it" in body["fault"]

    def test_unknown_pipeline(self, board: Board) -> None:
        status, body = board.ready("ecko")
        assert status == 404 and "served are echo, other" in body["fault"]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (None, [None, None]),
        (FAULT, [None, "its door died"]),
        (f"TRITONE_UNAVAILABLE: {FAULT}", [None, "its door died"]),
        (FAULT + "…", [f"not known, since: {FAULT}…", "its door died"]),
        ("deadline", ["not known, since: deadline"] * 2),
    ],
)
def test_faults_by_stage(fault: str | None, expected: list[str | None]) -> None:
    assert list(stage_faults(fault, STAGES["echo"]).values()) == expected


class TestServer:
    @pytest.fixture
    def url(self, board: Board) -> Iterator[str]:
        listening = doctor.bind("127.0.0.1", 0)
        server = HealthServer(listening, board)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.close()

    def get(self, url: str, **options: Any) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, **options), timeout=PATIENCE_S) as answer:
                return answer.status, json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def test_pages(self, url: str, board: Board) -> None:
        assert self.get(f"{url}/live")[0] == self.get(f"{url}/ready/")[0] == 200
        assert self.get(f"{url}/ready/echo?verbose=1")[1]["pipelines"].keys() == {"echo"}
        assert self.get(f"{url}/ready", method="HEAD") == (200, None)
        board.note("echo", "gone")
        assert self.get(f"{url}/ready")[0] == 503
        assert self.get(f"{url}/other")[0] == self.get(f"{url}/ready/ecko")[0] == 404
        assert self.get(f"{url}/ready", method="POST", data=b"x" * 100)[0] == 501

    def test_a_server_that_is_away_names_the_time_to_ask_again(self, url: str, board: Board) -> None:
        board.beat("being restarted")
        board.expect(30)
        with pytest.raises(urllib.error.HTTPError) as refusal:
            urllib.request.urlopen(f"{url}/ready", timeout=PATIENCE_S)
        assert 30 - PATIENCE_S <= int(refusal.value.headers["Retry-After"]) <= 30

    def test_silent_clients_keep_nobody_out_for_long(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(health._Handler, "timeout", 0.2)
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        silent = [
            socket.create_connection(address, timeout=PATIENCE_S) for _ in range(2 * health.MAX_CONNECTIONS)
        ]
        for client in silent:
            assert client.recv(1) == b"", "it is hung up on"
            client.close()
        assert self.get(f"{url}/live")[0] == 200

    def test_garbage_is_refused(self, url: str) -> None:
        with socket.create_connection(
            ("127.0.0.1", int(url.rpartition(":")[2])), timeout=PATIENCE_S
        ) as client:
            client.sendall(b"GET /" + b"x" * 70000 + b" HTTP/1.0\r\n\r\n")
            assert b"414" in client.recv(1000)
        assert self.get(f"{url}/live")[0] == 200
