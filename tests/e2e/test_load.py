"""Many at once, and many in a row."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator

import pytest

from tests.e2e.client import Connection
from tests.e2e.conftest import StartRouter
from tests.e2e.harness import rss_bytes
from tests.e2e.raw_worker import RawWorker, Received, Signal, Stream, unique_path

pytestmark = [pytest.mark.envoy, pytest.mark.slow]

STREAMS = 1500
WARM_UP = 2_000
REQUESTS = 10_000
CLIENTS = 16
GROWTH_BYTES = 10_000_000
USUAL_SOFT_FILE_LIMIT = 1024
"""What a login shell gives to programs; a router that needs more must ask for it."""


@pytest.fixture(autouse=True)
def _many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4 * STREAMS:
        pytest.skip(f"needs {4 * STREAMS} open files; raise the hard limit (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    "policy", ["round_robin", pytest.param("cache_aware", marks=pytest.mark.heavy)]
)
async def test_1500_streams_open_at_once_all_succeed(
    policy: str, start_router: StartRouter, worker: RawWorker
) -> None:
    """All have their first event at the same time, and all end whole.

    Once with a policy that reads no bodies, once with the default one, which does.
    """
    router = start_router(worker.urls, "--policy", policy, soft_file_limit=USUAL_SOFT_FILE_LIMIT)
    go_on = Signal()
    started = 0
    all_started = asyncio.Event()

    async def answer(_request: Received, stream: Stream) -> None:
        await stream.open_events()
        await stream.event("first")
        await go_on.wait()
        await stream.close_events()

    path = worker.on(unique_path(), answer)
    connecting = asyncio.Semaphore(100)

    async def client(number: int) -> tuple[int, str, bytes]:
        nonlocal started
        async with connecting:
            connection = await Connection(router.port).__aenter__()
            await connection.send("POST", path, body=b'{"stream": true, "n": %d}' % number)
            response = await connection.head()
            first = await connection.event() if response.status == 200 else ""
        started += 1
        if started == STREAMS:
            all_started.set()
        await all_started.wait()
        try:
            return response.status, first, await connection.body()
        finally:
            await connection.__aexit__()

    async with asyncio.timeout(50), asyncio.TaskGroup() as tasks:
        clients = [tasks.create_task(client(number)) for number in range(STREAMS)]
        await all_started.wait()
        in_flight = await asyncio.to_thread(router.in_flight)
        go_on.set()

    results = {task.result() for task in clients}
    assert results == {(200, "first", b"data: [DONE]\n\n")}
    assert in_flight == STREAMS
    await router.until_idle()


async def _ask_many(port: int, path: str, count: int) -> list[int]:
    """Send *count* requests over ``CLIENTS`` kept-alive connections; return the statuses."""
    statuses = []
    left = iter(range(count))
    headers = [("Content-Type", "application/json"), ("Authorization", "Bearer sk-e2e")]
    body = b'{"model": "m", "messages": [{"role": "user", "content": "%s"}]}' % (b"x" * 400)

    async def client() -> None:
        async with Connection(port) as connection:
            for _ in left:
                response = await connection.ask("POST", path, headers, body)
                statuses.append(response.status)

    async with asyncio.timeout(50), asyncio.TaskGroup() as tasks:
        for _ in range(CLIENTS):
            tasks.create_task(client())
    return statuses


@pytest.mark.heavy
async def test_nothing_grows_over_10000_requests(
    start_router: StartRouter, worker: RawWorker
) -> None:
    """All succeed, nothing stays in flight, and the service's memory is flat once it is warm.

    With the default policy, which reads bodies and remembers prompts.
    """
    router = start_router(worker.urls)
    path = unique_path()
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"

    async def serve(_request: Received, stream: Stream) -> None:
        worker.received(path).clear()
        await stream.send(answer)

    worker.on(path, serve)
    warm_up = await _ask_many(router.port, path, WARM_UP)
    service = router.service_pid
    before = rss_bytes(service)

    statuses = await _ask_many(router.port, path, REQUESTS)

    grown = rss_bytes(service) - before
    assert warm_up == [200] * WARM_UP
    assert statuses == [200] * REQUESTS
    await router.until_idle()
    assert grown < GROWTH_BYTES, f"the service grew by {grown / 1e6:.1f} MB"
    assert router.decisions() == WARM_UP + REQUESTS
    assert router.service_pid == service
