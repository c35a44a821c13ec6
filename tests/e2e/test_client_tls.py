"""HTTPS and mTLS for clients; certificates that change while streams run."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import re
import shutil
import ssl
import subprocess
import sys
import time
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from extproc.address import Address
from extproc.local_http import ask as ask_beside
from tests.e2e.certificates import Certificate, Maker
from tests.e2e.client import Connection, Response
from tests.e2e.conftest import StartRouter
from tests.e2e.h2_client import H2Connection
from tests.e2e.harness import Router, Sim, until
from tests.e2e.raw_worker import RawWorker, unique_path
from tests.e2e.workers_support import STREAM_BODY, STREAM_PATH, hold_streams

pytestmark = pytest.mark.envoy

NOTICED_S = 30.0
"""A change is noticed within about a second on an idle machine."""

XFCC = "x-forwarded-client-cert"


@dataclasses.dataclass(frozen=True)
class Certificates:
    """Who vouches, and whom for."""

    ca: Certificate
    first: Certificate
    """Of the router, as the next one."""
    second: Certificate
    client: Certificate
    client_ca: Certificate
    other_client: Certificate
    """Vouched for by ``other_client_ca``."""
    other_client_ca: Certificate


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Make certificates."""
    maker = Maker(tmp_path_factory.mktemp("client-tls"))
    ca, client_ca, other_ca = (maker.make(name) for name in ("ca", "clients", "others"))
    return Certificates(
        ca=ca,
        first=maker.sign("first", ca, "IP:127.0.0.1,DNS:localhost"),
        second=maker.sign("second", ca, "IP:127.0.0.1,DNS:localhost"),
        client=maker.sign("client", client_ca, "DNS:client"),
        client_ca=client_ca,
        other_client=maker.sign("other", other_ca, "DNS:other"),
        other_client_ca=other_ca,
    )


class Served:
    """The files that a router serves with, which tests replace."""

    def __init__(self, directory: Path, certificate: Certificate, client_ca: Path | None) -> None:
        directory.mkdir()
        self.cert, self.key = directory / "tls.crt", directory / "tls.key"
        self.client_ca = directory / "ca.crt"
        self.put(certificate)
        self.flags = ["--tls-cert", str(self.cert), "--tls-key", str(self.key)]
        if client_ca is not None:
            shutil.copy(client_ca, self.client_ca)
            self.flags += ["--tls-client-ca", str(self.client_ca)]

    def put(self, certificate: Certificate) -> None:
        """Write both files anew, in place."""
        shutil.copy(certificate.cert, self.cert)
        shutil.copy(certificate.key, self.key)


@dataclasses.dataclass(frozen=True)
class TlsRouter:
    """A router that serves https, and its files."""

    router: Router
    files: Served

    @property
    def port(self) -> int:
        return self.router.port


@pytest.fixture
def start_tls_router(
    start_policy_router: StartRouter, certificates: Certificates, tmp_path: Path
) -> Callable[..., TlsRouter]:
    """Start a router that serves https."""

    def start(*flags: str, client_ca: Path | None = None, **options: Any) -> TlsRouter:
        files = Served(tmp_path / "served", certificates.first, client_ca)
        router = start_policy_router("headers_only", *files.flags, *flags, **options)
        return TlsRouter(router, files)

    return start


def trusting(ca: Certificate, *protocols: str, shown: Certificate | None = None) -> ssl.SSLContext:
    """Return what a client needs that trusts *ca* and shows a certificate."""
    context = ssl.create_default_context(cafile=str(ca.cert))
    context.set_alpn_protocols(list(protocols))
    if shown is not None:
        context.load_cert_chain(shown.cert, shown.key)
    return context


async def ask(port: int, tls: ssl.SSLContext, target: str, *headers: tuple[str, str]) -> Response:
    async with Connection(port, tls=tls) as connection:
        return await connection.ask("GET", target, headers)


async def shown_by(port: int, tls: ssl.SSLContext) -> bytes:
    """Return the certificate that a new connection gets."""
    async with Connection(port, tls=tls) as connection:
        found: bytes = connection.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return found


