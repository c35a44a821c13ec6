"""Retries: what is tried again, where, after how long, and how much of it there is when everything fails."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import pytest

from tests.e2e.client import Connection, ask, openai_error
from tests.e2e.conftest import BODY_FLAGS, StartRouter
from tests.e2e.harness import Router, Sim, until
from tests.e2e.raw_worker import RawWorker, Received, Signal, Stream, respond, unique_path
from tests.e2e.test_circuit import ERROR, LONG, OK, Switch, post, statuses, until_circuit
from tests.e2e.workers_support import FAST, ROUND_ROBIN, AdminApi, chat, envoy_stats, paused

pytestmark = pytest.mark.envoy

StartWorker = Callable[..., RawWorker]

NO_BREAKER = ("--disable-circuit-breaker",)
RETRIED = (408, 429, 500, 502, 503, 504)
LEFT = (400, 401, 404, 409, 413, 422, 501)
RESERVE = 20


@pytest.fixture
def start_pair(
    start_worker: StartWorker, start_router: StartRouter
) -> Callable[..., tuple[Router, RawWorker, RawWorker]]:
    """Start a router before a worker that is going to fail and a sound one."""

    def start(*flags: str, **options: object) -> tuple[Router, RawWorker, RawWorker]:
        failing, sound = start_worker(), start_worker()
        urls = [*failing.urls, *sound.urls]
        return start_router(urls, *ROUND_ROBIN, *FAST, *flags, **options), failing, sound

    return start


@pytest.mark.parametrize("mode", list(BODY_FLAGS))
async def test_failed_request_is_tried_on_the_next_worker(
    mode: str,
    start_worker: StartWorker,
    start_router: StartRouter,
    plugin_env: dict[str, str],
) -> None:
    """Once there, with its whole body; what blames the client is not, nor 501."""
    failing, sound = start_worker(), start_worker()
    urls = [*failing.urls, *sound.urls]
    router = start_router(urls, *BODY_FLAGS[mode], *FAST, *NO_BREAKER, env=plugin_env)

    bodies = [b'{"n": %d}' % number for number in range(8)]

    async def send_all(path: str) -> Counter[int]:
        found: Counter[int] = Counter()
        for body in bodies:
            found[(await ask(router.port, "POST", path, body=body)).status] += 1
        return found

    for status in RETRIED:
        path = failing.on(unique_path(), respond(ERROR % status))
        sound.on(path, OK)
        assert await send_all(path) == {200: 8}, status
        in_vain = [request.body for request in failing.received(path)]
        assert 0 < len(in_vain) < 8, status
        assert len(set(in_vain)) == len(in_vain), status
        assert [request.body for request in sound.received(path)] == bodies
    for status in LEFT:
        path = failing.on(unique_path(), respond(ERROR % status))
        sound.on(path, OK)
        seen = await send_all(path)
        assert seen == {200: len(sound.received(path)), status: len(failing.received(path))}
        assert sum(seen.values()) == 8


async def test_without_retries_every_failure_is_the_clients(
    start_pair: Callable[..., tuple[Router, RawWorker, RawWorker]],
) -> None:
    """One attempt each, also when the connection breaks."""
    router, failing, sound = start_pair("--disable-retries", *NO_BREAKER)
    for status in RETRIED:
        path = failing.on(unique_path(), respond(ERROR % status))
        sound.on(path, OK)
        assert await statuses(router, path, 4) == {200: 2, status: 2}

    async def reset(_request: Received, stream: Stream) -> None:
        stream.reset()

    path = failing.on(unique_path(), reset)
    sound.on(path, OK)
    answers = [await post(router, path) for _ in range(2)]

    assert sorted(answer.status for answer in answers) == [200, 503]
    assert router.metrics()("retries_total") == 0


@pytest.mark.parametrize("count", [1, 2])
async def test_no_more_attempts_than_asked_for(
    count: int, start_worker: StartWorker, start_router: StartRouter
) -> None:
    """Each at another worker; then the client gets the last answer as it was."""
    worker = start_worker(4)
    path = worker.on(unique_path(), respond(ERROR % 503))
    router = start_router(
        worker.urls, *ROUND_ROBIN, *FAST, *NO_BREAKER, "--retry-max-retries", str(count)
    )

    response = await post(router, path)

    ports = [request.port for request in worker.received(path)]
    assert (response.status, response.body) == (503, b"{}")
    assert len(ports) == len(set(ports)) == 1 + count


async def test_a_worker_that_asks_for_time_gets_it(
    start_pair: Callable[..., tuple[Router, RawWorker, RawWorker]],
) -> None:
    """``Retry-After`` is waited for, up to the longest wait; a longer one is not waited for at all."""
    router, failing, sound = start_pair(*NO_BREAKER, "--retry-max-backoff-ms", "2500")
    took = {}
    for later in (1, 2, 3, 3600):
        head = b"HTTP/1.1 429 X\r\nretry-after: %d\r\ncontent-length: 0\r\n\r\n" % later
        path = failing.on(unique_path(), respond(head))
        sound.on(path, OK)
        took[later] = 0.0
        for _ in range(2):
            began = time.monotonic()
            assert (await post(router, path)).status == 200
            took[later] = max(took[later], time.monotonic() - began)
        assert len(failing.received(path)) == 1

    assert 1 <= took[1] < 2.5
    assert 2 <= took[2] < 4.5
    assert took[3] < 1
    assert took[3600] < 1


async def test_clients_have_no_say_and_workers_do_not_see_how_often(
    start_pair: Callable[..., tuple[Router, RawWorker, RawWorker]],
) -> None:
    """Envoy's headers for retries: a client's own are taken away, the service's are used up."""
    router, failing, sound = start_pair(*NO_BREAKER, "--retry-budget-ratio", "0.001")
    path = failing.on(unique_path(), respond(ERROR % 503))
    sound.on(path, OK)
    headers = [("x-envoy-max-retries", "0"), ("x-envoy-retry-on", "gateway-error")]

    seen = {(await ask(router.port, "POST", path, headers, b"{}")).status for _ in range(10)}

    assert seen == {200}
    requests = failing.received(path) + sound.received(path)
    assert not {name for request in requests for name in request.names() if "envoy" in name}


