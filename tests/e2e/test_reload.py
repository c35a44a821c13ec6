"""A configuration that changes while requests run."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.client import Connection, ask
from tests.e2e.conftest import StartRouter
from tests.e2e.harness import Router, http_get, until
from tests.e2e.raw_worker import RawWorker, Received, Signal, Stream, unique_path

pytestmark = pytest.mark.envoy

LIMIT_S = 15.0
CHANGED = "configuration changed"
REFUSED = "configuration refused; the running one stays"


def write(path: Path, text: str) -> None:
    """Replace what the file holds."""
    path.write_text(text)


@pytest.fixture(name="file")
def _file(tmp_path: Path) -> Path:
    """Return a file of options."""
    path = tmp_path / "router.yaml"
    path.write_text("queue_size: 1\n")
    return path


@pytest.fixture
def router(file: Path, start_router: StartRouter, worker: RawWorker) -> Router:
    """Start a router with that file."""
    return start_router(list(worker.urls), "--policy", "round_robin", "--config", str(file))


async def test_file_that_changes_is_applied_and_a_stream_goes_on(
    router: Router, file: Path, worker: RawWorker
) -> None:
    """Routes, clusters and the service follow; neither the stream nor its connection ends."""
    held = Signal()

    async def answer(_request: Received, stream: Stream) -> None:
        await stream.open_events()
        await stream.event("before")
        await held.wait()
        await stream.event("after")
        await stream.close_events()

    envoy, service = router.envoy_pid, router.service_pid
    path = worker.on(unique_path(), answer)
    async with Connection(router.port) as connection:
        await connection.send("GET", path)
        assert (await connection.head()).status == 200
        write(
            file,
            "queue_size: 2\nretry_max_retries: 1\nrequest_timeout_secs: 9\nstream_idle_timeout_secs: 60\n"
            "cb_failure_threshold: 3\nhealth_check_interval_secs: 5\n",
        )
        await until(lambda: router.logged(CHANGED), LIMIT_S, "the file is applied")
        (changed,) = router.logged(CHANGED)
        response = await ask(router.port, "GET", worker.on(unique_path(), answer_ok))
        held.set()
        rest = await connection.body()
        other = await connection.ask("GET", worker.on(unique_path(), answer_ok))

    assert changed["options"] == [
        "cb_failure_threshold",
        "health_check_interval_secs",
        "queue_size",
        "retry_max_retries",
        "stream_idle_timeout_secs",
    ]
    (restart,) = router.logged("options changed that need a restart")
    assert restart["options"] == ["request_timeout_secs"]
    assert b"before" in rest
    assert b"after" in rest
    assert (response.status, other.status) == (200, 200)
    assert (router.envoy_pid, router.service_pid) == (envoy, service)
    await router.until_idle()


async def answer_ok(_request: Received, stream: Stream) -> None:
    await stream.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")


async def test_broken_file_changes_nothing_and_its_line_is_named(
    router: Router, file: Path, worker: RawWorker
) -> None:
    """What was good in it waits, too; a good file afterwards is applied."""
    write(file, "queue_size: 3\nretry_max_retries: many\n")
    await until(lambda: router.logged(REFUSED), LIMIT_S, "the file is refused")

    (refused,) = router.logged(REFUSED)
    assert f"{file}, line 2" in refused["reason"]
    assert not router.logged(CHANGED)
    assert (await ask(router.port, "GET", worker.on(unique_path(), answer_ok))).status == 200

    write(file, "queue_size: 3\nretry_max_retries: 2\n")
    await until(lambda: router.logged(CHANGED), LIMIT_S, "the file is applied")


async def test_sighup_reads_again(router: Router, file: Path) -> None:
    """It ends neither the router nor its parts."""
    before = router.service_pid
    for _ in range(3):
        router.send_signal(signal.SIGHUP)
    write(file, "queue_size: 5\n")
    router.send_signal(signal.SIGHUP)

    await until(lambda: router.logged(CHANGED), LIMIT_S, "the file is applied")
    assert router.service_pid == before
    assert router.running


async def test_workers_of_the_file_come_and_go(
    start_router: StartRouter, file: Path, start_worker: Callable[..., RawWorker]
) -> None:
    """Like those of any other source: nothing is lost."""
    first, second = start_worker(1), start_worker(1)
    write(file, f"worker_urls: [{first.urls[0]}]\n")
    router = start_router([], "--policy", "round_robin", "--config", str(file))
    router.until_workers(1)
    path = first.on(unique_path(), answer_ok)
    assert (await ask(router.port, "GET", path)).status == 200

    path = second.on(path, answer_ok)
    statuses = []
    for urls, workers in (([*first.urls, *second.urls], 2), (second.urls, 1)):
        write(file, f"worker_urls: {json.dumps(urls)}\n")
        deadline = time.monotonic() + LIMIT_S
        while router.metrics()("workers") != workers:
            statuses.append((await ask(router.port, "GET", path)).status)
            assert time.monotonic() < deadline

    assert set(statuses) == {200}


async def test_service_that_starts_again_knows_what_was_applied(router: Router, file: Path) -> None:
    """And nothing of what was held back."""
    write(file, "queue_size: 7\nprometheus_port: 1\n")
    await until(lambda: router.logged(CHANGED), LIMIT_S, "the file is applied")
    os.kill(router.service_pid, signal.SIGKILL)
    url = f"{router.base_url}/config"
    await until(lambda: http_get(url)[0] == 200, LIMIT_S, "the service is back")

    shown = json.loads(http_get(url)[1])
    assert shown["queue_size"] == 7
    assert shown["prometheus_port"] == router.metrics_port
