"""Nothing between worker and client waits for more before it passes on what it has."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e import harness
from tests.e2e.client import Connection
from tests.e2e.conftest import StartRouter
from tests.e2e.harness import Router
from tests.e2e.raw_worker import RawWorker, Received, Signal, Stream, unique_path

pytestmark = pytest.mark.envoy

EVENTS = 5
LONG_STREAM_S = 62


async def test_client_has_each_event_before_the_worker_sends_the_next(
    any_router: Router, worker: RawWorker
) -> None:
    """The worker sends event k + 1 only when the client has confirmed event k."""
    confirmed = [Signal() for _ in range(EVENTS)]

    async def answer(_request: Received, stream: Stream) -> None:
        await stream.open_events()
        for number, signal in enumerate(confirmed):
            await stream.event(f"token {number}")
            await signal.wait(limit_s=10)
        await stream.close_events()

    path = worker.on(unique_path(), answer)

    async with Connection(any_router.port) as connection:
        await connection.send("POST", path, body=b'{"stream": true}')
        await connection.head()
        received = []
        for signal in confirmed:
            received.append(await connection.event())
            signal.set()
        rest = await connection.body()

    assert received == [f"token {number}" for number in range(EVENTS)]
    assert rest == b"data: [DONE]\n\n"


async def test_client_has_the_head_before_the_first_event(
    any_router: Router, worker: RawWorker
) -> None:
    """A client sees that its request was taken while the worker still reads the prompt."""
    seen = Signal()

    async def answer(_request: Received, stream: Stream) -> None:
        await stream.open_events()
        await seen.wait(limit_s=10)
        await stream.close_events()

    path = worker.on(unique_path(), answer)

    async with Connection(any_router.port) as connection:
        await connection.send("POST", path, body=b"{}")
        response = await connection.head()
        seen.set()
        await connection.body()

    assert response.status == 200


async def test_parts_of_events_are_passed_on_too(router: Router, worker: RawWorker) -> None:
    """Even half an event does not wait for its other half: bytes are not understood."""
    seen = Signal()

    async def answer(_request: Received, stream: Stream) -> None:
        await stream.open_events()
        await stream.send(b"7\r\ndata: h\r\n")
        await seen.wait(limit_s=10)
        await stream.send(b"6\r\nalf\n\n.\r\n0\r\n\r\n")

    path = worker.on(unique_path(), answer)

    async with Connection(router.port) as connection:
        await connection.send("GET", path)
        await connection.head()
        first = await connection.piece()
        seen.set()
        rest = await connection.body()

    assert first == b"data: h"
    assert rest == b"alf\n\n."


async def test_worker_has_the_upload_before_it_is_complete(
    router: Router, worker: RawWorker
) -> None:
    """With a policy that reads no body, uploads are not held back either."""
    # The worker answers at the head of the request, the client ends its body only then.
    async with Connection(router.port) as connection:
        path = unique_path()
        await connection.send_raw(
            f"POST {path} HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        await connection.send_raw(b"5\r\nfirst\r\n")
        await harness.until(
            lambda: worker.reading(path) == 5, 10, "the first piece is with the worker"
        )
        await connection.send_raw(b"4\r\nlast\r\n0\r\n\r\n")
        response = await connection.head()

    assert response.status == 200
    assert worker.only(path).body == b"firstlast"
    assert worker.begun(path) == 1


async def test_slow_reader_slows_the_worker_only(router: Router, worker: RawWorker) -> None:
    """A client that does not read fills no memory: the worker is made to wait."""
    sent = 0
    block = b"%x\r\n%s\r\n" % (1 << 20, b"x" * (1 << 20))

    async def answer(_request: Received, stream: Stream) -> None:
        nonlocal sent
        await stream.open_events()
        for _ in range(256):
            await stream.send(block)
            sent += 1
        await stream.send(b"0\r\n\r\n")

    path = worker.on(unique_path(), answer)

    async with Connection(router.port) as connection:
        await connection.send("GET", path)
        await connection.head()
        await connection.piece()
        await asyncio.sleep(1)
        held = sent
        connection.abort()

    assert held < 64, f"{held} MB were taken for a client that read 1"


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.timeout(150)
async def test_stream_of_a_minute_ends_well(start_router: StartRouter, worker: RawWorker) -> None:
    """Envoy outlives its end: the lengths of real generations are minutes.

    With ``ext_proc_graceful_grpc_close`` Envoy 1.40.0 crashes when a stream ends that lasted 54 s (see
    ADR 2).
    """
    router = start_router(worker.urls, "--policy", "round_robin")
    envoy = router.envoy_pid

    async def answer(_request: Received, stream: Stream) -> None:
        await stream.open_events()
        for number in range(LONG_STREAM_S // 2):
            await stream.event(f"token {number}")
            await asyncio.sleep(2)
        await stream.close_events()

    path = worker.on(unique_path(), answer)

    async def client() -> bytes:
        async with Connection(router.port) as connection:
            await connection.send("POST", path, body=b'{"stream": true}')
            await connection.head()
            for _ in range(LONG_STREAM_S // 2):
                await connection.event()
            return await connection.body()

    rests = await asyncio.gather(*(client() for _ in range(3)))

    assert rests == [b"data: [DONE]\n\n"] * 3
    await asyncio.sleep(1)  # the crash came right after the end
    assert router.envoy_pid == envoy
    assert router.in_flight() == 0
