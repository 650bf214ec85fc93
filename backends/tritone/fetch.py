"""Files that a request names by URL: fetched as deploy.yaml allows, and not at all where it says nothing.

    URL ─► scheme, host, port allowed? ─► resolve ─► all addresses public? ─► connect to one ─► bounded body
     ▲                                                                            │
     └───── another place on the same host, at most MAX_REDIRECTS times ◄─────────┘

A connection goes to an address that was checked, not to the name again, so a name that changes its address
meanwhile gains nothing. Threads wait for the sockets; when the request ends, its sockets are shut down.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import http.client
import ipaddress
import re
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urljoin

from tritone.deploy import HOST, Deploy, Urls
from tritone.errors import InvalidRequest
from tritone.media import is_url
from tritone.pipeline import Plan

if TYPE_CHECKING:
    from tritone.request import Request

MAX_REDIRECTS = 3
MAX_URL_BYTES = 2048
MAX_HOST_CHARACTERS = 253
READ_BYTES = 1 << 16
REDIRECTS = (301, 302, 303, 307, 308)
DEFAULT_PORTS = {"http": 80, "https": 443}
SEND_IT = "send the file itself"

_PLACE = re.compile(r"([a-z][a-z0-9+.-]*)://([^/?#]*)([^#]*)(?:#.*)?", re.IGNORECASE)
# Addresses that the standard library calls global, although others may stand behind them.
_INDIRECT = [
    ipaddress.ip_network(network)
    for network in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96", "fec0::/10")
]


@dataclass(frozen=True)
class Place:
    """What a URL says, checked."""

    scheme: str
    host: str  # lower case
    port: int
    target: str  # path and query

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}{self.target}"


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host, as numbers. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_public(address: str) -> bool:
    """Whether an address, as a number, belongs to one machine of the public internet and to no other."""
    number = ipaddress.ip_address(address)
    if isinstance(number, ipaddress.IPv6Address):
        if number.ipv4_mapped is not None or number.scope_id is not None:
            return False
        if any(number in network for network in _INDIRECT if network.version == 6):
            return False
    return number.is_global and not (number.is_multicast or number.is_reserved)


@dataclass(frozen=True)
class Network:
    """How the world is reached; a test puts its own in place."""

    resolve: Callable[[str, int], list[str]] = resolve
    is_public: Callable[[str], bool] = is_public
    tls: Callable[[], ssl.SSLContext] = ssl.create_default_context


def read_url(url: str, urls: Urls, name: str) -> Place:
    """Where a URL points to. Raises InvalidRequest unless `urls` allows it; name: the field in errors."""
    if len(url) > MAX_URL_BYTES:
        raise InvalidRequest(
            f"{name} is a URL of more than {MAX_URL_BYTES} bytes", f"shorten it, or {SEND_IT}"
        )
    if not all("!" <= character <= "~" for character in url) or "\\" in url:
        raise InvalidRequest(f"{name} is a URL with characters that no URL has", "percent-encode them")
    match = _PLACE.fullmatch(url)
    scheme = match[1].lower() if match else url.partition(":")[0].lower()
    if match is None or scheme not in DEFAULT_PORTS:
        raise InvalidRequest(f"{name} is a URL of scheme '{scheme:.20}'", f"use http or https, or {SEND_IT}")
    authority, target = match[2], match[3] or "/"
    if "@" in authority:
        raise InvalidRequest(f"{name} is a URL with a user name in it", "leave it out")
    host, colon, digits = authority.lower().partition(":")
    if not HOST.fullmatch(host) or len(host) > MAX_HOST_CHARACTERS:
        raise InvalidRequest(f"{name} is a URL of host '{authority:.60}'", "use the name of a host")
    if not is_allowed(host, urls):
        raise InvalidRequest(f"{name} is a URL of host '{host:.60}', which is not allowed", SEND_IT)
    port = DEFAULT_PORTS[scheme]
    if colon:
        port = int(digits) if digits.isdecimal() and len(digits) <= 5 else 0
    if port not in urls.ports:
        raise InvalidRequest(
            f"{name} is a URL of port '{digits:.20}'", f"use one of {', '.join(map(str, urls.ports))}"
        )
    return Place(scheme, host, port, target if target.startswith("/") else f"/{target}")


def is_allowed(host: str, urls: Urls) -> bool:
    """Whether a pattern names the host, or, as *.domain, a domain above it."""
    return any(
        host == pattern or (pattern[:1] == "*" and host.endswith(pattern[1:])) for pattern in urls.allow
    )


def check_urls(media: Mapping[str, list[bytes]], urls: Urls) -> None:
    """Raise InvalidRequest for URLs that will not be fetched, before anything is."""
    named = _urls(media)
    if named and not urls.allow:
        raise InvalidRequest(
            f"{named[0][0]} is a URL, and this server fetches none",
            f"{SEND_IT}, or have its host allowed in deploy.yaml (urls: allow: [...])",
        )
    if len(named) > urls.per_request:
        raise InvalidRequest(f"{len(named)} URLs are given", f"send at most {urls.per_request}")
    for name, url in named:
        read_url(url, urls, name)


def _urls(media: Mapping[str, list[bytes]]) -> list[tuple[str, str]]:
    """The URLs among the files: name of the field, URL."""
    return [
        (_name(kind, number, files), _text(file))
        for kind, files in media.items()
        for number, file in enumerate(files)
        if is_url(file)
    ]


def _text(file: bytes) -> str:
    """A URL as text; one that is too long stays too long."""
    return file[: MAX_URL_BYTES + 128].strip().decode("latin-1")


def _name(kind: str, number: int, files: list[bytes]) -> str:
    return kind if len(files) == 1 else f"{kind}[{number}]"


class Fetcher:
    """Fetches for one orchestrator, on threads of its own."""

    def __init__(self, deploy: Deploy, network: Network | None = None) -> None:
        self._deploy = deploy
        self._urls = deploy.urls
        self._network = network or Network()
        self._tls = functools.cache(self._network.tls)
        self._turns = asyncio.Semaphore(self._urls.at_once)
        self._pool = ThreadPoolExecutor(self._urls.at_once, "fetch")

    async def filled(self, request: Request, plan: Plan) -> tuple[Request, Plan]:
        """The request with files in place of URLs, and its plan. Raises InvalidRequest."""
        if not _urls(request.media):
            return request, plan
        jobs = {}
        try:
            async with asyncio.TaskGroup() as group:
                for kind, files in request.media.items():
                    most = min(self._urls.max_bytes, int(getattr(self._deploy.limits, f"{kind}_bytes")))
                    jobs[kind] = [
                        group.create_task(self._file(file, _name(kind, number, files), most))
                        for number, file in enumerate(files)
                    ]
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        media = {kind: [job.result() for job in files] for kind, files in jobs.items()}
        filled = dataclasses.replace(request, media=media)
        return filled, self._deploy.pipeline.plan(filled)

    async def _file(self, file: bytes, name: str, most_bytes: int) -> bytes:
        """`file`, or what it is the URL of."""
        if not is_url(file):
            return file
        place = read_url(_text(file), self._urls, name)
        transfer = _Transfer(place, name, self._urls, most_bytes, self._network, self._tls)
        async with self._turns:
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(self._urls.timeout_s):
                    return await loop.run_in_executor(self._pool, transfer.run)
            except TimeoutError:
                raise InvalidRequest(
                    f"{name}: {place.host} did not give it within {self._urls.timeout_s:g} s", SEND_IT
                ) from None
            finally:
                transfer.abort()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Transfer:
    """One file, from its first connection to the last byte, on a thread; `abort` ends it from another."""

    def __init__(
        self,
        place: Place,
        name: str,
        urls: Urls,
        most_bytes: int,
        network: Network,
        tls: Callable[[], ssl.SSLContext],
    ) -> None:
        self._place, self._name, self._urls, self._most_bytes = place, name, urls, most_bytes
        self._network, self._tls = network, tls
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._aborted = False

    def run(self) -> bytes:
        """Raises InvalidRequest; nothing else, whatever the other side does."""
        place = self._place
        for _ in range(MAX_REDIRECTS + 1):
            try:
                answer = self._ask(place)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise self._refusal(f"cannot be fetched from {place.host} ({_reason(error)})") from None
            if isinstance(answer, bytes):
                return answer
            place = answer
        raise self._refusal(f"is redirected by {place.host} more than {MAX_REDIRECTS} times")

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            if self._socket is not None:
                _shut_down(self._socket)

    def hold(self, sock: socket.socket | None) -> None:
        """Note the socket in use, None when it is about to be closed."""
        with self._lock:
            self._socket = sock
            if self._aborted and sock is not None:
                sock.close()
                raise ConnectionAbortedError("the request ended")

    def _ask(self, place: Place) -> bytes | Place:
        """The file at a place, or the place that it redirects to."""
        tls = self._tls() if place.scheme == "https" else None
        connection = _Connection(place, self._addresses(place), self.hold, self._urls.timeout_s, tls)
        try:
            headers = {"User-Agent": "tritone", "Accept-Encoding": "identity", "Connection": "close"}
            connection.request("GET", place.target, headers=headers)
            response = connection.getresponse()
            if response.status in REDIRECTS:
                return self._redirect(place, response.getheader("Location") or "")
            if response.status != 200:
                raise self._refusal(f"cannot be fetched from {place.host} (status {response.status})")
            return self._body(response, place)
        finally:
            self.hold(None)
            connection.close()

    def _addresses(self, place: Place) -> list[str]:
        found = self._network.resolve(place.host, place.port)
        if not found or not all(self._network.is_public(address) for address in found):
            raise self._refusal(f"is a URL of {place.host}, which has no public address")
        return found

    def _redirect(self, place: Place, location: str) -> Place:
        target = read_url(urljoin(place.url, location), self._urls, f"the redirect of {self._name}")
        if target.host != place.host:
            raise self._refusal(f"is redirected from {place.host} to another host")
        if (place.scheme, target.scheme) == ("https", "http"):
            raise self._refusal(f"is redirected by {place.host} from https to http")
        return target

    def _body(self, response: http.client.HTTPResponse, place: Place) -> bytes:
        encoding = response.getheader("Content-Encoding") or "identity"
        if encoding.strip().lower() != "identity":
            raise self._refusal(f"comes from {place.host} in content encoding '{encoding:.20}'")
        if response.length is not None and response.length > self._most_bytes:
            raise self._too_long(f"{response.length} bytes")
        body = bytearray()
        while piece := response.read(READ_BYTES):
            body += piece
            if len(body) > self._most_bytes:
                raise self._too_long("more bytes than that")
        if response.length:
            raise self._refusal(f"ended {response.length} bytes early at {place.host}")
        if not body:
            raise self._refusal(f"is empty at {place.host}")
        return bytes(body)

    def _refusal(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"{self._name} {what}", SEND_IT)

    def _too_long(self, size: str) -> InvalidRequest:
        return InvalidRequest(f"{self._name} has {size}", f"send at most {self._most_bytes} bytes a file")


class _Connection(http.client.HTTPConnection):
    """A connection to one of the addresses that were found for a host, and to no other."""

    def __init__(
        self,
        place: Place,
        addresses: list[str],
        hold: Callable[[socket.socket | None], None],
        timeout_s: float,
        tls: ssl.SSLContext | None,
    ) -> None:
        super().__init__(place.host, place.port, timeout=timeout_s)
        self.default_port = DEFAULT_PORTS[place.scheme]  # the Host header leaves it out
        self._addresses, self._hold, self._timeout_s, self._tls = addresses, hold, timeout_s, tls

    def connect(self) -> None:
        failure = OSError("no address")
        for address in self._addresses:
            try:
                self.sock = self._opened(address)
                return
            except OSError as error:
                failure = error
        raise failure

    def _opened(self, address: str) -> socket.socket:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._hold(sock)
            sock.settimeout(self._timeout_s)
            sock.connect((address, self.port))
            self._hold(sock)  # the request may have ended meanwhile
            if self._tls is None:
                return sock
            sock = self._tls.wrap_socket(sock, server_hostname=self.host, do_handshake_on_connect=False)
            self._hold(sock)
            sock.do_handshake()
            return sock
        except BaseException:
            self._hold(None)
            sock.close()
            raise


def _shut_down(sock: socket.socket) -> None:
    """Wake whoever waits for the socket. Not the method of a TLS socket, which would go on in clear text."""
    with contextlib.suppress(OSError):  # it is not connected yet, or not any more
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _reason(error: Exception) -> str:
    """Why a transfer failed, in a few words, none of them from the other side."""
    match error:
        case ssl.SSLCertVerificationError():
            return "its certificate is not trusted"
        case ssl.SSLError():
            return "TLS failed"
        case socket.gaierror():
            return "no such host"
        case TimeoutError():
            return "it does not answer"
        case OSError() if error.strerror:
            return error.strerror.lower()
        case _:
            return "it does not speak HTTP"
