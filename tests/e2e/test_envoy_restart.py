"""Envoy dies: it is started again and takes its configuration from the service."""

from __future__ import annotations

import pytest

from tests.e2e.client import Connection, ask
from tests.e2e.conftest import StartRouter
from tests.e2e.harness import until
from tests.e2e.raw_worker import RawWorker, Received, Stream, unique_path

pytestmark = pytest.mark.envoy

RESTART_LIMIT_S = 20


async def test_killed_envoy_is_started_again(
    start_policy_router: StartRouter, worker: RawWorker
) -> None:
    """Requests work again, picks are made, nothing of the old one stays in flight."""
    router = start_policy_router("headers_only")
    service = router.service_pid

    async def answer(_request: Received, stream: Stream) -> None:
        await stream.open_events()
        await stream.event("first")
        await stream.until_peer_leaves()

    path = worker.on(unique_path(), answer)

    for _ in range(2):
        before = router.envoy_pid
        async with Connection(router.port) as connection:
            await connection.send("GET", path)
            await connection.head()
            await connection.event()
            router.kill_envoy()
            with pytest.raises((EOFError, OSError)):
                await connection.body()
        await until(
            lambda before=before: router.envoy_pid != before, RESTART_LIMIT_S, "started again"
        )
        await router.until_serving()
        decisions = router.decisions()
        for _ in range(5):
            assert (await ask(router.port, "POST", unique_path(), body=b"{}")).status == 200
        assert router.decisions() == decisions + 5
        await router.until_idle()

    assert router.service_pid == service
    assert router.metrics()("envoys_connected") == 1
    router.stop()
