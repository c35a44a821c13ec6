"""What the clients of the scenarios call complete, cut and failed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from tests.cluster.load import Kind, Load
from tests.e2e.harness import until

WAIT_S = 10
Serve = Callable[[Callable[[web.Request], Awaitable[web.StreamResponse]]], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Return a function that serves a handler and returns its URL."""
    runners = []

    async def start(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> str:
        runner = web.ServerRunner(web.Server(handler))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        runners.append(runner)
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


async def results(url: str, kind: Kind) -> Load:
    """Run clients until one request has ended."""
    load = Load(url, [kind])
    async with load.running():
        await until(lambda: load.results, WAIT_S, "a request has ended")
    return load


@pytest.mark.parametrize("keep_alive", [True, False])
async def test_whole_answers_are_complete_and_tell_the_worker(serve: Serve, keep_alive):
    """With and without a stream."""

    async def handler(request: web.Request) -> web.StreamResponse:
        stream = (await request.json())["stream"]
        text = "data: {}\n\ndata: [DONE]\n\n" if stream else "{}"
        return web.Response(text=text, headers={"x-sim-worker": "pod-1"})

    url = await serve(handler)
    for stream in (True, False):
        kind = Kind(clients=1, tokens=1, stream=stream, keep_alive=keep_alive)
        first = (await results(url, kind)).results[0]
        assert (first.complete, first.failed, first.cut) == (True, False, False)
        assert first.worker == "pod-1"
        assert first.started < first.ended


@pytest.mark.parametrize("reset", [True, False])
async def test_stream_without_its_end_is_cut(serve: Serve, reset):
    """Whether the connection breaks, or the answer ends too early."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        if reset:
            assert request.transport is not None
            request.transport.abort()
        return response

    first = (await results(await serve(handler), Kind(clients=1, tokens=1))).results[0]

    assert (first.complete, first.failed, first.cut) == (False, False, True)
    assert first.error


async def test_errors_and_refused_connections_are_failures(serve: Serve):
    """With what was said."""

    async def handler(_request: web.Request) -> web.StreamResponse:
        return web.Response(status=503, text="no_healthy_worker")

    refused = Kind(clients=1, tokens=1)
    first = (await results(await serve(handler), refused)).results[0]
    nobody = (await results("http://127.0.0.1:9", refused)).results[0]

    assert (first.complete, first.failed, first.cut) == (False, True, False)
    assert "no_healthy_worker" in first.error
    assert (nobody.failed, nobody.status) == (True, 0)


async def test_end_of_the_load_waits_for_the_answers_under_way(serve: Serve):
    """They are counted too."""
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def handler(_request: web.Request) -> web.StreamResponse:
        arrived.set()
        await go_on.wait()
        return web.Response(text="data: [DONE]\n\n")

    load = Load(await serve(handler), [Kind(clients=1, tokens=1)])
    async with load.running():
        await asyncio.wait_for(arrived.wait(), WAIT_S)
        asyncio.get_running_loop().call_later(0.05, go_on.set)

    assert [result.complete for result in load.results] == [True]
