"""Probes and metrics over HTTP."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from extproc.admin import build_admin_app, build_metrics_app
from extproc.discovery.updates import Reset
from extproc.metrics import Metrics
from extproc.readiness import Readiness
from policies.base import Request
from policies.round_robin import RoundRobin
from policies.sticky_least_loaded import StickyLeastLoaded


@pytest.fixture
def readiness(pool):
    return Readiness(pool, lambda: True)


@pytest.fixture
def policy():
    return RoundRobin()


@pytest.fixture
async def probes(readiness, policy):
    async with TestClient(TestServer(build_admin_app(readiness, policy))) as client:
        yield client


@pytest.fixture
async def scrape(pool):
    async with TestClient(
        TestServer(build_metrics_app(Metrics("random", [pool]).registry))
    ) as client:
        yield client


async def ask(client, path):
    async with client.get(path) as response:
        return response.status, response.content_type, await response.text()


async def test_all_probes_are_content_when_ready(probes):
    """200 each; readiness counts the workers."""
    assert await ask(probes, "/liveness") == (200, "text/plain", "OK")
    assert await ask(probes, "/health") == (200, "text/plain", "OK")
    assert await ask(probes, "/readiness") == (
        200,
        "application/json",
        '{"status": "ready", "healthy_workers": 3, "total_workers": 3}',
    )


async def test_service_without_workers_is_alive_but_not_ready(probes, pool):
    """A restart would not help, so liveness stays 200."""
    pool.apply(Reset(()))

    assert (await ask(probes, "/liveness"))[0] == 200
    assert await ask(probes, "/health") == (503, "text/plain", "no healthy workers available")
    assert await ask(probes, "/readiness") == (
        503,
        "application/json",
        '{"status": "not_ready", "reason": "no healthy workers available", "total_workers": 0}',
    )


async def test_service_that_stops_is_not_ready(probes, readiness):
    """Load balancers take it out before it goes."""
    readiness.stopping = True

    assert (await ask(probes, "/readiness"))[0] == 503
    assert (await ask(probes, "/health"))[2] == "shutting down"
    assert (await ask(probes, "/liveness"))[0] == 200


@pytest.mark.parametrize("path", ["/", "/metrics", "/readiness/", "/health/x"])
async def test_nothing_else_is_served_beside_the_probes(probes, path):
    """Metrics have a port of their own."""
    assert (await ask(probes, path))[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
async def test_probes_are_only_read(probes, method):
    """There is nothing to change."""
    async with probes.request(method, "/readiness") as response:
        assert response.status == 405


@pytest.mark.parametrize("policy", [StickyLeastLoaded()], ids=["sticky"])
async def test_session_can_be_finished_once(probes, policy, workers):
    """Answered as vLLM Router does; the second time nobody knows it any more."""
    policy.on_workers(workers)
    policy.on_sent(workers[0], Request("POST", "/", {"x-session-id": "s 1"}), 0.0)
    answers = []
    for _ in range(2):
        async with probes.post("/finish_session", params={"session_id": "s 1"}) as response:
            assert response.status == 200
            answers.append(await response.json())

    assert answers == [
        {"status": "ok", "session_id": "s 1"},
        {"status": "ok", "session_id": "s 1"},
    ]


async def test_policy_without_sessions_knows_none(probes):
    """It is no error to finish a session that was never kept."""
    async with probes.post("/finish_session?session_id=x") as response:
        assert (response.status, (await response.json())["status"]) == (200, "ok")


@pytest.mark.parametrize("query", ["", "?session_id=", "?id=x"])
async def test_session_that_is_not_named_is_a_bad_request(probes, query):
    """In OpenAI's shape, with what to do."""
    async with probes.post(f"/finish_session{query}") as response:
        error = (await response.json())["error"]

    assert response.status == 400
    assert (error["code"], error["type"]) == ("missing_session_id", "invalid_request_error")


async def test_metrics_are_prometheus_text(scrape):
    """They parse, and in-flight is among them."""
    async with scrape.get("/metrics") as response:
        text = await response.text()

    assert response.status == 200
    assert response.headers["Content-Type"].startswith("text/plain; version=")
    found = {family.name for family in text_string_to_metric_families(text)}
    assert "vllm_extproc_worker_in_flight" in found


async def test_metrics_are_open_metrics_when_asked(scrape):
    """As newer Prometheus servers do; the text ends with its mark."""
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    async with scrape.get("/metrics", headers=accept) as response:
        text = await response.text()

    assert response.headers["Content-Type"].startswith(
        "application/openmetrics-text; version=1.0.0"
    )
    assert text.endswith("# EOF\n")
