"""A healthy worker that never ends: headers, one server-sent event, then silence.

``python -m tests.bench.sse_server PORT...`` listens on every port. SIGUSR1 ends the streams that are
open.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import cast

import uvloop

_OPENING = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b'1b\r\ndata: {"object": "chunk"}\n\n\r\n'
)
_EMPTY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
_END = b"0\r\n\r\n"
_open: set[_Worker] = set()


class _Worker(asyncio.Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.received = bytearray()

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, separator, body = bytes(self.received).partition(b"\r\n\r\n")
        if not separator:
            return
        if head.startswith(b"GET "):  # a health check, or a question about models
            self.received.clear()
            self.transport.write(_EMPTY)
            return
        length = next(
            int(line.partition(b":")[2])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length:")
        )
        if len(body) >= length:
            self.received.clear()
            _open.add(self)
            self.transport.write(_OPENING)

    def connection_lost(self, _error: Exception | None) -> None:
        _open.discard(self)


def _end_all() -> None:
    for worker in _open:
        worker.transport.write(_END)
    _open.clear()


async def _run(ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, _end_all)
    servers = [await loop.create_server(_Worker, "127.0.0.1", port, backlog=4096) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    uvloop.run(_run([int(port) for port in sys.argv[1:]]))
