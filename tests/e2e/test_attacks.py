"""Requests that are meant to break in: raw bytes against the real router, and what workers see of them.

A shape passes when the router refuses it, or when what a worker gets of it means the same to any parser: one
length, no control characters, one host. Envoy is lenient at some places (a line may end with LF alone, a folded
line is one); what it then takes for a second request is one like any other, and passes through everything that
requests pass through. ``LENIENT`` lists them, so that the list does not grow unseen.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client import Connection, Headers, Response, ask, openai_error
from tests.e2e.conftest import StartRouter
from tests.e2e.harness import Router, rss_bytes
from tests.e2e.raw_worker import RawWorker, Received, respond, unique_path

pytestmark = [pytest.mark.envoy, pytest.mark.slow]

ADMIN_KEY = "admin-key-of-the-attack-tests"
QUIET_S = 0.3
"""Nothing more is coming from a connection after so long a silence; a refusal takes a millisecond."""

LIMIT_S = 20.0
INSIDE = ("envoy", "127.0.0.1", "0.0.0.0", "upstream", "extproc", "localhost", "traceback")
"""Words that no refusal may hold."""


@pytest.fixture(scope="module")
def router(worker: RawWorker, logs: Path) -> Iterator[Router]:
    """Start a router that everybody can reach, with a key for its admin API."""
    flags = ("--policy", "round_robin", "--max-payload-size", "2000000")
    env = {"VLLM_EXTPROC_ADMIN_API_KEY": ADMIN_KEY}
    router = Router(worker.urls, logs, *flags, host="0.0.0.0", env=env)
    try:
        yield router.until_ready()
        router.stop()
    finally:
        router.end()


@pytest.fixture(autouse=True)
async def _nothing_breaks(router: Router, worker: RawWorker) -> None:
    """After every attack the same processes serve the next request, with its own body, and nothing is left."""
    pids = router.service_pid, router.envoy_pid
    yield
    for number in range(4):  # each connection to each worker is used again
        path = unique_path()
        body = b"victim %d" % number
        response = await ask(router.port, "POST", path, body=body)
        assert response.status == 200
        victim = worker.only(path)
        assert victim.body == body
        check_plain(victim)
    await router.until_idle()
    assert (router.service_pid, router.envoy_pid) == pids


def check_plain(request: Received) -> None:
    """Check that *request* means the same to every parser."""
    lengths, codings = request.values("content-length"), request.values("transfer-encoding")
    assert len(lengths) + len(codings) <= 1, request
    assert all(length.isdecimal() and length.isascii() for length in lengths), request
    assert codings in ([], ["chunked"]), request
    assert len(request.values("host")) == 1, request
    for text in (request.target, *(text for pair in request.headers for text in pair)):
        assert not set(text) & set("\r\n\0"), request
    for name, _ in request.headers:
        assert name, request
        assert not set(name) & set(" \t:"), request
    seen = [name for name in request.names() if name.startswith(("x-router", "x-gateway", "x-env"))]
    assert seen == [], request


async def exchange(port: int, *pieces: bytes) -> bytes:
    """Send *pieces* and return all that comes back until the connection closes or falls silent."""
    async with Connection(port) as connection:
        with contextlib.suppress(OSError):
            for piece in pieces:
                await connection.send_raw(piece)
        received = b""
        with contextlib.suppress(TimeoutError, OSError):
            while data := await asyncio.wait_for(connection.reader.read(65536), QUIET_S):
                received += data
        return received


def statuses(received: bytes) -> list[int]:
    """Return the statuses in *received*, of final responses."""
    lines = [line for line in received.split(b"\r\n") if line.startswith(b"HTTP/1.")]
    found = [int(line.split(b" ")[1]) for line in lines]
    return [status for status in found if status != 100]


def check_refusal(received: bytes) -> None:
    """Check that a refusal is 4xx or silence, and says nothing of the inside."""
    found = statuses(received)
    assert all(400 <= status < 500 for status in found), received
    text = received.decode("latin-1").lower()
    assert not [word for word in INSIDE if word in text], received


LINES = {
    "bare CR in a value": b"X-A: b\rX-Evil: 1",
    "bare LF in a value": b"X-A: b\nX-Evil: 1",
    "NUL in a value": b"X-A: b\0c",
    "NUL in a name": b"X-Evil\0: 1",
    "CR in a name": b"X-A\rX-Evil: 1",
    "LF in a name": b"X-A\nX-Evil: 1",
    "LF first": b"\nX-Evil: 1",
    "CR first": b"\rX-Evil: 1",
    "folded": b"X-A: b\r\n X-Evil: 1",
    "folded with tab": b"X-A: b\r\n\tX-Evil: 1",
    "folded at once": b" X-Evil: 1",
    "space before the colon": b"X-Evil : 1",
    "tab before the colon": b"X-Evil\t: 1",
    "no colon": b"X-Evil",
    "no name": b": X-Evil",
    "colon in front": b":path: /evil",
    "pseudo header": b":authority: evil",
    "control character": b"X-A: \x01\x02\x1b[31m",
    "delete": b"X-A: \x7f",
    "high bytes in a name": b"X-\xc3\xa9: 1",
    "brackets in a name": b"X[Evil]: 1",
    "vertical tab": b"X-A: \x0bX-Evil: 1",
    "unicode line end": "X-A: b\u2028X-Evil: 1".encode(),
    "next line": b"X-A: b\x85X-Evil: 1",
    "encoded CRLF": b"X-A: b%0d%0aX-Evil: 1",
    "two hosts": b"Host: evil",
    "host of another case": b"hOST: evil",
    "two hosts, one folded": b"Host: evil\r\n .test",
    "underscores": b"x_router_cluster: extproc_admin\r\nx_forwarded_for: 127.0.0.1\r\ncontent_length: 9",
    "our own": b"x-router-cluster: extproc_admin\r\nx-gateway-destination-endpoint: 127.0.0.1:1"
    b"\r\nx-envoy-retry-on: 5xx\r\nx-envoy-original-path: /config",
    "ours named by Connection": b"Connection: x-router-cluster, x-request-id, host, content-length",
    "close named twice": b"Connection: close, close\r\nConnection: keep-alive",
}


LF_ENDS_A_LINE = (LINES["bare LF in a value"],)
"""Here a second header was sent, by the lenient reading that RFC 9112 allows (section 2.2)."""


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
async def test_header_injection(router: Router, worker: RawWorker, line: bytes) -> None:
    """No header appears that was not sent as one, and none of ours comes from outside."""
    path = unique_path()
    head = b"POST %s HTTP/1.1\r\nHost: h\r\n%s\r\nContent-Length: 2\r\n\r\n{}"

    received = await exchange(router.port, head % (path.encode(), line))

    for request in worker.received(path):
        check_plain(request)
        assert ("x-evil" in request.names()) is (line in LF_ENDS_A_LINE)
        assert request.values("host") == ["h"]
        assert request.body == (b"" if line == LINES["LF first"] else b"{}")
    if not worker.received(path):
        check_refusal(received)


@pytest.mark.parametrize(
    ("count", "size"),
    [
        *((count, 10) for count in (50, *range(86, 102), 1000, 20_000)),
        *((1, size) for size in (10_000, 60_000, 62_000, 70_000, 1_000_000)),
    ],
)
async def test_many_and_large_headers(
    router: Router, worker: RawWorker, count: int, size: int
) -> None:
    """Served, or refused with 431 and nothing but that; the memory of neither process follows.

    Nothing in between either, where the client's headers fit and those that the router adds do not.
    """
    path = unique_path()
    pids = (router.service_pid, router.envoy_pid)
    before = sum(map(rss_bytes, pids))
    lines = b"".join(b"X-H%d: %s\r\n" % (number, b"x" * size) for number in range(count))
    head = b"GET %s HTTP/1.1\r\nHost: h\r\n" % path.encode()

    answers = await asyncio.gather(
        *(exchange(router.port, head, lines, b"\r\n") for _ in range(20))
    )

    served = len(worker.received(path))
    assert served in (0, 20) or count > 85, "the router adds one header more or less"
    assert served or count > 80 or size > 60_000, "that much must pass"
    refused = [received for received in answers if statuses(received) != [200]]
    assert len(refused) == 20 - served
    for received in refused:
        assert statuses(received) == [431] or not received
        check_refusal(received)
    assert sum(map(rss_bytes, pids)) - before < 60_000_000


def smuggled(evil: str) -> bytes:
    return f"GET {evil} HTTP/1.1\r\nHost: h\r\nX-Smuggled: 1\r\n\r\n".encode()


def shapes() -> dict[str, tuple[bytes, bytes]]:
    """Return header lines and body of requests whose end is in dispute; EVIL stands for a request."""
    after = b"0\r\n\r\nEVIL"
    chunk = b"5\r\nhello\r\n0\r\n\r\n"
    chunked = b"Transfer-Encoding: chunked"
    found: dict[str, tuple[bytes, bytes]] = {
        "CL.TE": (b"Content-Length: 6\r\n" + chunked, after),
        "TE.CL": (chunked + b"\r\nContent-Length: 4", after),
        "CL of all, TE": (b"Content-Length: 500\r\n" + chunked, after),
        "CL 0, TE": (b"Content-Length: 0\r\n" + chunked, chunk + b"EVIL"),
    }
    codings = {
        "unknown": b"Transfer-Encoding: xchunked",
        "identity": b"Transfer-Encoding: identity",
        "space before the colon": b"Transfer-Encoding : chunked",
        "two headers": chunked + b"\r\nTransfer-Encoding: x",
        "two headers, turned": b"Transfer-Encoding: x\r\n" + chunked,
        "twice the same": chunked + b"\r\n" + chunked,
        "tab": b"Transfer-Encoding:\tchunked",
        "vertical tab": b"Transfer-Encoding: \x0bchunked",
        "form feed after": b"Transfer-Encoding: chunked\x0c",
        "leading space": b" Transfer-Encoding: chunked",
        "after a bare LF": b"X: X\nTransfer-Encoding: chunked",
        "after a bare CR": b"X: X\rTransfer-Encoding: chunked",
        "LF before the colon": b"Transfer-Encoding\n : chunked",
        "folded": b"Transfer-Encoding:\r\n chunked",
        "list with identity": b"Transfer-Encoding: chunked, identity",
        "identity first": b"Transfer-Encoding: identity, chunked",
        "gzip first": b"Transfer-Encoding: gzip, chunked",
        "chunked twice": b"Transfer-Encoding: chunked, chunked",
        "capitals": b"Transfer-Encoding: CHUNKED",
        "quoted": b'Transfer-Encoding: "chunked"',
        "parameter": b"Transfer-Encoding: chunked;a=b",
        "comma": b"Transfer-Encoding: ,chunked",
        "empty": b"Transfer-Encoding:",
        "NUL": b"Transfer-Encoding: chunked\0",
        "underscore": b"Transfer_Encoding: chunked",
        "high byte": b"Transfer-Encoding: chunked\xa0",
        "not ASCII": "Transfer-Encoding: ch\u00fcnked".encode(),
        "lookalike": "Transfer-Encoding: \u0441hunked".encode(),
    }
    for name, coding in codings.items():
        found[f"TE, {name}, CL of a part"] = b"Content-Length: 4\r\n" + coding, after
        found[f"TE, {name}, CL of all"] = b"Content-Length: LEN\r\n" + coding, after
    lengths = {
        "different": b"Content-Length: 0\r\nContent-Length: 90",
        "different, turned": b"Content-Length: 90\r\nContent-Length: 0",
        "list": b"Content-Length: 0, 90",
        "list of the same": b"Content-Length: 90, 90",
        "plus": b"Content-Length: +0",
        "minus": b"Content-Length: -1",
        "minus zero": b"Content-Length: -0",
        "hex": b"Content-Length: 0x0",
        "space within": b"Content-Length: 0 9",
        "letters after": b"Content-Length: 0a",
        "point": b"Content-Length: 0.0",
        "exponent": b"Content-Length: 0e1",
        "empty": b"Content-Length:",
        "overflow": b"Content-Length: 18446744073709551616",
        "overflow by far": b"Content-Length: " + b"9" * 100,
        "signed overflow": b"Content-Length: 9223372036854775808",
        "space before the colon": b"Content-Length : 0",
        "folded": b"Content-Length:\r\n 0",
        "vertical tab": b"Content-Length: \x0b0",
        "NUL": b"Content-Length: 0\0",
        "Arabic digits": "Content-Length: \u0660".encode(),
        "underscore": b"Content-Length: 0_0",
    }
    found |= {f"length, {name}": (length, b"EVIL") for name, length in lengths.items()}
    bodies = {
        "size overflow": b"10000000000000000\r\nEVIL\r\n0\r\n\r\n",
        "size overflow by far": b"f" * 40 + b"\r\nEVIL",
        "size wraps to 0": b"100000000\r\nEVIL",
        "negative size": b"-1\r\nEVIL\r\n0\r\n\r\n",
        "plus size": b"+0\r\n\r\nEVIL",
        "hex prefix": b"0x0\r\n\r\nEVIL",
        "space before": b" 0\r\n\r\nEVIL",
        "no size": b"\r\nEVIL",
        "letters": b"zz\r\nEVIL",
        "size ends with bare LF": b"0\n\nEVIL",
        "size ends with bare CR": b"0\r\rEVIL",
        "size and LF": b"5\nhello\r\n0\r\n\r\nEVIL",
        "chunk too long": b"5\r\nhelloEVIL\r\n0\r\n\r\n",
        "chunk ends with bare LF": b"5\r\nhello\n0\r\n\r\nEVIL",
        "chunk without an end": b"5\r\nhello0\r\n\r\nEVIL",
        "NUL in the size": b"0\0\r\n\r\nEVIL",
        "underscore in the size": b"0_0\r\n\r\nEVIL",
        "bare LF in an extension": b"5;a\nhello\r\n0\r\n\r\nEVIL",
        "bare CR in an extension": b"5;a\rhello\r\n0\r\n\r\nEVIL",
    }
    return found | {f"chunks, {name}": (chunked, body) for name, body in bodies.items()}


SHAPES = shapes()
LENIENT = frozenset(
    {
        "TE, after a bare CR, CL of a part",  # a part of the header before it, so the length counts
        "TE, underscore, CL of a part",  # another header
        "length, folded",
        "chunks, chunk ends with bare LF",
    }
)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "in two pieces"])
async def test_request_smuggling(
    router: Router, worker: RawWorker, shape: str, at_once: bool
) -> None:
    """What stands behind a request whose length is in dispute never becomes a request."""
    path, evil = unique_path(), unique_path()
    lines, body = SHAPES[shape]
    body = body.replace(b"EVIL", smuggled(evil))
    lines = lines.replace(b"LEN", b"%d" % len(body))
    head = b"POST %s HTTP/1.1\r\nHost: h\r\n%s\r\n\r\n" % (path.encode(), lines)

    received = await exchange(router.port, *([head + body] if at_once else [head, body]))

    check_pipelined(worker, path, evil, lenient=shape in LENIENT)
    if not worker.received(path):
        check_refusal(received)


def check_pipelined(worker: RawWorker, path: str, evil: str, *, lenient: bool) -> None:
    """Check that the request for *evil* was never one, or where Envoy is *lenient* one like any other."""
    assert worker.begun(evil) == len(worker.received(evil)) <= lenient
    for request in worker.received(path):
        check_plain(request)
        names = {name.replace("_", "-") for name in request.names()}
        assert "x-smuggled" not in names
    for request in worker.received(evil):
        check_plain(request)
        assert request.values("x-request-id"), "not seen by the router"
        assert len(worker.received(path)) == 1, "what stood before it is whole"


ODD_REQUESTS = {
    "body of GET": b"GET PATH HTTP/1.1\r\nHost: h\r\nContent-Length: LEN\r\n\r\nEVIL",
    "body of HEAD": b"HEAD PATH HTTP/1.1\r\nHost: h\r\nContent-Length: LEN\r\n\r\nEVIL",
    "body of OPTIONS": b"OPTIONS PATH HTTP/1.1\r\nHost: h\r\nContent-Length: LEN\r\n\r\nEVIL",
    "body of TRACE": b"TRACE PATH HTTP/1.1\r\nHost: h\r\nContent-Length: LEN\r\n\r\nEVIL",
    "HTTP/1.0 with chunks": b"POST PATH HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nEVIL",
    "HTTP/0.9": b"GET PATH\r\nEVIL",
    "HTTP/1.2": b"GET PATH HTTP/1.2\r\nHost: h\r\n\r\n",
    "HTTP/11.1": b"GET PATH HTTP/11.1\r\nHost: h\r\n\r\nEVIL",
    "HTTP/2.0 in words": b"GET PATH HTTP/2.0\r\nHost: h\r\n\r\nEVIL",
    "no version": b"GET PATH HTTP/\r\nHost: h\r\n\r\nEVIL",
    "space in the target": b"GET PATH evil HTTP/1.1\r\nHost: h\r\n\r\nEVIL",
    "tabs": b"GET\tPATH\tHTTP/1.1\r\nHost: h\r\n\r\nEVIL",
    "LF only": b"GET PATH HTTP/1.1\nHost: h\n\nEVIL",
    "no host": b"GET PATH HTTP/1.1\r\n\r\nEVIL",
    "bad method": b"G(E)T PATH HTTP/1.1\r\nHost: h\r\n\r\nEVIL",
    "long method": b"G" * 70_000 + b" PATH HTTP/1.1\r\nHost: h\r\n\r\nEVIL",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nEVIL",
    "NUL in the target": b"GET PATH\0/x HTTP/1.1\r\nHost: h\r\n\r\nEVIL",
    "CR in the target": b"GET PATH\r/x HTTP/1.1\r\nHost: h\r\n\r\nEVIL",
    "high bytes": b"GET PATH\xff\xfe HTTP/1.1\r\nHost: h\r\n\r\nEVIL",
}
LENIENT_ODD = frozenset({"tabs", "LF only"})


@pytest.mark.parametrize("name", ODD_REQUESTS)
async def test_odd_requests(router: Router, worker: RawWorker, name: str) -> None:
    """A body is a body whatever the method; behind something that is no HTTP nothing is read."""
    path, evil = unique_path(), unique_path()
    behind = smuggled(evil)
    raw = ODD_REQUESTS[name].replace(b"LEN", b"%d" % len(behind))
    raw = raw.replace(b"PATH", path.encode()).replace(b"EVIL", behind)

    received = await exchange(router.port, raw)

    check_pipelined(worker, path, evil, lenient=name in LENIENT_ODD)
    assert all(request.body in (b"", behind) for request in worker.received(path))
    if not worker.received(path):
        check_refusal(received)


@pytest.mark.parametrize(
    "bad",
    [
        b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: x\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /x y HTTP/1.1\r\nHost: h\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /x HTTP/1.1\r\nHost: h\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999\r\n\r\n",
    ],
    ids=["bad length", "two lengths", "bad line", "bad chunk", "large header", "large body"],
)
async def test_nothing_is_read_behind_a_refused_request(
    router: Router, worker: RawWorker, bad: bytes
) -> None:
    """The connection ends there: where the next request begins is not known any more."""
    before, evil = unique_path(), unique_path()
    good = f"GET {before} HTTP/1.1\r\nHost: h\r\n\r\n".encode()

    received = await exchange(router.port, good + bad + smuggled(evil))

    assert worker.begun(evil) == 0
    found = statuses(received)
    assert found[:1] in ([200], []), "what came before it is answered, or the connection is cut"
    assert all(400 <= status < 500 for status in found[1:])
    assert len(found) <= 2


async def test_nothing_is_tunnelled_behind_an_upgrade_that_the_worker_denies(
    router: Router, worker: RawWorker
) -> None:
    """A proxy that takes any answer for a switch would hand on the bytes behind it unread."""
    path, evil = unique_path(), unique_path()
    worker.on(path, respond(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nno"))
    upgrades = [
        b"Upgrade: websocket\r\nConnection: Upgrade",
        b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
        b"Upgrade: foo\r\nConnection: Upgrade",
    ]
    for upgrade in upgrades:
        head = b"GET %s HTTP/1.1\r\nHost: h\r\n%s\r\n\r\n" % (path.encode(), upgrade)
        await exchange(router.port, head + smuggled(evil))
        connect = b"CONNECT h:80 HTTP/1.1\r\nHost: h:80\r\n%s\r\n\r\n" % upgrade
        check_refusal(await exchange(router.port, connect + smuggled(evil)))

    # An upgrade that nobody speaks is a plain request, and then the next one is one of its own.
    for request in worker.received(evil):
        check_plain(request)
    assert all(not request.body for request in worker.received(path))


async def test_tunnel_that_is_denied_ends(router: Router, worker: RawWorker) -> None:
    """What a client sends behind a websocket upgrade never reaches a worker that answered 200."""
    path, evil = unique_path(), unique_path()
    worker.on(path, respond(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nno"))
    head = (
        f"GET {path} HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    ).encode()

    await exchange(router.port, head, smuggled(evil))

    for request in worker.received(evil):
        check_plain(request)
        assert not request.values("x-smuggled"), "tunnelled past the router"


ADMIN = [
    ("GET", "/workers"),
    ("POST", "/workers"),
    ("DELETE", "/workers/x"),
    ("PUT", "/workers/x"),
    ("POST", "/add_worker?url=http://127.0.0.1:9"),
    ("POST", "/remove_worker?url=x"),
    ("GET", "/list_workers"),
    ("POST", "/flush_cache"),
    ("GET", "/config"),
    ("GET", "/get_loads"),
    ("GET", "/get_server_info"),
    ("POST", "/finish_session"),
    ("POST", "/authorize"),
    ("GET", "/authorize"),
    ("GET", "/metrics"),
    ("GET", "/debug/config"),
    ("POST", "/config_dump"),
    ("POST", "/quitquitquit"),
]

TRICKS = {
    "plain": lambda p: p,
    "dot segments": lambda p: "/v1/models/../.." + p,
    "encoded dots": lambda p: "/x/%2e%2e" + p,
    "encoded dots, capitals": lambda p: "/x/%2E%2E" + p,
    "half-encoded dots": lambda p: "/x/.%2e" + p,
    "doubly encoded dots": lambda p: "/x/%252e%252e" + p,
    "more dots than segments": lambda p: "/../../.." + p,
    "dot": lambda p: "/." + p,
    "slashes": lambda p: "/" + p,
    "slashes within": lambda p: p.replace("/", "//"),
    "encoded slash": lambda p: "/x%2f.." + p,
    "encoded slash, capitals": lambda p: "/x%2F.." + p,
    "encoded slash first": lambda p: "/%2f" + p[1:],
    "encoded backslash": lambda p: "/x%5c.." + p,
    "backslash": lambda p: "/x\\.." + p,
    "backslashes": lambda p: p.replace("/", "\\"),
    "semicolon": lambda p: p + ";x=y",
    "semicolon before": lambda p: "/x;/.." + p,
    "dots with semicolon": lambda p: "/x/..;" + p,
    "absolute form": lambda p: "http://127.0.0.1:29000" + p,
    "absolute form, the service": lambda p: "http://extproc_admin" + p,
    "absolute form, https": lambda p: "https://localhost" + p,
    "user in the address": lambda p: "http://a@127.0.0.1" + p,
    "asterisk": lambda _: "*",
    "fragment": lambda p: p + "#x",
    "fragment first": lambda p: "/x#/.." + p,
    "encoded": lambda p: "/" + "".join(f"%{ord(c):02x}" for c in p[1:]),
    "one letter encoded": lambda p: p[:2] + f"%{ord(p[2]):02X}" + p[3:],
    "NUL": lambda p: p + "%00",
    "NUL before": lambda p: "/%00" + p,
    "overlong dots": lambda p: "/x/%c0%ae%c0%ae" + p,
    "overlong slash": lambda p: "/x%c0%af.." + p,
    "fullwidth dots": lambda p: "/x/%ef%bc%8e%ef%bc%8e" + p,
    "trailing slash": lambda p: p + "/",
    "trailing dot": lambda p: p + "/.",
    "capitals": str.upper,
    "question marks": lambda p: "/x?/.." + p,
    "line end encoded": lambda p: "/x%0d%0aHost:%20evil%0d%0a" + p,
    "space": lambda p: p + "%20",
    "no slash": lambda p: p[1:],
    "bad escape": lambda p: p + "%zz",
}

FORGED: Headers = [
    ("X-Forwarded-For", "127.0.0.1"),
    ("X-Real-IP", "127.0.0.1"),
    ("Forwarded", "for=127.0.0.1;host=localhost;proto=https"),
    ("X-Forwarded-Host", "localhost"),
    ("X-Forwarded-Proto", "https"),
    ("X-Forwarded-Prefix", "/workers"),
    ("X-Forwarded-Client-Cert", "By=spiffe://x;Subject=admin"),
    ("X-Original-URL", "/config"),
    ("X-Rewrite-URL", "/config"),
    ("X-Envoy-Original-Path", "/config"),
    ("X-Envoy-Internal", "true"),
    ("X-Envoy-External-Address", "127.0.0.1"),
    ("X-Envoy-Decorator-Operation", "admin"),
    ("X-Http-Method-Override", "DELETE"),
    ("x-router-cluster", "extproc_admin"),
    ("x-router-client", "admin"),
    ("x_router_cluster", "extproc_admin"),
    ("x-gateway-destination-endpoint", "127.0.0.1:1"),
    ("x-ext-authz-check-result", "allowed"),
]

KEYS: dict[str, Headers] = {
    "no key": [],
    "empty": [("Authorization", "")],
    "bearer of nothing": [("Authorization", "Bearer ")],
    "another": [("Authorization", "Bearer x")],
    "basic": [("Authorization", f"Basic {ADMIN_KEY}")],
    "twice": [("Authorization", "Bearer x"), ("Authorization", f"Bearer {ADMIN_KEY}")],
    "key as x-api-key": [("x-api-key", ADMIN_KEY)],
    "long": [("Authorization", "Bearer " + "x" * 30_000)],
    "not ASCII": [("Authorization", "Bearer \xff\xe9")],
    "prefix of the key": [("Authorization", f"Bearer {ADMIN_KEY[:-1]}")],
    "more than the key": [("Authorization", f"Bearer {ADMIN_KEY}x")],
}


async def _ask(port: int, method: str, target: str, headers: Headers) -> Response | None:
    """Send a request as it stands; None when the connection ends without an answer."""
    try:
        return await ask(port, method, target, headers, b"{}")
    except (EOFError, OSError):
        return None


def check_not_admin(response: Response | None, context: object) -> None:
    """Check that *response* is a worker's, or says no."""
    if response is None:
        return
    if response.status < 400:
        document = json.loads(response.body or b"null")
        # raw workers say which of them served; a liveness probe has nothing to hide
        assert isinstance(document, dict), (context, response)
        assert "served" in document, (context, response)
    else:
        text = f"{response.headers}{response.body.decode('latin-1')}".lower()
        assert ADMIN_KEY not in text
        assert not [word for word in INSIDE if word in text], (context, response)


