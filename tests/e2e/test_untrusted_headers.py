"""A client that sends the router's own headers gains nothing by it."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.e2e.client import Connection, ask, openai_error
from tests.e2e.conftest import StartRouter
from tests.e2e.h2_client import H2Connection
from tests.e2e.harness import Router, refusing_url
from tests.e2e.raw_worker import RawWorker, Received, Signal, Stream, respond, unique_path

pytestmark = pytest.mark.envoy

CLUSTERS = ["extproc", "extproc_admin", "default", "unrouted", "no_such_cluster", ""]


def attacks(ports: list[int]) -> dict[str, list[tuple[str, str]]]:
    """Return headers that would change the routing if they were believed."""
    other = f"127.0.0.1:{ports[1]}"
    return {
        **{f"cluster {name!r}": [("x-router-cluster", name)] for name in CLUSTERS},
        "endpoint": [("x-gateway-destination-endpoint", other)],
        "foreign endpoint": [("x-gateway-destination-endpoint", "127.0.0.1:1")],
        "subset": [("x-gateway-destination-endpoint-subset", other)],
        "original destination": [("x-envoy-original-dst-host", "127.0.0.1:1")],
        "timeouts": [
            ("x-envoy-upstream-rq-timeout-ms", "1"),
            ("x-envoy-upstream-rq-per-try-timeout-ms", "1"),
            ("x-envoy-expected-rq-timeout-ms", "1"),
        ],
        "retries": [
            ("x-envoy-retry-on", "5xx,retriable-4xx"),
            ("x-envoy-max-retries", "100"),
            ("x-envoy-hedge-on-per-try-timeout", "true"),
        ],
        "path": [("x-envoy-original-path", "/health"), ("x-envoy-decorator-operation", "x")],
        "anything": [("x-router-anything", "1"), ("x-router-", "2"), ("x-envoy-", "3")],
        "any case": [("X-ROUTER-Cluster", "extproc"), ("X-Envoy-Retry-ON", "5xx")],
        "repeated": [("x-router-cluster", "extproc"), ("x-router-cluster", "default")],
        "spaces around": [("x-router-cluster", " \t extproc \t ")],
        "both": [("x-router-cluster", "default"), ("x-gateway-destination-endpoint", other)],
    }


ATTACKS = list(attacks([1, 2]))


def check_unseen(request: Received) -> None:
    seen = [name for name in request.names() if name.startswith(("x-router", "x-gateway", "x-env"))]
    assert seen == []


@pytest.mark.parametrize("attack", ATTACKS)
async def test_headers_of_a_client_do_not_route(
    router: Router, worker: RawWorker, attack: str
) -> None:
    """The workers take turns as ever, and see none of the headers."""
    path = unique_path()
    headers = attacks(worker.ports)[attack]

    async with Connection(router.port) as connection:
        statuses = [(await connection.ask("POST", path, headers, b"{}")).status for _ in range(6)]

    assert statuses == [200] * 6
    arrived = worker.received(path)
    assert Counter(request.port for request in arrived) == dict.fromkeys(worker.ports, 3)
    for request in arrived:
        check_unseen(request)


@pytest.mark.parametrize("attack", ATTACKS)
async def test_headers_of_a_client_do_not_route_by_body_either(
    any_router: Router, worker: RawWorker, attack: str
) -> None:
    """The same however the router decides, over HTTP/2."""
    path = unique_path()
    headers = [(name.lower(), value.strip()) for name, value in attacks(worker.ports)[attack]]

    async with H2Connection(any_router.port) as connection:
        response = await connection.ask("POST", path, headers, b"{}")

    assert response.status == 200
    check_unseen(worker.only(path))


@pytest.mark.parametrize(
    "line",
    [
        "x-router-cluster : extproc",
        " x-router-cluster: extproc",
        "x-router-cluster\t: extproc",
        "x-a: b\r\n x-router-cluster: extproc",
        "x-a: b\nx-router-cluster: extproc",
        "x_router_cluster: extproc",
        "x-router-cluster\0: extproc",
    ],
    ids=["space", "leading space", "tab", "folded", "bare LF", "underscores", "NUL"],
)
async def test_headers_in_odd_spelling(router: Router, worker: RawWorker, line: str) -> None:
    """They are refused as no HTTP, or go to a worker without effect."""
    path = unique_path()
    async with Connection(router.port) as connection:
        await connection.send_raw(f"GET {path} HTTP/1.1\r\nHost: h\r\n{line}\r\n\r\n".encode())
        response = await connection.head()

    if response.status == 200:
        check_unseen(worker.only(path))
    else:
        assert response.status == 400
        assert worker.received(path) == []


async def test_slow_worker_is_not_cut_by_a_clients_timeout(
    router: Router, worker: RawWorker
) -> None:
    """``x-envoy-upstream-rq-timeout-ms: 1`` would cut an answer that takes 100 ms."""
    path = unique_path()
    go_on = Signal()

    async def answer(request: Received, stream: Stream) -> None:
        with pytest.raises(TimeoutError):
            await go_on.wait(limit_s=0.1)
        await respond(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")(request, stream)

    worker.on(path, answer)

    response = await ask(router.port, "GET", path, attacks(worker.ports)["timeouts"])

    assert response.status == 200


async def test_error_of_a_worker_is_not_retried_for_a_client(
    router: Router, worker: RawWorker
) -> None:
    """``x-envoy-retry-on: 5xx`` would make work: this is a status that the router itself never retries."""
    path = worker.on(unique_path(), respond(b"HTTP/1.1 501 No\r\ncontent-length: 0\r\n\r\n"))

    response = await ask(router.port, "GET", path, attacks(worker.ports)["retries"])

    assert response.status == 501
    assert len(worker.received(path)) == 1


@pytest.mark.parametrize(
    ("flags", "code"),
    [([], "no_worker_available"), (["--when-none-healthy", "try"], "worker_connection_failed")],
    ids=["not picked", "picked all the same"],
)
async def test_client_cannot_make_a_worker_out_of_nothing(
    start_router: StartRouter, flags: list[str], code: str
) -> None:
    """Where no worker is, naming the service's own clusters reaches nothing."""
    router = start_router([refusing_url()], *flags, healthy=False)

    for name in CLUSTERS:
        response = await ask(router.port, "GET", "/liveness?x", [("x-router-cluster", name)])
        assert response.status == 200  # the probe itself, with or without the header
        response = await ask(router.port, "GET", "/version", [("x-router-cluster", name)])
        assert response.status == 503
        assert openai_error(response)["code"] == code


@pytest.mark.parametrize(
    "path", ["/%2e%2e/readiness", "//readiness", "/readiness/", "/READINESS", "/readiness%00"]
)
async def test_paths_that_resemble_probes_do_not_crash(router: Router, path: str) -> None:
    """Each is a probe, a worker's business, or refused; the router goes on."""
    response = await ask(router.port, "GET", path)

    assert response.status in (200, 400)
    assert (await ask(router.port, "GET", unique_path())).status == 200
