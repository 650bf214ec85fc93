"""The admin APIs of a tritonserver: who may call them, and loading and unloading one model.

    `tritone serve` ──POST /v2/repository/models/<model>/{unload,load}, header tritone-admin: KEY──► server
    anybody else ────────────────────────────────────────────────────────────────────────────────► 403

The key is drawn anew for every start of a server. A server takes it on its command line only, which every
user of the machine can read, so it is overwritten there as soon as the server has read it.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tritone.errors import TritoneError, Unavailable

HEADER = "tritone-admin"
RESTRICTED = ("model-repository", "trace", "logging")
SHARED_MEMORY = "shared-memory"
CALL_TIMEOUT_S = 10.0  # of every call but a load
POLL_S = 0.05


def draw_key() -> str:
    return secrets.token_hex(16)


def options(key: str, host: str) -> list[str]:
    """The options that close the admin APIs of a server which listens on `host` to all without the key.

    Registering shared memory makes sense for clients on the same machine only, and a server that listens
    just there lets them.
    """
    closed = RESTRICTED if is_loopback(host) else (*RESTRICTED, SHARED_MEMORY)
    setting = f"{','.join(closed)}:{HEADER}={key}"
    return [f"--http-restricted-api={setting}", f"--grpc-restricted-protocol={setting}"]


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def hide(pid: int, secret: str) -> bool:
    """Overwrite `secret` in the command line that the process list shows of a child that has read it.

    False where the kernel forbids that; then it stays readable for the users of this machine.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        begin, end = int(fields[45]), int(fields[46])
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(begin)
            words = memory.read(end - begin)
            place = words.find(secret.encode())
            while place >= 0:
                memory.seek(begin + place)
                memory.write(b"*" * len(secret))
                place = words.find(secret.encode(), place + len(secret))
    except (OSError, IndexError, ValueError):
        return False
    return secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()


@dataclass(frozen=True)
class Admin:
    """Model control of one server. The methods raise TritoneError when the server refuses or is gone."""

    http_url: str
    key: str = ""  # "": its admin APIs are open

    def load(self, model: str, timeout_s: float) -> None:
        """Returns when the model is loaded. One that is loaded already is left as it is."""
        self._post(f"models/{model}/load", timeout_s)

    def unload(self, model: str) -> None:
        """Returns when the server has begun: it waits for the requests that the model has."""
        self._post(f"models/{model}/unload", CALL_TIMEOUT_S)

    def wait_unloaded(self, models: Iterable[str], timeout_s: float) -> bool:
        """Whether none of the models is left after at most `timeout_s`."""
        names, deadline = set(models), time.monotonic() + timeout_s
        while any(state != "UNAVAILABLE" for name, state in self.states().items() if name in names):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def states(self) -> dict[str, str]:
        """Model name to READY, LOADING, UNLOADING or UNAVAILABLE; "" for one that was never loaded."""
        index = json.loads(self._post("index", CALL_TIMEOUT_S))
        return {entry["name"]: entry.get("state", "UNAVAILABLE") for entry in index}

    def _post(self, path: str, timeout_s: float) -> bytes:
        url = f"{self.http_url}/v2/repository/{path}"
        headers = {HEADER: self.key} if self.key else {}
        request = urllib.request.Request(url, data=b"{}", headers=headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                body: bytes = answer.read()
                return body
        except urllib.error.HTTPError as error:
            what = f"the server refuses {path}: {_reason(error)}"
            raise TritoneError(what, "the server log has the details") from None
        except (OSError, urllib.error.URLError) as error:
            raise Unavailable(f"the server does not answer {path}: {error}", "see the server log") from None


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return " ".join(str(json.loads(error.read())["error"]).split())
    except (OSError, ValueError, KeyError, TypeError):
        return f"HTTP status {error.code}"
