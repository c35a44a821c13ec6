"""Attacks over HTTP/2: frames that no client sends, and requests that mean something else in HTTP/1.1."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Self

import hpack
import pytest

from tests.e2e.client import ask
from tests.e2e.h2_client import H2Connection
from tests.e2e.harness import Router, rss_bytes
from tests.e2e.raw_worker import RawWorker, Received, unique_path

pytestmark = [pytest.mark.envoy, pytest.mark.slow]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 0, 1, 3, 4, 6, 7, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
QUIET_S = 0.3
LIMIT_S = 30.0
GROWTH_BYTES = 80_000_000

Pairs = Sequence[tuple[bytes, bytes]]


@pytest.fixture(scope="module")
def router(worker: RawWorker, logs: Path) -> Iterator[Router]:
    """Start a router of its own: it is meant to be abused."""
    router = Router(worker.urls, logs, "--policy", "round_robin")
    try:
        yield router.until_ready()
        router.stop()
    finally:
        router.end()


@pytest.fixture(autouse=True)
async def _nothing_breaks(router: Router, worker: RawWorker) -> AsyncIterator[None]:
    """After every attack the same processes serve, in bounded memory, and nothing is left under way."""
    pids = router.service_pid, router.envoy_pid
    before = sum(map(rss_bytes, pids))
    yield
    for number in range(4):
        path = unique_path()
        body = b"victim %d" % number
        async with asyncio.timeout(LIMIT_S):
            assert (await ask(router.port, "POST", path, body=body)).status == 200
        victim = worker.only(path)
        assert victim.body == body
        check_plain(victim)
    await router.until_idle(20)
    assert (router.service_pid, router.envoy_pid) == pids
    assert sum(map(rss_bytes, pids)) - before < GROWTH_BYTES


def check_plain(request: Received) -> None:
    """Check that *request* means the same to every parser of HTTP/1.1."""
    lengths, codings = request.values("content-length"), request.values("transfer-encoding")
    assert len(lengths) + len(codings) <= 1, request
    assert codings in ([], ["chunked"]), request
    assert len(request.values("host")) == 1, request
    for text in (request.method, request.target, *(t for pair in request.headers for t in pair)):
        assert not set(text) & set("\r\n\0"), request
    assert " " not in request.target
    assert " " not in request.method


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    )


class Raw:
    """A connection on which any frame can be sent."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.encoder = hpack.Encoder()
        self._decoder = hpack.Decoder()
        self.statuses: dict[int, bytes] = {}
        self.resets: dict[int, int] = {}
        self.gone: int | None = None
        """Error code with which the peer said goodbye."""

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        self.writer.write(PREFACE + frame(SETTINGS, 0, 0))
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.writer.transport.abort()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    @property
    def closed(self) -> bool:
        """Whether the peer has ended the connection."""
        ended = self.reader.at_eof() or self.reader.exception() is not None
        return ended or self.gone is not None

    def head(self, stream: int, pairs: Pairs, *, last: bool = True) -> bytes:
        """Return the frame of a request's head."""
        block = self.encoder.encode([(name, value) for name, value in pairs])
        return frame(HEADERS, END_HEADERS | (END_STREAM if last else 0), stream, block)

    async def send(self, data: bytes) -> None:
        """Send; a peer that has closed meanwhile is no error."""
        with contextlib.suppress(OSError):
            self.writer.write(data)
            await self.writer.drain()

    async def until_quiet(self) -> None:
        """Read what comes until the peer closes or falls silent."""
        with contextlib.suppress(TimeoutError, OSError, EOFError):
            while True:
                head = await asyncio.wait_for(self.reader.readexactly(9), QUIET_S)
                size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
                stream = int.from_bytes(head[5:], "big")
                payload = await asyncio.wait_for(self.reader.readexactly(size), QUIET_S)
                if kind == HEADERS:
                    for name, value in self._decoder.decode(payload, raw=True):
                        if name == b":status":
                            self.statuses[stream] = value
                elif kind == RST_STREAM:
                    (self.resets[stream],) = struct.unpack(">I", payload)
                elif kind == GOAWAY:
                    self.gone = struct.unpack(">II", payload[:8])[1]
                elif kind == SETTINGS and not flags & ACK:
                    await self.send(frame(SETTINGS, ACK, 0))


