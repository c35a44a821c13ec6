"""A worker that is lost in the middle of its answer: no client may take what it got for the whole.

A worker can end an answer without having announced its length and without chunks, by closing the connection
(HTTP/1.0's way). When such a worker closes early nobody can tell, the worker's own clients neither, and Envoy
takes a reset for such an end too. vLLM never answers that way. Nor can a client that speaks HTTP/1.0 itself
tell, when a stream is cut. In these two cases alone a truncated answer looks complete, and tests say so.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import h2.events
import pytest

from tests.e2e.client import Connection
from tests.e2e.conftest import StartRouter
from tests.e2e.h2_client import H2Connection
from tests.e2e.harness import Router, Sim
from tests.e2e.raw_worker import RawWorker, Received, Signal, Stream, unique_path

pytestmark = pytest.mark.envoy

IDLE_S = 1.0
LIMIT_S = 10.0
PART = b"data: part\n\n"

HEADS = {
    "chunked": b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
    "length": b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n",
    "until close": b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n",
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n",
}
FRAMED = ("chunked", "length")


@pytest.fixture(scope="module")
def router(worker: RawWorker, logs: Path) -> Iterator[Router]:
    """Start a router that waits for silent workers no longer than ``IDLE_S``.

    Its workers do nothing but break off answers; without a breaker they go on getting requests.
    """
    idle = ("--stream-idle-timeout-secs", str(IDLE_S))
    flags = ("--policy", "round_robin", "--disable-circuit-breaker", *idle)
    router = Router(worker.urls, logs, *flags)
    try:
        yield router.until_ready()
        router.stop()
    finally:
        router.end()


def part_of(framing: str) -> bytes:
    return b"%x\r\n%s\r\n" % (len(PART), PART) if framing == "chunked" else PART


def answer_then(framing: str, loss: str, seen: Signal) -> Callable[..., object]:
    """Return a handler that sends the head and a part, and is lost once the client has *seen* it."""

    async def answer(_request: Received, stream: Stream) -> None:
        await stream.send(HEADS[framing] + part_of(framing))
        await seen.wait(LIMIT_S)
        match loss:
            case "reset":
                stream.reset()
            case "closes":
                stream.close()
            case "half a chunk":
                await stream.send(b"20\r\ndata: ")
                stream.close()
            case "garbage":
                await stream.send(b"zz\r\nno chunk\r\n")
            case "silent":
                await stream.until_peer_leaves(LIMIT_S)

    return answer


async def ask_h1(port: int, path: str, seen: Signal | Callable[[], None]) -> tuple[bytes, str]:
    """Return the body, and how it ended: ``complete`` or ``cut``."""
    async with Connection(port) as connection, asyncio.timeout(LIMIT_S):
        await connection.send("POST", path, body=b"{}")
        response = await connection.head()
        assert response.status == 200
        body = await connection.piece()
        seen.set() if isinstance(seen, Signal) else seen()
        try:
            while piece := await connection.piece():
                body += piece
        except (EOFError, OSError):
            return body, "cut"
    return body, "complete"


async def ask_h2(port: int, path: str, seen: Signal | Callable[[], None]) -> tuple[bytes, str]:
    """Return the body, and how it ended: ``complete`` or ``cut``."""
    async with H2Connection(port) as connection, asyncio.timeout(LIMIT_S):
        stream = await connection.send("POST", path, body=b"{}")
        response = await stream.head()
        assert response.status == 200
        body = await stream.piece()
        seen.set() if isinstance(seen, Signal) else seen()
        while True:
            match await stream._events.get():
                case h2.events.DataReceived(data=data):
                    body += data
                case h2.events.StreamReset(error_code=code):
                    # NO_ERROR after a whole answer would be allowed, so it must not stand for a cut one
                    return body, "cut" if code else "complete"
                case h2.events.StreamEnded():
                    return body, "complete"


CLIENTS = {"HTTP/1.1": ask_h1, "HTTP/2": ask_h2}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("framing", "loss"),
    [
        *((framing, "silent") for framing in HEADS),
        *((framing, loss) for framing in FRAMED for loss in ("reset", "closes")),
        ("chunked", "half a chunk"),
        ("chunked", "garbage"),
    ],
)
async def test_loss_is_seen(
    router: Router, worker: RawWorker, framing: str, loss: str, client: str
) -> None:
    """What came before it arrives, the end is an error, and nothing was asked twice."""
    seen = Signal()
    path = worker.on(unique_path(), answer_then(framing, loss, seen))
    started = time.monotonic()

    body, end = await CLIENTS[client](router.port, path, seen)

    took = time.monotonic() - started
    assert body.startswith(PART)
    assert end == "cut"
    assert len(worker.received(path)) == 1
    assert took < IDLE_S + 2
    if loss == "silent":
        assert took > IDLE_S * 0.9
    await router.until_idle()


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("loss", ["closes", "reset"])
@pytest.mark.parametrize("framing", ["until close", "HTTP/1.0"])
async def test_early_end_of_an_answer_without_length_cannot_be_told(
    router: Router, worker: RawWorker, framing: str, loss: str, client: str
) -> None:
    """The end of the connection is the end of such an answer, early or not: HTTP has nothing else."""
    seen = Signal()
    path = worker.on(unique_path(), answer_then(framing, loss, seen))

    assert await CLIENTS[client](router.port, path, seen) == (PART, "complete")

    await router.until_idle()


@pytest.mark.parametrize(("framing", "end"), [("length", "cut"), ("chunked", "complete")])
async def test_http_1_0_client_sees_it_by_the_length_alone(
    router: Router, worker: RawWorker, framing: str, end: str
) -> None:
    """A stream has none, and HTTP/1.0 no chunks: such a client must look for the last event, ``[DONE]``."""
    seen = Signal()
    path = worker.on(unique_path(), answer_then(framing, "reset", seen))

    async with Connection(router.port) as connection, asyncio.timeout(LIMIT_S):
        head = f"POST {path} HTTP/1.0\r\nHost: h\r\nContent-Length: 2\r\n\r\n{{}}"
        await connection.send_raw(head.encode())
        response = await connection.head()
        body = await connection.piece()
        seen.set()
        how = await _rest(connection)

    assert (response.status, body, how) == (200, PART, end)
    await router.until_idle()


async def _rest(connection: Connection) -> str:
    """Read to the end and say how it was."""
    try:
        while await connection.piece():
            pass
    except (EOFError, OSError):
        return "cut"
    return "complete"


@pytest.mark.parametrize("client", CLIENTS)
async def test_killed_worker_is_seen(
    start_router: StartRouter, start_sim: Callable[..., Sim], client: str
) -> None:
    """Kill -9 in the middle of a stream; the next request goes to the worker that is left."""
    sims = [start_sim("--itl-ms", "100", "--ttft-ms", "0") for _ in range(2)]
    router = start_router([sim.url for sim in sims])
    body = b'{"model":"sim-model","stream":true,"max_tokens":1000,"messages":[{"role":"user","content":"x"}]}'
    headers = [("content-type", "application/json")]

    def kill() -> None:
        (busy,) = [sim for sim in sims if sim.state()["requests_active"]]
        os.kill(busy.pid, signal.SIGKILL)

    received, end = await _stream(client, router.port, headers, body, kill)
    again, _ = await _stream(client, router.port, headers, body, None)

    assert received.startswith(b"data: ")
    assert b"[DONE]" not in received
    assert end == "cut"
    assert again.startswith(b"data: ")
    await router.until_idle()


async def _stream(
    client: str,
    port: int,
    headers: list[tuple[str, str]],
    body: bytes,
    kill: Callable[[], None] | None,
) -> tuple[bytes, str]:
    """Ask for a stream and *kill* after its first bytes; without, leave after them."""
    path = "/v1/chat/completions"
    async with asyncio.timeout(LIMIT_S):
        if client == "HTTP/1.1":
            async with Connection(port) as connection:
                await connection.send("POST", path, headers, body)
                assert (await connection.head()).status == 200
                received = await connection.piece()
                if kill is None:
                    return received, ""
                await asyncio.to_thread(kill)
                try:
                    while piece := await connection.piece():
                        received += piece
                except (EOFError, OSError):
                    return received, "cut"
                return received, "complete"
        async with H2Connection(port) as connection:
            stream = await connection.send("POST", path, headers, body)
            assert (await stream.head()).status == 200
            received = await stream.piece()
            if kill is None:
                return received, ""
            await asyncio.to_thread(kill)
            while True:
                match await stream._events.get():
                    case h2.events.DataReceived(data=data):
                        received += data
                    case h2.events.StreamReset(error_code=code):
                        return received, "cut" if code else "complete"
                    case h2.events.StreamEnded():
                        return received, "complete"
