"""A TCP proxy before the API server whose connections can be cut, or made to hang."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Self

from tests.e2e.harness import free_port

CHUNK_BYTES = 65_536
END_LIMIT_S = 10.0


class Proxy:
    """Passes on what comes, in a thread of its own: tests block. Use ``with``."""

    def __init__(self, target: int) -> None:
        self.port = free_port()
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        self.open()
        return self

    def __exit__(self, *_error: object) -> None:
        self.cut()
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_LIMIT_S)
        self._loop.close()

    def open(self) -> None:
        """Take connections."""
        self._do(self._open())

    def cut(self) -> None:
        """End all connections and take no more."""
        self._do(self._cut())

    def stall(self) -> None:
        """Let the connections that there are hang for ever; new ones work."""
        self._do(self._stall())

    def _do(self, what) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(END_LIMIT_S)

    async def _open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def _cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            writer.transport.abort()

    async def _stall(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers |= {writer, back}
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(_pass_on(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while chunk := await reader.read(CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
        writer.close()
