"""What stays inside: headers of one connection, of ours and of Envoy's, and what tells which software answers."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client import Connection, Response, ask, openai_error
from tests.e2e.conftest import StartRouter
from tests.e2e.h2_client import H2Connection
from tests.e2e.harness import Router
from tests.e2e.raw_worker import RawWorker, Received, respond, unique_path

pytestmark = [pytest.mark.envoy, pytest.mark.slow]

TELLING = re.compile(r"^(server|via|x-powered-by|x-envoy-.*|x-router-.*|x-gateway-.*|proxy-.*)$")


def check_silent(response: Response) -> None:
    """Check that a response tells nothing of what is behind it, and names its request."""
    found = [name for name, _ in response.headers if TELLING.match(name.lower())]
    assert found == []
    assert len(response.values("x-request-id")) == 1
    assert response.values("x-request-id")[0]


async def raw(router: Router, head: str, worker: RawWorker, path: str) -> Received:
    """Send *head* as it is, and return what the worker got."""
    async with Connection(router.port) as connection:
        await connection.send_raw(head.format(path=path).replace("\n", "\r\n").encode())
        response = await connection.head()
        await connection.body()
    assert response.status == 200, response
    return worker.only(path)


@pytest.mark.parametrize(
    "lines",
    [
        "Connection: close, x-private\nx-private: 1\n",
        "Connection: keep-alive, X-Private\nx-private: 1\nKeep-Alive: timeout=5\n",
        "Connection: x-private\nConnection: x-other\nx-private: 1\nx-other: 2\n",
        "Keep-Alive: timeout=5\n",
        "Proxy-Connection: keep-alive\n",
        "Proxy-Authorization: Basic eDp5\n",
        "Connection: proxy-authorization\nProxy-Authorization: Basic eDp5\n",
        "Connection: Upgrade, HTTP2-Settings\nUpgrade: h2c\nHTTP2-Settings: AAMAAABkAAQ\n",
        "TE: trailers, gzip\n",
    ],
)
async def test_headers_of_one_connection_stay_on_it(
    any_router: Router, worker: RawWorker, lines: str
) -> None:
    """What ``Connection`` names, and what HTTP/1.1 means for the next hop alone."""
    head = f"GET {{path}} HTTP/1.1\nHost: h\n{lines}\n"

    request = await raw(any_router, head, worker, unique_path())

    private = {"x-private", "x-other", "keep-alive", "proxy-connection", "proxy-authorization"}
    assert not (private | {"upgrade", "http2-settings", "connection"}) & request.names()
    assert request.values("te") in ([], ["trailers"])


@pytest.mark.parametrize(
    "connection",
    ["Upgrade, x-private", "x-private, upgrade", "upgrade, x-router-client", "close, upgrade"],
)
async def test_upgrade_that_names_more_is_refused(
    router: Router, worker: RawWorker, connection: str
) -> None:
    """Envoy would hand it on as it is, and the worker would drop what it names: our headers, for one."""
    path = unique_path()
    headers = [("Connection", connection), ("Upgrade", "websocket"), ("x-private", "1")]

    response = await ask(router.port, "GET", path, headers)

    assert response.status == 400
    assert openai_error(response)["code"] == "bad_request"
    assert worker.received(path) == []


@pytest.mark.parametrize(
    "connection", ["Upgrade", "upgrade", "keep-alive, Upgrade", "Upgrade,keep-alive"]
)
async def test_upgrade_as_browsers_ask_for_it_goes_through(
    router: Router, worker: RawWorker, connection: str
) -> None:
    """The worker decides."""
    path = unique_path()

    await ask(router.port, "GET", path, [("Connection", connection), ("Upgrade", "websocket")])

    assert worker.only(path).values("upgrade") == ["websocket"]


async def test_other_upgrades_are_refused_in_words(router: Router) -> None:
    """403, since Envoy passes on WebSockets only."""
    response = await ask(
        router.port, "GET", unique_path(), [("Connection", "Upgrade"), ("Upgrade", "telnet")]
    )

    assert response.status == 403
    assert openai_error(response)["code"] == "upgrade_not_supported"


async def test_request_for_two_hosts_is_refused(router: Router, worker: RawWorker) -> None:
    """Envoy would make one of two; a worker must not guess which is meant."""
    path = unique_path()
    async with Connection(router.port) as connection:
        await connection.send_raw(f"GET {path} HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n".encode())
        response = await connection.head()

    assert response.status == 400
    assert worker.received(path) == []


async def test_workers_software_is_not_told(any_router: Router, worker: RawWorker) -> None:
    """Nor what it says in our name."""
    path = worker.on(
        unique_path(),
        respond(
            b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\nvia: 1.1 inner\r\nx-powered-by: vLLM\r\n"
            b"x-envoy-upstream-service-time: 3\r\nx-router-client: root\r\n"
            b"x-gateway-destination-endpoint: 10.0.0.5:8000\r\nx-request-id: workers\r\n"
            b"proxy-authenticate: Basic\r\nkeep-alive: timeout=5\r\nx-kept: 1\r\n"
            b"content-length: 0\r\n\r\n"
        ),
    )

    response = await ask(any_router.port, "GET", path, [("x-request-id", "mine")])

    check_silent(response)
    assert response.values("x-request-id") == ["mine"]
    assert response.values("x-kept") == ["1"]
    assert response.values("keep-alive") == []


REDIRECTS = {
    "http://{host}/v1/models?a=%2F#b": "/v1/models?a=%2F#b",
    "http://{host}:{port}/v1/models": "/v1/models",
    "HTTPS://user@{host}/v1/models": "/v1/models",
    "//{host}/v1/models": "/v1/models",
    "http://{address}/v1/models": "/v1/models",
    "http://localhost:{port}/v1/models": "/v1/models",
    "http://{host}": "/",
    "http://{host}?a": "/?a",
    "http://{host}//elsewhere.example/x": "/.//elsewhere.example/x",
    "http://{host}/\\elsewhere.example/x": "/./\\elsewhere.example/x",
    "http://{host}:1/x": "http://{host}:1/x",
    "http://elsewhere.example:1/x": "http://elsewhere.example:1/x",
    "http://elsewhere.example/?to=http://a/": "http://elsewhere.example/?to=http://a/",
    "/v1/models": "/v1/models",
    "../models": "../models",
}
"""What a worker says in ``Location``, and what the client is to see."""


@pytest.mark.parametrize("by_name", [True, False])
async def test_redirects_of_a_worker_do_not_tell_where_it_is(
    start_router: StartRouter, worker: RawWorker, by_name: bool
) -> None:
    """Those to itself become paths; a path with two slashes must not lead elsewhere."""
    address = worker.urls[0].removeprefix("http://")
    port = worker.ports[0]
    host = "localhost" if by_name else "router.example"
    url = f"http://localhost:{port}" if by_name else f"http://{address}"
    router = start_router([url], "--policy", "round_robin")
    path = unique_path()
    shown, told = [], []

    for said in REDIRECTS:
        location = said.format(host=host, port=port, address=address)
        head = f"location: {location}\r\ncontent-location: {location}\r\ncontent-length: 0"
        worker.on(path, respond(f"HTTP/1.1 307 X\r\n{head}\r\n\r\n".encode()))
        async with Connection(router.port) as connection:
            get = f"GET {path} HTTP/1.1\r\nHost: router.example\r\n\r\n"
            await connection.send_raw(get.encode())
            response = await connection.head()
        check_silent(response)
        shown += [*response.values("location"), *response.values("content-location")]
        told += [request.values("host") for request in worker.received(path)][-1]

    assert set(told) == {host}
    assert shown == [seen.format(host=host) for seen in REDIRECTS.values() for _ in range(2)]


TELLING_LINKS = {
    "location": [
        "http:/{address}/x",
        "http:{address}/x",
        "\\\\{address}/x",
        "/\\{address}/x",
        "ws://{address}/x",
        "ws://LOCALHOST:{port}/x",
        "ftp://u:p@{address}",
        "http://elsewhere.example/?to=http://{address}/",
        "/login?next=http%3A%2F%2F127.0.0.1%3a{port}%2F",
        "//elsewhere.example/x\r\nlocation: http://{address}/x",
        "http://{address}/x\r\nlocation: //{address}/x",
    ],
    "content-location": [
        "http:/{address}/x",
        "/a\r\ncontent-location: /b\r\ncontent-location: ws://{address}/x",
    ],
    "link": [
        "<http://{address}/a>; rel=next",
        '</a>; rel=prev, <http://localhost:{port}/b>; rel="next"',
        "</a>; rel=prev\r\nlink: <//{address}>; rel=next",
    ],
    "refresh": ["0; url=http://{address}/x", "5;URL='http://localhost:{port}'"],
}
"""Where else a worker may tell its address."""


@pytest.mark.parametrize("by_name", [True, False])
async def test_links_of_a_worker_do_not_tell_where_it_is(
    start_router: StartRouter, worker: RawWorker, by_name: bool
) -> None:
    """What cannot be made a path is taken out."""
    address, port = worker.urls[0].removeprefix("http://"), worker.ports[0]
    router = start_router([f"http://localhost:{port}" if by_name else f"http://{address}"])
    path = unique_path()

    for name, sayings in TELLING_LINKS.items():
        for said in sayings:
            value = said.format(address=address, port=port)
            answer = f"HTTP/1.1 201 X\r\n{name}: {value}\r\nx-kept: 1\r\ncontent-length: 0\r\n\r\n"
            worker.on(path, respond(answer.encode()))
            response = await ask(router.port, "GET", path)
            assert response.values(name) == [], said
            assert response.values("x-kept") == ["1"]


async def test_other_links_of_a_worker_stay(router: Router, worker: RawWorker) -> None:
    """Those that lead elsewhere, or nowhere in particular; localhost with its port is the worker itself."""
    kept = [
        ("link", "</a>; rel=prev"),
        ("link", "<http://elsewhere.example:{port}/a>; rel=next"),
        ("link", "<http://1{address}1/a>; rel=next"),
        ("refresh", "5; url=/x"),
        ("refresh", "5; url=http://localhost:1/x"),
        ("location", "http://localhost:1{port}/x"),
        ("location", "/x?100%"),
    ]
    path = unique_path()
    for port in worker.ports:
        for name, said in kept:
            value = said.format(address=f"127.0.0.1:{port}", port=port)
            answer = f"HTTP/1.1 201 X\r\n{name}: {value}\r\ncontent-length: 0\r\n\r\n"
            worker.on(path, respond(answer.encode()))
            assert (await ask(router.port, "GET", path)).values(name) == [value]


@pytest.mark.parametrize(("said", "seen"), [("/b/x/", "/x/"), ("/b", "/"), ("/bd", "/bd")])
async def test_redirect_of_a_worker_below_a_base_path(
    start_router: StartRouter, worker: RawWorker, said: str, seen: str
) -> None:
    """Clients do not know of the base path, which is put before theirs again."""
    router = start_router([f"http://localhost:{worker.ports[0]}/b"], "--policy", "round_robin")
    path = unique_path()
    location = f"http://localhost:{worker.ports[0]}{said}"
    worker.on(
        f"/b{path}",
        respond(f"HTTP/1.1 307 X\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n".encode()),
    )

    response = await ask(router.port, "GET", path)

    assert response.values("location") == [seen]


async def test_internal_headers_reach_no_worker(any_router: Router, worker: RawWorker) -> None:
    """Where a request goes is nothing that a worker need know."""
    path = unique_path()

    await ask(any_router.port, "POST", path, body=b"{}")

    internal = re.compile(r"^x-(router|gateway|envoy)-.*")
    assert [name for name in worker.only(path).names() if internal.match(name)] == []


async def test_made_up_id_is_the_same_for_worker_and_client(
    any_router: Router, worker: RawWorker
) -> None:
    """One id for one request, another for the next."""
    found = []
    for _ in range(2):
        path = unique_path()
        response = await ask(any_router.port, "POST", path, body=b"{}")
        (request_id,) = response.values("x-request-id")
        assert worker.only(path).values("x-request-id") == [request_id]
        found.append(request_id)

    assert len(set(found)) == 2


@pytest.fixture(scope="module")
def refusing(worker: RawWorker, logs: Path) -> Iterator[Router]:
    """Start a router that lets one key in, small bodies, and takes ids from a header of its own."""
    flags = ("--api-key", "sk-a", "--max-payload-size", "10", "--policy", "round_robin")
    ids = ("--request-id-headers", "x-trace-id", "x-request-id")
    router = Router(worker.urls, logs, *flags, *ids)
    try:
        yield router.until_ready()
        router.stop()
    finally:
        router.end()


KEY = ("Authorization", "Bearer sk-a")


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ([("x-request-id", "mine")], "mine"),
        ([("x-trace-id", "trace")], "trace"),
        ([], None),
    ],
    ids=["own", "of another header", "none"],
)
@pytest.mark.parametrize("kind", ["served", "refused by key", "too large", "probe"])
async def test_every_answer_has_the_id_of_its_request(
    refusing: Router, kind: str, sent: list[tuple[str, str]], expected: str | None
) -> None:
    """The client's own, also where nobody but Envoy saw the request; else one is made."""
    path, headers, body = unique_path(), [KEY, *sent], b"{}"
    if kind == "refused by key":
        headers = sent
    if kind == "too large":
        body = b"x" * 100
    if kind == "probe":
        path = "/readiness"

    response = await ask(refusing.port, "POST" if kind != "probe" else "GET", path, headers, body)

    check_silent(response)
    if expected is not None:
        assert response.values("x-request-id") == [expected]


