"""Clients of other HTTP versions."""

from __future__ import annotations

import asyncio
import hashlib
import random
import zlib

import pytest

from tests.e2e.client import Connection
from tests.e2e.h2_client import H2Connection
from tests.e2e.harness import Router
from tests.e2e.raw_worker import RawWorker, Received, Signal, Stream, unique_path

pytestmark = pytest.mark.envoy


async def test_http2_request_arrives_unchanged(any_router: Router, worker: RawWorker) -> None:
    """Query string, repeated headers and a body of 3 MB, over cleartext with prior knowledge."""
    path = unique_path() + "?a=%2F&a=2&b"
    body = random.Random(8).randbytes(3_000_000)
    headers = [
        ("authorization", "Bearer sk-1"),
        ("content-type", "application/json"),
        ("x-repeated", "one"),
        ("x-repeated", "two"),
    ]

    async with H2Connection(any_router.port) as connection:
        response = await connection.ask("POST", path, headers, body)

    assert response.status == 200
    arrived = worker.only(path.partition("?")[0])
    assert arrived.target == path
    assert arrived.version == "HTTP/1.1"
    assert arrived.sha256 == hashlib.sha256(body).hexdigest()
    assert arrived.values("host") == ["router.test"]
    for name in ("authorization", "content-type", "x-repeated"):
        assert arrived.values(name) == [value for key, value in headers if key == name]


async def test_many_streams_on_one_http2_connection(any_router: Router, worker: RawWorker) -> None:
    """300 streams at once, more than the usual limit of 100; each gets its own answer."""
    count = 300
    go_on = Signal()

    async def answer(request: Received, stream: Stream) -> None:
        await stream.open_events()
        await stream.event("first")
        await go_on.wait()
        await stream.event(request.body.decode())
        await stream.close_events()

    path = worker.on(unique_path(), answer)

    async with H2Connection(any_router.port) as connection:
        streams = [
            await connection.send("POST", path, body=b"number %d" % number)
            for number in range(count)
        ]
        async with asyncio.timeout(30):
            for stream in streams:
                await stream.head()
                assert await stream.piece() == b"data: first\n\n"
        in_flight = any_router.in_flight()
        go_on.set()
        bodies = []
        for stream in streams:
            body = b""
            while piece := await stream.piece():
                body += piece
            bodies.append(body)

    assert bodies == [b"data: number %d\n\ndata: [DONE]\n\n" % number for number in range(count)]
    assert in_flight == count
    await any_router.until_idle()


async def test_reset_stream_leaves_the_others(any_router: Router, worker: RawWorker) -> None:
    """RST_STREAM frees one worker; the connection and its other streams go on."""
    go_on, left = Signal(), Signal()

    async def answer(request: Received, stream: Stream) -> None:
        await stream.open_events()
        await stream.event("first")
        if request.body == b"leaves":
            await stream.until_peer_leaves()
            left.set()
        else:
            await go_on.wait()
            await stream.close_events()

    path = worker.on(unique_path(), answer)

    async with H2Connection(any_router.port) as connection:
        stays = await connection.send("POST", path, body=b"stays")
        leaves = await connection.send("POST", path, body=b"leaves")
        for stream in (stays, leaves):
            await stream.head()
            await stream.piece()
        await connection.reset(leaves)
        await left.wait(5)
        go_on.set()
        rest = await stays.piece()

    assert rest == b"data: [DONE]\n\n"
    await any_router.until_idle(2)


@pytest.mark.parametrize("host", ["", "Host: h\r\n"], ids=["no host", "host"])
@pytest.mark.parametrize("keep_alive", [False, True])
async def test_http_1_0_client(
    router: Router, worker: RawWorker, keep_alive: bool, host: str
) -> None:
    """It need not send a Host header, and gets no chunks."""
    body = b'{"model": "m"}'
    paths = [unique_path() for _ in range(2 if keep_alive else 1)]
    connection_header = "Connection: keep-alive\r\n" if keep_alive else ""

    async with Connection(router.port) as connection:
        for path in paths:
            await connection.send_raw(
                f"POST {path} HTTP/1.0\r\n{host}{connection_header}"
                f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            response = await connection.head()
            response.body = await connection.body()
            assert response.status == 200
            assert response.json()["body_bytes"] == len(body)
        if not keep_alive:
            assert await connection.reader.read() == b""

    for path in paths:
        assert worker.only(path).body == body


async def test_http_1_0_client_of_a_stream(router: Router, worker: RawWorker) -> None:
    """A stream ends with the connection, since HTTP/1.0 knows no chunks."""

    async def answer(_request: Received, stream: Stream) -> None:
        await stream.open_events()
        await stream.event("first")
        await stream.close_events()

    path = worker.on(unique_path(), answer)

    async with Connection(router.port) as connection:
        await connection.send_raw(f"GET {path} HTTP/1.0\r\nHost: h\r\n\r\n".encode())
        response = await connection.head()
        rest = await connection.body()

    assert response.values("transfer-encoding") == []
    assert rest == b"data: first\n\ndata: [DONE]\n\n"


async def test_pick_by_body_sees_the_whole_http2_body(
    buffered_router: Router, full_duplex_router: Router, worker: RawWorker
) -> None:
    """A body in many frames is one body."""
    for used in (buffered_router, full_duplex_router):
        async with H2Connection(used.port) as connection:
            for number in range(6):
                path = unique_path()
                body = b"%d" % number * 50_000
                response = await connection.ask("POST", path, body=body)
                assert response.status == 200
                port = worker.ports[zlib.crc32(body) % len(worker.ports)]
                assert worker.only(path).port == port


UPGRADE_TO_H2C = (
    b"GET PATH HTTP/1.1\r\nhost: h\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\n"
    b"http2-settings: AAMAAABkAAQAAP__\r\n\r\n"
)


@pytest.mark.parametrize(
    ("head", "version"),
    [
        (b"GET PATH\r\n\r\n", b"HTTP/1.0"),
        (b"GET PATH HTTP/0.9\r\n\r\n", b"HTTP/1.0"),
        (UPGRADE_TO_H2C, b"HTTP/1.1"),
    ],
    ids=["no version", "HTTP/0.9", "upgrade to h2c"],
)
async def test_versions_that_nobody_speaks_are_served_as_http_1(
    router: Router, worker: RawWorker, head: bytes, version: bytes
) -> None:
    """As docs/errors.md says: neither is an error."""
    path = unique_path()

    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(head.replace(b"PATH", path.encode()))
    async with asyncio.timeout(10):
        status_line = await reader.readline()
    writer.close()

    assert status_line.startswith(version + b" 200")
    assert worker.only(path).version == "HTTP/1.1"
