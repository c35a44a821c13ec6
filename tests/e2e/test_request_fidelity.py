"""What a client sends arrives at the worker byte for byte, however the router decides."""

from __future__ import annotations

import base64
import hashlib
import random
import zlib
from collections.abc import Iterator

import pytest

from tests.e2e.client import Connection, ask
from tests.e2e.harness import Router
from tests.e2e.raw_worker import RawWorker, Received, unique_path

pytestmark = pytest.mark.envoy

JSON = ("Content-Type", "application/json")

_IMAGE = base64.b64encode(random.Random(1).randbytes(5_000_000))

BODIES = {
    "odd spacing": b'{ "model":"m" ,\n\t"messages" : [ ],"stream" :  true }\r\n ',
    "escaped unicode": rb'{"model":"m","prompt":"\u00e9\ud83d\ude00\/\u0000","x":"\u0041"}',
    "raw unicode": '{"model":"m","prompt":"é😀\u2028"}'.encode(),
    "duplicate keys": b'{"model":"a","n":1,"model":"b","n":1e0,"n":1.0,"big":123456789012345678901}',
    "unknown nested fields": b'{"model":"m","a":{"b":[{"c":null,"d":{"e":[[],{},-0.0,1E+2]}}]}}',
    "tool without parameters": (
        b'{"model":"m","messages":[],"tools":[{"type":"function","function":{"name":"f"}}]}'
    ),
    "5 MB image": (
        b'{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":'
        b'{"url":"data:image/png;base64,' + _IMAGE + b'"}}]}]}'
    ),
    "not JSON": b"\x00\xff\xfe not json \r\n\r\n0\r\n\r\n",
    "cut JSON": b'{"model": "m", "messages": [',
    "empty": b"",
}


def pick_by_body(worker: RawWorker, body: bytes) -> int:
    """Return the port that the policy ``e2e_body`` chooses for *body*."""
    return worker.ports[zlib.crc32(body) % len(worker.ports)]


def check_body(worker: RawWorker, router: Router, arrived: Received, body: bytes) -> None:
    assert arrived.body_bytes == len(body)
    assert arrived.sha256 == hashlib.sha256(body).hexdigest()
    if decides_by_body(router):
        assert arrived.port == pick_by_body(worker, body)


def decides_by_body(router: Router) -> bool:
    return 'policy="e2e_body"' in router.metrics().text


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
async def test_body_with_a_length_arrives_unchanged(
    any_router: Router, worker: RawWorker, body: bytes
) -> None:
    """The digest at the worker is the client's, and a policy that reads bodies saw all of it."""
    path = unique_path()

    response = await ask(any_router.port, "POST", path, [JSON], body)

    assert response.status == 200, response
    check_body(worker, any_router, worker.only(path), body)


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
async def test_chunked_body_arrives_unchanged(
    any_router: Router, worker: RawWorker, body: bytes
) -> None:
    """The same for uploads whose length is not known beforehand, in pieces of odd sizes."""
    path = unique_path()

    response = await ask(any_router.port, "POST", path, [JSON], chunks=_pieces(body))

    assert response.status == 200, response
    check_body(worker, any_router, worker.only(path), body)


def _pieces(body: bytes) -> Iterator[bytes]:
    sizes = random.Random(2)
    while body:
        size = sizes.choice((1, 7, 1000, 16_384, 65_537, 300_000))
        yield body[:size]
        body = body[size:]


@pytest.mark.parametrize("method", ["GET", "DELETE", "POST", "PUT", "PATCH", "OPTIONS", "HEAD"])
async def test_request_without_a_body_arrives_without_one(
    any_router: Router, worker: RawWorker, method: str
) -> None:
    """No method needs a body."""
    path = unique_path()

    response = await ask(any_router.port, method, path)

    assert response.status == 200
    arrived = worker.only(path)
    assert arrived.method == method
    assert arrived.body_bytes == 0


@pytest.mark.parametrize(
    "query",
    [
        "?a=1&a=2&b",
        "?",
        "?a=%2F%2f%20+%00%zz%",
        "?q=%E2%82%AC%ff&r=%e9",
        "?x=a/../b//c/./d;e=f?g",
        "?a[]=1&b={c}|^`",
        "?" + "k=v&" * 2000,
    ],
    ids=["repeated", "lone", "escapes", "not UTF-8", "path-like", "brackets", "long"],
)
async def test_query_string_arrives_unchanged(
    any_router: Router, worker: RawWorker, query: str
) -> None:
    """Neither escapes nor what looks like a path in it is touched."""
    path = unique_path()

    response = await ask(any_router.port, "GET", path + query)

    assert response.status == 200
    assert worker.only(path).target == path + query


@pytest.mark.parametrize(
    "tail", ["/org%2Fmodel", "/a%20b", "/%C3%A9", "/A%3aB:c@d,e;f=g", "/~user/$x!'()*+"]
)
async def test_escaped_path_arrives_unchanged(router: Router, worker: RawWorker, tail: str) -> None:
    """Names of models and files stand in paths, with escapes."""
    path = unique_path() + tail

    response = await ask(router.port, "GET", path)

    assert response.status == 200
    assert worker.only(path).target == path


