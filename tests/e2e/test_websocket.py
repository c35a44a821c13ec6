"""WebSockets pass through the router (vLLM's ``/v1/realtime``)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import websockets.exceptions
from websockets.asyncio.client import ClientConnection, connect

from tests.e2e.client import ask
from tests.e2e.conftest import BODY_FLAGS
from tests.e2e.harness import Router, Sim

pytestmark = pytest.mark.envoy

LIMIT_S = 10


@pytest.fixture(scope="module", params=["default", "buffered", "full_duplex"])
def realtime_router(
    request: pytest.FixtureRequest,
    sims: list[Sim],
    logs: Path,
    plugin_env: dict[str, str],
) -> Iterator[Router]:
    """Give a router before simulated workers; policies that read bodies must not wait for one."""
    if request.param == "default":
        yield request.getfixturevalue("sim_router")
        return
    router = Router([sim.url for sim in sims], logs, *BODY_FLAGS[request.param], env=plugin_env)
    try:
        yield router.until_ready()
        router.stop()
    finally:
        router.end()


def _connect(router: Router, **options: object) -> connect:
    url = f"ws://127.0.0.1:{router.port}/v1/realtime?model=sim-model"
    return connect(url, proxy=None, open_timeout=LIMIT_S, close_timeout=LIMIT_S, **options)


async def _echo(socket: ClientConnection, message: str | bytes) -> str | bytes:
    async with asyncio.timeout(LIMIT_S):
        await socket.send(message)
        return await socket.recv()


async def test_messages_flow_both_ways(realtime_router: Router) -> None:
    """Text, bytes and a message of 1 MB come back as they were."""
    async with _connect(realtime_router, max_size=None) as socket:
        for message in ("hello", "é😀", b"\x00\xff", b"x" * 1_000_000, ""):
            assert await _echo(socket, message) == message


async def test_open_socket_counts_as_in_flight(realtime_router: Router) -> None:
    """It is load on the worker for as long as it is open."""
    async with _connect(realtime_router) as socket:
        await _echo(socket, "hello")
        while_open = realtime_router.in_flight()

    await realtime_router.until_idle(2)
    assert while_open == 1


async def test_aborted_socket_is_not_in_flight(realtime_router: Router) -> None:
    """A client that vanishes frees the worker."""
    async with _connect(realtime_router) as socket:
        await _echo(socket, "hello")
        socket.transport.abort()

    await realtime_router.until_idle(2)


async def test_many_sockets_at_once(realtime_router: Router) -> None:
    """They do not wait for each other."""

    async def one(number: int) -> str | bytes:
        async with _connect(realtime_router) as socket:
            await _echo(socket, "first")
            return await _echo(socket, f"socket {number}")

    async with asyncio.timeout(20):
        answers = await asyncio.gather(*(one(number) for number in range(40)))

    assert answers == [f"socket {number}" for number in range(40)]
    await realtime_router.until_idle(2)


async def test_subprotocol_is_negotiated_with_the_worker(realtime_router: Router) -> None:
    """OpenAI's clients ask for ``realtime`` and carry their key in a protocol name."""
    async with _connect(
        realtime_router, subprotocols=["realtime", "openai-insecure-api-key.sk-1"]
    ) as socket:
        assert socket.subprotocol in ("realtime", "openai-insecure-api-key.sk-1")
        assert await _echo(socket, "hello") == "hello"


async def test_refused_upgrade_is_the_workers_answer(realtime_router: Router) -> None:
    """A path that is no WebSocket does not hang."""
    url = f"ws://127.0.0.1:{realtime_router.port}/v1/no-socket"
    with pytest.raises(websockets.exceptions.InvalidStatus) as caught:
        async with connect(url, proxy=None, open_timeout=LIMIT_S):
            pass

    assert caught.value.response.status_code == 404
    after = await ask(realtime_router.port, "GET", "/version")
    assert after.status == 200


async def test_upgrade_without_a_worker_is_refused(workerless_router: Router) -> None:
    """It gets the same 503 as any request."""
    with pytest.raises(websockets.exceptions.InvalidStatus) as caught:
        async with _connect(workerless_router):
            pass

    assert caught.value.response.status_code == 503
    assert b"no_worker_available" in caught.value.response.body
