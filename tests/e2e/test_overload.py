"""Clients that take all they can: memory and connections stay bounded, and others are served.

Many large uploads, requests that never end, connections that say nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import ssl
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

import pytest

from tests.e2e.certificates import Maker
from tests.e2e.client import Connection, Response, ask, openai_error
from tests.e2e.conftest import StartRouter
from tests.e2e.h2_client import H2Connection
from tests.e2e.harness import Router, rss_bytes
from tests.e2e.raw_worker import RawWorker, unique_path
from tests.e2e.workers_support import ROUND_ROBIN, STREAM_BODY, STREAM_PATH, hold_streams

pytestmark = [pytest.mark.envoy, pytest.mark.slow, pytest.mark.heavy]

MB = 2**20
LIMIT_BYTES = 200 * MB
SLACK_BYTES = 140 * MB
"""What Envoy takes besides its heap, about 70 MB, and what comes in before it notices."""

UPLOADS = 40
UPLOAD_BYTES = 20 * MB
CHAT_PATH = "/v1/chat/completions"

HALF_OPEN = 10_000
NEEDED_FILES = 12_000
IDLE_CLIENT_BYTES = 40_000
"""Envoy's memory for a client that says nothing, about twice what was measured."""


class Watch:
    """Follows the memory of an Envoy."""

    def __init__(self, router: Router) -> None:
        self.peak = 0
        self._pid = router.envoy_pid
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._done.wait(0.02):
            with contextlib.suppress(OSError):
                self.peak = max(self.peak, rss_bytes(self._pid))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._done.set()
        self._thread.join(5)