CLIENT_HEADERS = [
    ("Host", "api.example.test:8443"),
    ("Authorization", "Bearer sk-Secret.with+odd/chars=="),
    ("Cookie", "a=1; b=2"),
    ("X-Api-Key", "key"),
    ("User-Agent", "OpenAI/Python 1.0"),
    ("Accept", "text/event-stream, */*;q=0.1"),
    ("Accept-Encoding", "gzip, deflate"),
    ("X-Repeated", "one"),
    ("X-Repeated", "two, three"),
    ("x-repeated", "one"),
    ("X-Empty", ""),
    ("X-Spaces", "a  b\tc"),
    ("X-Latin", "caf\xe9"),
    ("X-Request-Id", "client-chosen-id"),
    ("X-Forwarded-For", "203.0.113.7, 198.51.100.2"),
    ("Traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ("OpenAI-Organization", "org"),
    ("X-Long", "v" * 8000),
    ("Content-Type", "application/json; charset=UTF-8"),
]


async def test_client_headers_arrive_unchanged(any_router: Router, worker: RawWorker) -> None:
    """Every header comes with its value, as often as it was sent and in order; one may be added."""
    path = unique_path()

    response = await ask(any_router.port, "POST", path, CLIENT_HEADERS, b"{}")

    assert response.status == 200, response
    arrived = worker.only(path)
    for name in dict.fromkeys(name.lower() for name, _ in CLIENT_HEADERS):
        sent = [value for key, value in CLIENT_HEADERS if key.lower() == name]
        assert arrived.values(name) == sent
    added = arrived.names() - {name.lower() for name, _ in CLIENT_HEADERS}
    assert added <= {"content-length", "transfer-encoding", "x-forwarded-proto"}


async def test_worker_sees_nothing_of_the_router(any_router: Router, worker: RawWorker) -> None:
    """The pick and Envoy's own headers stay inside; a request id is added when there is none."""
    path = unique_path()

    response = await ask(any_router.port, "POST", path, [JSON], b'{"model": "m"}')

    assert response.status == 200
    arrived = worker.only(path)
    internal = [
        name for name in arrived.names() if name.startswith(("x-router-", "x-gateway-", "x-envoy-"))
    ]
    assert internal == []
    assert [len(value) for value in arrived.values("x-request-id")] == [32]


async def test_length_of_the_body_stays_announced(
    router: Router, buffered_router: Router, worker: RawWorker
) -> None:
    """A body that came with a length leaves with one: some servers refuse chunked uploads."""
    for used in (router, buffered_router):
        path = unique_path()

        await ask(used.port, "POST", path, [JSON], b"x" * 100_000)

        assert worker.only(path).values("content-length") == ["100000"]
        assert worker.only(path).values("transfer-encoding") == []


async def test_multipart_upload_arrives_unchanged(any_router: Router, worker: RawWorker) -> None:
    """An audio file keeps its boundary and its bytes."""
    path = unique_path()
    boundary = "----e2e'()+_,-./:=?"
    audio = random.Random(3).randbytes(1_500_000)
    body = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="a b.wav"\r\n'
        "Content-Type: audio/wav\r\n\r\n"
    ).encode() + audio
    body += f"\r\n--{boundary}--\r\n".encode()
    content_type = f'multipart/form-data; boundary="{boundary}"'

    response = await ask(any_router.port, "POST", path, [("Content-Type", content_type)], body)

    assert response.status == 200
    arrived = worker.only(path)
    check_body(worker, any_router, arrived, body)
    assert arrived.values("content-type") == [content_type]


async def test_upload_that_expects_100_continue_is_taken(
    any_router: Router, worker: RawWorker
) -> None:
    """A client that waits for permission, as curl does above 1 MB, gets it."""
    path = unique_path()
    body = b"z" * 1_100_000
    async with Connection(any_router.port) as connection:
        await connection.send_raw(
            f"POST {path} HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
        )
        interim = await connection.reader.readuntil(b"\r\n\r\n")
        await connection.send_raw(body)
        response = await connection.head()

    assert interim.startswith(b"HTTP/1.1 100")
    assert response.status == 200
    check_body(worker, any_router, worker.only(path), body)


async def test_slow_upload_arrives_whole(any_router: Router, worker: RawWorker) -> None:
    """Pieces that trickle in, one in the middle of a character, make one body."""
    path = unique_path()
    body = '{"prompt": "€uro"}'.encode()
    async with Connection(any_router.port) as connection:
        await connection.send_raw(
            f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        )
        for at in range(len(body)):
            await connection.send_raw(body[at : at + 1])
        response = await connection.head()

    assert response.status == 200
    check_body(worker, any_router, worker.only(path), body)


async def test_pipelined_requests_are_answered_in_order(any_router: Router) -> None:
    """Several requests in one write on one connection do not run into each other."""
    paths = [unique_path() for _ in range(5)]
    request = "POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc"
    async with Connection(any_router.port) as connection:
        await connection.send_raw("".join(request.format(path=path) for path in paths).encode())
        targets = []
        for _ in paths:
            response = await connection.head()
            response.body = await connection.body()
            targets.append(response.json()["target"])

    assert targets == paths
