"""What the tests of workers at run time share: the admin API, verdicts of Envoy, clients that go on."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import http.client
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import aiohttp

from tests.e2e.client import Connection, Response, ask
from tests.e2e.harness import HTTP_LIMIT_S, POLL_S, Program, Router, Sim, until, wait_until
from tests.e2e.raw_worker import RawWorker, Received, Signal, Stream

FAST = (
    *("--health-check-interval-secs", "0.25"),
    *("--health-check-timeout-secs", "2"),
    *("--worker-poll-interval-secs", "0.5"),
)
"""Flags with which verdicts and models come soon."""

ROUND_ROBIN = ("--policy", "round_robin")

StartSim = Callable[..., Sim]
StartWorker = Callable[..., RawWorker]


def worker_path(url: str) -> str:
    """Return the path of the worker *url* in the admin API."""
    return f"/workers/{quote(url, safe='')}"


class AdminApi:
    """The admin API of a router, one connection per request; it blocks."""

    def __init__(self, router: Router, key: str = "") -> None:
        self.port = router.port
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def ask(
        self,
        method: str,
        target: str,
        described: Any = None,
        *,
        headers: dict[str, str] | None = None,
        limit_s: float = HTTP_LIMIT_S,
    ) -> Response:
        """Send a request, with *described* as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=limit_s)
        with contextlib.closing(connection):
            body = None if described is None else json.dumps(described)
            connection.request(method, target, body, {**self._headers, **(headers or {})})
            with connection.getresponse() as answer:
                found = answer.getheaders()
                return Response(answer.status, "HTTP/1.1", found, answer.read())

    def add(self, url: str, *, wait: bool = False, **described: Any) -> Response:
        """Add a worker."""
        return self.ask("POST", f"/workers{'?wait=1' if wait else ''}", {"url": url, **described})

    def remove(self, url: str) -> Response:
        """Remove a worker."""
        return self.ask("DELETE", worker_path(url))

    def drain(self, url: str, *, timeout_s: float | None = None) -> Response:
        """Drain a worker."""
        query = "" if timeout_s is None else f"?timeout={timeout_s:g}"
        return self.ask("POST", f"{worker_path(url)}/drain{query}")

    def workers(self) -> dict[str, dict[str, Any]]:
        """Return the entries of all workers by URL."""
        answer = self.ask("GET", "/workers")
        assert answer.status == 200, answer
        document = answer.json()
        assert document["total"] == len(document["workers"])
        return {entry["url"]: entry for entry in document["workers"]}

    def worker(self, url: str) -> dict[str, Any]:
        """Return the entry of one worker."""
        answer = self.ask("GET", worker_path(url))
        assert answer.status == 200, answer
        entry: dict[str, Any] = answer.json()
        assert entry["is_healthy"] is (entry["state"] == "healthy")
        return entry

    def state(self, url: str) -> str:
        """Return the state of one worker, "gone" when it is not there."""
        entry = self.workers().get(url)
        return "gone" if entry is None else entry["state"]

    def states(self) -> dict[str, str]:
        """Return the states of all workers by URL."""
        return {url: entry["state"] for url, entry in self.workers().items()}

    async def until_service_answers(self, limit_s: float = 30.0) -> None:
        """Wait until the service answers, not Envoy in its place."""
        await until(lambda: self.ask("GET", "/workers").status == 200, limit_s, "service answers")

    def until_state(self, url: str, *states: str, limit_s: float = 10.0) -> float:
        """Wait until the worker is in one of *states*; return the seconds that took."""
        what = f"{url} is {' or '.join(states)}"
        return wait_until(lambda: self.state(url) in states, limit_s, what)

    def until_states(self, states: dict[str, str], limit_s: float = 10.0) -> float:
        """Wait until these are the workers and their states; return the seconds that took."""
        return wait_until(lambda: self.states() == states, limit_s, f"states {states}")


def unix_time(text: str) -> float:
    """Return the Unix time of an ISO 8601 time stamp."""
    return dt.datetime.fromisoformat(text).timestamp()