async def workers_of(router: Router) -> str:
    """Return what the admin API says of the workers to who has the key."""
    response = await ask(router.port, "GET", "/workers", [("Authorization", f"Bearer {ADMIN_KEY}")])
    assert response.status == 200
    return json.dumps(sorted(each["url"] for each in response.json()["workers"]))


@pytest.mark.parametrize("trick", TRICKS)
async def test_no_path_leads_to_the_admin_api_without_its_key(router: Router, trick: str) -> None:
    """Nothing is read or changed; what the router does not take for admin goes to a worker as it is."""
    before = await workers_of(router)
    for method, path in ADMIN:
        target = TRICKS[trick](path)
        for headers in ([], FORGED):
            response = await _ask(router.port, method, target, headers)
            check_not_admin(response, (method, target))

    assert await workers_of(router) == before


@pytest.mark.parametrize(
    "host", ["extproc_admin", "127.0.0.1", "localhost", "[::1]", "", "a b", "x" * 9000]
)
async def test_no_host_leads_to_the_admin_api_without_its_key(router: Router, host: str) -> None:
    """``Host`` chooses nothing."""
    for method, path in ADMIN:
        response = await _ask(router.port, method, path, [("Host", host), *FORGED])
        check_not_admin(response, (method, path))


@pytest.mark.parametrize("key", KEYS)
async def test_what_resembles_the_key_is_not_the_key(router: Router, key: str) -> None:
    """401 for all that is not the key, byte by byte."""
    for method, path in ADMIN[:9]:
        response = await _ask(router.port, method, path, KEYS[key])
        check_not_admin(response, (method, path, key))
        assert response is None or response.status in (400, 401, 403), response