def request(path: str, *more: tuple[bytes, bytes], method: bytes = b"POST") -> Pairs:
    return [
        (b":method", method),
        (b":scheme", b"http"),
        (b":authority", b"h"),
        (b":path", path.encode()),
        *more,
    ]


SMUGGLED = "GET EVIL HTTP/1.1\r\nHost: h\r\n\r\n"


def pairs_of(name: str, path: str, evil: str) -> Pairs:
    """Return a head that would be two requests, or no request, in HTTP/1.1."""
    inner = SMUGGLED.replace("EVIL", evil).encode()
    p = path.encode()
    normal = request(path)
    return {
        "transfer-encoding": request(path, (b"transfer-encoding", b"chunked")),
        "transfer-encoding and length": request(
            path, (b"content-length", b"5"), (b"transfer-encoding", b"chunked")
        ),
        "TE gzip": request(path, (b"te", b"gzip")),
        "connection": request(path, (b"connection", b"close, content-length")),
        "keep-alive": request(path, (b"keep-alive", b"timeout=1")),
        "upgrade": request(path, (b"upgrade", b"websocket"), (b"connection", b"upgrade")),
        "proxy-connection": request(path, (b"proxy-connection", b"close")),
        "two lengths": request(path, (b"content-length", b"5"), (b"content-length", b"500")),
        "list of lengths": request(path, (b"content-length", b"5, 500")),
        "plus length": request(path, (b"content-length", b"+5")),
        "length is no number": request(path, (b"content-length", b"x")),
        "length too small": request(path, (b"content-length", b"0")),
        "length too large": request(path, (b"content-length", b"500")),
        "CRLF in a value": request(path, (b"x-a", b"b\r\n\r\n" + inner)),
        "LF in a value": request(path, (b"x-a", b"b\nx-evil: 1")),
        "CR in a value": request(path, (b"x-a", b"b\rx-evil: 1")),
        "NUL in a value": request(path, (b"x-a", b"b\0c")),
        "CRLF in a name": request(path, (b"x-a: b\r\nx-evil", b"1")),
        "colon in a name": request(path, (b"x-a: b", b"1")),
        "space in a name": request(path, (b"x-evil ", b"1")),
        "capitals in a name": request(path, (b"X-Evil", b"1")),
        "empty name": request(path, (b"", b"1")),
        "request in the path": [
            *normal[:3],
            (b":path", p + b" HTTP/1.1\r\nHost: h\r\n\r\n" + inner),
        ],
        "space in the path": [*normal[:3], (b":path", p + b" x")],
        "no slash in the path": [*normal[:3], (b":path", b"x")],
        "empty path": [*normal[:3], (b":path", b"")],
        "no path": normal[:3],
        "asterisk": [*normal[:3], (b":path", b"*")],
        "fragment": [*normal[:3], (b":path", p + b"#x")],
        "request in the method": request(path, method=b"GET / HTTP/1.1\r\nHost: h\r\n\r\nGET"),
        "space in the method": request(path, method=b"GET /"),
        "request in the authority": [
            *normal[:2],
            (b":authority", b"h\r\n\r\n" + inner),
            normal[3],
        ],
        "authority with a path": [*normal[:2], (b":authority", b"h/../x"), normal[3]],
        "authority with a user": [*normal[:2], (b":authority", b"a@h"), normal[3]],
        "no authority": [*normal[:2], normal[3]],
        "host differs": request(path, (b"host", b"evil")),
        "host twice": request(path, (b"host", b"evil"), (b"host", b"evil2")),
        "request in the scheme": [
            normal[0],
            (b":scheme", b"http\r\n\r\n" + inner),
            *normal[2:],
        ],
        "path twice": [*normal, (b":path", b"/config")],
        "method twice": [*normal, (b":method", b"GET")],
        "pseudo header last": [(b"x-a", b"b"), *normal],
        "pseudo header of a response": [*normal, (b":status", b"200")],
        "unknown pseudo header": [*normal, (b":evil", b"1")],
        "extended connect": [
            (b":method", b"CONNECT"),
            (b":protocol", b"websocket"),
            *normal[1:],
        ],
        "our own": request(
            path,
            (b"x-router-cluster", b"extproc_admin"),
            (b"x-gateway-destination-endpoint", b"127.0.0.1:1"),
            (b"x-envoy-original-path", b"/config"),
        ),
    }[name]  # fmt: skip