async def test_failure_counts_while_the_request_streams_elsewhere(
    start_pair: Callable[..., tuple[Router, RawWorker, RawWorker]],
) -> None:
    """Whoever comes next is not sent there."""
    router, failing, sound = start_pair(*LONG, "--cb-failure-threshold", "1")
    path = failing.on(unique_path(), respond(ERROR % 500))
    go_on = Signal()

    async def streams(_request: Received, stream: Stream) -> None:
        await stream.open_events()
        await stream.event("part")
        await go_on.wait()
        await stream.close_events()

    sound.on(path, streams)
    async with Connection(router.port) as first, Connection(router.port) as second:
        for connection in (first, second):
            await connection.send("POST", path, body=b"{}")
            assert (await connection.head()).status == 200
        until_circuit(router, failing.urls[0], 1)
        assert router.metrics()("requests_total") == 0
        go_on.set()
        for connection in (first, second):
            assert (await connection.body()).endswith(b"data: [DONE]\n\n")

    assert len(failing.received(path)) == 1


async def test_stalled_worker_is_given_up_and_left_alone(
    start_sim: Callable[..., Sim], start_router: StartRouter
) -> None:
    """One that is stopped says nothing: its requests are tried elsewhere, the next ones begin there."""
    stalled, sound = start_sim(), start_sim()
    router = start_router([stalled.url, sound.url], *ROUND_ROBIN, "--stream-idle-timeout-secs", "1")
    with paused(stalled.pid):
        began = time.monotonic()
        answers = await asyncio.gather(*(chat(router) for _ in range(6)))
        took = time.monotonic() - began
        began = time.monotonic()
        again = [(await chat(router)).status for _ in range(4)]
        took_again = time.monotonic() - began

    assert [answer.status for answer in answers] == [200] * 6
    assert {answer.values("x-sim-worker")[0] for answer in answers} == {sound.worker_name}
    assert 1 <= took < 5
    assert again == [200] * 4
    assert took_again < 3
    await router.until_idle()