async def test_what_is_no_http_is_answered_silently(refusing: Router) -> None:
    """Such requests pass no filter."""
    for data in (
        b"\x16\x03\x01\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nx-a: " + b"a" * 100_000 + b"\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n",
    ):
        async with Connection(refusing.port) as connection:
            with contextlib.suppress(ConnectionError):
                await connection.send_raw(data)
            response = await connection.head()
            response.body = await connection.body()

        assert 400 <= response.status <= 501
        check_silent(response)
        openai_error(response)


async def test_same_over_http2(any_router: Router, worker: RawWorker) -> None:
    """Silent, with an id."""
    path = worker.on(
        unique_path(),
        respond(b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-length: 0\r\n\r\n"),
    )

    async with H2Connection(any_router.port) as connection:
        response = await connection.ask(
            "POST", path, [("proxy-authorization", "Basic eDp5")], b"{}"
        )

    check_silent(response)
    assert "proxy-authorization" not in worker.only(path).names()


async def test_client_that_takes_its_time_with_headers_is_let_go(router: Router) -> None:
    """A slow loris holds a connection for ten seconds, not for ever."""
    async with Connection(router.port) as connection, asyncio.timeout(30):
        await connection.send_raw(b"GET /v1/x HTTP/1.1\r\nHost: h\r\nx-a: ")
        response = await connection.head()
        response.body = await connection.body()

    assert response.status == 408
    assert openai_error(response)["code"] == "request_timeout"
    check_silent(response)


async def test_errors_of_workers_are_silent_too(start_router: StartRouter) -> None:
    """No address, no software."""
    router = start_router([])

    response = await ask(router.port, "POST", unique_path(), body=b"{}")

    assert response.status == 503
    check_silent(response)
