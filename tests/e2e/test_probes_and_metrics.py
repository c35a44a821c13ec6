"""What operators see: probes through Envoy, and Prometheus metrics that add up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from tests.e2e.client import Connection, ask
from tests.e2e.conftest import StartRouter
from tests.e2e.harness import Router, http_get, until
from tests.e2e.raw_worker import RawWorker, Received, Signal, Stream, respond, unique_path

pytestmark = pytest.mark.envoy

ACCESS_LOG_LIMIT_S = 5
"""Envoy reports finished requests four times a second."""

METRICS = {
    "requests_total",
    "worker_in_flight",
    "in_flight",
    "workers",
    "worker_states",
    "worker_healthy",
    "decisions_total",
    "decision_duration_seconds_count",
    "request_duration_seconds_count",
    "time_to_first_byte_seconds_count",
    "retries_total",
    "client_aborts_total",
    "stream_errors_total",
    "xds_nacks_total",
    "envoys_connected",
}


async def test_probes(any_router: Router) -> None:
    """All three are answered by the router itself, on the port of the clients."""
    liveness = await ask(any_router.port, "GET", "/liveness")
    readiness = await ask(any_router.port, "GET", "/readiness")
    health = await ask(any_router.port, "GET", "/health")

    assert [response.status for response in (liveness, readiness, health)] == [200] * 3
    assert readiness.json() == {"status": "ready", "healthy_workers": 2, "total_workers": 2}


async def test_probes_without_a_worker(workerless_router: Router) -> None:
    """The service lives, but is not ready, and says why."""
    router = workerless_router

    liveness = await ask(router.port, "GET", "/liveness")
    readiness = await ask(router.port, "GET", "/readiness")
    health = await ask(router.port, "GET", "/health")

    assert liveness.status == 200
    assert readiness.status == health.status == 503
    assert readiness.values("content-type")[0].startswith("application/json")
    document = readiness.json()
    assert document["status"] == "not_ready"
    assert document["total_workers"] == 0
    assert "worker" in document["reason"]
    assert document["reason"] in health.body.decode()


async def test_readiness_ends_with_the_drain(
    start_policy_router: StartRouter, worker: RawWorker
) -> None:
    """On SIGTERM the probe on an open connection fails, so that nobody sends more."""
    router = start_policy_router("headers_only")
    go_on = Signal()

    async def answer(_request: Received, stream: Stream) -> None:
        await go_on.wait()
        await stream.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    path = worker.on(unique_path(), answer)

    async with Connection(router.port) as probe, Connection(router.port) as busy:
        assert (await probe.ask("GET", "/readiness")).status == 200
        await busy.send("GET", path)
        await until(lambda: worker.received(path), 5, "a request is under way")
        router.send_signal(15)
        await until(lambda: router.logged("router stopping"), 5, "the router drains")
        readiness = await probe.ask("GET", "/readiness")
        go_on.set()
        assert (await busy.head()).status == 200

    assert readiness.status == 503 or readiness.values("connection") == ["close"]


async def test_metrics_page(any_router: Router) -> None:
    """Prometheus has a port of its own, and clients do not reach it through Envoy."""
    through_envoy = await ask(any_router.port, "GET", "/metrics")
    await until(
        lambda: any_router.metrics()("requests_total"), ACCESS_LOG_LIMIT_S, "a request counted"
    )
    names = {name.removeprefix("vllm_extproc_") for name in any_router.metrics().names()}

    assert names >= METRICS
    assert any_router.metrics()("workers") == 2
    assert any_router.metrics()("envoys_connected") == 1
    assert any_router.metrics()("xds_nacks_total") == 0
    assert "served" in through_envoy.json()  # a worker's path as any other


async def test_counts_are_right_after_known_requests(
    start_policy_router: StartRouter, worker: RawWorker
) -> None:
    """By worker and status: 12 x 200, 4 x 404, 3 clients that left; no probe is counted."""
    router = start_policy_router("headers_only")
    first, second = worker.urls
    missing = worker.on(unique_path(), respond(b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n"))

    async def endless(_request: Received, stream: Stream) -> None:
        await stream.open_events()
        await stream.event("first")
        await stream.until_peer_leaves()

    streaming = worker.on(unique_path(), endless)

    async with Connection(router.port) as connection:
        for _ in range(12):
            assert (await connection.ask("POST", unique_path(), body=b"{}")).status == 200
        for _ in range(4):
            assert (await connection.ask("GET", missing)).status == 404
        for _ in range(5):
            assert (await connection.ask("GET", "/readiness")).status == 200
    for _ in range(3):
        async with Connection(router.port) as connection:
            await connection.send("GET", streaming)
            await connection.head()
            await connection.event()
            connection.abort()
    await until(
        lambda: router.metrics()("requests_total") == 19, ACCESS_LOG_LIMIT_S, "19 requests counted"
    )
    await router.until_idle()
    metrics = router.metrics()

    assert metrics("requests_total", code="404") == 4
    assert metrics("requests_total", worker=first, code="404") == 2
    assert metrics("requests_total", worker=second, code="404") == 2
    assert metrics("requests_total", code="200") == 15
    assert {metrics("requests_total", worker=url) for url in (first, second)} == {9, 10}
    assert metrics("decisions_total", policy="round_robin", result="routed") == 19
    assert metrics("decision_duration_seconds_count") == 19
    assert 0 < metrics("decision_duration_seconds_sum") < 19 * 0.1
    assert metrics("request_duration_seconds_count") >= 16
    assert metrics("time_to_first_byte_seconds_count") == 19
    assert metrics("client_aborts_total") == 3
    assert metrics("retries_total") == 0
    assert metrics("stream_errors_total") == 0


async def test_in_flight_is_counted_per_worker(router: Router, worker: RawWorker) -> None:
    """While five streams are open, three are on one worker and two on the other."""
    go_on = Signal()

    async def answer(_request: Received, stream: Stream) -> None:
        await stream.open_events()
        await stream.event("first")
        await go_on.wait()
        await stream.close_events()

    path = worker.on(unique_path(), answer)
    started = asyncio.Barrier(6)

    async def client() -> None:
        async with Connection(router.port) as connection:
            await connection.send("GET", path)
            await connection.head()
            await connection.event()
            await started.wait()
            await connection.body()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(5):
            tasks.create_task(client())
        await started.wait()
        metrics = router.metrics()
        go_on.set()

    in_flight = [metrics("worker_in_flight", worker=url) for url in worker.urls]
    assert sorted(in_flight) == [2, 3]
    assert metrics("in_flight") == 5
    await router.until_idle()


async def test_retries_are_counted(
    start_router: StartRouter, start_worker: Callable[..., RawWorker]
) -> None:
    """One retry for each request that the worker that resets saw; the other one served them all."""
    failing, worker = start_worker(), start_worker()
    router = start_router([*failing.urls, *worker.urls], "--policy", "round_robin")

    async def reset(_request: Received, stream: Stream) -> None:
        stream.reset()

    path = worker.on(unique_path(), respond(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"))
    failing.on(path, reset)

    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(ask(router.port, "POST", path, body=b"{}")) for _ in range(10)]
    await until(
        lambda: router.metrics()("requests_total") == 10, ACCESS_LOG_LIMIT_S, "10 requests counted"
    )
    metrics = router.metrics()

    assert [task.result().status for task in asking] == [200] * 10
    # The first failures suspend it, so how many of its five turns it really gets is not certain.
    assert 1 <= len(failing.received(path)) <= 5
    assert metrics("retries_total") == len(failing.received(path))
    assert metrics("requests_total", worker=worker.urls[0], code="200") == 10


async def test_failures_are_counted(
    start_router: StartRouter, start_worker: Callable[..., RawWorker]
) -> None:
    """A request that no worker took is there with its status."""
    worker = start_worker()
    router = start_router(worker.urls)
    worker.refuse()

    for _ in range(3):
        assert (await ask(router.port, "GET", unique_path())).status == 503
    await until(
        lambda: router.metrics()("requests_total") == 3, ACCESS_LOG_LIMIT_S, "3 requests counted"
    )

    assert router.metrics()("requests_total", code="503") == 3


async def test_metrics_can_be_turned_off(start_router: StartRouter, worker: RawWorker) -> None:
    """Port 0 means no port."""
    router = start_router(worker.urls, "--prometheus-port", "0", workers=0)

    assert (await ask(router.port, "GET", unique_path())).status == 200
    with pytest.raises(OSError, match="refused"):
        http_get(f"http://127.0.0.1:{router.metrics_port}/metrics")


def test_log_is_json_and_tells_no_secret(start_router: StartRouter, worker: RawWorker) -> None:
    """One entry a line; neither credentials nor prompts are in it, at any level."""
    router = start_router(worker.urls, "--log-level", "debug", "--policy", "round_robin")
    headers = [("Authorization", "Bearer sk-very-secret"), ("Cookie", "id=also-secret")]

    response = asyncio.run(
        ask(router.port, "POST", unique_path(), headers, b'{"prompt": "my private words"}')
    )
    router.stop()

    assert response.status == 200
    for text in ("very-secret", "also-secret", "private words"):
        assert text not in router.stderr
    own = [line for line in router.stderr.splitlines() if line.startswith("{")]
    assert all("event" in json.loads(line) for line in own)