@contextlib.contextmanager
def many_files() -> Iterator[int]:
    """Raise the limit of open files of this process; yield it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_files(router: Router) -> int:
    return len(list(Path(f"/proc/{router.envoy_pid}/fd").iterdir()))


async def upload_h1(port: int) -> str:
    """Send most of a large request; return what became of it within some seconds."""
    async with Connection(port) as connection:
        head = f"POST {CHAT_PATH} HTTP/1.1\r\nHost: a\r\nContent-Length: {UPLOAD_BYTES}\r\n\r\n"
        await connection.send_raw(head.encode())
        with contextlib.suppress(OSError):  # an answer may be there all the same
            for _ in range(UPLOAD_BYTES // MB - 1):
                await connection.send_raw(bytes(MB))
        try:
            async with asyncio.timeout(3):
                response = await connection.head()
                response.body = await connection.body()
        except TimeoutError:
            return "held"
        except (EOFError, OSError):
            return "cut"
        assert response.status == 503
        assert openai_error(response)["code"] == "router_overloaded"
        return "refused"


async def upload_h2(port: int) -> str:
    """Do the same over HTTP/2."""
    async with H2Connection(port) as h2:
        headers = [("content-length", str(UPLOAD_BYTES))]
        body = bytes(UPLOAD_BYTES - MB)
        try:
            async with asyncio.timeout(10):
                stream = await h2.send("POST", CHAT_PATH, headers, body, last=False)
                response = await stream.head()
        except TimeoutError:
            return "held"
        except Exception:  # noqa: BLE001  the stream was reset: h2 says so in several ways
            return "cut"
        except AssertionError:
            return "cut"
        assert response.status == 503
        return "refused"


@pytest.mark.parametrize("upload", [upload_h1, upload_h2], ids=["HTTP/1.1", "HTTP/2"])
async def test_uploads_are_cut_before_memory_ends(
    upload: Callable[[int], Awaitable[str]], start_router: StartRouter, worker: RawWorker
) -> None:
    """The largest go; a stream of events and requests afterwards do not notice."""
    router = start_router(
        worker.urls, "--envoy-max-memory", str(LIMIT_BYTES), "--envoy-concurrency", "2"
    )
    go_on = hold_streams(worker)
    async with Connection(router.port) as streaming:
        await streaming.send("GET", STREAM_PATH)
        await streaming.head()
        first = await streaming.event()

        with Watch(router) as envoy:
            ends = Counter(await asyncio.gather(*(upload(router.port) for _ in range(UPLOADS))))
        path = unique_path()
        answers = [await ask(router.port, "POST", path, body=b"{}") for _ in range(10)]
        go_on.set()
        rest = await streaming.body()

    # Over HTTP/2 Envoy also makes clients wait.
    assert ends["cut"] + ends["refused"] >= UPLOADS / 5, ends
    assert envoy.peak < LIMIT_BYTES + SLACK_BYTES, f"{envoy.peak / MB:.0f} MB"
    assert [answer.status for answer in answers] == [200] * 10
    assert first
    assert STREAM_BODY.endswith(rest)
    assert not router.logged("child ended; starting it again")
    await router.until_idle()


async def half_open(
    port: int, count: int, stack: contextlib.AsyncExitStack, said: bytes
) -> list[Connection]:
    """Open *count* connections that say *said* and no more."""
    places = asyncio.Semaphore(100)

    async def one() -> Connection | None:
        async with places:
            try:
                connection = await stack.enter_async_context(Connection(port))
                await connection.send_raw(said)
            except OSError:
                return None
            return connection

    opened = await asyncio.gather(*(one() for _ in range(count)))
    return [connection for connection in opened if connection is not None]


@pytest.mark.parametrize(
    ("said", "tls"),
    [
        (b"", False),
        (b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-Slow: ", False),
        (b"", True),
    ],
    ids=["nothing", "half a request", "half a handshake"],
)
async def test_half_open_connections(
    said: bytes, tls: bool, start_router: StartRouter, worker: RawWorker, tmp_path: Path
) -> None:
    """Ten thousand of them: others are served, memory stays bounded, who began and does not go on is closed."""
    with many_files() as files:
        if files < NEEDED_FILES:
            pytest.skip(f"needs {NEEDED_FILES} open files; raise the hard limit (ulimit -Hn)")
        flags: Sequence[str] = ()
        context = None
        if tls:
            made = Maker(tmp_path).make("a", "-addext", "subjectAltName=IP:127.0.0.1")
            flags = ("--tls-cert", str(made.cert), "--tls-key", str(made.key))
            context = ssl.create_default_context(cafile=str(made.cert))
        router = start_router(worker.urls, *ROUND_ROBIN, *flags)
        before = rss_bytes(router.envoy_pid)
        path = unique_path()

        async with contextlib.AsyncExitStack() as stack:
            with Watch(router) as envoy:
                opened = await half_open(router.port, HALF_OPEN, stack, said)
                statuses = []
                for _ in range(20):
                    async with Connection(router.port, tls=context) as connection:
                        statuses.append((await connection.ask("GET", path)).status)
            if said or tls:
                async with asyncio.timeout(30):
                    await asyncio.gather(*(_until_closed(connection) for connection in opened))
            for connection in opened:
                connection.abort()

    assert len(opened) == HALF_OPEN
    assert statuses == [200] * 20
    assert envoy.peak - before < HALF_OPEN * IDLE_CLIENT_BYTES, f"{envoy.peak / MB:.0f} MB"


async def _until_closed(connection: Connection) -> None:
    with contextlib.suppress(OSError):
        while await connection.reader.read(4096):
            pass


async def test_slow_requests_are_ended(router: Router) -> None:
    """Headers that come byte by byte get 408 after some seconds, and others are served meanwhile."""
    path = unique_path()
    started = time.monotonic()

    async def slow() -> tuple[int, float]:
        async with Connection(router.port) as connection:
            await connection.send_raw(b"GET / HTTP/1.1\r\nHost: a\r\nX: ")
            reading = asyncio.create_task(connection.head())
            while not reading.done():
                with contextlib.suppress(OSError):
                    await connection.send_raw(b"x")
                await asyncio.wait([reading], timeout=0.5)
            return (await reading).status, time.monotonic() - started

    ends = await asyncio.gather(
        *(slow() for _ in range(50)), *(ask(router.port, "GET", path) for _ in range(10))
    )

    for end in ends[:50]:
        assert isinstance(end, tuple)
        assert end[0] == 408
        assert 8 < end[1] < 20
    assert {answer.status for answer in ends[50:] if isinstance(answer, Response)} == {200}


async def test_no_more_clients_than_files_allow(
    start_router: StartRouter, worker: RawWorker
) -> None:
    """Of a router with few open files: clients beyond are turned away, those that came first are served."""
    router = start_router(worker.urls, *ROUND_ROBIN, hard_file_limit=600)
    path = unique_path()

    async with contextlib.AsyncExitStack() as stack:
        opened = await half_open(router.port, 700, stack, b"")
        await asyncio.sleep(0.5)
        served = await asyncio.gather(*(connection.ask("GET", path) for connection in opened[:50]))
        files = open_files(router)
        for connection in opened:
            connection.abort()
    await router.until_serving()

    assert [answer.status for answer in served] == [200] * 50
    assert files < 600
    assert (await ask(router.port, "GET", path)).status == 200
