"""Media by URL: off by default; where hosts are allowed, bounded in every way and kept off private networks.

The sites are sockets on 127.0.0.1. `Network` says which names lead there, and whether that counts as public.
"""

import asyncio
import base64
import contextlib
import dataclasses
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tritone import contract, deploy_reader
from tritone.deploy import Limits, Urls
from tritone.errors import ConfigError, InvalidRequest
from tritone.fetch import Fetcher, Network, check_urls, is_public, read_url, resolve
from tritone.media import is_url
from tritone.request import read_request
from waiting import PATIENCE_S, until

DEPLOY = deploy_reader.load(Path(__file__).parents[3] / "model_repository" / "smoltalk" / "deploy.yaml")
FILE = bytes(range(256)) * 40
SECONDS_OF_A_SLOW_SITE = 3 * PATIENCE_S


class Site:
    """A server of one host. pages: by path, what answers on a connection; `heads` are the requests it got."""

    def __init__(self, tls=None):
        self.heads, self.pages = [], {}
        self.closing = threading.Event()
        self.hung_up = threading.Event()  # a client went away while a page was being sent
        self._tls = tls
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection):
        with contextlib.suppress(OSError), connection:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            head = b""
            while b"\r\n\r\n" not in head:
                piece = connection.recv(4096)
                if not piece:
                    return
                head += piece
            self.heads.append(head.decode())
            path = head.split()[1].decode()
            try:
                self.pages[path](self, connection)
            except OSError:
                self.hung_up.set()
            connection.close()

    def close(self):
        self.closing.set()
        with contextlib.suppress(OSError):  # it is closed already
            self._server.shutdown(socket.SHUT_RDWR)  # also wakes the thread that accepts


def page(body=FILE, status="200 OK", length=None, **headers):
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return lambda site, connection: connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)


def redirect(location, status="302 Found"):
    return page(b"", status, Location=location)


def raw(data):
    return lambda site, connection: connection.sendall(data)


def drip(head, piece):
    """A page that goes on and on, a piece at a time."""

    def send(site, connection):
        connection.sendall(head)
        ends = time.monotonic() + SECONDS_OF_A_SLOW_SITE
        while not site.closing.wait(0.02) and time.monotonic() < ends:
            connection.sendall(piece)

    return send


@pytest.fixture
def site():
    site = Site()
    yield site
    site.close()


def urls_of(site, **changes):
    return Urls(allow=("media.example", "*.cdn.example"), ports=(80, 443, site.port), **changes)


def leads_here(public=True):
    """A network where every name is 127.0.0.1."""
    return Network(lambda host, port: ["127.0.0.1"], lambda address: public)


async def fetch(url, urls, network=None, limits=None, kind="audio"):
    """What a request with the URL gets in its place."""
    deploy = dataclasses.replace(DEPLOY, urls=urls, limits=limits or DEPLOY.limits)
    request = read_request({kind: [url.encode()], "text_input": "What is it?"}, {}, deploy, drawn_seed=1)
    fetcher = Fetcher(deploy, network or leads_here())
    try:
        filled, plan = await fetcher.filled(request, deploy.pipeline.plan(request))
    finally:
        fetcher.close()
    assert plan["ears"].inputs[kind] == filled.media[kind], "the plan must hold the file too"
    return filled.media[kind][0]


# -- off by default ----------------------------------------------------------------------------------------

URLS = [
    "http://media.example/a.wav",
    "https://media.example/a.wav",
    " HTTP://media.example/a.wav",
    "file:///etc/passwd",
    "file:/etc/passwd",
    "gopher://media.example/1",
    "ftp://media.example/a",
    "s3://bucket/key",
]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("kind", ["image", "audio", "video"])
def test_a_url_is_refused_by_default_and_the_cure_named(url, kind):
    pipeline = dataclasses.replace(DEPLOY.pipeline, accepts=(*DEPLOY.pipeline.accepts, contract.IMAGE))
    deploy = dataclasses.replace(DEPLOY, pipeline=pipeline)
    with pytest.raises(InvalidRequest, match=r"fetches none; send the file itself.*urls: allow") as refusal:
        read_request({kind: [url.encode()]}, {}, deploy, drawn_seed=1)
    assert str(refusal.value).startswith(f"{kind} is a URL")


