"""Requests that the router answers itself: errors as OpenAI shapes them, without internals."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.e2e.client import Connection, Response, ask, openai_error
from tests.e2e.conftest import MAX_PAYLOAD_BYTES
from tests.e2e.h2_client import H2Connection
from tests.e2e.harness import Router
from tests.e2e.raw_worker import RawWorker, unique_path

pytestmark = pytest.mark.envoy

PIECE_BYTES = 100_000


def _chunks(size: int) -> Iterator[bytes]:
    while size:
        piece = min(size, PIECE_BYTES)
        yield b"x" * piece
        size -= piece


async def _send(port: int, path: str, size: int, framing: str) -> Response:
    """Send a body of *size* bytes, whatever comes back meanwhile."""
    async with Connection(port) as connection:
        kind = f"Content-Length: {size}" if framing == "length" else "Transfer-Encoding: chunked"

        async def send() -> None:
            head = f"POST {path} HTTP/1.1\r\nHost: h\r\n{kind}\r\n\r\n"
            await connection.send_raw(head.encode())
            for piece in _chunks(size):
                if framing == "length":
                    await connection.send_raw(piece)
                else:
                    await connection.send_raw(b"%x\r\n%s\r\n" % (len(piece), piece))
            if framing != "length":
                await connection.send_raw(b"0\r\n\r\n")

        sending = asyncio.create_task(send())
        try:
            response = await connection.head()
            response.body = await connection.body()
        finally:
            sending.cancel()
            await asyncio.wait([sending])
            if not sending.cancelled():
                sending.exception()  # a server may stop reading a body that it refuses
        return response


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_body_of_exactly_the_limit_passes(
    any_router: Router, worker: RawWorker, framing: str
) -> None:
    """The limit is what is allowed."""
    path = unique_path()

    response = await _send(any_router.port, path, MAX_PAYLOAD_BYTES, framing)

    assert response.status == 200, response
    assert worker.only(path).body_bytes == MAX_PAYLOAD_BYTES


@pytest.mark.parametrize("excess", [1, 4_000_000])
@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_body_over_the_limit_is_refused(
    any_router: Router, worker: RawWorker, framing: str, excess: int
) -> None:
    """413, and no worker has seen a whole request."""
    path = unique_path()

    response = await _send(any_router.port, path, MAX_PAYLOAD_BYTES + excess, framing)

    assert response.status == 413
    assert openai_error(response)["code"] == "payload_too_large"
    assert worker.received(path) == []
    await any_router.until_idle()


async def test_body_over_the_limit_is_refused_over_http2(any_router: Router) -> None:
    """The same, where the length need not be announced."""
    async with H2Connection(any_router.port) as connection:
        stream = await connection.send(
            "POST",
            unique_path(),
            [("content-length", str(MAX_PAYLOAD_BYTES + 1))],
            b"x",
            last=False,
        )
        response = await stream.response()

    assert response.status == 413
    assert openai_error(response)["code"] == "payload_too_large"


@pytest.mark.parametrize("kind", ["router", "buffered_router", "full_duplex_router", "sim_router"])
async def test_connect_leads_nowhere(request: pytest.FixtureRequest, kind: str) -> None:
    """At once, although neither a length nor an end is announced; the last router has the default policy."""
    router: Router = request.getfixturevalue(kind)
    async with Connection(router.port) as connection, asyncio.timeout(3):
        await connection.send_raw(b"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n")
        response = await connection.head()
        response.body = await connection.body()

    assert response.status == 404
    assert openai_error(response)["code"] == "not_found"
    await router.until_idle(2)


async def test_no_worker(workerless_router: Router) -> None:
    """Without workers every request is refused at once, in both protocols."""
    router = workerless_router
    before = router.metrics()("decisions_total", result="no_worker_available")

    responses = [
        await ask(router.port, "POST", "/v1/chat/completions", body=b'{"model": "m"}'),
        await ask(router.port, "GET", "/version"),
    ]
    async with H2Connection(router.port) as connection:
        responses.append(await connection.ask("GET", "/version"))

    for response in responses:
        assert response.status == 503
        assert openai_error(response)["code"] == "no_worker_available"
    refused = router.metrics()("decisions_total", result="no_worker_available")
    assert refused == before + 3


async def test_headers_that_are_too_large(router: Router) -> None:
    """431 in the same shape."""
    response = await ask(router.port, "GET", "/v1/models", [("X-Large", "x" * 200_000)])

    assert response.status == 431
    assert openai_error(response)["code"] == "request_header_fields_too_large"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /caf\xe9 HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: h\r\nHost: i\r\nX Y: z\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
    ],
    ids=["raw bytes in path", "space in name", "two lengths", "negative length", "TLS hello"],
)
async def test_request_that_is_no_http(router: Router, request_bytes: bytes) -> None:
    """400 as an error of the client, or no answer where there is nobody to talk HTTP to."""
    async with Connection(router.port) as connection:
        await connection.send_raw(request_bytes)
        try:
            response = await connection.head()
        except EOFError:
            return
        response.body = await connection.body()

    assert response.status == 400
    if response.body:  # Envoy's codec has no body to give when there is no request yet
        openai_error(response)
    assert (await ask(router.port, "GET", unique_path())).status == 200


async def test_nothing_names_what_is_inside(router: Router) -> None:
    """No header of an answer tells which proxy gave it."""
    response = await ask(router.port, "GET", unique_path())

    names = {name.lower() for name, _ in response.headers}
    assert not [name for name in names if name.startswith("x-envoy")]
    assert "envoy" not in str(response.headers).lower()
