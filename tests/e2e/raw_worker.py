"""A worker of which the tests decide every byte.

It runs in a thread with an event loop of its own, so that routers that live for a whole session can
have it, whatever loop a test uses. Each test takes a path of its own (``unique_path``) and says with
``on`` what happens there; other paths, ``/health`` among them, are answered with what arrived, as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import json
import socket
import struct
import threading
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine

from tests.e2e.harness import free_port

WAIT_LIMIT_S = 90.0
KEPT_BYTES = 65_536
READ_BYTES = 262_144
SETTLE_S = 0.01


class Signal:
    """Set in one thread, awaited in any loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def set(self) -> None:
        with self._lock:
            self._event.set()
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            with contextlib.suppress(RuntimeError):  # its loop is gone
                loop.call_soon_threadsafe(event.set)

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self, limit_s: float = WAIT_LIMIT_S) -> None:
        with self._lock:
            if self._event.is_set():
                return
            event = asyncio.Event()
            self._waiting.append((asyncio.get_running_loop(), event))
        async with asyncio.timeout(limit_s):
            await event.wait()


@dataclasses.dataclass(slots=True)
class Received:
    """One request as it came in."""

    port: int
    """Of the listener: which of the workers it was."""
    method: str
    target: str
    """Path and query string, not decoded."""
    version: str
    headers: list[tuple[str, str]]
    """In the order sent, names in the letter case sent, Latin-1."""
    body_bytes: int = 0
    sha256: str = ""
    body: bytes = b""
    """Only of small ones."""

    def values(self, name: str) -> list[str]:
        """Return every value of header *name*."""
        return [value for key, value in self.headers if key.lower() == name.lower()]

    def names(self) -> set[str]:
        return {key.lower() for key, _ in self.headers}