async def test_worker_that_cannot_be_reached_is_left_alone_at_once(
    start_pair: Callable[..., tuple[Router, RawWorker, RawWorker]],
) -> None:
    """While the request that found out streams elsewhere; its circuit stays closed."""
    router, failing, sound = start_pair("--cb-failure-threshold", "1")
    path = unique_path()
    go_on = Signal()

    async def streams(_request: Received, stream: Stream) -> None:
        await stream.open_events()
        await go_on.wait()
        await stream.close_events()

    sound.on(path, streams)
    failing.refuse()
    async with Connection(router.port) as first, Connection(router.port) as second:
        for connection in (first, second):
            await connection.send("POST", path, body=b"{}")
            assert (await connection.head()).status == 200
        event = "worker suspended: it cannot be reached"
        await until(lambda: router.logged(event, worker=failing.urls[0]), 5, "left alone")
        go_on.set()
        for connection in (first, second):
            await connection.body()
    await router.until_idle()

    assert AdminApi(router).state(failing.urls[0]) != "ejected"


async def storm(router: Router, path: str, count: int, at_once: int) -> tuple[Counter[int], float]:
    """Send *count* requests, *at_once* at the same time; return the statuses and the seconds it took."""
    began = time.monotonic()
    parts = await asyncio.gather(
        *(statuses(router, path, count // at_once) for _ in range(at_once))
    )
    return sum(parts, Counter()), time.monotonic() - began


@pytest.mark.parametrize("status", [503, pytest.param(429, marks=pytest.mark.heavy)])
async def test_retry_storm_stays_within_the_budget(
    status: int, start_worker: StartWorker, start_router: StartRouter
) -> None:
    """All workers fail and none is taken out: attempts stay near 120 % of the requests."""
    worker = start_worker(4)
    path = worker.on(unique_path(), respond(ERROR % status))
    router = start_router(worker.urls, *ROUND_ROBIN, *FAST, *NO_BREAKER)

    seen, took_s = await storm(router, path, 1000, 20)

    attempts = len(worker.received(path))
    assert seen == {status: 1000}
    assert 1100 <= attempts <= 1000 * 1.2 + RESERVE + took_s + 2 * 20
    assert router.metrics()("retry_budget_exhausted_total") > 500
    names = {name for request in worker.received(path) for name in request.names()}
    assert not {name for name in names if "envoy" in name}, "the number of retries stays here"
    # The calm after it: what is left of the storm costs nobody's retry for long.
    worker.on(path, OK)
    await statuses(router, path, 150)
    lame = Switch(worker, 503)

    async def only_first(request: Received, stream: Stream) -> None:
        await (respond(ERROR % 503) if request.port == worker.ports[0] else OK)(request, stream)

    worker.on(lame.path, only_first)
    assert await statuses(router, lame.path, 40) == {200: 40}


async def test_retry_storm_ends_with_the_circuits(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """With the circuit breaker the workers are spared altogether."""
    worker = start_worker(4)
    path = worker.on(unique_path(), respond(ERROR % 503))
    router = start_router(worker.urls, *ROUND_ROBIN, *FAST, *LONG)

    seen, _ = await storm(router, path, 1000, 20)

    assert seen == {503: 1000}
    assert len(worker.received(path)) <= 4 * 10 + 20 * 6
    refused = await post(router, path)
    assert openai_error(refused)["code"] == "no_worker_available"


async def test_one_bad_worker_among_good_ones_costs_no_client_anything(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """However long it lasts: one of six fails a sixth of the requests, less than the budget."""
    worker = start_worker(6)
    path = unique_path()

    async def answer(request: Received, stream: Stream) -> None:
        await (respond(ERROR % 503) if request.port == worker.ports[0] else OK)(request, stream)

    worker.on(path, answer)
    router = start_router(worker.urls, *ROUND_ROBIN, *FAST, *NO_BREAKER)

    seen, _ = await storm(router, path, 1200, 12)

    assert seen == {200: 1200}


async def test_good_requests_cost_no_report_of_their_attempts(
    start_pair: Callable[..., tuple[Router, RawWorker, RawWorker]],
) -> None:
    """Envoy writes one entry for each request; a failed attempt is one more."""
    router, failing, sound = start_pair(*NO_BREAKER)
    good = unique_path()
    bad = failing.on(unique_path(), respond(ERROR % 500))
    sound.on(bad, OK)

    async def written() -> int:
        stats = await envoy_stats(router, "access_logs.grpc_access_log.logs_written")
        return sum(stats.values())

    await statuses(router, good, 50)
    await until(lambda: router.metrics()("requests_total") == 50, 5, "reported")
    after_good = await written()
    await statuses(router, bad, 10)
    await until(lambda: router.metrics()("requests_total") == 60, 5, "reported")

    assert after_good == 50
    assert await written() == 60 + 5
