"""Limits on what is under way, queues, and the wait for a worker, with a real Envoy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest
from websockets.asyncio.client import connect

from tests.e2e.client import Connection, Headers, Response, ask, openai_error
from tests.e2e.conftest import StartRouter
from tests.e2e.harness import Router, rss_bytes, until
from tests.e2e.raw_worker import RawWorker, Received, Signal, Stream, unique_path
from tests.e2e.workers_support import (
    CHAT_PATH,
    FAST,
    JSON_HEADERS,
    ROUND_ROBIN,
    AdminApi,
    StartSim,
    StartWorker,
    chat,
    chat_body,
    json_response,
    kill_now,
    server,
    set_faults,
    traffic,
)

pytestmark = pytest.mark.envoy

LIMIT_S = 30.0
BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'
MODES = {
    "headers_only": ROUND_ROBIN,
    "buffered": ("--policy", "cache_aware"),
    "full_duplex": ("--policy", "cache_aware", "--body-mode", "full_duplex"),
}


def waiting(router: Router, reason: str = "limit") -> float:
    """Return how many requests wait for *reason*."""
    return router.metrics()("queue_waiting", reason=reason)


async def until_waiting(
    router: Router, count: int, reason: str = "limit", limit_s: float = LIMIT_S
) -> None:
    await until(lambda: waiting(router, reason) == count, limit_s, f"{count} requests wait")


async def until_nothing_is_left(router: Router) -> None:
    """Wait until every count is zero again."""

    def idle() -> bool:
        metrics = router.metrics()
        return not (metrics("admitted") or metrics("queue_waiting") or metrics("in_flight"))

    await until(idle, LIMIT_S, "nothing under way, nobody waits")


class Held:
    """Streams on a raw worker that are open until they are let go, and how many were open at once."""

    def __init__(self, worker: RawWorker, *, seconds: float | None = None) -> None:
        self.go_on = Signal()
        self.open: Counter[int] = Counter()
        self.most: Counter[int] = Counter()
        self.order: list[str] = []
        self._changes: list[tuple[float, int]] = []
        """When a stream was opened (1) or closed (-1)."""
        self._seconds = seconds
        self.path = worker.on(unique_path(), self._answer)

    async def _answer(self, request: Received, stream: Stream) -> None:
        self.order += request.values("x-name")
        self.open[request.port] += 1
        self.most[request.port] = max(self.most[request.port], self.open[request.port])
        self._changes.append((time.monotonic(), 1))
        try:
            await stream.open_events()
            await stream.event("first")
            if self._seconds is None:
                await self.go_on.wait()
            else:
                await asyncio.sleep(self._seconds)
            await stream.close_events()
        finally:
            self.open[request.port] -= 1
            self._changes.append((time.monotonic(), -1))

    def concurrency(self, cap: int) -> tuple[int, float]:
        """Return the most streams at once, and the average from when *cap* were open until the last opened."""
        most = at_once = 0
        spent_s = until_last = began = at = last = 0.0
        for when, change in self._changes:
            if began:
                spent_s += at_once * (when - at)
            at, at_once = when, at_once + change
            most = max(most, at_once)
            if at_once >= cap and not began:
                began = when
            if began and change > 0:
                last, until_last = when, spent_s
        return most, until_last / (last - began)


@contextlib.asynccontextmanager
async def holding(router: Router, held: Held, count: int = 1) -> AsyncIterator[None]:
    """Keep *count* streams open."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count):
            connection = await stack.enter_async_context(Connection(router.port))
            await connection.send("POST", held.path, body=BODY)
            assert (await connection.head()).status == 200
            await connection.event()
        yield


@contextlib.asynccontextmanager
async def sent(router: Router, path: str, headers: Headers = ()) -> AsyncIterator[Connection]:
    """Send a request and do not wait for its answer."""
    async with Connection(router.port) as connection:
        await connection.send("POST", path, headers, BODY)
        yield connection


async def answer_of(connection: Connection) -> Response:
    response = await connection.head()
    response.body = await connection.body()
    return response