def verdict_times(router: Router, port: int) -> list[float]:
    """Return when Envoy found the worker at *port* unhealthy or ejected it, as its event logs tell."""
    found = []
    for path in router.temporary.glob("vllm-extproc-*/*.jsonl"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # a line that is being written
                event = json.loads(line)
                against = "eject_unhealthy_event" in event or event.get("action") == "EJECT"
                if against and (f'"port_value":{port}' in line or f":{port}" in line):
                    found.append(unix_time(event["timestamp"]))
    return sorted(found)


def kill_now(program: Program) -> None:
    """Kill *program* with -9 and wait for its end."""
    program.send_signal(signal.SIGKILL)
    program.wait()


@contextlib.contextmanager
def paused(pid: int) -> Any:
    """Let a process hang."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def set_faults(sim: Sim, **fields: object) -> None:
    """Change faults of a simulated worker."""
    _control(sim, "faults", fields)


def set_models(sim: Sim, *models: str) -> None:
    """Let a simulated worker serve other models."""
    _control(sim, "models", {"models": models})


def _control(sim: Sim, what: str, document: object) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", sim.port, timeout=HTTP_LIMIT_S)
    with contextlib.closing(connection):
        connection.request("POST", f"/_sim/{what}", json.dumps(document))
        with connection.getresponse() as answer:
            assert answer.status == 200, answer.read()


def chat_body(model: str = "sim-model", *, tokens: int = 2, stream: bool = False) -> bytes:
    """Return the body of a short chat."""
    return json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": tokens,
            "stream": stream,
        }
    ).encode()


CHAT_PATH = "/v1/chat/completions"
JSON_HEADERS = [("Content-Type", "application/json")]


async def chat(router: Router, model: str = "sim-model", **options: Any) -> Response:
    """Send one short chat."""
    return await ask(router.port, "POST", CHAT_PATH, JSON_HEADERS, chat_body(model, **options))


async def chats(router: Router, count: int, model: str = "sim-model") -> Counter[str]:
    """Send *count* chats one after the other, all of which must succeed; return who served them."""
    served: Counter[str] = Counter()
    async with Connection(router.port) as connection:
        for _ in range(count):
            response = await connection.ask("POST", CHAT_PATH, JSON_HEADERS, chat_body(model))
            served[server(response)] += 1
    return served


def server(response: Response) -> str:
    """Return who served: the name of a simulated worker, or the port of a raw one."""
    assert response.status == 200, response
    names = response.values("x-sim-worker")
    return names[0] if names else str(response.json()["port"])


async def until_status(
    router: Router, status: int, model: str = "sim-model", limit_s: float = 20.0
) -> Response:
    """Chat until the answer has this status; return that answer."""
    async with asyncio.timeout(limit_s):
        while True:
            response = await chat(router, model)
            if response.status == status:
                return response
            await asyncio.sleep(POLL_S)


class HealthSwitch:
    """``/health`` of raw workers: 200 unless told otherwise."""

    def __init__(self, worker: RawWorker) -> None:
        self.statuses: dict[int, int] = {}
        """By port."""
        self.asked: Counter[tuple[int, int]] = Counter()
        """Checks, by port and status answered."""
        worker.on("/health", self._answer)

    async def _answer(self, request: Received, stream: Stream) -> None:
        status = self.statuses.get(request.port, 200)
        self.asked[request.port, status] += 1
        await stream.send(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % status)


def serve_models(worker: RawWorker, models: Mapping[int, Sequence[str | tuple[str, str]]]) -> None:
    """Let raw workers say that they serve *models*, by port; the mapping may change later.

    A LoRA adapter is a pair: its name and that of its base model.
    """

    async def answer(request: Received, stream: Stream) -> None:
        data = [_card(model) for model in models.get(request.port, ())]
        await stream.send(json_response({"object": "list", "data": data}))

    worker.on("/v1/models", answer)


def _card(model: str | tuple[str, str]) -> dict[str, Any]:
    name, parent = (model, None) if isinstance(model, str) else model
    return {"id": name, "object": "model", "parent": parent}


def json_response(document: Any, *headers: str) -> bytes:
    """Return a response of a raw worker, head and all."""
    body = json.dumps(document).encode()
    lines = [
        "HTTP/1.1 200 OK",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


STREAM_PATH = "/e2e/stream"
STREAM_BODY = b"data: before\n\ndata: after\n\ndata: [DONE]\n\n"


def hold_streams(worker: RawWorker) -> Signal:
    """Let ``STREAM_PATH`` send an event at once, and the rest when the signal is set.

    The header ``x-port`` of the answer says which of the workers it was.
    """
    go_on = Signal()

    async def answer(request: Received, stream: Stream) -> None:
        await stream.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"x-port: %d\r\ntransfer-encoding: chunked\r\n\r\n" % request.port
        )
        await stream.event("before")
        await go_on.wait()
        await stream.event("after")
        await stream.close_events()

    worker.on(STREAM_PATH, answer)
    return go_on


@contextlib.asynccontextmanager
async def stream_on(router: Router, port: int) -> AsyncIterator[Connection]:
    """Open a stream of ``hold_streams`` on the raw worker at *port*: its head and first event are read."""
    async with contextlib.AsyncExitStack() as others:
        for _ in range(20):
            connection = await others.enter_async_context(Connection(router.port))
            await connection.send("GET", STREAM_PATH)
            response = await connection.head()
            assert response.status == 200, response
            if response.values("x-port") == [str(port)]:
                assert await connection.event() == "before"
                yield connection
                return
        raise AssertionError(f"the worker at {port} is never picked")


async def rest_of(connection: Connection) -> bytes:
    """Return the whole body of a stream of ``hold_streams``, of which the first event was read."""
    return b"data: before\n\n" + await connection.body()


async def hang(_request: Received, stream: Stream) -> None:
    """Never answer."""
    await stream.until_peer_leaves()


class Traffic:
    """Clients that chat without a pause until they are told to stop."""

    def __init__(self, router: Router) -> None:
        self.served: Counter[str] = Counter()
        self.failures: list[str] = []
        self._router = router
        self._stop = False

    async def client(self) -> None:
        while not self._stop:
            try:
                async with Connection(self._router.port) as connection:
                    while not self._stop:
                        response = await connection.ask(
                            "POST", CHAT_PATH, JSON_HEADERS, chat_body()
                        )
                        if response.status == 200:
                            self.served[server(response)] += 1
                        else:
                            self.failures.append(f"{response.status} {response.body!r}")
                        await asyncio.sleep(0.005)
            except (OSError, EOFError) as error:
                self.failures.append(repr(error))

    def stop(self) -> None:
        self._stop = True

    async def until_served(self, more: int, limit_s: float = 20.0) -> None:
        """Wait until *more* further requests are served."""
        wanted = self.served.total() + more
        await until(lambda: self.served.total() >= wanted, limit_s, f"{more} more are served")


@contextlib.asynccontextmanager
async def traffic(router: Router, clients: int = 4) -> AsyncIterator[Traffic]:
    """Keep *clients* busy."""
    load = Traffic(router)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(load.client())
        try:
            await load.until_served(10)
            yield load
        finally:
            load.stop()


async def retries(router: Router, requests: float) -> float:
    """Return the retries so far once *requests* have been accounted for."""

    def ended() -> bool:
        return router.metrics()("requests_total") >= requests

    await until(ended, 10, f"{requests} requests accounted for")
    return router.metrics()("retries_total")


def elapsed(since: float) -> float:
    """Return the seconds since *since* on the monotonic clock."""
    return time.monotonic() - since


async def until_ended(router: Router, limit_s: float = 5.0) -> None:
    """Wait until nothing is in flight, on workers that are gone neither."""
    await until(lambda: router.metrics()("in_flight") == 0, limit_s, "in-flight back to 0")
    assert router.in_flight() == 0


def remembered(router: Router) -> list[dict[str, Any]]:
    """Return what the next run of the service would know of each worker."""
    (path,) = router.temporary.glob("vllm-extproc-*/extproc.sock.workers")
    engines: list[dict[str, Any]] = json.loads(path.read_bytes())["engines"]
    return engines


async def ask_envoy(router: Router, target: str) -> bytes:
    """Return what Envoy's own admin endpoint answers."""
    (path,) = router.temporary.glob("vllm-extproc-*/envoy-admin.sock")
    timeout = aiohttp.ClientTimeout(total=HTTP_LIMIT_S)
    connector = aiohttp.UnixConnector(str(path))
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
        session.get(f"http://envoy{target}") as response,
    ):
        assert response.status == 200
        return await response.read()


async def envoy_endpoints(router: Router) -> dict[str, set[str]]:
    """Return the endpoints that Envoy has for its clusters of workers, by cluster."""
    clusters = json.loads(await ask_envoy(router, "/clusters?format=json"))["cluster_statuses"]
    found: dict[str, set[str]] = {}
    for cluster in clusters:
        if cluster["name"] in ("extproc", "extproc_admin"):
            continue
        sockets = [host["address"]["socket_address"] for host in cluster.get("host_statuses", [])]
        found[cluster["name"]] = {f"{s['address']}:{s['port_value']}" for s in sockets}
    return found


async def envoy_stats(router: Router, pattern: str) -> dict[str, int]:
    """Return the counters and gauges of Envoy whose name matches *pattern*."""
    lines = (await ask_envoy(router, f"/stats?filter={pattern}")).decode().splitlines()
    pairs = [line.partition(": ") for line in lines]
    return {name: int(value) for name, _, value in pairs if value.isdecimal()}
