"""When the launcher says that the router is ready."""

from __future__ import annotations

import asyncio
import json
import socket
import types

import pytest
from structlog.testing import capture_logs

from extproc import launcher
from extproc.config import Config
from extproc.errors import ConfigError
from extproc.launcher import MAX_READINESS_POLL_S, Launcher

CHILDREN = {"service": types.SimpleNamespace(pid=7), "envoy": types.SimpleNamespace(pid=8)}
URL = "http://127.0.0.1:30000"
READY = (200, b'{"status": "ready", "healthy_workers": 2, "total_workers": 3}')


def not_ready(total):
    return 503, json.dumps({"status": "not_ready", "reason": "x", "total_workers": total}).encode()


class Service:
    """A service whose answers to readiness probes the test sets."""

    def __init__(self):
        self.answers = {0.0: None}
        """By the time from which it holds; None for no answer."""
        self.asked = []

    async def ask(self, address, method, path, *, timeout_s):
        now = asyncio.get_running_loop().time()
        self.asked.append(now)
        assert (str(address), method, path) == ("127.0.0.1:9003", "GET", "/readiness")
        assert timeout_s <= 5
        return self.answers[max(at for at in self.answers if at <= now)]


@pytest.fixture
def service(monkeypatch):
    """Make a service that does not answer yet."""
    service = Service()
    monkeypatch.setattr(launcher, "ask", service.ask)
    monkeypatch.setattr(launcher, "find_envoy", lambda _: None)
    return service


async def announce(**settings):
    """Let the launcher announce; return the time that took and what it logged."""
    told = []
    with capture_logs() as entries:
        await Launcher(Config(**settings))._announce(CHILDREN, lambda: told.append(1))
    assert told == [1]
    return asyncio.get_running_loop().time(), entries


def ready(count):
    return {
        "event": "router ready",
        "log_level": "info",
        "url": URL,
        "healthy_workers": count,
        "service": 7,
        "envoy": 8,
    }


@pytest.mark.looptime
async def test_router_is_ready_with_its_first_healthy_worker(service):
    """How many are healthy by then is said; a service that is just starting is asked again."""
    service.answers |= {0.1: not_ready(3), 5.0: READY}

    took, entries = await announce()

    assert entries == [ready(2)]
    assert 5 <= took <= 5 + MAX_READINESS_POLL_S


@pytest.mark.looptime
async def test_service_is_asked_often_at_first_and_then_less_often(service):
    """Most are ready within a moment; a model may take minutes to load."""
    service.answers |= {0.0: not_ready(1), 120.0: READY}

    await announce()

    assert sum(at < 0.7 for at in service.asked) >= 5
    assert len(service.asked) <= 120 / MAX_READINESS_POLL_S + 10


@pytest.mark.looptime
@pytest.mark.parametrize("answer", [not_ready(2), None, (200, b"<html>"), (503, b"[]")])
async def test_time_that_is_up_is_an_error_and_no_worker_is_called_healthy(service, answer):
    """The router serves all the same, with 503 until a worker is healthy."""
    service.answers[0.0] = answer

    took, entries = await announce(worker_startup_timeout_secs=30)

    assert entries == [
        {"event": "no worker became healthy in time", "log_level": "error", "seconds": 30},
        ready(0),
    ]
    assert took == pytest.approx(30, abs=0.1)


@pytest.mark.looptime
async def test_router_without_workers_waits_for_none(service):
    """They come later, through the API."""
    service.answers[0.0] = not_ready(0)

    took, entries = await announce()

    assert (took, entries) == (0, [ready(0)])


@pytest.mark.looptime
async def test_workers_of_a_name_are_waited_for(service):
    """The name has yet to be looked up."""
    service.answers |= {0.0: not_ready(0), 2.0: READY}

    took, entries = await announce(worker_dns=("http://workers:8000",))

    assert entries == [ready(2)]
    assert took >= 2


@pytest.mark.parametrize(
    ("host", "prometheus_host"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("localhost", "0.0.0.0")],
)
async def test_port_for_clients_and_for_metrics_are_not_the_same(host, prometheus_host):
    """It is said at once: each alone is free."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    config = Config(host=host, port=port, prometheus_host=prometheus_host, prometheus_port=port)

    with pytest.raises(ConfigError, match="--port and --prometheus-port are the same"):
        await Launcher(config).run(asyncio.Event())
