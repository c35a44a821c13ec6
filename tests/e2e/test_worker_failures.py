"""Workers that fail before they answer: another one serves, and the client notices nothing."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Sequence

import pytest

from tests.e2e.client import Connection, ask, openai_error
from tests.e2e.conftest import BODY_FLAGS, StartRouter
from tests.e2e.harness import Router, Sim, until
from tests.e2e.raw_worker import RawWorker, Received, Stream, respond, unique_path
from tests.e2e.workers_support import AdminApi

pytestmark = pytest.mark.envoy

REQUESTS = 50
StartWorker = Callable[..., RawWorker]

FAILURES = {"refuses": RawWorker.refuse, "hangs up": RawWorker.hang_up}


@pytest.fixture
def start_failing_router(
    start_router: StartRouter, start_worker: StartWorker, plugin_env: dict[str, str]
) -> Callable[..., tuple[Router, list[str], RawWorker]]:
    """Start a router before workers that fail once they are healthy, and *sound* sound ones.

    Returns the URLs of those that fail, too.
    """

    def start(
        mode: str, failures: Sequence[str], sound: int
    ) -> tuple[Router, list[str], RawWorker]:
        worker = start_worker(sound)
        failing = [start_worker() for _ in failures]
        urls = [url for one in failing for url in one.urls]
        router = start_router([*urls, *worker.urls], *BODY_FLAGS[mode], env=plugin_env)
        for one, failure in zip(failing, failures, strict=True):
            FAILURES[failure](one)
        return router, urls, worker

    return start


SWITCHES = (
    b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    b"HTTP/1.1 101 S\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nlocation: /x\r\n\r\nbytes",
    b"HTTP/1.1 101 S\r\nContent-Length: 2\r\n\r\n{}",
)


SILENT = {"content-type", "content-length", "date", "x-request-id", "connection"}


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_switch_that_nobody_asked_for(
    any_router: Router, worker: RawWorker, method: str
) -> None:
    """Is no answer, and takes nothing from the requests after it."""
    path = unique_path()
    for answer in SWITCHES:
        worker.on(path, respond(answer))
        async with Connection(any_router.port) as connection, asyncio.timeout(5):
            response = await connection.ask(method, path, body=b"{}" if method == "POST" else None)
            assert response.status == 502
            assert openai_error(response)["code"] == "worker_answer_invalid"
            assert len(response.values("x-request-id")) == 1
            assert {name.lower() for name, _ in response.headers} <= SILENT
            assert (await connection.ask("GET", unique_path())).status == 200
    await any_router.until_idle(2)


@pytest.mark.parametrize(
    ("mode", "failures", "sound"),
    [
        ("headers_only", ["refuses"], 1),
        ("headers_only", ["hangs up"], 1),
        ("headers_only", ["refuses"], 2),
        ("headers_only", ["refuses", "refuses"], 1),
        ("buffered", ["refuses", "hangs up"], 1),
        ("full_duplex", ["hangs up", "refuses"], 1),
    ],
)
async def test_next_worker_serves(
    start_failing_router: Callable[..., tuple[Router, list[str], RawWorker]],
    mode: str,
    failures: list[str],
    sound: int,
) -> None:
    """Every request is answered with 200, its body is whole, and it reaches one worker only.

    Small bodies, then 1 MB with its length announced and in chunks, several at once. Each of the failing
    workers is picked, so the first picks walk the list of fallbacks.
    """
    router, failing, worker = start_failing_router(mode, failures, sound)
    paths = [unique_path() for _ in range(REQUESTS)]
    bodies = [b'{"n": %d}' % number for number in range(REQUESTS)]
    noise = random.Random(6)

    async def send_large(number: int) -> None:
        body = noise.randbytes(1_000_000)
        path = unique_path()
        if number % 2:
            response = await ask(router.port, "POST", path, body=body)
        else:
            pieces = [body[at : at + 50_000] for at in range(0, len(body), 50_000)]
            response = await ask(router.port, "POST", path, chunks=pieces)
        assert response.status == 200, response
        assert worker.only(path).sha256 == hashlib.sha256(body).hexdigest()

    async with Connection(router.port) as connection:
        statuses = [
            (await connection.ask("POST", path, body=body)).status
            for path, body in zip(paths, bodies, strict=True)
        ]
    for _ in range(2):
        await asyncio.gather(*(send_large(number) for number in range(4)))

    assert statuses == [200] * REQUESTS
    assert [worker.only(path).body for path in paths] == bodies
    event = "worker suspended: it cannot be reached"
    await until(
        lambda: all(router.logged(event, worker=url) for url in failing),
        5,
        "all were tried in vain",
    )
    assert router.metrics()("retries_total") >= len(failing)
    await router.until_idle()


async def test_worker_that_dies_with_the_request_in_its_hands(
    any_router: Router, worker: RawWorker
) -> None:
    """Before the head of an answer nothing is lost: the other worker gets the request."""
    router = any_router
    dies, lives = worker.ports

    async def answer(request: Received, stream: Stream) -> None:
        if request.port == dies:
            stream.reset()
        else:
            await respond(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")(request, stream)

    served = []
    for number in range(10):
        path = worker.on(unique_path(), answer)
        response = await ask(router.port, "POST", path, body=b'{"n": %d}' % number)
        assert response.status == 200, response
        served.append([request.port for request in worker.received(path)])

    assert all(ports in ([lives], [dies, lives]) for ports in served)
    assert [dies, lives] in served
    await router.until_idle()


async def test_stream_that_breaks_does_not_look_whole(
    any_router: Router, worker: RawWorker
) -> None:
    """After the head of an answer nothing is tried again: the client sees that it was cut."""
    router = any_router

    async def answer(_request: Received, stream: Stream) -> None:
        await stream.open_events()
        await stream.event("half")
        stream.reset()

    path = worker.on(unique_path(), answer)
    async with Connection(router.port) as connection:
        await connection.send("POST", path, body=b"{}")
        response = await connection.head()
        with pytest.raises((EOFError, OSError)):
            await connection.body()

    assert response.status == 200
    assert len(worker.received(path)) == 1
    await router.until_idle()


@pytest.mark.parametrize(
    ("mode", "failures"),
    [
        ("headers_only", ["refuses"]),
        ("headers_only", ["hangs up", "refuses", "hangs up", "refuses"]),
        ("buffered", ["refuses"]),
        ("full_duplex", ["hangs up"]),
    ],
)
async def test_no_worker_can_be_reached(
    start_failing_router: Callable[..., tuple[Router, list[str], RawWorker]],
    mode: str,
    failures: list[str],
) -> None:
    """503 as OpenAI words errors, without an address in it."""
    router, _, _ = start_failing_router(mode, failures, 0)

    response = await ask(router.port, "POST", "/v1/chat/completions", body=b'{"model": "m"}')

    assert response.status == 503
    error = openai_error(response)
    assert error["code"] == "worker_connection_failed"
    everything = f"{response.headers}{response.body.decode()}"
    for secret in ("127.0.0.1", "localhost", "refused", "upstream", "envoy", "delayed"):
        assert secret not in everything.lower()
    await router.until_idle()


async def test_worker_comes_back(start_router: StartRouter, start_sim: Callable[..., Sim]) -> None:
    """A worker that is started again gets its requests again."""
    sim = start_sim()
    router = start_router([sim.url])
    assert (await ask(router.port, "GET", "/version")).status == 200

    sim.end()
    away = await ask(router.port, "GET", "/version")
    start_sim(port=sim.port)
    AdminApi(router).until_state(sim.url, "healthy", limit_s=3)
    back = await ask(router.port, "GET", "/version")

    assert away.status == 503
    assert openai_error(away)["code"] == "worker_connection_failed"
    assert back.status == 200