NAMES = (
    *("transfer-encoding", "transfer-encoding and length", "TE gzip", "connection", "keep-alive"),
    *("upgrade", "proxy-connection", "two lengths", "list of lengths", "plus length"),
    *("length is no number", "length too small", "length too large", "CRLF in a value"),
    *("LF in a value", "CR in a value", "NUL in a value", "CRLF in a name", "colon in a name"),
    *("space in a name", "capitals in a name", "empty name", "request in the path"),
    *("space in the path", "no slash in the path", "empty path", "no path", "asterisk"),
    *("fragment", "request in the method", "space in the method", "request in the authority"),
    *("authority with a path", "authority with a user", "no authority", "host differs"),
    *("host twice", "request in the scheme", "path twice", "method twice"),
    *("pseudo header last", "pseudo header of a response", "unknown pseudo header"),
    *("extended connect", "our own"),
)


@pytest.mark.parametrize("name", NAMES)
async def test_downgrade_shapes(router: Router, worker: RawWorker, name: str) -> None:
    """What would be something else in HTTP/1.1 is refused, or reaches a worker as one plain request."""
    path, evil = unique_path(), unique_path()
    async with asyncio.timeout(LIMIT_S), Raw(router.port) as raw:
        await raw.send(raw.head(1, pairs_of(name, path, evil), last=False))
        await raw.send(frame(DATA, END_STREAM, 1, b"hello"))
        await raw.until_quiet()

    assert worker.begun(evil) == 0
    for arrived in worker.received(path):
        check_plain(arrived)
        # an announced length of 0 is a whole request, before the rest of it shows that it was a lie
        assert arrived.body == (b"" if name == "length too small" else b"hello")
        assert "x-evil" not in arrived.names()
        assert not [n for n in arrived.names() if n.startswith(("x-router", "x-gateway", "x-env"))]
    status = raw.statuses.get(1)
    assert status is None or status == b"200" or status.startswith(b"4"), status
    if not worker.received(path) and status == b"200":
        assert name in {"empty path", "no slash in the path", "asterisk"}, "served, but not seen"


@pytest.mark.parametrize("longer", [True, False], ids=["more than announced", "less"])
async def test_body_that_is_not_as_long_as_announced(
    router: Router, worker: RawWorker, longer: bool
) -> None:
    """The worker sees no whole request, so no rest that could be taken for the next one."""
    path, evil = unique_path(), unique_path()
    body = SMUGGLED.replace("EVIL", evil).encode()
    length = len(body) // 2 if longer else len(body) * 2
    async with asyncio.timeout(LIMIT_S), Raw(router.port) as raw:
        pairs = request(path, (b"content-length", b"%d" % length))
        await raw.send(raw.head(1, pairs, last=False) + frame(DATA, END_STREAM, 1, body))
        await raw.until_quiet()

    assert worker.received(path) == []
    assert worker.begun(evil) == 0
    assert raw.statuses.get(1) != b"200"


async def test_rapid_reset(router: Router, worker: RawWorker) -> None:
    """30,000 requests that are taken back at once (CVE-2023-44487): cut off, others are served meanwhile."""
    path, other = unique_path(), unique_path()
    took: list[float] = []
    done = asyncio.Event()

    async def attack() -> None:
        async with Raw(router.port) as raw:
            for first in range(1, 20_000, 200):
                await raw.send(
                    b"".join(
                        raw.head(stream, request(path), last=True)
                        + frame(RST_STREAM, 0, stream, struct.pack(">I", 8))
                        for stream in range(first, first + 200, 2)
                    )
                )
                await asyncio.sleep(0)
            await raw.until_quiet()

    async def others() -> None:
        while not done.is_set():
            started = time.monotonic()
            assert (await ask(router.port, "POST", other, body=b"{}")).status == 200
            took.append(time.monotonic() - started)

    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(others())
        await asyncio.gather(attack(), attack(), attack())
        done.set()

    assert len(worker.received(other)) == len(took)
    assert max(took) < 5
    assert worker.begun(path) < 30_000 / 4, "cut off long before the end"