# --- how many are under way ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
async def test_open_streams_never_pass_the_limit_and_keep_it_busy(
    mode: str, start_router: StartRouter, start_worker: StartWorker
) -> None:
    """Under four times the load: never one more at the workers, and on average within 5 % of the limit."""
    cap, clients = 10, 40
    worker = start_worker(2)
    held = Held(worker, seconds=1.0)
    router = start_router(
        worker.urls, *MODES[mode], "--max-concurrent-requests", str(cap), "--queue-size", "100"
    )

    async def client() -> int:
        async with Connection(router.port) as connection:
            return (await connection.ask("POST", held.path, (), BODY)).status

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(client()) for _ in range(clients)]

    assert [task.result() for task in asked] == [200] * clients
    most, average = held.concurrency(cap)
    assert most == cap
    assert average >= 0.95 * cap, f"{average:.2f} of {cap} on average"
    await until_nothing_is_left(router)


async def test_websocket_counts_and_waits_like_any_other(
    start_router: StartRouter, start_sim: StartSim
) -> None:
    """It is under way for as long as it is open, and the next one opens when it closes."""
    router = start_router(
        [start_sim().url], "--max-concurrent-requests", "1", "--queue-timeout-secs", "20"
    )
    url = f"ws://127.0.0.1:{router.port}/v1/realtime?model=sim-model"

    async with connect(url, proxy=None, open_timeout=LIMIT_S) as first:
        second = asyncio.ensure_future(connect(url, proxy=None, open_timeout=LIMIT_S).__aenter__())
        await until_waiting(router, 1)
        await first.close()
        socket = await second
        await socket.send("hello")
        assert await socket.recv() == "hello"
        await socket.close()

    await until_nothing_is_left(router)


@pytest.mark.parametrize("mode", MODES)
async def test_longer_wait_than_envoy_has_patience_for_decisions(
    mode: str, start_router: StartRouter, start_worker: StartWorker
) -> None:
    """The pick after the wait is as good as any, whether the body is read or not."""
    held = Held(worker := start_worker())
    router = start_router(
        worker.urls,
        *MODES[mode],
        *("--max-concurrent-requests", "1", "--decision-timeout-secs", "0.3"),
    )
    async with holding(router, held), sent(router, held.path) as late:
        await until_waiting(router, 1)
        await asyncio.sleep(1.0)  # as long as Envoy is to be patient
        assert waiting(router) == 1
        held.go_on.set()
        response = await answer_of(late)

    assert (response.status, response.body) == (200, b"data: first\n\ndata: [DONE]\n\n")
    assert worker.received(held.path)[-1].body == BODY
    assert router.decisions() == 2


# --- full, too long, gone --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_full_queue_and_too_long_a_wait(
    mode: str, start_router: StartRouter, start_worker: StartWorker
) -> None:
    """429 with Retry-After in whole seconds at once; 408 when the time is over. Both as JSON."""
    held = Held(worker := start_worker())
    router = start_router(
        worker.urls,
        *MODES[mode],
        *("--max-concurrent-requests", "1", "--queue-size", "1", "--queue-timeout-secs", "2"),
    )
    async with holding(router, held), sent(router, held.path) as patient:
        started = time.monotonic()
        await until_waiting(router, 1)

        refused = await ask(router.port, "POST", held.path, (), BODY)
        assert time.monotonic() - started < 1.5
        late = await answer_of(patient)
        took = time.monotonic() - started

    assert refused.status == 429
    assert openai_error(refused)["code"] == "queue_full"
    (after,) = refused.values("retry-after")
    assert 1 <= int(after) <= 2
    assert late.status == 408
    assert openai_error(late)["code"] == "queue_timeout"
    assert 1.5 < took < 5
    held.go_on.set()
    await until_nothing_is_left(router)
    assert router.metrics()("decisions_total", result="queue_full") == 1
    assert router.metrics()("decisions_total", result="queue_timeout") == 1


