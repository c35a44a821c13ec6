"""Workers behind https, and below a base path."""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.certificates import Certificate, Maker
from tests.e2e.client import Connection, ask
from tests.e2e.conftest import StartRouter
from tests.e2e.harness import Router, wait_until
from tests.e2e.raw_worker import READ_BYTES, RawWorker, unique_path
from tests.e2e.workers_support import (
    FAST,
    ROUND_ROBIN,
    STREAM_BODY,
    AdminApi,
    StartSim,
    StartWorker,
    chats,
    hold_streams,
    rest_of,
    serve_models,
    stream_on,
)

pytestmark = pytest.mark.envoy

OTHER_NAME = "worker.e2e.test"


@dataclasses.dataclass(frozen=True)
class Certificates:
    """Who vouches, and whom for."""

    ca: Path
    """Vouches for all but the last."""
    localhost: Certificate
    address: Certificate
    """For 127.0.0.1."""
    other: Certificate
    """For ``OTHER_NAME``."""
    stranger: Certificate
    """For localhost, by somebody else."""


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Make certificates."""
    maker = Maker(tmp_path_factory.mktemp("certificates"))
    make, sign = maker.make, maker.sign
    ca, stranger = make("ca"), make("stranger")
    return Certificates(
        ca=ca.cert,
        localhost=sign("a", ca, "DNS:localhost"),
        address=sign("b", ca, "IP:127.0.0.1"),
        other=sign("c", ca, f"DNS:{OTHER_NAME}"),
        stranger=sign("d", stranger, "DNS:localhost"),
    )


class TlsWorker(RawWorker):
    """A raw worker that serves https and notes the names that it is asked for."""

    def __init__(self, certificate: Certificate) -> None:
        super().__init__()
        self.names: set[str | None] = set()
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(certificate.cert, certificate.key)
        self._tls.sni_callback = self._note

    def url(self, host: str) -> str:
        return f"https://{host}:{self.ports[0]}"

    def _note(self, _connection: object, name: str | None, _context: object) -> None:
        self.names.add(name)

    async def _listen(self) -> None:
        (port,) = self.ports
        self._servers.append(
            await asyncio.start_server(
                self._accept, "127.0.0.1", port, limit=READ_BYTES, ssl=self._tls
            )
        )


@dataclasses.dataclass(frozen=True)
class Fleet:
    """Workers with each of the certificates."""

    named: TlsWorker
    address: TlsWorker
    other: TlsWorker
    stranger: TlsWorker


@pytest.fixture
def fleet(certificates: Certificates) -> Iterator[Fleet]:
    """Start workers with each of the certificates."""
    workers = [
        TlsWorker(certificate)
        for certificate in (
            certificates.localhost,
            certificates.address,
            certificates.other,
            certificates.stranger,
        )
    ]
    for worker in workers:
        serve_models(worker, {worker.ports[0]: ["sim-model"]})
        worker.start()
    yield Fleet(*workers)
    for worker in workers:
        worker.stop()


async def test_only_workers_with_a_good_certificate_serve(
    fleet: Fleet, certificates: Certificates, start_worker: StartWorker, start_router: StartRouter
) -> None:
    """By name and by address, beside a plain one; not with another name, nor from another CA."""
    plain = start_worker()
    good = [fleet.named.url("localhost"), fleet.address.url("127.0.0.1"), *plain.urls]
    bad = [fleet.other.url("localhost"), fleet.stranger.url("localhost")]
    router = start_router(
        [*good, *bad],
        *FAST,
        *ROUND_ROBIN,
        *("--worker-ca-file", str(certificates.ca)),
        *("--worker-startup-timeout-secs", "1"),
        workers=3,
    )
    api = AdminApi(router)
    api.until_states(dict.fromkeys(good, "healthy") | dict.fromkeys(bad, "unhealthy"))
    entries = api.workers()

    served = await chats(router, 12)
    go_on = hold_streams(fleet.named)
    for worker in (fleet.address, plain):
        hold_streams(worker).set()
    async with stream_on(router, fleet.named.ports[0]) as connection:
        go_on.set()
        body = await rest_of(connection)

    ports = [worker.ports[0] for worker in (fleet.named, fleet.address, plain)]
    assert served == {str(port): 4 for port in ports}
    assert body == STREAM_BODY
    assert fleet.named.names == {"localhost"}
    assert fleet.address.names == {None}, "an address is no name to ask for"
    for worker in (fleet.named, fleet.address):
        assert worker.begun("/health") > 0
        assert worker.begun("/v1/models") > 0
    for url, worker in zip(bad, (fleet.other, fleet.stranger), strict=True):
        assert entries[url]["reason"]
        assert entries[url]["models"] == []
        assert worker.begun("/health") == worker.begun("/v1/models") == 0
        (said,) = router.logged("worker does not say what it serves", worker=url)
        assert "certificate" in said["reason"]
    (request, *_) = fleet.named.received("/v1/chat/completions")
    assert request.values("host")[0].partition(":")[0] == "localhost"

    # The name that one certificate carries can be said of that worker alone.
    api.remove(bad[0])
    added = api.add(fleet.other.url("127.0.0.1"), tls_name=OTHER_NAME, wait=True)
    assert added.status == 200, added
    assert str(fleet.other.ports[0]) in await chats(router, 8)


async def test_one_name_for_all_certificates(
    fleet: Fleet, certificates: Certificates, start_router: StartRouter
) -> None:
    """``--worker-tls-server-name`` is asked for and expected, whatever the URL says."""
    good, bad = fleet.other.url("127.0.0.1"), fleet.named.url("localhost")
    router = start_router(
        [good, bad],
        *FAST,
        *ROUND_ROBIN,
        *("--worker-ca-file", str(certificates.ca), "--worker-tls-server-name", OTHER_NAME),
        *("--worker-startup-timeout-secs", "1"),
        workers=1,
    )

    AdminApi(router).until_states({good: "healthy", bad: "unhealthy"})
    served = await chats(router, 4)

    assert served == {str(fleet.other.ports[0]): 4}
    assert fleet.other.names == {OTHER_NAME}
    assert fleet.named.begun("/health") == 0


async def test_any_certificate_if_asked_to(fleet: Fleet, start_router: StartRouter) -> None:
    """``--worker-tls-insecure``: another name, another CA, no name at all."""
    urls = [
        fleet.other.url("localhost"),
        fleet.stranger.url("localhost"),
        fleet.named.url("127.0.0.1"),
    ]
    router = start_router(urls, *FAST, *ROUND_ROBIN, "--worker-tls-insecure")

    served = await chats(router, 6)

    ports = [worker.ports[0] for worker in (fleet.other, fleet.stranger, fleet.named)]
    assert served == {str(port): 2 for port in ports}
    assert {w["model_id"] for w in AdminApi(router).workers().values()} == {"sim-model"}


# --- base paths


async def test_worker_below_a_base_path(
    start_sim: StartSim, start_worker: StartWorker, start_router: StartRouter
) -> None:
    """Requests, queries, health checks and models reach it there; a plain one is asked as before."""
    sim = start_sim("--root-path", "/llama/v2", "--speed", "0")
    plain = start_worker()
    serve_models(plain, {plain.ports[0]: ["sim-model"]})
    url = f"{sim.url}/llama/v2"
    router = start_router([url, *plain.urls], *FAST, *ROUND_ROBIN)

    served = await chats(router, 6)
    async with Connection(router.port) as connection:
        targets = ("/v1/x?a=%2F&b=/../c", "/", "/a%20b/%2e?")
        answers = [await connection.ask("GET", target) for target in targets for _ in range(2)]
    sim_paths = {request["path"] for request in sim.requests()}
    entry = AdminApi(router).worker(url)

    assert served == {sim.worker_name: 3, str(plain.ports[0]): 3}
    assert {answer.status for answer in answers} <= {200, 404}
    assert sim_paths >= {f"/llama/v2{target}" for target in ("/v1/chat/completions", targets[0])}
    assert "/llama/v2/" in sim_paths
    assert all(path.startswith("/llama/v2/") for path in sim_paths), sim_paths
    assert "/llama/v2" not in {request.target for request in plain.received("/")}
    assert entry["models"] == ["sim-model"]
    assert sim.state()["probes"]["/health"] > 0


async def test_base_paths_without_the_service(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """Envoy, left alone, balances over all and still asks each where it is; streams go on."""
    worker = start_worker(3)
    first, second, third = worker.ports
    urls = [f"http://127.0.0.1:{first}/a", f"http://127.0.0.1:{second}/b/c", worker.urls[2]]
    bases = {first: "/a", second: "/b/c", third: ""}
    router = start_router(urls, *FAST, *ROUND_ROBIN, "--decision-timeout-secs", "0.2")
    path = unique_path()

    with_it = await _targets(router, path, 9)
    with router.service_stopped():
        without = await _targets(router, path, 40)
    wait_until(lambda: router.serving_metrics() is not None, 10, "the service answers")
    again = await _targets(router, path, 9)

    expected = {(port, f"{base}{path}?q=1") for port, base in bases.items()}
    assert with_it == again == expected
    assert without <= expected
    assert len(without) >= 2, "balanced"
    await router.until_idle()


async def _targets(router: Router, path: str, count: int) -> set[tuple[int, str]]:
    """Send *count* requests; return who got them under which targets."""
    answers = await asyncio.gather(
        *(ask(router.port, "POST", f"{path}?q=1", body=b"{}") for _ in range(count))
    )
    assert {answer.status for answer in answers} == {200}
    return {(answer.json()["port"], answer.json()["target"]) for answer in answers}
