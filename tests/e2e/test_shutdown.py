"""The end of a router: streams finish within the grace time, nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable

import pytest

from tests.e2e import harness
from tests.e2e.client import Connection, ask
from tests.e2e.conftest import StartRouter
from tests.e2e.h2_client import H2Connection
from tests.e2e.harness import Router, session, until
from tests.e2e.raw_worker import RawWorker, Received, Signal, Stream, unique_path

pytestmark = pytest.mark.envoy

SIGNALS = [signal.SIGTERM, signal.SIGINT]
AT_ONCE_S = 4.0
"""Ending two processes takes about half a second on an idle machine."""


def refuses(port: int) -> bool:
    """Tell whether nobody accepts connections on *port*."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) != 0


def slow_stream(worker: RawWorker, go_on: Signal) -> str:
    """Let the worker stream until *go_on*, or until its peer leaves; return the path."""

    async def answer(_request: Received, stream: Stream) -> None:
        await stream.open_events()
        await stream.event("first")
        await go_on.wait()
        await stream.event("last")
        await stream.close_events()

    return worker.on(unique_path(), answer)


async def ended(router: Router, limit_s: float) -> int:
    """Wait for the end of *router*; return its exit status."""
    await until(lambda: not router.running, limit_s, "the router ends")
    return router.wait(0)


@pytest.mark.parametrize("number", SIGNALS)
async def test_stream_under_way_finishes(
    number: int, start_policy_router: StartRouter, worker: RawWorker
) -> None:
    """New connections are refused, the open stream ends whole, then the router ends with 0."""
    router = start_policy_router("headers_only")
    go_on = Signal()
    path = slow_stream(worker, go_on)

    async with Connection(router.port) as connection, H2Connection(router.port) as h2:
        await connection.send("POST", path, body=b"{}")
        await connection.head()
        first = await connection.event()
        stream = await h2.send("POST", path, body=b"{}")
        await stream.head()
        await stream.piece()
        router.send_signal(number)
        await until(lambda: refuses(router.port), 5, "new connections are refused")
        still_up = router.running
        go_on.set()
        rest = await connection.body()
        h2_rest = b""
        while piece := await stream.piece():
            h2_rest += piece
    status = await ended(router, 10)

    assert first == "first"
    assert still_up
    assert rest == h2_rest == b"data: last\n\ndata: [DONE]\n\n"
    assert status == 0
    router.check_nothing_left()


async def test_request_without_an_answer_yet_finishes(
    start_policy_router: StartRouter, worker: RawWorker
) -> None:
    """A request that a worker thinks about counts as under way, and is told to be the last."""
    router = start_policy_router("headers_only")
    go_on = Signal()

    async def answer(_request: Received, stream: Stream) -> None:
        await go_on.wait()
        await stream.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    path = worker.on(unique_path(), answer)

    async with Connection(router.port) as connection:
        await connection.send("POST", path, body=b"{}")
        await until(lambda: worker.received(path), 5, "the request is with the worker")
        router.send_signal(signal.SIGTERM)
        await until(lambda: refuses(router.port), 5, "new connections are refused")
        go_on.set()
        response = await connection.head()
        response.body = await connection.body()
    status = await ended(router, 10)

    assert response.body == b"ok"
    assert response.values("connection") == ["close"]
    assert status == 0


async def test_stream_longer_than_the_grace_time_is_cut(
    start_policy_router: StartRouter, worker: RawWorker
) -> None:
    """The grace time is kept, not less and not much more; the exit is clean all the same."""
    router = start_policy_router("headers_only", "--shutdown-grace-s", "1")
    go_on = Signal()
    path = slow_stream(worker, go_on)

    async with Connection(router.port) as connection:
        await connection.send("POST", path, body=b"{}")
        await connection.head()
        await connection.event()
        started = time.monotonic()
        router.send_signal(signal.SIGTERM)
        with pytest.raises((EOFError, OSError)):
            await connection.body()
        took = time.monotonic() - started
    status = await ended(router, 10)
    go_on.set()

    assert 0.9 < took < 1 + AT_ONCE_S
    assert status == 0


