"""Asking a pipeline model whether it can serve, over the protocol that this machine can speak to it.

gRPC is what clients use, so that is asked. Where the server wants TLS there, it may want a certificate that
only clients have: then HTTP, which the server never encrypts.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from tritone.errors import TritoneError, Unavailable
from tritone.server import Listen

PASSING_CLASSES = 2048
TLS_OPTIONS = ("--grpc-use-ssl", "--grpc-use-ssl-mutual")


class Probe(Protocol):
    """Asks one pipeline model; raises with the reason when it cannot serve."""

    def ping(self, deadline_s: float) -> dict[str, Any]: ...


def make(model: str, listen: Listen, extra: Sequence[str], clients: ExitStack) -> Probe:
    """extra: the user's own options for the server. clients: closes what is opened here."""
    if wants_tls(extra):
        return HttpProbe(model, listen.http_url)
    from tritone_client import TritoneClient  # gRPC starts threads, which must not be there before the start

    client: Probe = clients.enter_context(TritoneClient(listen.grpc_url, pipeline=model))
    for _ in range(PASSING_CLASSES):  # the client's library makes one a call; the list that they pass through
        type("Passing", (), {})  # grows once, and better now than after a thousand calls
    return client


def wants_tls(extra: Sequence[str]) -> bool:
    given = dict(word.partition("=")[::2] for word in extra)
    return any(given.get(option, "0").lower() not in ("0", "false") for option in TLS_OPTIONS)


class HttpProbe:
    """One model, over the generate extension of HTTP."""

    def __init__(self, model: str, http_url: str) -> None:
        self._url = f"{http_url}/v2/models/{model}/generate"

    def ping(self, deadline_s: float) -> dict[str, Any]:
        request = urllib.request.Request(self._url, data=b'{"op": "ping"}', method="POST")
        try:
            with urllib.request.urlopen(request, timeout=deadline_s) as answer:
                stages: dict[str, Any] = json.loads(json.load(answer)["info"])["stages"]
                return stages
        except urllib.error.HTTPError as error:
            raise Unavailable(_reason(error)) from None
        except (OSError, urllib.error.URLError) as error:
            raise Unavailable(f"it did not answer within {deadline_s:g} s ({error})") from None
        except (ValueError, KeyError, TypeError):
            raise TritoneError("it answered the ping without its stages") from None


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"HTTP status {error.code}"