async def becomes(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until *condition* holds."""
    deadline = time.monotonic() + NOTICED_S
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def until_shown(port: int, tls: ssl.SSLContext, wanted: Certificate) -> None:
    async def shown() -> bool:
        return await shown_by(port, tls) == wanted.der()

    await becomes(shown)


async def envoy(router: Router, path: str) -> str:
    """Ask Envoy's own admin endpoint."""
    (directory,) = router.temporary.glob("vllm-extproc-*")
    answer = await ask_beside(
        Address(path=str(directory / "envoy-admin.sock")), "GET", path, timeout_s=10
    )
    assert answer is not None
    assert answer[0] == 200
    return answer[1].decode()


async def listener_changes(router: Router) -> str:
    text = await envoy(
        router, "/stats?filter=^listener_manager.listener_(modified|removed|in_place)"
    )
    return "".join(line for line in text.splitlines() if not line.endswith(": 0"))


async def test_both_versions_of_http_over_tls(
    start_tls_router: Callable[..., TlsRouter], certificates: Certificates, worker: RawWorker
) -> None:
    """ALPN decides; workers are asked in plain HTTP as before and are told of the https."""
    tls = start_tls_router()
    path, h2_path, plain_path = unique_path(), unique_path(), unique_path()

    async with Connection(tls.port, tls=trusting(certificates.ca, "http/1.1")) as connection:
        response = await connection.ask("POST", path, body=b"{}")
        ssl_object = connection.writer.get_extra_info("ssl_object")
        chosen = ssl_object.selected_alpn_protocol()
    async with H2Connection(tls.port, tls=trusting(certificates.ca, "h2", "http/1.1")) as h2:
        h2_response = await h2.ask("POST", h2_path, body=b"{}")
        h2_ssl = h2._writer.get_extra_info("ssl_object")
        h2_chosen = h2_ssl.selected_alpn_protocol()
    without_alpn = await ask(tls.port, trusting(certificates.ca), plain_path)

    assert (response.status, h2_response.status, without_alpn.status) == (200, 200, 200)
    assert (chosen, h2_chosen) == ("http/1.1", "h2")
    assert worker.only(path).values("x-forwarded-proto") == ["https"]
    (said,) = tls.router.logged("router ready")
    assert said["url"] == f"https://127.0.0.1:{tls.port}"
    assert ssl_object.version() == h2_ssl.version() == "TLSv1.3"


async def test_old_versions_and_plain_http_are_refused(
    start_tls_router: Callable[..., TlsRouter], certificates: Certificates, worker: RawWorker
) -> None:
    """TLS 1.2 is the oldest that is spoken; a request without TLS gets no answer and reaches nobody."""
    tls = start_tls_router()
    path = unique_path()
    tls_1_2 = trusting(certificates.ca)
    tls_1_2.maximum_version = ssl.TLSVersion.TLSv1_2
    old = trusting(certificates.ca)
    old.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings(action="ignore"):  # Python says that they are old, too
        old.minimum_version = ssl.TLSVersion.TLSv1
        old.maximum_version = ssl.TLSVersion.TLSv1_1

    assert (await ask(tls.port, tls_1_2, unique_path())).status == 200
    with pytest.raises((OSError, EOFError)):
        await ask(tls.port, old, path)
    async with Connection(tls.port) as plain:
        await plain.send("GET", path)
        with pytest.raises((OSError, EOFError)):
            await plain.head()

    assert worker.begun(path) == 0


def test_openai_sdk_over_https(
    start_router: StartRouter,
    start_sim: Callable[..., Sim],
    certificates: Certificates,
    tmp_path: Path,
) -> None:
    """The client our users use, told whom to trust, streams a chat."""
    files = Served(tmp_path / "served", certificates.first, None)
    router = start_router([start_sim("--speed", "0").url], *files.flags)
    http_client = openai.DefaultHttpxClient(trust_env=False, verify=trusting(certificates.ca))
    with openai.OpenAI(
        base_url=f"https://localhost:{router.port}/v1",
        api_key="sk-e2e",
        max_retries=0,
        timeout=20,
        http_client=http_client,
    ) as client:
        chunks = client.chat.completions.create(
            model="sim-model",
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=8,
            stream=True,
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    assert text


async def test_only_clients_with_a_certificate_are_served(
    start_tls_router: Callable[..., TlsRouter], certificates: Certificates, worker: RawWorker
) -> None:
    """mTLS: no certificate, or one that somebody else vouches for, gets nothing."""
    tls = start_tls_router(client_ca=certificates.client_ca.cert)
    path = unique_path()
    good = trusting(certificates.ca, shown=certificates.client)

    for shown in (None, certificates.other_client):
        for protocol in ("http/1.1", "h2"):
            with pytest.raises((OSError, EOFError)):
                await ask(tls.port, trusting(certificates.ca, protocol, shown=shown), path)
    refused = worker.begun(path)
    served = await ask(tls.port, good, path)

    assert refused == 0
    assert served.status == 200


@pytest.mark.parametrize("mutual", [False, True])
async def test_client_cannot_claim_a_certificate(
    start_tls_router: Callable[..., TlsRouter],
    certificates: Certificates,
    worker: RawWorker,
    mutual: bool,
) -> None:
    """``x-forwarded-client-cert`` of a client never reaches a worker, nor does the real one."""
    tls = start_tls_router(client_ca=certificates.client_ca.cert if mutual else None)
    shown = certificates.client if mutual else None
    paths = [unique_path(), unique_path()]
    claim = (XFCC, "Hash=0;Subject=admin")

    await ask(tls.port, trusting(certificates.ca, shown=shown), paths[0], claim, claim)
    async with H2Connection(tls.port, tls=trusting(certificates.ca, "h2", shown=shown)) as h2:
        await h2.ask("GET", paths[1], [claim])

    assert all(XFCC not in worker.only(path).names() for path in paths)


async def test_client_cannot_claim_a_certificate_without_tls(
    router: Router, worker: RawWorker
) -> None:
    """A router that serves plain HTTP believes it no more."""
    path = unique_path()

    async with Connection(router.port) as connection:
        await connection.ask("GET", path, [(XFCC, "Hash=0;Subject=admin")])

    assert XFCC not in worker.only(path).names()


async def test_certificate_is_replaced_under_running_streams(
    start_tls_router: Callable[..., TlsRouter], certificates: Certificates, worker: RawWorker
) -> None:
    """New connections get the new one; streams and kept connections go on; the listener is the same."""
    tls = start_tls_router()
    client = trusting(certificates.ca)
    go_on = hold_streams(worker)

    async with (
        Connection(tls.port, tls=client) as streaming,
        Connection(tls.port, tls=client) as kept,
        H2Connection(tls.port, tls=trusting(certificates.ca, "h2")) as h2,
    ):
        await streaming.send("GET", STREAM_PATH)
        await streaming.head()
        first = await streaming.event()
        h2_stream = await h2.send("GET", STREAM_PATH)
        await h2_stream.head()
        assert (await kept.ask("GET", unique_path())).status == 200
        before = await shown_by(tls.port, client)
        tls.files.put(certificates.second)
        await until_shown(tls.port, client, certificates.second)
        kept_on = await kept.ask("GET", unique_path())
        h2_on = await h2.ask("GET", unique_path())
        go_on.set()
        rest = await streaming.body()
        pieces = []
        while piece := await h2_stream.piece():
            pieces.append(piece)
        changes = await listener_changes(tls.router)

    assert before == certificates.first.der()
    assert (kept_on.status, h2_on.status) == (200, 200)
    assert first
    assert STREAM_BODY.endswith(rest)
    assert STREAM_BODY.endswith(b"".join(pieces))
    assert changes == ""
    assert len(tls.router.logged("certificate changed")) == 1


async def test_kubernetes_swaps_a_secret(
    start_policy_router: StartRouter, certificates: Certificates, tmp_path: Path
) -> None:
    """There the files are links through a link to a directory, and that link alone is replaced."""
    for number, certificate in enumerate((certificates.first, certificates.second)):
        folder = tmp_path / f"..{number}"
        folder.mkdir()
        shutil.copy(certificate.cert, folder / "tls.crt")
        shutil.copy(certificate.key, folder / "tls.key")
    data = tmp_path / "..data"
    data.symlink_to("..0")
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    router = start_policy_router(
        "headers_only",
        *("--tls-cert", str(tmp_path / "tls.crt"), "--tls-key", str(tmp_path / "tls.key")),
    )
    client = trusting(certificates.ca)
    before = await shown_by(router.port, client)

    fresh = tmp_path / "..data_tmp"
    fresh.symlink_to("..1")
    fresh.rename(data)
    await until_shown(router.port, client, certificates.second)

    assert before == certificates.first.der()


async def test_pair_that_does_not_fit_is_refused_whole(
    start_tls_router: Callable[..., TlsRouter], certificates: Certificates
) -> None:
    """The file is named once, the good pair stays; when the other half comes the new pair is taken."""
    tls = start_tls_router()
    client = trusting(certificates.ca)
    refused = "certificate refused; the one in use stays"

    shutil.copy(certificates.second.key, tls.files.key)
    await until(lambda: tls.router.logged(refused), NOTICED_S, "the key is refused")
    await asyncio.sleep(2.5)  # a few more looks
    after_key = await shown_by(tls.port, client)
    (said,) = tls.router.logged(refused)
    shutil.copy(certificates.second.cert, tls.files.cert)
    await until_shown(tls.port, client, certificates.second)
    tls.files.cert.unlink()
    await until(lambda: len(tls.router.logged(refused)) == 2, NOTICED_S, "it is missed")
    after_loss = await shown_by(tls.port, client)

    assert after_key == certificates.first.der()
    assert str(tls.files.key) in said["reason"]
    assert after_loss == certificates.second.der()
    assert tls.router.metrics()("xds_nacks_total") == 0


async def test_other_clients_are_vouched_for(
    start_tls_router: Callable[..., TlsRouter], certificates: Certificates
) -> None:
    """The CA of clients is followed, too: new connections are judged by the new one."""
    tls = start_tls_router(client_ca=certificates.client_ca.cert)
    old = trusting(certificates.ca, shown=certificates.client)
    new = trusting(certificates.ca, shown=certificates.other_client)

    async def served(context: ssl.SSLContext) -> bool:
        with contextlib.suppress(OSError, EOFError):
            return (await ask(tls.port, context, unique_path())).status == 200
        return False

    before = await served(old), await served(new)
    shutil.copy(certificates.other_client_ca.cert, tls.files.client_ca)
    await becomes(functools.partial(served, new))
    after = await served(old)

    assert before == (True, False)
    assert after is False


async def test_https_goes_on_without_the_service(
    start_tls_router: Callable[..., TlsRouter], certificates: Certificates, worker: RawWorker
) -> None:
    """New connections too; a certificate that changed meanwhile is served once it is back."""
    tls = start_tls_router()
    client = trusting(certificates.ca)
    go_on = hold_streams(worker)

    async with Connection(tls.port, tls=client) as streaming:
        await streaming.send("GET", STREAM_PATH)
        await streaming.head()
        with tls.router.service_stopped():
            tls.files.put(certificates.second)
            during = await shown_by(tls.port, client)
            tls.router.kill_service()
        await until_shown(tls.port, client, certificates.second)
        go_on.set()
        rest = await streaming.body()

    assert during == certificates.first.der()
    assert STREAM_BODY.endswith(rest)


def _of_processes(router: Router) -> list[str]:
    """Return what others can see of the processes of *router*, and the files that it has written."""
    (directory,) = router.temporary.glob("vllm-extproc-*")
    files = [path for path in directory.iterdir() if path.is_file()]
    files += [
        Path(f"/proc/{pid}/{name}")
        for pid in (router.pid, router.service_pid, router.envoy_pid)
        for name in ("cmdline", "environ")
    ]
    return [path.read_bytes().decode(errors="replace") for path in files]


async def test_key_is_shown_nowhere(
    start_tls_router: Callable[..., TlsRouter], certificates: Certificates
) -> None:
    """Not in Envoy's dumps, files, logs or the list of processes."""
    tls = start_tls_router("--log-level", "debug", client_ca=certificates.client_ca.cert)
    client = trusting(certificates.ca, shown=certificates.client)
    tls.files.put(certificates.second)
    await until_shown(tls.port, client, certificates.second)
    lines = [
        line
        for certificate in (certificates.first, certificates.second)
        for line in certificate.key.read_text().splitlines()
        if not line.startswith("-----")
    ]

    dump = await envoy(tls.router, "/config_dump?include_eds")
    shown = [dump, await envoy(tls.router, "/certs"), tls.router.stderr, tls.router.metrics().text]
    shown += _of_processes(tls.router)
    for path in ("/config", "/get_server_info"):
        shown.append((await ask(tls.port, client, path)).body.decode())

    assert "client_tls_certificate" in dump
    assert "[redacted]" in dump
    assert lines
    assert not [line for line in lines for text in shown if line in text]


@pytest.mark.parametrize("case", ["encrypted", "mismatch", "missing", "half"])
def test_start_with_a_pair_that_cannot_be_used(
    start_policy_router: StartRouter, certificates: Certificates, tmp_path: Path, case: str
) -> None:
    """It ends at once with a sentence that names the file."""
    cert, key = certificates.first.cert, certificates.first.key
    flags = ["--tls-cert", str(cert), "--tls-key", str(tmp_path / "tls.key")]
    wanted = str(tmp_path / "tls.key")
    match case:
        case "encrypted":
            command = ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:x"]
            subprocess.run([*command, "-out", wanted], check=True, capture_output=True, timeout=30)
            wanted += " is encrypted"
        case "mismatch":
            shutil.copy(certificates.second.key, wanted)
            wanted += " is not the key of the certificate"
        case "half":
            flags = flags[:2]
            wanted = "tls_key must be given too"

    router = start_policy_router("headers_only", *flags, ready=False)

    assert router.wait(20) == 1
    assert wanted in router.stderr
    assert "Traceback" not in router.stderr


CliRun = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_cli(tmp_path: Path) -> CliRun:
    """Run a command against a router."""

    def run(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "extproc", *arguments, "--router-url", url],
            capture_output=True,
            text=True,
            timeout=30,
            cwd=tmp_path,
            env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "", "NO_COLOR": "1"},
            check=False,
        )

    return run