@pytest.mark.parametrize(
    "data",
    [
        b"RIFF\x00\x00\x00\x00WAVEfmt ",
        b"data:audio/wav;base64,UklGRg==",
        base64.b64encode(b"http://media.example/" * 9),
        b"\x89PNG\r\n\x1a\n",
        b"fLaC",
        b"",
        b"http:",
    ],
)
def test_a_file_is_no_url(data):
    assert not is_url(data)
    check_urls({"audio": [data]}, Urls())


# -- what is allowed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["media.example", "MEDIA.example", "a.cdn.example", "a.b.cdn.example"])
async def test_an_allowed_host_gives_the_file(site, host):
    site.pages["/a.wav?x=1&y=%20"] = page()
    assert await fetch(f"http://{host}:{site.port}/a.wav?x=1&y=%20#t=3", urls_of(site)) == FILE
    (head,) = site.heads
    assert f"Host: {host.lower()}:{site.port}" in head and "Accept-Encoding: identity" in head


async def test_files_and_urls_mix_and_keep_their_order(site):
    site.pages.update({"/1": page(b"first"), "/2": page(b"second")})
    deploy = dataclasses.replace(DEPLOY, urls=urls_of(site))
    place = f"http://media.example:{site.port}"
    media = [b"RIFF", f"{place}/1".encode(), b"fLaC", f"{place}/2".encode()]
    request = read_request({"audio": media, "text_input": "?"}, {}, deploy, drawn_seed=1)
    fetcher = Fetcher(deploy, leads_here())
    filled, plan = await fetcher.filled(request, deploy.pipeline.plan(request))
    fetcher.close()
    assert filled.media["audio"] == plan["ears"].inputs["audio"] == [b"RIFF", b"first", b"fLaC", b"second"]


async def test_a_body_in_chunks_and_one_without_a_length_are_read_whole(site):
    site.pages["/chunks"] = raw(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )
    site.pages["/until-the-end"] = raw(b"HTTP/1.0 200 OK\r\n\r\nabcde")
    for path in ("/chunks", "/until-the-end"):
        assert await fetch(f"http://media.example:{site.port}{path}", urls_of(site)) == b"abcde"


async def test_a_redirect_on_the_same_host_is_followed(site):
    site.pages.update({"/a": redirect("/b"), "/b": redirect(f"//media.example:{site.port}/c"), "/c": page()})
    assert await fetch(f"http://media.example:{site.port}/a", urls_of(site)) == FILE


async def test_a_fetched_file_that_is_a_url_is_not_fetched_again(site):
    site.pages["/a"] = page(b"http://media.example/b")
    assert await fetch(f"http://media.example:{site.port}/a", urls_of(site)) == b"http://media.example/b"
    assert len(site.heads) == 1


# -- what is refused before a socket is opened -------------------------------------------------------------

ALLOW = Urls(allow=("media.example", "*.cdn.example"))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://other.example/a", "host 'other.example', which is not allowed"),
        ("http://cdn.example/a", "which is not allowed"),
        ("http://evilcdn.example/a", "which is not allowed"),
        ("http://media.example.evil.org/a", "which is not allowed"),
        ("http://localhost/a", "which is not allowed"),
        ("http://media.example./a", "use the name of a host"),
        ("http://127.0.0.1/a", "use the name of a host"),
        ("http://169.254.169.254/latest/meta-data", "use the name of a host"),
        ("http://10.0.0.1/a", "use the name of a host"),
        ("http://0.0.0.0/a", "use the name of a host"),
        ("http://0/a", "use the name of a host"),
        ("http://[::1]/a", "use the name of a host"),
        ("http://[::ffff:127.0.0.1]/a", "use the name of a host"),
        ("http://2130706433/a", "use the name of a host"),
        ("http://017700000001/a", "use the name of a host"),
        ("http://0177.0.0.1/a", "use the name of a host"),
        ("http://0x7f000001/a", "use the name of a host"),
        ("http://0x7f.1/a", "use the name of a host"),
        ("http://127.1/a", "use the name of a host"),
        ("http://a.0x7f/a", "use the name of a host"),
        ("http://media.example@169.254.169.254/a", "user name"),
        ("http://root:secret@media.example/a", "user name"),
        ("http://media.example\\@other.example/a", "percent-encode"),
        ("http://media.example/a b", "percent-encode"),
        ("http://media.example/a\r\nHost: other", "percent-encode"),
        ("http://media.example/a\x00", "percent-encode"),
        ("http://mediä.example/a", "percent-encode"),
        ("http:///a", "use the name of a host"),
        ("http://", "use the name of a host"),
        ("http://media.example:22/a", "port '22'"),
        ("http://media.example:8000/v2", "port '8000'"),
        ("http://media.example:/a", "port ''"),
        ("http://media.example:80:80/a", "port"),
        ("http://media.example:065616/a", "port"),
        ("http://media.example:-1/a", "port"),
        ("file:///etc/passwd", "scheme 'file'"),
        ("file:/etc/passwd", "scheme 'file'"),
        ("file://media.example/etc/passwd", "scheme 'file'"),
        ("gopher://media.example/1", "scheme 'gopher'"),
        ("ftp://media.example/a", "scheme 'ftp'"),
        (f"http://media.example/{'a' * 4000}", "more than 2048 bytes"),
    ],
)
def test_a_url_that_is_not_allowed_is_refused_at_once(url, words):
    with pytest.raises(InvalidRequest, match=words.replace("(", r"\(")) as refusal:
        check_urls({"image": [url.encode()]}, ALLOW)
    sentence = str(refusal.value)
    assert sentence.count(";") == 1 and "\n" not in sentence and len(sentence) < 250
    assert "secret" not in sentence and "meta-data" not in sentence, "a path may be nobody else's business"


