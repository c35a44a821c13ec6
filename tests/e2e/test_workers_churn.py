"""Workers come and go as fast as an administrator can, under load."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from yarl import URL

from tests.e2e import harness
from tests.e2e.client import Connection
from tests.e2e.conftest import StartRouter
from tests.e2e.harness import Router, rss_bytes
from tests.e2e.workers_support import (
    CHAT_PATH,
    FAST,
    JSON_HEADERS,
    StartSim,
    envoy_endpoints,
    envoy_stats,
    until_ended,
    worker_path,
)

pytestmark = [pytest.mark.envoy, pytest.mark.slow]

WORKERS = 4
STREAMS = 50
OPERATIONS = 500
TOKENS = 16
GROWTH_BYTES = 8_000_000


class Streams:
    """Clients that stream one chat after the other, each checked to its last byte."""

    def __init__(self, port: int) -> None:
        self.served: Counter[str] = Counter()
        self.failures: list[str] = []
        self._port = port
        self._stop = False

    async def client(self, number: int) -> None:
        """Stream until told to stop; a failure ends it."""
        rng = random.Random(number)
        try:
            async with Connection(self._port) as connection:
                while not self._stop:
                    await self._stream(connection, f"{number} {rng.random()}")
        except (OSError, EOFError, AssertionError) as error:
            self.failures.append(repr(error))

    async def _stream(self, connection: Connection, prompt: str) -> None:
        asked = {
            "model": "sim-model",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": TOKENS,
            "stream": True,
        }
        response = await connection.ask("POST", CHAT_PATH, JSON_HEADERS, json.dumps(asked).encode())
        assert response.status == 200, response
        *chunks, done, rest = response.body.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", ""), response
        choices = [json.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks]
        texts = [choice["delta"].get("content") for choice in choices]
        assert len(list(filter(None, texts))) == TOKENS, texts
        assert choices[-1]["finish_reason"] is not None
        self.served[response.values("x-sim-worker")[0]] += 1

    def stop(self) -> None:
        self._stop = True


class Operator:
    """An administrator who changes workers without a pause, but always leaves one that is healthy."""

    def __init__(self, session: aiohttp.ClientSession, router: Router, urls: list[str]) -> None:
        self.done: Counter[str] = Counter()
        self._session = session
        self._base_url = router.base_url
        self._urls = urls
        self._rng = random.Random(4)

    async def work(self, operations: int) -> None:
        """Add, remove, drain and add again."""
        wanted = self.done.total() + operations
        while self.done.total() < wanted:
            await self._operate()

    async def restore(self) -> None:
        """Let all workers be there and healthy."""
        async with asyncio.timeout(20):
            while (states := await self._states()) != dict.fromkeys(self._urls, "healthy"):
                for url in self._urls:
                    if states.get(url) in (None, "draining"):
                        await self._add(url)
                await asyncio.sleep(0.02)

    async def _operate(self) -> None:
        states = await self._states()
        url = self._rng.choice(self._urls)
        match states.get(url):
            case None | "draining":
                await self._add(url)
            case _ if not any(s == "healthy" for other, s in states.items() if other != url):
                await asyncio.sleep(0)  # it is the last one
            case _ if self._rng.random() < 0.5:
                await self._expect(200, "DELETE", worker_path(url))
                self.done["remove"] += 1
            case _:
                timeout_s = self._rng.choice([0.1, 0.5, 30])
                await self._expect(202, "POST", f"{worker_path(url)}/drain?timeout={timeout_s}")
                self.done["drain"] += 1

    async def _add(self, url: str) -> None:
        wait = "?wait=1" if self._rng.random() < 0.3 else ""
        await self._expect(200, "POST", f"/workers{wait}", json={"url": url})
        self.done["add"] += 1

    async def _states(self) -> dict[str, str]:
        document = await self._expect(200, "GET", "/workers")
        return {worker["url"]: worker["state"] for worker in document["workers"]}

    async def _expect(self, status: int, method: str, target: str, **options: Any) -> Any:
        url = URL(f"{self._base_url}{target}", encoded=True)
        async with self._session.request(method, url, **options) as response:
            document = await response.json()
            assert response.status == status, (method, target, response.status, document)
            return document


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session


async def test_500_changes_of_workers_under_50_streams(
    start_sim: StartSim, start_router: StartRouter, session: aiohttp.ClientSession
) -> None:
    """No stream fails or is cut; nothing leaks; Envoy and the service agree at the end."""
    sims = [start_sim("--itl-ms", "50") for _ in range(WORKERS)]
    urls = [sim.url for sim in sims]
    router = start_router(urls, *FAST)
    service, envoy = router.service_pid, router.envoy_pid
    operator = Operator(session, router, urls)
    streams = Streams(router.port)

    async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
        clients = [tasks.create_task(streams.client(number)) for number in range(STREAMS)]
        try:
            await operator.work(OPERATIONS // 2)
            half = rss_bytes(service)
            await operator.work(OPERATIONS // 2)
            grown = rss_bytes(service) - half
            await operator.restore()
        finally:
            streams.stop()

    assert all(client.done() for client in clients)
    assert streams.failures == []
    assert set(streams.served) == {sim.worker_name for sim in sims}
    assert min(operator.done.values()) >= OPERATIONS // 10, operator.done
    await until_ended(router)
    assert grown < GROWTH_BYTES, f"the service grew by {grown / 1e6:.1f} MB"

    metrics = router.metrics()
    assert metrics("xds_nacks_total") == 0
    assert metrics("stream_errors_total") == 0
    assert metrics("worker_states", state="healthy") == metrics("workers") == WORKERS
    assert set((await envoy_stats(router, "update_rejected")).values()) == {0}
    expected = {"default": {url.removeprefix("http://") for url in urls}}
    assert await envoy_endpoints(router) == expected
    assert (router.service_pid, router.envoy_pid) == (service, envoy)
    assert harness.alive(service)
    assert harness.alive(envoy)
    assert router.logged("child ended; starting it again") == []