def test_commands_reach_an_https_router(
    start_tls_router: Callable[..., TlsRouter], certificates: Certificates, run_cli: CliRun
) -> None:
    """``workers`` and ``top`` with a CA, or with any certificate; otherwise they say what is missing."""
    tls = start_tls_router()
    url = f"https://127.0.0.1:{tls.port}"
    ca = ("--router-ca-file", str(certificates.ca.cert))

    listed = run_cli(url, "workers", "list", *ca)
    top = run_cli(url, "top", "--once", "--router-tls-insecure")
    untrusted = run_cli(url, "workers", "list")
    other_ca = run_cli(url, "workers", "list", "--router-ca-file", str(certificates.client_ca.cert))
    plain = run_cli(f"http://127.0.0.1:{tls.port}", "workers", "list")

    assert (listed.returncode, listed.stderr) == (0, "")
    assert listed.stdout.count("healthy") == 2
    assert (top.returncode, top.stderr) == (0, "")
    for refused in (untrusted, other_ca):
        assert refused.returncode == 1
        assert "certificate is refused" in refused.stderr
        assert "--router-ca-file" in refused.stderr
    assert plain.returncode == 1
    assert "cannot be reached" in plain.stderr


def test_commands_show_a_certificate(
    start_tls_router: Callable[..., TlsRouter],
    certificates: Certificates,
    run_cli: CliRun,
    tmp_path: Path,
) -> None:
    """To a router that asks for one; without it the command says which flag."""
    tls = start_tls_router(client_ca=certificates.client_ca.cert)
    url = f"https://127.0.0.1:{tls.port}"
    ca = ("--router-ca-file", str(certificates.ca.cert))
    both = tmp_path / "both.pem"
    both.write_text(certificates.client.cert.read_text() + certificates.client.key.read_text())
    pair = ("--router-client-cert", str(certificates.client.cert))
    pair += ("--router-client-key", str(certificates.client.key))

    with_pair = run_cli(url, "workers", "list", *ca, *pair)
    with_both = run_cli(url, "workers", "list", *ca, "--router-client-cert", str(both))
    without = run_cli(url, "workers", "list", *ca)

    assert with_pair.stdout.count("healthy") == with_both.stdout.count("healthy") == 2
    assert without.returncode == 1
    assert "--router-client-cert" in without.stderr
    assert not re.search("Traceback|SSL:", without.stderr)