def bomb(references: int) -> bytes:
    """Return a header block of a few bytes per header of 4 KB: one entry of the table, again and again."""
    encoder = hpack.Encoder()
    block = encoder.encode(
        [(b":method", b"GET"), (b":scheme", b"http"), (b":authority", b"h"), (b":path", b"/x")]
    )
    block += encoder.encode([(b"x-bomb", b"x" * 3900)])
    return block + encoder.encode([(b"x-bomb", b"x" * 3900)]) * references


@pytest.mark.parametrize("references", [30, 16_000])
async def test_header_bomb(router: Router, references: int) -> None:
    """A header block that grows by three orders of magnitude is refused while it is read."""
    async with asyncio.timeout(LIMIT_S), Raw(router.port) as raw:
        for stream in (1, 3, 5, 7):
            block = bomb(references)
            await raw.send(frame(HEADERS, END_HEADERS | END_STREAM, stream, block))
        await raw.until_quiet()

    assert b"200" not in raw.statuses.values()
    assert set(raw.statuses.values()) <= {b"431", b"400"}
    assert raw.statuses or raw.resets or raw.gone is not None


async def test_endless_continuations(router: Router) -> None:
    """A head that never ends (CVE-2024-27316) ends the connection long before 64 MB."""
    async with asyncio.timeout(LIMIT_S), Raw(router.port) as raw:
        await raw.send(frame(HEADERS, END_STREAM, 1, raw.encoder.encode(request("/x"))))
        piece = frame(CONTINUATION, 0, 1, b"\x00\x03x-a\x7f\xa1\x7e" + b"y" * 16_000)
        sent = 0
        while sent < 4000 and not raw.closed:
            await raw.send(piece)
            sent += 1
        await raw.until_quiet()

    assert sent < 4000


FLOODS = {
    "settings": frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65_535)),
    "large header table": frame(SETTINGS, 0, 0, struct.pack(">HI", 1, 0xFFFFFFFF)),
    "pings": frame(PING, 0, 0, bytes(8)),
    "priorities": frame(2, 0, 1, struct.pack(">IB", 0, 1)),
    "resets of nothing": frame(RST_STREAM, 0, 1, struct.pack(">I", 8)),
    "empty continuations": frame(CONTINUATION, 0, 1),
    "window updates": frame(8, 0, 0, struct.pack(">I", 1)),
    "unknown frames": frame(0xEE, 0xFF, 0, bytes(100)),
    "too large a frame": (1 << 20).to_bytes(3, "big") + bytes([DATA, 0]) + (1).to_bytes(4, "big"),
    "data of nothing": frame(DATA, 0, 1, b"x" * 1000),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
async def test_floods_of_frames(router: Router, flood: bytes) -> None:
    """100,000 frames that ask for work or for memory, their answers not read."""
    async with asyncio.timeout(LIMIT_S), Raw(router.port) as raw:
        for _ in range(100):
            if raw.closed:
                break
            try:
                async with asyncio.timeout(1):
                    await raw.send(flood * 1000)
            except TimeoutError:
                break  # it reads no more from us: that is a defence, too
        await raw.until_quiet()


async def test_empty_data_frames(router: Router, worker: RawWorker) -> None:
    """A body of 100,000 empty pieces (CVE-2019-9518) is no way to keep the router busy."""
    async with asyncio.timeout(LIMIT_S), Raw(router.port) as raw:
        path = unique_path()
        await raw.send(raw.head(1, request(path), last=False))
        for _ in range(100):
            await raw.send(frame(DATA, 0, 1) * 1000)
        await raw.until_quiet()
        while not raw.closed:  # it is let go after a second
            await raw.until_quiet()
    assert worker.received(path) == []


async def test_windows_of_nothing(router: Router) -> None:
    """Clients that ask for answers and never take them hold nothing but their own streams."""
    path = unique_path()
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(20):
            raw = await stack.enter_async_context(Raw(router.port))
            await raw.send(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0)))
            for stream in range(1, 41, 2):
                await raw.send(raw.head(stream, request(path)))
        async with asyncio.timeout(LIMIT_S), H2Connection(router.port) as connection:
            response = await connection.ask("POST", unique_path(), body=b"{}")
        assert response.status == 200