class Stream:
    """What a handler writes to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer
        self.keep_alive = True

    async def send(self, data: bytes) -> None:
        """Write *data* as it is."""
        self._writer.write(data)
        await self._writer.drain()

    async def event(self, text: str) -> None:
        """Write one server-sent event as a chunk."""
        data = f"data: {text}\n\n".encode()
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def open_events(self) -> None:
        """Write the head of a stream of events."""
        await self.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )

    async def close_events(self) -> None:
        """Write the end of a stream of events."""
        await self.event("[DONE]")
        await self.send(b"0\r\n\r\n")

    async def until_peer_leaves(self, limit_s: float = WAIT_LIMIT_S) -> None:
        """Wait until the other side has closed or reset the connection."""
        async with asyncio.timeout(limit_s):
            with contextlib.suppress(OSError):
                while await self.reader.read(READ_BYTES):
                    pass

    def close(self) -> None:
        """Close the connection without an answer."""
        self.keep_alive = False

    def reset(self) -> None:
        """Reset the connection."""
        self.keep_alive = False
        connection = self._writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


Handler = Callable[[Received, Stream], Awaitable[None]]


def unique_path() -> str:
    """Return a path that no other test uses."""
    return f"/e2e/{uuid.uuid4().hex}"


def respond(data: bytes) -> Handler:
    """Return a handler that answers *data*, head and all."""

    async def handler(_request: Received, stream: Stream) -> None:
        await stream.send(data)

    return handler


class RawWorker:
    """One or more workers in a thread.

    *keep_alive_s*: idle connections are closed after so many seconds; None keeps them.
    """

    def __init__(self, count: int = 1, *, keep_alive_s: float | None = None) -> None:
        # No connection of anybody's takes one of these ports while a worker refuses.
        self.ports = [free_port() for _ in range(count)]
        self.errors: list[BaseException] = []
        """What handlers raised, lost connections aside."""
        self._keep_alive_s = keep_alive_s
        self._hangs_up = False
        self._servers: list[asyncio.Server] = []
        self._begun: Counter[str] = Counter()
        self._received: dict[str, list[Received]] = {}
        self._arriving: dict[str, Received] = {}
        self._handlers: dict[str, Handler] = {}
        self._open: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._stop = Signal()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def start(self) -> RawWorker:
        self._thread.start()
        assert self._ready.wait(10), "the raw worker does not start"
        return self

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)
        assert not self.errors, self.errors

    def on(self, path: str, handler: Handler) -> str:
        """Let *handler* answer requests for *path* (query string aside)."""
        self._handlers[path] = handler
        return path

    def received(self, path: str) -> list[Received]:
        """Return the requests for *path* (query string aside) that arrived whole."""
        return self._received.get(path, [])

    def reading(self, path: str) -> int:
        """Return how many bytes of the last request's body have arrived, -1 before its head."""
        request = self._arriving.get(path)
        return -1 if request is None else request.body_bytes

    def only(self, path: str) -> Received:
        """Return the one request for *path*."""
        (request,) = self.received(path)
        return request

    def begun(self, path: str) -> int:
        """Return how many requests for *path* (query string aside) began to arrive, whole or not."""
        return self._begun[path]

    def refuse(self) -> None:
        """Close all connections and refuse new ones."""
        self._call(self._close())

    def hang_up(self) -> None:
        """Close all connections, and new ones as soon as they are accepted."""
        self._hangs_up = True
        self._call(self._drop())

    def come_back(self) -> None:
        """Serve as at the beginning."""
        self._hangs_up = False
        if not self._servers:
            self._call(self._listen())

    def _call(self, work: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        await self._listen()
        self._ready.set()
        await self._stop.wait(24 * 3600)
        await self._close()

    async def _listen(self) -> None:
        for port in self.ports:
            server = await asyncio.start_server(
                self._accept, "127.0.0.1", port, limit=READ_BYTES, backlog=4096
            )
            self._servers.append(server)

    async def _close(self) -> None:
        # Checks of health connect at any time. A server that closes while it accepts would forget the socket.
        for server in self._servers:
            for listener in server.sockets:
                self._loop.remove_reader(listener.fileno())
        await asyncio.sleep(SETTLE_S)
        for server in self._servers:
            server.close()
        self._servers.clear()
        await self._drop()

    async def _drop(self) -> None:
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(self._open, timeout=5)
        await asyncio.sleep(0)  # their sockets are closed

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        stream = Stream(reader, writer)
        try:
            while stream.keep_alive and not self._hangs_up:
                async with asyncio.timeout(self._keep_alive_s):
                    head = await reader.readuntil(b"\r\n\r\n")
                request = _parse_head(head, writer.get_extra_info("sockname")[1])
                path = request.target.partition("?")[0]
                self._arriving[path] = request
                self._begun[path] += 1
                await _read_body(request, reader)
                self._received.setdefault(path, []).append(request)
                await self._handlers.get(path, _describe)(request, stream)
        except asyncio.CancelledError:
            writer.transport.abort()
        except (EOFError, OSError, TimeoutError):
            pass
        except Exception as error:  # noqa: BLE001  reported by stop
            self.errors.append(error)
        finally:
            self._open.discard(task)
            writer.close()


def _parse_head(head: bytes, port: int) -> Received:
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    method, target, version = first.split(" ")
    headers = []
    for line in lines:
        name, _, value = line.partition(":")
        headers.append((name, value.strip(" \t")))
    return Received(port, method, target, version, headers)


async def _read_body(request: Received, reader: asyncio.StreamReader) -> None:
    digest = hashlib.sha256()

    async def take(count: int) -> None:
        while count:
            data = await reader.read(min(count, READ_BYTES))
            if not data:
                raise EOFError
            count -= len(data)
            request.body_bytes += len(data)
            digest.update(data)
            if request.body_bytes <= KEPT_BYTES:
                request.body += data

    if [value.lower() for value in request.values("transfer-encoding")] == ["chunked"]:
        while line := await reader.readline():
            size = int(line.partition(b";")[0], 16)
            if not size:
                break
            await take(size)
            await reader.readexactly(2)
        else:
            raise EOFError
        while (await reader.readline()).strip():
            pass
    else:
        await take(sum(map(int, request.values("content-length"))))
    request.sha256 = digest.hexdigest()


_served = itertools.count(1)


async def _describe(request: Received, stream: Stream) -> None:
    body = json.dumps(
        {
            "served": next(_served),
            "port": request.port,
            "method": request.method,
            "target": request.target,
            "body_bytes": request.body_bytes,
            "sha256": request.sha256,
        }
    ).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    await stream.send(head % len(body) + (b"" if request.method == "HEAD" else body))
