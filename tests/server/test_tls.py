"""gRPC over mutual TLS: Triton's own flags, our client, and nobody without a certificate."""

import subprocess
import sys

import pytest

from tritone_client import AsyncTritoneClient, InvalidRequest, TritoneClient, TritoneError
from waiting import PATIENCE_S

pytestmark = pytest.mark.server


def openssl(*words):
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A root, and a key and a certificate of it for the server and for a client; by name, paths as text."""
    folder = tmp_path_factory.mktemp("certificates")
    made = {}
    for name, subject in (("root", "/CN=a root"), ("server", "/CN=localhost"), ("client", "/CN=a client")):
        key, asked, signed = (folder / f"{name}.{kind}" for kind in ("key", "csr", "pem"))
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key)
        if name == "root":
            openssl("req", "-x509", *curve, "-out", signed, "-days", 2, "-subj", subject)
        else:
            openssl("req", *curve, "-out", asked, "-subj", subject)
            names = folder / f"{name}.names"
            names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
            root = ("-CA", folder / "root.pem", "-CAkey", folder / "root.key", "-CAcreateserial")
            openssl("x509", "-req", "-in", asked, *root, "-days", 2, "-extfile", names, "-out", signed)
        made[f"{name}_key"], made[name] = str(key), str(signed)
    return made


def tls_flags(files):
    return (
        "--grpc-use-ssl=1",
        "--grpc-use-ssl-mutual=1",
        f"--grpc-server-cert={files['server']}",
        f"--grpc-server-key={files['server_key']}",
        f"--grpc-root-cert={files['root']}",
    )


async def test_mutual_tls_lets_in_who_has_a_certificate_and_nobody_else(serve, echo_folder, files):
    trusted = {
        "root_certificates": files["root"],
        "private_key": files["client_key"],
        "certificate_chain": files["client"],
    }
    flags = [f"--{name.replace('_', '-')}={file}" for name, file in trusted.items()]
    server = serve(echo_folder, options=[*flags, "--", *tls_flags(files)])
    async with AsyncTritoneClient(server.grpc_url, "echo", ssl=True, **trusted) as client:
        assert set(await client.ping(PATIENCE_S)) == {"writer", "singer", "wave"}
        assert (await client.ask("over a wire that nobody reads")).text.split()[0] == "over"
    for options in ({"ssl": True, "root_certificates": files["root"]}, {"ssl": True}, {}):
        async with AsyncTritoneClient(server.grpc_url, "echo", **options) as client:
            with pytest.raises(TritoneError):
                await client.ping(2)

    for words, text in ((["ping"], "is ready"), (["chat", "--modalities=text", "said in secret"], "said in")):
        done = tritone(*words, *flags, f"--url={server.grpc_url}", "--pipeline=echo")
        assert done.returncode == 0 and text in done.stdout, done.stdout + done.stderr
    refused = tritone("ping", flags[0], f"--url={server.grpc_url}", "--pipeline=echo", "--deadline-s=2")
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1


def tritone(*words):
    return subprocess.run(
        [sys.executable, "-m", "tritone_client", *words],
        capture_output=True,
        text=True,
        timeout=6 * PATIENCE_S,
    )


def test_serve_asks_for_the_certificates_that_it_needs_itself(echo_folder, files):
    refused = tritone("serve", str(echo_folder), "--check", "--", *tls_flags(files))
    assert refused.returncode == 1 and "give it --private-key and --certificate-chain" in refused.stderr


@pytest.mark.parametrize("one", ["private_key", "certificate_chain"])
def test_a_key_without_its_certificate_is_refused(one):
    with pytest.raises(InvalidRequest, match="belong together"):
        TritoneClient(ssl=True, **{one: "a.pem"})
