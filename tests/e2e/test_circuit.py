"""Circuit breakers: a worker that fails is out after so many failures, and comes back one request at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable

import pytest

from tests.e2e.client import Connection, Response, ask, openai_error
from tests.e2e.conftest import StartRouter
from tests.e2e.harness import Router, until, wait_until
from tests.e2e.raw_worker import RawWorker, Received, Stream, respond, unique_path
from tests.e2e.workers_support import FAST, ROUND_ROBIN, AdminApi

pytestmark = pytest.mark.envoy

StartWorker = Callable[..., RawWorker]

OPEN_S = 1.0
LONG = ("--cb-timeout-duration-secs", "60")
SHORT = ("--cb-timeout-duration-secs", str(OPEN_S))
ERROR = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
OK = respond(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
UPGRADE = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n"
WEBSOCKET = [("Connection", "upgrade"), ("Upgrade", "websocket")]


class Switch:
    """What a worker answers at a path, to be changed at any time."""

    def __init__(self, worker: RawWorker, status: int = 500, *, path: str = "") -> None:
        self.path = worker.on(path or unique_path(), self._answer)
        self.status = status
        self.asked = 0
        self.under_way = 0
        self.most_under_way = 0
        self.takes_s = 0.0

    async def _answer(self, request: Received, stream: Stream) -> None:
        self.asked += 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(self.takes_s)
            if self.status == 200:
                await OK(request, stream)
            else:
                await stream.send(ERROR % self.status)
        finally:
            self.under_way -= 1


def until_circuit(router: Router, url: str, state: int, limit_s: float = 10.0) -> float:
    """Wait until the metric shows the circuit of *url* in *state*."""
    return wait_until(
        lambda: router.metrics()("circuit_state", worker=url) == state, limit_s, f"circuit {state}"
    )


async def post(router: Router, path: str) -> Response:
    return await ask(router.port, "POST", path, body=b"{}")


async def statuses(router: Router, path: str, count: int) -> Counter[int]:
    """Send *count* requests one after the other on one connection."""
    found: Counter[int] = Counter()
    async with Connection(router.port) as connection:
        for _ in range(count):
            found[(await connection.ask("POST", path, body=b"{}")).status] += 1
    return found


@pytest.mark.parametrize("one_connection", [True, False], ids=["one connection", "many"])
@pytest.mark.parametrize("status", [500, 503])
@pytest.mark.parametrize(
    ("flags", "threshold"),
    [((), 10), (("--disable-retries",), 10), (("--cb-failure-threshold", "3"), 3)],
    ids=["default", "no retries", "threshold 3"],
)
async def test_failing_worker_gets_no_more_requests_than_the_threshold(
    flags: tuple[str, ...],
    threshold: int,
    status: int,
    one_connection: bool,
    start_worker: StartWorker,
    start_router: StartRouter,
) -> None:
    """At most one more, one request following the other; with retries no client sees an error."""
    failing, sound = start_worker(), start_worker()
    path = unique_path()
    switch = Switch(failing, status, path=path)
    sound.on(path, OK)
    router = start_router([*failing.urls, *sound.urls], *ROUND_ROBIN, *FAST, *LONG, *flags)

    if one_connection:
        seen = await statuses(router, path, 60)
    else:
        seen = Counter([(await post(router, path)).status for _ in range(60)])

    assert threshold <= switch.asked <= threshold + 1
    if "--disable-retries" in flags:
        assert seen == {200: 60 - switch.asked, status: switch.asked}
    else:
        assert seen == {200: 60}
    entry = AdminApi(router).worker(failing.urls[0])
    assert entry["state"] == "ejected"
    assert "failures in a row" in entry["reason"]
    assert f"status {status}" in entry["reason"]
    metrics = router.metrics()
    assert metrics("circuit_state", worker=failing.urls[0]) == 1
    assert metrics("circuit_state", worker=sound.urls[0]) == 0
    assert metrics("circuit_transitions_total", worker=failing.urls[0], to="open") == 1
    assert metrics("circuit_transitions_total") == 1


async def test_failing_worker_of_three_gets_no_more_than_the_threshold_at_once(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """Of 20 clients at once, time after time: what is under way when it fails is no more than it may get."""
    failing, *sound = start_worker(), start_worker(), start_worker()
    router = start_router(
        [url for worker in (failing, *sound) for url in worker.urls],
        *(*ROUND_ROBIN, *FAST, "--cb-timeout-duration-secs", "1", "--cb-success-threshold", "1"),
        *("--cb-failure-threshold", "10", "--retry-initial-backoff-ms", "10"),
    )
    (url,) = failing.urls

    async def client(path: str) -> list[int]:
        return [(await post(router, path)).status for _ in range(5)]

    for _ in range(10):
        bad = Switch(failing)
        good = [Switch(worker, 200, path=bad.path) for worker in sound]
        for switch in (bad, *good):
            switch.takes_s = 0.02
        answers = await asyncio.gather(*(client(bad.path) for _ in range(20)))

        assert answers == [[200] * 5] * 20
        assert bad.asked in (10, 11)
        bad.status = 200
        until_circuit(router, url, 2)
        while router.metrics()("circuit_state", worker=url):
            await post(router, bad.path)


async def test_half_open_worker_gets_one_request_at_a_time(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """Of 20 clients at once, until three have succeeded; the others wait and are served."""
    worker = start_worker()
    switch = Switch(worker)
    (url,) = worker.urls
    flags = ("--disable-retries", "--cb-failure-threshold", "2")
    router = start_router([url], *ROUND_ROBIN, *FAST, *SHORT, *flags)
    assert await statuses(router, switch.path, 2) == {500: 2}
    until_circuit(router, url, 1)
    refused = await post(router, switch.path)
    until_circuit(router, url, 2)
    switch.status, switch.takes_s, switch.asked, switch.most_under_way = 200, 0.1, 0, 0
    one_at_a_time = []

    async def watch() -> None:
        while True:
            so_far = (
                switch.most_under_way
            )  # before the circuit is asked for: it may close meanwhile
            if router.metrics()("circuit_state", worker=url) != 2:
                return
            one_at_a_time.append(so_far)
            await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch())
    async with asyncio.timeout(20):
        answers = await asyncio.gather(*(post(router, switch.path) for _ in range(20)))
        await watching

    assert (refused.status, openai_error(refused)["code"]) == (503, "no_worker_available")
    assert [answer.status for answer in answers] == [200] * 20
    assert set(one_at_a_time) <= {0, 1}
    assert switch.most_under_way > 1, "closed, the circuit holds nobody back"
    metrics = router.metrics()
    for state in ("open", "half_open", "closed"):
        assert metrics("circuit_transitions_total", worker=url, to=state) == 1
    assert AdminApi(router).state(url) == "healthy"
    await router.until_idle()


async def test_one_failure_in_half_open_ejects_again(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """For the full time, whatever Envoy thinks; no client sees it where there is another worker."""
    failing, sound = start_worker(), start_worker()
    path = unique_path()
    switch = Switch(failing, path=path)
    sound.on(path, OK)
    (url,) = failing.urls
    flags = ("--cb-failure-threshold", "3")
    router = start_router([url, *sound.urls], *ROUND_ROBIN, *FAST, *SHORT, *flags)
    await statuses(router, path, 8)
    until_circuit(router, url, 1)
    asked = switch.asked
    began = time.monotonic()

    seen: Counter[int] = Counter()
    async with Connection(router.port) as connection:
        while time.monotonic() - began < 4 * OPEN_S:
            seen[(await connection.ask("POST", path, body=b"{}")).status] += 1
            await asyncio.sleep(0.01)

    assert set(seen) == {200}
    assert 2 <= switch.asked - asked <= 4, "one probe after each full pause"
    metrics = router.metrics()
    assert metrics("circuit_transitions_total", worker=url, to="closed") == 0
    assert metrics("circuit_transitions_total", worker=url, to="open") == 1 + switch.asked - asked


async def test_failures_that_are_too_old_do_not_count(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """Not for the picker; Envoy, which knows no window, is not heard."""
    worker = start_worker()
    switch = Switch(worker)
    (url,) = worker.urls
    flags = ("--disable-retries", "--cb-failure-threshold", "3")
    window = ("--cb-window-duration-secs", "0.5")
    router = start_router([url], *ROUND_ROBIN, *FAST, *LONG, *flags, *window)

    for _ in range(5):
        assert (await post(router, switch.path)).status == 500
        await asyncio.sleep(0.4)
    slowly = AdminApi(router).state(url)
    quickly = await statuses(router, switch.path, 4)

    assert slowly == "healthy"
    assert quickly[500] in (2, 3)
    assert AdminApi(router).state(url) == "ejected"


async def test_a_success_ends_the_row(start_worker: StartWorker, start_router: StartRouter) -> None:
    """Two failures, one success, again and again: never three in a row."""
    worker = start_worker()
    bad, good = Switch(worker), Switch(worker, 200)
    (url,) = worker.urls
    flags = ("--disable-retries", "--cb-failure-threshold", "3")
    router = start_router([url], *ROUND_ROBIN, *FAST, *LONG, *flags)
    requests = router.metrics

    for number in range(1, 6):
        await statuses(router, bad.path, 2)
        await statuses(router, good.path, 1)
        done = 3 * number
        await until(lambda: requests()("requests_total") >= done, 5, "the end is reported")  # noqa: B023

    assert AdminApi(router).state(url) == "healthy"
    assert bad.asked == 10


@pytest.mark.parametrize("counts", [True, False], ids=["counted", "not"])
async def test_429_counts_if_it_is_to(
    counts: bool, start_worker: StartWorker, start_router: StartRouter
) -> None:
    """By default a worker that has too much to do stays in."""
    worker = start_worker()
    switch = Switch(worker, 429)
    (url,) = worker.urls
    flags = ("--disable-retries", "--cb-failure-threshold", "3")
    also = ("--cb-count-429",) if counts else ()
    router = start_router([url], *ROUND_ROBIN, *FAST, *LONG, *flags, *also)

    seen = await statuses(router, switch.path, 8)

    assert set(seen) == ({429, 503} if counts else {429})
    if counts:
        assert seen[429] <= 4
    assert AdminApi(router).state(url) == ("ejected" if counts else "healthy")


async def test_answers_that_blame_the_client_never_open_a_circuit(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """400, 404, 422 and others, each many times; 501 and 505 as well, neither here nor in Envoy."""
    worker = start_worker()
    (url,) = worker.urls
    router = start_router([url], *ROUND_ROBIN, *FAST, "--cb-failure-threshold", "2")

    for status in (400, 401, 403, 404, 409, 413, 422, 501, 505):
        assert await statuses(router, Switch(worker, status).path, 6) == {status: 6}

    assert AdminApi(router).state(url) == "healthy"
    assert router.metrics()("retries_total") == 0


async def test_clients_that_leave_never_open_a_circuit(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """Neither before the head of the answer nor amid it."""
    worker = start_worker()
    (url,) = worker.urls
    router = start_router([url], *ROUND_ROBIN, *FAST, "--cb-failure-threshold", "2")

    async def silent(_request: Received, stream: Stream) -> None:
        await stream.until_peer_leaves()

    async def begins(_request: Received, stream: Stream) -> None:
        await stream.open_events()
        await stream.event("part")
        await stream.until_peer_leaves()

    before, amid = worker.on(unique_path(), silent), worker.on(unique_path(), begins)
    for number in range(1, 7):
        async with Connection(router.port) as connection:
            await connection.send("POST", before, body=b"{}")
            await until(lambda: len(worker.received(before)) == number, 5, "arrived")  # noqa: B023
            connection.abort()
        async with Connection(router.port) as connection:
            await connection.send("POST", amid, body=b"{}")
            await connection.head()
            await connection.piece()
            connection.abort()
    await until(lambda: router.metrics()("client_aborts_total") == 12, 5, "all are reported")

    assert AdminApi(router).state(url) == "healthy"
    assert router.metrics()("circuit_transitions_total") == 0
    await router.until_idle()


@pytest.mark.parametrize("end", ["closes", "resets"])
async def test_websockets_that_the_worker_ends_never_open_a_circuit(
    end: str, start_worker: StartWorker, start_router: StartRouter
) -> None:
    """To Envoy each is a connection that broke."""
    worker = start_worker()
    (url,) = worker.urls
    router = start_router([url], *ROUND_ROBIN, *FAST, "--cb-failure-threshold", "2")

    async def upgrade(_request: Received, stream: Stream) -> None:
        await stream.send(UPGRADE)
        if end == "resets":
            stream.reset()
        stream.close()

    path = worker.on(unique_path(), upgrade)
    for _ in range(6):
        async with Connection(router.port) as connection:
            await connection.send("GET", path, WEBSOCKET)
            assert (await connection.head()).status == 101
            with contextlib.suppress(OSError):
                assert await connection.reader.read() == b""
    await until(lambda: router.metrics()("requests_total", code="101") == 6, 5, "reported")

    assert AdminApi(router).state(url) == "healthy"
    assert router.metrics()("circuit_transitions_total") == 0


async def test_streams_that_break_one_after_the_other_open_the_circuit(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """Clients see each of them cut; then another worker serves."""
    breaking, sound = start_worker(), start_worker()
    path = unique_path()
    (url,) = breaking.urls

    async def breaks(_request: Received, stream: Stream) -> None:
        await stream.open_events()
        await stream.event("part")
        stream.reset()

    breaking.on(path, breaks)
    sound.on(path, OK)
    router = start_router(
        [url, *sound.urls], *ROUND_ROBIN, *FAST, *LONG, "--cb-failure-threshold", "3"
    )

    cut = 0
    for _ in range(12):
        async with Connection(router.port) as connection:
            try:
                assert (await connection.ask("POST", path, body=b"{}")).status == 200
            except (EOFError, OSError):
                cut += 1

    assert cut == len(breaking.received(path))
    assert 3 <= cut <= 4
    assert AdminApi(router).state(url) == "ejected"
    assert "it broke off" in AdminApi(router).worker(url)["reason"]


async def test_streams_that_one_loss_takes_along_are_one_failure(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """A worker that is started again serves at once, however many streams it had."""
    worker = start_worker()
    (url,) = worker.urls
    router = start_router([url], *ROUND_ROBIN, *FAST, *LONG, "--cb-failure-threshold", "2")

    async def begins(_request: Received, stream: Stream) -> None:
        await stream.open_events()
        await stream.event("part")
        await stream.until_peer_leaves()

    path = worker.on(unique_path(), begins)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(20):
            connection = await stack.enter_async_context(Connection(router.port))
            await connection.send("POST", path, body=b"{}")
            await connection.head()
        worker.refuse()
        worker.come_back()
        await until(lambda: router.metrics()("requests_total") == 20, 5, "all are reported")

    assert AdminApi(router).state(url) == "healthy"
    assert (await post(router, unique_path())).status == 200


async def test_disabled_circuit_breaker_never_opens(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """Neither here nor in Envoy."""
    worker = start_worker()
    switch = Switch(worker)
    router = start_router(
        worker.urls, *ROUND_ROBIN, *FAST, "--disable-circuit-breaker", "--disable-retries"
    )

    assert await statuses(router, switch.path, 30) == {500: 30}

    assert AdminApi(router).state(worker.urls[0]) == "healthy"
    events = list(router.temporary.glob("vllm-extproc-*/outlier.jsonl"))
    assert all(not path.read_text() for path in events)


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_circuit_stays_open_when_the_service_is_started_again(
    how: str, start_worker: StartWorker, start_router: StartRouter
) -> None:
    """It is remembered, and Envoy has it too."""
    failing, sound = start_worker(), start_worker()
    path = unique_path()
    switch = Switch(failing, path=path)
    sound.on(path, OK)
    (url,) = failing.urls
    flags = ("--cb-failure-threshold", "3")
    router = start_router([url, *sound.urls], *ROUND_ROBIN, *FAST, *LONG, *flags)
    await statuses(router, path, 8)
    until_circuit(router, url, 1)
    asked = switch.asked
    api = AdminApi(router)

    pid = router.service_pid
    if how == "killed":
        router.kill_service()
    else:
        os.kill(pid, signal.SIGTERM)
    await until(lambda: router.service_pid != pid, 20, "a new service")
    await api.until_service_answers()
    states = [api.state(url) for _ in range(5)]
    seen = await statuses(router, path, 20)

    assert set(states) == {"ejected"}
    assert seen == {200: 20}
    assert switch.asked == asked
