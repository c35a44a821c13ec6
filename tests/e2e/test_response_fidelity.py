"""What a worker answers arrives at the client byte for byte."""

from __future__ import annotations

import gzip
import hashlib
import random

import pytest

from tests.e2e.client import Connection, ask
from tests.e2e.harness import Router
from tests.e2e.raw_worker import RawWorker, Received, Stream, respond, unique_path

pytestmark = pytest.mark.envoy


async def test_headers_arrive_unchanged(any_router: Router, worker: RawWorker) -> None:
    """Every header comes with its value, as often as it was sent and in order, and none is added."""
    sent = [
        ("content-type", "application/json"),
        ("date", "Thu, 01 Jan 1970 00:00:00 GMT"),
        ("set-cookie", "a=1; Path=/"),
        ("set-cookie", "b=2"),
        ("x-repeated", "one"),
        ("x-repeated", "two, three"),
        ("x-empty", ""),
        ("x-latin", "caf\xe9"),
        ("x-ratelimit-remaining", "7"),
        ("openai-processing-ms", "12"),
        ("content-length", "2"),
    ]
    head = "".join(f"{name}: {value}\r\n" for name, value in sent)
    path = worker.on(unique_path(), respond(f"HTTP/1.1 200 OK\r\n{head}\r\n{{}}".encode("latin-1")))

    response = await ask(any_router.port, "GET", path, [("x-request-id", "mine")])

    assert response.body == b"{}"
    assert response.values("x-request-id") == ["mine"]
    for name in dict.fromkeys(name for name, _ in sent):
        assert response.values(name) == [value for key, value in sent if key == name]
    names = {name for name, _ in sent} | {"x-request-id"}
    assert {name.lower() for name, _ in response.headers} == names


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
async def test_large_body_arrives_unchanged(
    any_router: Router, worker: RawWorker, framing: str
) -> None:
    """3 MB of noise keep their digest, however their end is marked."""
    body = random.Random(4).randbytes(3_000_000)

    async def answer(_request: Received, stream: Stream) -> None:
        head = "HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\n"
        if framing == "length":
            await stream.send(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        elif framing == "chunked":
            await stream.send(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
            for at in range(0, len(body), 70_001):
                piece = body[at : at + 70_001]
                await stream.send(b"%x\r\n%s\r\n" % (len(piece), piece))
            await stream.send(b"0\r\n\r\n")
        else:
            await stream.send(f"{head}connection: close\r\n\r\n".encode() + body)
            stream.close()

    path = worker.on(unique_path(), answer)

    response = await ask(any_router.port, "GET", path)

    assert hashlib.sha256(response.body).digest() == hashlib.sha256(body).digest()


async def test_compressed_body_stays_compressed(any_router: Router, worker: RawWorker) -> None:
    """A gzip body is neither decompressed nor compressed again."""
    packed = gzip.compress(b'{"object": "list"}' * 100)
    head = (
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\n"
        f"vary: accept-encoding\r\ncontent-length: {len(packed)}\r\n\r\n"
    )
    path = worker.on(unique_path(), respond(head.encode() + packed))

    response = await ask(any_router.port, "GET", path, [("Accept-Encoding", "gzip")])

    assert response.values("content-encoding") == ["gzip"]
    assert response.values("vary") == ["accept-encoding"]
    assert response.body == packed


@pytest.mark.parametrize(
    "head",
    [
        "HTTP/1.1 204 No Content\r\nx-kept: yes\r\n\r\n",
        'HTTP/1.1 304 Not Modified\r\netag: "abc"\r\nx-kept: yes\r\n\r\n',
    ],
    ids=["204", "304"],
)
async def test_answer_without_a_body_arrives_without_one(
    any_router: Router, worker: RawWorker, head: str
) -> None:
    """The connection stays in step: the next request on it is answered."""
    path = worker.on(unique_path(), respond(head.encode()))
    async with Connection(any_router.port) as connection:
        response = await connection.ask("GET", path)
        after = await connection.ask("GET", unique_path())

    assert str(response.status) in head
    assert response.body == b""
    assert response.values("x-kept") == ["yes"]
    assert response.values("transfer-encoding") == []
    assert after.status == 200


async def test_answer_to_head_keeps_its_length(any_router: Router, worker: RawWorker) -> None:
    """HEAD tells how long the body would be, and has none."""
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 1234\r\n\r\n"
    path = worker.on(unique_path(), respond(answer))
    async with Connection(any_router.port) as connection:
        response = await connection.ask("HEAD", path)
        after = await connection.ask("GET", unique_path())

    assert response.values("content-length") == ["1234"]
    assert after.status == 200


@pytest.mark.parametrize("status", [201, 202, 301, 400, 401, 404, 408, 409, 422, 429, 500, 503])
async def test_status_and_error_body_of_a_worker_arrive_unchanged(
    router: Router, worker: RawWorker, status: int
) -> None:
    """An answer of the worker is its answer: not reworded, and retried only if another worker may do better.

    The last attempt is the one that the client sees.
    """
    body = b'{"object":"error","message":"worker says no","code":%d}' % status
    head = b"HTTP/1.1 %d Whatever\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    path = worker.on(unique_path(), respond(head % (status, len(body)) + body))

    response = await ask(router.port, "POST", path, body=b"{}")

    assert response.status == status
    assert response.body == body
    attempts = len(worker.received(path))
    assert attempts > 1 if status in (408, 429, 500, 503) else attempts == 1


async def test_unknown_path_is_passed_to_the_worker(sim_router: Router) -> None:
    """What the router does not know the worker may."""
    response = await ask(sim_router.port, "GET", "/no/such/path?x=1")

    assert response.status == 404
    assert response.json() == {"detail": "Not Found"}
    assert response.values("x-sim-worker")