CLIENT_KEY = "client-key-of-the-attack-tests"
INFERENCE = [
    ("POST", "/v1/chat/completions"),
    ("GET", "/version"),
    ("POST", "/v1/load_lora_adapter"),
]
PROBES = frozenset({"/health", "/liveness", "/readiness", "/ping"})


@pytest.fixture(scope="module")
def keyed_router(worker: RawWorker, logs: Path) -> Iterator[Router]:
    """Start a router that asks clients for a key."""
    env = {"VLLM_EXTPROC_ADMIN_API_KEY": ADMIN_KEY, "VLLM_EXTPROC_API_KEY": CLIENT_KEY}
    router = Router(worker.urls, logs, "--policy", "round_robin", host="0.0.0.0", env=env)
    try:
        yield router.until_ready()
        router.stop()
    finally:
        router.end()


@pytest.mark.parametrize("trick", TRICKS)
async def test_no_path_leads_past_the_key_of_clients(
    keyed_router: Router, worker: RawWorker, trick: str
) -> None:
    """Whatever the path, without the key nothing is served: neither by a worker nor by the router."""
    before = dict(worker._begun)
    for method, path in [*ADMIN, *INFERENCE, *(("GET", probe) for probe in PROBES)]:
        target = TRICKS[trick](path)
        for headers in ([], FORGED, [("Authorization", f"Bearer {CLIENT_KEY[:-1]}")]):
            response = await _ask(keyed_router.port, method, target, headers)
            if response is None or path in PROBES:
                continue  # whether it is healthy is no secret
            assert 400 <= response.status < 500, (method, target, response)
            text = f"{response.headers}{response.body.decode('latin-1')}".lower()
            assert not [word for word in INSIDE if word in text], (target, response)
    reached = {path for path, count in worker._begun.items() if count > before.get(path, 0)}

    assert reached <= {"/health", "/v1/models", "/metrics"}, "other than the router's own questions"