async def test_open_socket_is_cut_at_the_end_of_the_grace_time(
    start_policy_router: StartRouter, start_sim: Callable[..., harness.Sim]
) -> None:
    """A WebSocket may stay open for ever; the router does not."""
    router = start_policy_router("headers_only", "--shutdown-grace-s", "1", urls=[start_sim().url])
    request = (
        "GET /v1/realtime HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )

    async with Connection(router.port) as connection:
        await connection.send_raw(request.encode())
        response = await connection.head()
        started = time.monotonic()
        router.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            await connection.reader.read()
        took = time.monotonic() - started
    status = await ended(router, 10)

    assert response.status == 101
    assert 0.9 < took < 1 + AT_ONCE_S
    assert status == 0


async def test_idle_connections_do_not_delay_the_end(start_policy_router: StartRouter) -> None:
    """Kept-alive connections without a request are just closed, grace time or not."""
    router = start_policy_router("headers_only", "--shutdown-grace-s", "60")
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(20):
            connection = await stack.enter_async_context(Connection(router.port))
            assert (await connection.ask("GET", unique_path())).status == 200
        h2 = await stack.enter_async_context(H2Connection(router.port))
        assert (await h2.ask("GET", unique_path())).status == 200

        started = time.monotonic()
        router.send_signal(signal.SIGINT)
        status = await ended(router, 15)
        took = time.monotonic() - started

    assert status == 0
    assert took < AT_ONCE_S


async def test_readiness_fails_before_connections_are_refused(
    start_policy_router: StartRouter, worker: RawWorker
) -> None:
    """A load balancer has the delay to notice; requests that it still sends are served."""
    delay_s = 1.5
    router = start_policy_router("headers_only", "--shutdown-delay-s", str(delay_s))
    go_on = Signal()
    path = slow_stream(worker, go_on)

    async with Connection(router.port) as connection, Connection(router.port) as kept:
        await connection.send("POST", path, body=b"{}")
        await connection.head()
        assert (await kept.ask("GET", "/readiness")).status == 200
        started = time.monotonic()
        router.send_signal(signal.SIGTERM)
        await until(
            lambda: harness.http_get(f"{router.base_url}/readiness")[0] == 503, 1, "not ready"
        )
        not_ready_after = time.monotonic() - started
        alive = await kept.ask("GET", "/liveness")
        served = await kept.ask("GET", unique_path())
        fresh = await ask(router.port, "GET", unique_path())
        await until(lambda: refuses(router.port), delay_s + AT_ONCE_S, "connections are refused")
        refused_after = time.monotonic() - started
        go_on.set()
        body = await connection.body()
    status = await ended(router, 10)

    assert not_ready_after < delay_s < refused_after
    assert [alive.status, served.status, fresh.status] == [200, 200, 200]
    assert body.endswith(b"\n\n")
    assert status == 0


@pytest.mark.parametrize("delay_s", ["0", "0.5"])
async def test_requests_that_wait_are_served(
    start_policy_router: StartRouter, worker: RawWorker, delay_s: str
) -> None:
    """One after the other, as if nothing had happened."""
    router = start_policy_router(
        "headers_only", "--max-concurrent-requests", "1", "--shutdown-delay-s", delay_s
    )
    go_on = Signal()
    path = slow_stream(worker, go_on)
    asked = [asyncio.create_task(ask(router.port, "GET", path)) for _ in range(4)]
    await until(lambda: router.metrics()("queue_waiting") == 3, 5, "three wait")

    router.send_signal(signal.SIGTERM)
    await until(lambda: refuses(router.port), 0.5 + AT_ONCE_S, "connections are refused")
    go_on.set()

    assert [response.status for response in await asyncio.gather(*asked)] == [200] * 4
    assert await ended(router, 10) == 0


async def test_second_signal_skips_the_delay(start_policy_router: StartRouter) -> None:
    """Whoever asks twice is in a hurry."""
    router = start_policy_router("headers_only", "--shutdown-delay-s", "60")
    router.send_signal(signal.SIGTERM)
    await until(lambda: router.logged("router stopping"), 5, "the router stops")
    started = time.monotonic()
    router.send_signal(signal.SIGTERM)

    assert await ended(router, 15) == 0
    assert time.monotonic() - started < AT_ONCE_S


async def test_second_signal_ends_it_at_once(
    start_policy_router: StartRouter, worker: RawWorker
) -> None:
    """Whoever asks twice does not want to wait for streams."""
    router = start_policy_router("headers_only", "--shutdown-grace-s", "60")
    go_on = Signal()
    path = slow_stream(worker, go_on)

    async with Connection(router.port) as connection:
        await connection.send("POST", path, body=b"{}")
        await connection.head()
        await connection.event()
        router.send_signal(signal.SIGTERM)
        await until(lambda: router.logged("router stopping"), 5, "the router drains")
        await asyncio.sleep(0.2)
        still_up = router.running
        started = time.monotonic()
        router.send_signal(signal.SIGTERM)
        status = await ended(router, 15)
        took = time.monotonic() - started
    go_on.set()

    assert still_up
    assert status == 0
    assert took < AT_ONCE_S
    router.check_nothing_left()


async def test_signal_while_starting(start_policy_router: StartRouter) -> None:
    """A router that is not up yet ends as cleanly."""
    router = start_policy_router("headers_only", ready=False)
    await until(lambda: router.logged("service ready"), 30, "the service is up")

    router.stop(limit_s=15)


async def test_signal_while_the_service_hangs(start_policy_router: StartRouter) -> None:
    """A child that does not react is made to end: 5 s are given to it."""
    router = start_policy_router("headers_only")

    with router.service_stopped():
        router.send_signal(signal.SIGTERM)
        status = await ended(router, 15)

    assert status == 0
    router.check_nothing_left()


async def test_signal_while_the_service_is_down(start_policy_router: StartRouter) -> None:
    """No child is started again by a router that is ending."""
    router = start_policy_router("headers_only")

    router.kill_service()
    await until(lambda: router.logged("child ended; starting it again"), 5, "death noticed")
    router.send_signal(signal.SIGTERM)
    status = await ended(router, 15)

    assert status == 0
    await asyncio.sleep(0.2)
    router.check_nothing_left()


async def test_killed_launcher_takes_its_children_along(
    start_policy_router: StartRouter, worker: RawWorker
) -> None:
    """Without its supervisor no router serves on, even with a stream under way."""
    router = start_policy_router("headers_only")
    family = session(router.pid)
    go_on = Signal()
    path = slow_stream(worker, go_on)

    async with Connection(router.port) as connection:
        await connection.send("POST", path, body=b"{}")
        await connection.head()
        router.send_signal(signal.SIGKILL)
        router.wait(5)
        await until(lambda: not session(router.pid), 10, "the children end")
    go_on.set()

    assert len(family) == 3
    assert refuses(router.port)


def test_same_ports_at_once_again(start_policy_router: StartRouter) -> None:
    """A router can be started again on its ports right after it has ended."""
    router = start_policy_router("headers_only")
    assert asyncio.run(_one(router.port)) == 200
    router.stop()

    again = start_policy_router("headers_only", ports=(router.port, router.metrics_port))

    assert asyncio.run(_one(router.port)) == 200
    assert again.running


async def _one(port: int) -> int:
    return (await ask(port, "GET", unique_path())).status