async def test_tenant_that_fills_the_queue_does_not_shut_others_out(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    """The latest of its requests is answered 429, and the other tenant's is served."""
    held = Held(worker := start_worker())
    router = start_router(
        worker.urls, *ROUND_ROBIN, "--max-concurrent-requests", "1", "--queue-size", "3"
    )
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(holding(router, held))
        greedy = []
        for count in range(1, 4):
            one = await stack.enter_async_context(
                sent(router, held.path, (("x-tenant-id", "greedy"),))
            )
            greedy.append(one)
            await until_waiting(router, count)
        modest = await stack.enter_async_context(
            sent(router, held.path, (("x-tenant-id", "modest"),))
        )
        displaced = await answer_of(greedy[-1])
        held.go_on.set()
        served = [(await answer_of(one)).status for one in (*greedy[:-1], modest)]

    assert (displaced.status, openai_error(displaced)["code"]) == (429, "queue_full")
    assert displaced.values("retry-after")
    assert served == [200, 200, 200]
    await until_nothing_is_left(router)


async def test_without_a_queue_nobody_waits(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    """429 at once."""
    held = Held(worker := start_worker())
    router = start_router(
        worker.urls, *ROUND_ROBIN, "--max-concurrent-requests", "1", "--queue-size", "0"
    )
    async with holding(router, held):
        response = await ask(router.port, "POST", held.path, (), BODY)
        held.go_on.set()

    assert (response.status, openai_error(response)["code"]) == (429, "queue_full")


@pytest.mark.parametrize("mode", MODES)
async def test_client_that_leaves_is_out_of_the_queue_at_once(
    mode: str, start_router: StartRouter, start_worker: StartWorker
) -> None:
    """Its place is free for another, and the worker never hears of it."""
    held = Held(worker := start_worker())
    router = start_router(
        worker.urls, *MODES[mode], "--max-concurrent-requests", "1", "--queue-size", "1"
    )
    async with holding(router, held):
        for _ in range(5):
            async with sent(router, held.path) as connection:
                await until_waiting(router, 1)
                connection.abort()
                assert await until(lambda: waiting(router) == 0, 5, "it has left") < 1
        async with sent(router, held.path) as last:
            await until_waiting(router, 1)
            held.go_on.set()
            assert (await answer_of(last)).status == 200

    assert worker.begun(held.path) == 2
    await until_nothing_is_left(router)


# --- in which order --------------------------------------------------------------------------------


async def order_of(
    router: Router, held: Held, requests: list[tuple[str, dict[str, str]]]
) -> list[str]:
    """Let named requests wait, one after the other, and return the order in which they are served."""
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(holding(router, held))
        connections = []
        for number, (name, headers) in enumerate(requests, start=1):
            named = [("x-name", name), *headers.items()]
            connections.append(await stack.enter_async_context(sent(router, held.path, named)))
            await until_waiting(router, number)
        held.go_on.set()
        for connection in connections:
            assert (await answer_of(connection)).status == 200
    return held.order


async def test_tenant_with_many_waiting_does_not_delay_others(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    """They take turns, each in the order of its own requests."""
    held = Held(worker := start_worker())
    router = start_router(worker.urls, *ROUND_ROBIN, "--max-concurrent-requests", "1")
    requests = [(f"a{n}", {"x-tenant-id": "a"}) for n in range(8)]
    requests += [("b0", {"x-tenant-id": "b"}), ("b1", {"x-tenant-id": "b"}), ("c0", {})]

    order = await order_of(router, held, requests)

    assert order[:6] == ["a0", "b0", "c0", "a1", "b1", "a2"]


async def test_priority_goes_first_and_clients_cannot_say_who_they_are_for_envoy(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    """Higher before lower; garbage counts as nothing; ``x-router-client`` of a client is removed."""
    held = Held(worker := start_worker())
    router = start_router(worker.urls, *ROUND_ROBIN, "--max-concurrent-requests", "1")
    requests = [
        ("low", {"x-request-priority": "-1"}),
        ("plain", {}),
        ("garbage", {"x-request-priority": "very"}),
        ("forged", {"x-router-client": "someone else"}),
        ("high", {"x-request-priority": "10"}),
        ("higher", {"x-request-priority": "50"}),
    ]

    order = await order_of(router, held, requests)

    assert order == ["higher", "high", "plain", "garbage", "forged", "low"]


# --- each worker -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_no_worker_gets_more_than_its_limit(
    mode: str, start_router: StartRouter, start_worker: StartWorker
) -> None:
    """Ten at a time for two workers of two: all are served, none is refused, none is overloaded."""
    worker = start_worker(2)
    held = Held(worker, seconds=0.1)
    router = start_router(
        worker.urls,
        *MODES[mode],
        *("--max-worker-concurrency", "2", "--decision-timeout-secs", "0.5"),
    )

    async def client() -> int:
        async with Connection(router.port) as connection:
            return (await connection.ask("POST", held.path, (), BODY)).status

    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        clients = [tasks.create_task(client()) for _ in range(30)]

    assert [task.result() for task in clients] == [200] * 30
    assert max(held.most.values()) == 2
    assert sorted(held.most) == sorted(worker.ports)
    await until_nothing_is_left(router)


async def test_queue_of_busy_workers_is_bounded_in_length_and_time(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    """As the one at the gate."""
    held = Held(worker := start_worker())
    router = start_router(
        worker.urls,
        *MODES["buffered"],
        *("--max-worker-concurrency", "1", "--queue-size", "1", "--queue-timeout-secs", "2"),
    )
    async with holding(router, held), sent(router, held.path) as patient:
        await until_waiting(router, 1, "busy")
        refused = await ask(router.port, "POST", held.path, (), BODY)
        late = await answer_of(patient)

    assert (refused.status, openai_error(refused)["code"]) == (429, "queue_full")
    assert 1 <= int(refused.values("retry-after")[0]) <= 2
    assert (late.status, openai_error(late)["code"]) == (408, "queue_timeout")
    held.go_on.set()
    await until_nothing_is_left(router)


# --- no worker -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", ["round_robin", pytest.param("cache_aware", marks=pytest.mark.heavy)]
)
@pytest.mark.parametrize("how", ["removed", "drained", "unhealthy"])
async def test_rolling_update_with_a_gap_fails_no_request(
    policy: str, how: str, start_router: StartRouter, start_sim: StartSim
) -> None:
    """All workers go, for a while there is none, others come: everybody waits, nobody is refused."""
    old = [start_sim("--itl-ms", "2") for _ in range(2)]
    router = start_router(
        [sim.url for sim in old],
        *("--policy", policy, "--no-worker-timeout-secs", "60"),
        *("--decision-timeout-secs", "1", "--health-failure-threshold", "1", *FAST),
    )
    admin = AdminApi(router)
    async with traffic(router, clients=8) as load:
        for sim in old:
            match how:
                case "removed":
                    assert admin.remove(sim.url).status < 300
                case "drained":
                    assert admin.drain(sim.url, timeout_s=30).status < 300
                case _:
                    set_faults(sim, health_status=503)
        await until_waiting(router, 8, "no_worker")
        for sim in old:
            kill_now(sim)
        await asyncio.sleep(3)  # the gap
        assert waiting(router, "no_worker") == 8
        new = start_sim("--itl-ms", "2")
        assert admin.add(new.url).status < 300
        await load.until_served(50)

    assert load.failures == []
    assert load.served[new.worker_name] >= 50
    await until_nothing_is_left(router)


async def test_model_whose_workers_are_gone_waits_and_one_that_never_was_does_not(
    start_router: StartRouter, start_sim: StartSim
) -> None:
    """Another model goes on being served, and is not what the requests that wait get."""
    a, b = start_sim("--model", "a"), start_sim("--model", "b")
    router = start_router([a.url, b.url], "--no-worker-timeout-secs", "60", *FAST)
    admin = AdminApi(router)
    assert server(await chat(router, "a")) == a.worker_name

    assert admin.remove(a.url).status < 300
    kill_now(a)
    async with Connection(router.port) as late:
        await late.send("POST", CHAT_PATH, JSON_HEADERS, chat_body("a"))
        await until_waiting(router, 1, "no_worker")
        assert server(await chat(router, "b")) == b.worker_name
        new = start_sim("--model", "a")
        assert admin.add(new.url).status < 300
        response = await answer_of(late)
        unknown = await chat(router, "never")

    assert server(response) == new.worker_name
    assert (unknown.status, openai_error(unknown)["code"]) == (404, "model_not_found")


async def test_wait_for_a_worker_ends_with_503(start_router: StartRouter) -> None:
    """After its time, and not before."""
    router = start_router([], "--no-worker-timeout-secs", "1.5", "--decision-timeout-secs", "0.3")
    started = time.monotonic()

    response = await chat(router)

    assert 1.4 < time.monotonic() - started < 6
    assert (response.status, openai_error(response)["code"]) == (503, "no_worker_available")
    await until_nothing_is_left(router)


async def test_without_the_wait_a_request_is_refused_at_once(
    workerless_router: Router,
) -> None:
    """As ever."""
    started = time.monotonic()

    response = await chat(workerless_router)

    assert time.monotonic() - started < 2
    assert (response.status, openai_error(response)["code"]) == (503, "no_worker_available")


async def test_open_circuit_of_the_only_worker_means_503_at_once(
    start_router: StartRouter, start_sim: StartSim
) -> None:
    """It is there and answers with errors: waiting is for workers that are coming."""
    sim = start_sim()
    router = start_router([sim.url], "--no-worker-timeout-secs", "60", "--disable-retries", *FAST)
    set_faults(sim, fail_first_n=1_000_000, status_code=500)
    async with asyncio.timeout(LIMIT_S):
        while router.metrics()("worker_states", state="ejected") < 1:
            await chat(router)
    started = time.monotonic()

    response = await chat(router)

    assert time.monotonic() - started < 2
    assert (response.status, openai_error(response)["code"]) == (503, "no_worker_available")


# --- when the service ends -------------------------------------------------------------------------


@pytest.mark.parametrize("fail_closed", [False, True], ids=["fail open", "fail closed"])
async def test_service_that_is_killed_leaves_nobody_waiting(
    fail_closed: bool, start_router: StartRouter, start_worker: StartWorker
) -> None:
    """Envoy serves them by itself, or says that the router is not there."""
    held = Held(worker := start_worker())
    flags = ("--fail-closed",) if fail_closed else ()
    router = start_router(worker.urls, *ROUND_ROBIN, "--max-concurrent-requests", "1", *flags)
    async with holding(router, held), contextlib.AsyncExitStack() as stack:
        waits = [await stack.enter_async_context(sent(router, held.path)) for _ in range(5)]
        await until_waiting(router, 5)
        router.kill_service()
        held.go_on.set()
        async with asyncio.timeout(LIMIT_S):
            answers = [await answer_of(connection) for connection in waits]

    if fail_closed:
        assert {answer.status for answer in answers} == {503}
        assert {openai_error(answer)["code"] for answer in answers} == {"router_unavailable"}
    else:
        assert {answer.status for answer in answers} == {200}
    await router.until_serving(60)


async def test_service_that_is_asked_to_stop_refuses_who_waits(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    """503 at once, not at the end of their time; what is under way goes on."""
    held = Held(worker := start_worker())
    router = start_router(
        worker.urls, *ROUND_ROBIN, "--max-concurrent-requests", "1", "--shutdown-delay-s", "0"
    )
    async with Connection(router.port) as first, contextlib.AsyncExitStack() as stack:
        await first.send("POST", held.path, body=BODY)
        await first.head()
        await first.event()
        waits = [await stack.enter_async_context(sent(router, held.path)) for _ in range(5)]
        await until_waiting(router, 5)
        os.kill(router.service_pid, signal.SIGTERM)
        async with asyncio.timeout(10):
            answers = [await answer_of(connection) for connection in waits]
        held.go_on.set()
        rest = await first.body()

    assert {answer.status for answer in answers} == {503}
    assert {openai_error(answer)["code"] for answer in answers} == {"no_worker_available"}
    assert rest == b"data: [DONE]\n\n"
    await router.until_serving(60)


# --- request ids -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"X-Request-Id": "own"}, ["own"]),
        ({"X-Correlation-Id": "c"}, ["c"]),
        ({"Request-Id": "r", "X-Trace-Id": "t"}, ["t"]),
        ({"X-Request-Id": "own", "X-Correlation-Id": "c"}, ["own"]),
    ],
    ids=str,
)
async def test_worker_gets_the_id_that_the_client_sent(
    headers: dict[str, str], expected: list[str], router: Router, worker: RawWorker
) -> None:
    """The first of the listed headers; the client's own header stays as it is."""
    path = worker.on(unique_path(), _ok)

    response = await ask(router.port, "POST", path, list(headers.items()), BODY)

    assert response.status == 200
    received = worker.only(path)
    assert received.values("x-request-id") == expected
    for name, value in headers.items():
        assert received.values(name.lower()) == [value]


async def test_other_headers_may_be_listed_for_the_id(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    """One that is not listed is no id: the request gets another."""
    worker = start_worker()
    path = worker.on(unique_path(), _ok)
    router = start_router(worker.urls, *ROUND_ROBIN, "--request-id-headers", "X-Job", "x-task")

    for headers in ([("x-task", "t")], [("x-job", "j"), ("x-task", "t")], [("x-request-id", "r")]):
        assert (await ask(router.port, "POST", path, headers, BODY)).status == 200

    ids = [request.values("x-request-id") for request in worker.received(path)]
    assert ids[:2] == [["t"], ["j"]]
    assert len(ids[2]) == 1
    assert ids[2] != ["r"]


async def _ok(_request: Received, stream: Stream) -> None:
    await stream.send(json_response({}))


# --- many ------------------------------------------------------------------------------------------

MANY = 10_000
SERVICE_BYTES = 50_000_000
"""What that many waiting requests may cost the service."""

ENVOY_BYTES_EACH = 80_000
"""What one costs Envoy, waiting or not: its connection and two HTTP streams."""


@pytest.fixture
def _many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < MANY + 1000:
        pytest.skip(f"needs {MANY + 1000} open files; raise the hard limit (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.usefixtures("_many_files")
async def test_ten_thousand_wait_for_little_memory_and_leave_quickly(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    """The service holds their headers and nothing else; those who leave are gone at once."""
    held = Held(worker := start_worker())
    router = start_router(
        worker.urls,
        *MODES["buffered"],
        *("--max-concurrent-requests", "1", "--queue-size", str(MANY)),
        # The machine may be busy with other things, and the router must not fail open for that.
        *("--queue-timeout-secs", "600", "--decision-timeout-secs", "60"),
    )
    head = (
        f"POST {held.path} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        f"User-Agent: OpenAI/Python\r\nContent-Length: {len(BODY)}\r\n"
    ).encode()
    async with holding(router, held):
        service, envoy = rss_bytes(router.service_pid), rss_bytes(router.envoy_pid)
        with contextlib.ExitStack() as sockets:
            for number in range(MANY):
                client = sockets.enter_context(
                    socket.create_connection(("127.0.0.1", router.port), LIMIT_S)
                )
                client.sendall(head + b"X-Tenant-Id: t%d\r\n\r\n" % (number % 500) + BODY)
            await until_waiting(router, MANY, limit_s=90)
            service = rss_bytes(router.service_pid) - service
            envoy = rss_bytes(router.envoy_pid) - envoy
        took = await until(lambda: waiting(router) == 0, LIMIT_S, "all have left")
        held.go_on.set()

    assert service < SERVICE_BYTES, f"{service / 1e6:.0f} MB in the service"
    assert envoy < MANY * ENVOY_BYTES_EACH, f"{envoy / 1e6:.0f} MB in Envoy"
    assert took < 10
    await until_nothing_is_left(router)