def test_more_urls_than_a_request_may_have_are_refused():
    url = b"http://media.example/a"
    check_urls({"image": [url] * 4}, ALLOW)
    with pytest.raises(InvalidRequest, match="5 URLs are given; send at most 4"):
        check_urls({"image": [url] * 3, "audio": [url] * 2}, ALLOW)


@pytest.mark.parametrize(
    "pattern", ["*", "*.", "**.example", "MEDIA.example", "127.0.0.1", "a*.example", "", "http://a"]
)
def test_a_pattern_that_is_no_host_is_a_fault_of_the_deploy_file(pattern):
    raw = {"pipeline": "smoltalk", "urls": {"allow": [pattern]}}
    with pytest.raises(ConfigError, match=r"urls\.allow has"):
        deploy_reader.from_mapping(raw, "deploy.yaml")


# -- where names may lead ----------------------------------------------------------------------------------

PRIVATE = [
    "127.0.0.1",
    "127.8.8.8",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "192.0.2.1",
    "198.18.0.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:8.8.8.8",
    "64:ff9b::7f00:1",
    "64:ff9b:1::7f00:1",
    "2002:7f00:1::",
    "2001:0:7f00:1::",
    "2001:db8::1",
    "fc00::1",
    "fd12::1",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "ff02::1",
    "ff0e::1",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_is_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.216.34", "2606:4700::1111"])
def test_an_address_that_is_public(address):
    assert is_public(address)


@pytest.mark.parametrize("found", [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["::ffff:10.0.0.1"], []])
async def test_a_name_that_leads_to_anything_private_is_refused_and_nothing_connected(site, found):
    network = Network(resolve=lambda host, port: found)
    with pytest.raises(InvalidRequest, match=r"media\.example, which has no public address"):
        await fetch(f"http://media.example:{site.port}/a", urls_of(site), network)
    assert site.heads == []


async def test_the_real_names_of_this_machine_are_private(site):
    network = Network(resolve=lambda host, port: resolve("localhost", port))
    with pytest.raises(InvalidRequest, match="no public address"):
        await fetch(f"http://media.example:{site.port}/a", urls_of(site), network)


async def test_a_name_that_changes_its_address_is_asked_once_a_hop(site):
    """The connection goes to the address that was checked, whatever the name says a moment later."""
    site.pages["/a"] = page()
    asked = []

    def changing(host, port):
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["10.0.0.1"]

    network = Network(changing, lambda address: address == "127.0.0.1")
    assert await fetch(f"http://media.example:{site.port}/a", urls_of(site), network) == FILE
    assert asked == ["media.example"]


async def test_the_second_address_is_tried_when_the_first_does_not_answer(site):
    site.pages["/a"] = page()
    network = Network(lambda host, port: ["::1", "127.0.0.1"], lambda address: True)
    assert await fetch(f"http://media.example:{site.port}/a", urls_of(site), network) == FILE


# -- what a site may not do --------------------------------------------------------------------------------

BOMB = b"\x1f\x8b\x08" + bytes(2000)
SITES = {
    "another host": (redirect("http://a.cdn.example/b"), "redirected from media.example to another host"),
    "a host not allowed": (redirect("http://other.example/b"), "not allowed"),
    "the metadata of a cloud": (redirect("http://169.254.169.254/latest"), "use the name of a host"),
    "this machine": (redirect("http://127.0.0.1:8000/v2"), "use the name of a host"),
    "this machine by name": (redirect("http://localhost/"), "not allowed"),
    "a file": (redirect("file:///etc/passwd"), "scheme 'file'"),
    "another port": (redirect("http://media.example:22/"), "port '22'"),
    "a user": (redirect("//root@media.example/"), "user name"),
    "nowhere": (page(b"", "302 Found"), "more than 3 times"),
    "a circle": (redirect("/a"), "more than 3 times"),
    "not found": (page(b"no", "404 Not Found"), r"status 404"),
    "no content": (raw(b"HTTP/1.1 204 No Content\r\n\r\n"), "status 204"),
    "part of it": (page(b"no", "206 Partial Content"), "status 206"),
    "10 GB": (page(b"x", length=10 << 30), "has 10737418240 bytes; send at most 20000 bytes a file"),
    "a length that is a lie": (page(FILE, length=len(FILE) + 5), "ended 5 bytes early"),
    "endless": (drip(b"HTTP/1.1 200 OK\r\n\r\n", bytes(8192)), "more bytes than that"),
    "endless chunks": (
        drip(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1000\r\n" + bytes(4096) + b"\r\n"),
        "more bytes than that",
    ),
    "a bomb": (page(BOMB, Content_Encoding="gzip"), "content encoding 'gzip'"),
    "nothing": (page(b""), "is empty"),
    "hangs up": (lambda site, connection: None, "does not speak HTTP|reset"),
    "no HTTP": (raw(b"SSH-2.0-OpenSSH_9.2\r\n"), "does not speak HTTP"),
    "a chunk of no size": (
        raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
        "does not speak HTTP",
    ),
    "half a chunk": (
        raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nab"),
        "does not speak HTTP",
    ),
    "endless headers": (
        drip(b"HTTP/1.1 200 OK\r\n", b"".join(b"X-%d: y\r\n" % i for i in range(200))),
        "does not speak HTTP",
    ),
}


@pytest.mark.parametrize(("answer", "words"), SITES.values(), ids=SITES)
async def test_a_site_that_misbehaves_is_refused_in_one_sentence(site, answer, words):
    site.pages["/a"] = answer
    urls = urls_of(site, max_bytes=20_000, timeout_s=PATIENCE_S)
    with pytest.raises(InvalidRequest, match=words) as refusal:
        await fetch(f"http://media.example:{site.port}/a", urls)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 250
    assert len(site.heads) <= 4


SLOW = {
    "says nothing": drip(b"", b""),
    "a byte of the head at a time": drip(b"HTTP/1.1 200 OK\r\nX: ", b"y"),
    "a byte of the body at a time": drip(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n", b"y"),
    "a hundred and a hundred more": drip(b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"),
}


@pytest.mark.parametrize("answer", SLOW.values(), ids=SLOW)
async def test_a_slow_site_is_left_when_its_time_is_over(site, answer):
    site.pages["/a"] = answer
    began_s = time.monotonic()
    with pytest.raises(InvalidRequest, match=r"audio: media.example did not give it within 0\.4 s"):
        await fetch(f"http://media.example:{site.port}/a", urls_of(site, timeout_s=0.4))
    assert time.monotonic() - began_s < PATIENCE_S < SECONDS_OF_A_SLOW_SITE
    if answer is not SLOW["says nothing"]:  # which never learns that nobody listens
        await until(site.hung_up.is_set)


async def test_a_request_that_is_cancelled_leaves_the_site_at_once(site):
    site.pages["/a"] = SLOW["a byte of the body at a time"]
    job = asyncio.create_task(fetch(f"http://media.example:{site.port}/a", urls_of(site, timeout_s=60)))
    await until(lambda: site.heads)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    await until(site.hung_up.is_set)
    await until(lambda: not [t for t in threading.enumerate() if t.name.startswith("fetch")])


async def test_the_first_failure_ends_the_other_fetches_of_a_request(site):
    site.pages.update({"/slow": SLOW["a byte of the body at a time"], "/bad": page(b"", "404 Not Found")})
    deploy = dataclasses.replace(DEPLOY, urls=urls_of(site, timeout_s=60))
    media = [f"http://media.example:{site.port}/{path}".encode() for path in ("slow", "bad")]
    request = read_request({"audio": media, "text_input": "?"}, {}, deploy, drawn_seed=1)
    fetcher = Fetcher(deploy, leads_here())
    with pytest.raises(
        InvalidRequest, match=r"audio\[1\] cannot be fetched from media.example \(status 404\)"
    ):
        await fetcher.filled(request, {})
    fetcher.close()
    if len(site.heads) == 2:
        await until(site.hung_up.is_set)


async def test_no_more_files_are_fetched_at_once_than_deploy_says(site):
    running, most, lock, two = [], [], threading.Lock(), threading.Event()

    def counted(site, connection):
        with lock:
            running.append(1)
            most.append(len(running))
            if len(running) == 2:
                two.set()
        two.wait(PATIENCE_S)
        time.sleep(0.05)  # for one too many to come
        with lock:
            running.pop()
        page()(site, connection)

    site.pages["/a"] = counted
    deploy = dataclasses.replace(DEPLOY, urls=urls_of(site, at_once=2))
    url = f"http://media.example:{site.port}/a".encode()
    request = read_request({"audio": [url] * 4, "text_input": "?"}, {}, deploy, drawn_seed=1)
    fetcher = Fetcher(deploy, leads_here())
    await asyncio.gather(*(fetcher.filled(request, {}) for _ in range(3)))
    fetcher.close()
    assert max(most) == 2 and len(most) == 12


async def test_the_limit_of_the_kind_holds_as_well(site):
    site.pages["/a"] = page()
    with pytest.raises(InvalidRequest, match=f"has {len(FILE)} bytes; send at most 1000 bytes"):
        await fetch(f"http://media.example:{site.port}/a", urls_of(site), limits=Limits(audio_bytes=1000))


# -- TLS ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """The files of a key and a certificate of media.example, signed by itself."""
    folder = tmp_path_factory.mktemp("tls")
    key, chain = folder / "key.pem", folder / "chain.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-keyout", key, "-out", chain, "-days", "2", "-subj", "/CN=media.example"]
    subprocess.run([*words, "-addext", "subjectAltName=DNS:media.example"], check=True, capture_output=True)
    return key, chain


@pytest.fixture
def secure_site(certificate):
    key, chain = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    site = Site(context)
    site.names = []
    context.sni_callback = lambda connection, name, _: site.names.append(name)
    site.pages["/a"] = page()
    yield site
    site.close()


def trusting(chain):
    return Network(lambda *_: ["127.0.0.1"], lambda _: True, lambda: ssl.create_default_context(cafile=chain))


async def test_https_checks_the_certificate_against_the_name_and_says_the_name(secure_site, certificate):
    place = f":{secure_site.port}/a"
    network = trusting(certificate[1])
    assert await fetch(f"https://media.example{place}", urls_of(secure_site), network) == FILE
    assert secure_site.names == ["media.example"]
    for host, other in (("a.cdn.example", network), ("media.example", leads_here())):
        with pytest.raises(InvalidRequest, match="its certificate is not trusted"):
            await fetch(f"https://{host}{place}", urls_of(secure_site), other)


async def test_a_redirect_does_not_leave_https(secure_site, certificate):
    secure_site.pages["/a"] = redirect(f"http://media.example:{secure_site.port}/b")
    with pytest.raises(InvalidRequest, match="from https to http"):
        await fetch(
            f"https://media.example:{secure_site.port}/a", urls_of(secure_site), trusting(certificate[1])
        )


async def test_a_slow_handshake_is_left_when_its_time_is_over(site):
    site.pages = {}  # it reads what is no HTTP, and never answers
    with pytest.raises(InvalidRequest, match=r"did not give it within 0\.4 s"):
        await fetch(f"https://media.example:{site.port}/a", urls_of(site, timeout_s=0.4))


def test_a_url_that_is_read_says_where_it_leads():
    place = read_url("HTTPS://A.cdn.example?x=1", ALLOW, "image")
    assert (place.scheme, place.host, place.port, place.target) == ("https", "a.cdn.example", 443, "/?x=1")
