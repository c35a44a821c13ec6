"""A connection that a worker is just closing is never used for a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from tests.e2e.client import ask
from tests.e2e.conftest import StartRouter
from tests.e2e.raw_worker import RawWorker, unique_path

pytestmark = [pytest.mark.envoy, pytest.mark.slow]

UVICORN_KEEP_ALIVE_S = 5.0
"""After so many idle seconds uvicorn, and so vLLM, closes a connection."""

WORKERS = 45
FIRST_GAP_S, LAST_GAP_S = 3.8, 5.3


async def test_requests_after_any_pause_succeed_at_first_try(
    start_router: StartRouter, start_worker: Callable[..., RawWorker]
) -> None:
    """The second request on each connection comes 3.8 to 5.3 s after the first, 34 ms apart.

    Each worker has one connection and gets one request at each end of its own pause, so every pause
    around the 5 s of the worker is tried in the time of one.
    """
    worker = start_worker(WORKERS, keep_alive_s=UVICORN_KEEP_ALIVE_S)
    router = start_router(worker.urls, "--policy", "round_robin")
    path = unique_path()
    step_s = (LAST_GAP_S - FIRST_GAP_S) / WORKERS
    statuses = []

    async def request(wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        response = await ask(router.port, "POST", path, body=b"{}")
        statuses.append(response.status)

    for _ in range(WORKERS):
        await request(0)
    first_round = [received.port for received in worker.received(path)]
    begun = time.monotonic()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        for number in range(WORKERS):
            tasks.create_task(request(FIRST_GAP_S + number * step_s))
    took = time.monotonic() - begun
    second_round = [received.port for received in worker.received(path)][WORKERS:]

    assert first_round == worker.ports
    assert sorted(second_round) == sorted(worker.ports), "each served once: nothing was retried"
    assert statuses == [200] * (2 * WORKERS)
    assert router.metrics()("retries_total") == 0
    assert took < LAST_GAP_S + 2