async def test_slow_heads_and_bodies_do_not_disturb_others(
    router: Router, worker: RawWorker
) -> None:
    """300 clients send their head byte by byte, 300 their body; others are served, and slow heads are cut off."""
    path = unique_path()
    pids = (router.service_pid, router.envoy_pid)
    before = sum(map(rss_bytes, pids))
    stop = asyncio.Event()
    cut = 0

    async def slow(first: bytes) -> None:
        nonlocal cut
        async with Connection(router.port) as connection:
            try:
                await connection.send_raw(first)
                while not stop.is_set():
                    await connection.send_raw(b"a")
                    with contextlib.suppress(TimeoutError):
                        if not await asyncio.wait_for(connection.reader.read(4096), 0.5):
                            cut += 1
                            return
            except OSError:
                cut += 1
            connection.abort()

    head = b"POST /slow HTTP/1.1\r\nHost: h\r\nX-Slow: "
    body = b"POST /slow HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\n"
    took = []
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for _ in range(300):
            tasks.create_task(slow(head))
            tasks.create_task(slow(body))
        began = time.monotonic()
        while cut < 300:
            assert time.monotonic() - began < 25, f"{cut} of 300 slow heads were cut off"
            started = time.monotonic()
            response = await ask(router.port, "POST", path, body=b"{}")
            took.append(time.monotonic() - started)
            assert response.status == 200
            await asyncio.sleep(0.05)
        grown = sum(map(rss_bytes, pids)) - before
        stop.set()

    assert len(worker.received(path)) == len(took)
    assert sorted(took)[len(took) // 2] < 0.25, took
    assert grown < 100_000_000


async def test_compression_bombs_pass_unopened(router: Router, worker: RawWorker) -> None:
    """100 MB of zeros in 100 KB: the router counts and hands on what is on the wire, both ways."""
    bomb = gzip.compress(bytes(100_000_000), 9)
    pids = (router.service_pid, router.envoy_pid)
    before = sum(map(rss_bytes, pids))
    path, answered = unique_path(), unique_path()
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(bomb)
    worker.on(answered, respond(head + bomb))

    for coding in ("gzip", "br", "gzip, gzip"):
        sent = await ask(router.port, "POST", path, [("Content-Encoding", coding)], bomb)
        assert sent.status == 200
    received = await ask(router.port, "GET", answered, [("Accept-Encoding", "gzip")])

    assert {request.sha256 for request in worker.received(path)} == {
        hashlib.sha256(bomb).hexdigest()
    }
    assert received.body == bomb
    assert received.values("content-encoding") == ["gzip"]
    assert sum(map(rss_bytes, pids)) - before < 50_000_000


async def test_answer_of_a_worker_cannot_split_a_response(
    start_router: StartRouter, worker: RawWorker
) -> None:
    """A worker that is lied to may repeat a client's words in a header; what comes of it is one response."""
    evils = {
        "bare LF": b"X-A: b\nX-Evil: 1",
        "bare CR": b"X-A: b\rX-Evil: 1",
        "NUL": b"X-A: b\0c",
        "folded": b"X-A: b\r\n X-Evil: 1",
        "two lengths": b"Content-Length: 9",
        "length and chunks": b"Transfer-Encoding: chunked",
    }
    router = start_router(worker.urls, "--disable-retries", "--disable-circuit-breaker")
    for line in evils.values():
        path = worker.on(
            unique_path(),
            respond(b"HTTP/1.1 200 OK\r\n%s\r\nContent-Length: 2\r\n\r\nok" % line),
        )
        received = await exchange(
            router.port, b"GET %s HTTP/1.1\r\nHost: h\r\n\r\n" % path.encode()
        )
        assert len(statuses(received)) == 1, received
        head = received.partition(b"\r\n\r\n")[0].lower()
        lines = head.split(b"\r\n")
        assert not [line for line in lines if set(line) & set(b"\r\n\0")], received
        assert b"envoy" not in received.lower()
        if statuses(received) != [200]:
            assert statuses(received)[0] in (502, 503), received


async def test_refusals_are_json_and_say_nothing_of_the_inside(router: Router) -> None:
    """Every refusal with a body is an error as OpenAI shapes it, without a server or an address."""
    cases = [
        ("GET", "/workers", [], 401),
        ("POST", "/x", [("Content-Length", "9999999999")], 413),
        ("GET", "/x", [("X-Large", "x" * 70_000)], 431),
        ("GET", "/workers", [("Authorization", "Bearer x")], 401),
    ]
    for method, target, headers, status in cases:
        response = await ask(router.port, method, target, headers)
        assert response.status == status
        assert not [
            name
            for name, _ in response.headers
            if name.lower() == "server" or name.lower().startswith("x-envoy")
        ], response
        text = f"{response.headers}{response.body.decode()}".lower()
        assert not [word for word in INSIDE if word in text]
        if target != "/workers":  # the admin API has a shape of its own
            openai_error(response)
