"""An HTTP/1.1 client that sends exactly what it is given and shows exactly what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import ssl
from collections.abc import Iterable, Sequence
from typing import Any, Self

LIMIT_S = 60.0
READ_BYTES = 262_144

Headers = Sequence[tuple[str, str]]


@dataclasses.dataclass(slots=True)
class Response:
    """A response; *body* is filled once it is read."""

    status: int
    version: str
    headers: list[tuple[str, str]]
    body: bytes = b""

    def values(self, name: str) -> list[str]:
        """Return every value of header *name*."""
        return [value for key, value in self.headers if key.lower() == name.lower()]

    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """One connection. Use ``async with``."""

    def __init__(
        self, port: int, host: str = "127.0.0.1", *, tls: ssl.SSLContext | None = None
    ) -> None:
        self._address = (host, port)
        self._tls = tls
        self._method = "GET"
        self._left: int | None = 0
        """Bytes of the body still to come; None: chunked or until the end."""
        self._chunked = False

    async def __aenter__(self) -> Self:
        async with asyncio.timeout(LIMIT_S):
            self.reader, self.writer = await asyncio.open_connection(
                *self._address, limit=READ_BYTES, ssl=self._tls
            )
        return self

    async def __aexit__(self, *_error: object) -> None:
        transport = self.writer.transport
        if transport.get_write_buffer_size():
            transport.abort()  # close would wait for a peer that reads no more
        self.writer.close()
        with contextlib.suppress(OSError):  # TimeoutError is one
            async with asyncio.timeout(LIMIT_S):
                await self.writer.wait_closed()

    def abort(self) -> None:
        """Leave without a word."""
        self.writer.transport.abort()

    async def send_raw(self, data: bytes) -> None:
        """Send bytes."""
        async with asyncio.timeout(LIMIT_S):
            self.writer.write(data)
            await self.writer.drain()

    async def send(
        self,
        method: str,
        target: str,
        headers: Headers = (),
        body: bytes | None = None,
        *,
        chunks: Iterable[bytes] | None = None,
    ) -> None:
        """Send a request: with *body* and its length, or in *chunks*."""
        self._method = method
        lines = [f"{method} {target} HTTP/1.1"]
        if not any(name.lower() == "host" for name, _ in headers):
            lines.append("Host: router.test")
        lines += [f"{name}: {value}" for name, value in headers]
        if chunks is not None:
            lines.append("Transfer-Encoding: chunked")
        elif body is not None:
            lines.append(f"Content-Length: {len(body)}")
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        if chunks is None:
            await self.send_raw(head + (body or b""))
            return
        await self.send_raw(head)
        for chunk in chunks:
            await self.send_raw(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        await self.send_raw(b"0\r\n\r\n")

    async def head(self) -> Response:
        """Read the head of the response, past any 100-continue."""
        while True:
            async with asyncio.timeout(LIMIT_S):
                raw = await self.reader.readuntil(b"\r\n\r\n")
            first, *lines = raw[:-4].decode("latin-1").split("\r\n")
            version, status, *_ = first.split(" ")
            headers = []
            for line in lines:
                name, _, value = line.partition(":")
                headers.append((name, value.strip(" \t")))
            response = Response(int(status), version, headers)
            if response.status == 100:
                continue
            self._chunked = response.values("transfer-encoding") == ["chunked"]
            lengths = response.values("content-length")
            if self._method == "HEAD" or response.status in (101, 204, 304):
                self._chunked, self._left = False, 0
            elif self._chunked or not lengths:
                self._left = None
            else:
                (length,) = lengths
                self._left = int(length)
            return response

    async def piece(self) -> bytes:
        """Return the next piece of the body as it arrives, b"" at its end."""
        async with asyncio.timeout(LIMIT_S):
            if self._chunked:
                line = await self.reader.readline()
                if not line:
                    raise EOFError("the response ended before its last chunk")
                size = int(line.partition(b";")[0], 16)
                data = await self.reader.readexactly(size)
                await self.reader.readexactly(2)
                return data
            if self._left is None:
                return await self.reader.read(READ_BYTES)
            if not self._left:
                return b""
            data = await self.reader.read(min(self._left, READ_BYTES))
            if not data:
                raise EOFError("the response ended in the middle of its body")
            self._left -= len(data)
            return data

    async def body(self) -> bytes:
        """Read the rest of the body."""
        pieces = []
        while piece := await self.piece():
            pieces.append(piece)
        return b"".join(pieces)

    async def event(self) -> str:
        """Return the text of the next server-sent event, "" at the end."""
        data = await self.piece()
        while data and not data.endswith(b"\n\n"):
            data += await self.piece()
        return data.decode().removeprefix("data: ").strip()

    async def ask(
        self,
        method: str,
        target: str,
        headers: Headers = (),
        body: bytes | None = None,
        *,
        chunks: Iterable[bytes] | None = None,
    ) -> Response:
        """Send a request and read the whole response."""
        await self.send(method, target, headers, body, chunks=chunks)
        response = await self.head()
        response.body = await self.body()
        return response


async def ask(
    port: int,
    method: str,
    target: str,
    headers: Headers = (),
    body: bytes | None = None,
    *,
    chunks: Iterable[bytes] | None = None,
    host: str = "127.0.0.1",
) -> Response:
    """Send one request on a connection of its own and read the whole response."""
    async with Connection(port, host) as connection:
        return await connection.ask(method, target, headers, body, chunks=chunks)


def openai_error(response: Response) -> dict[str, Any]:
    """Check that *response* is an error as OpenAI shapes it and return what is in it."""
    assert response.values("content-type") == ["application/json"], response
    document = response.json()
    assert set(document) == {"error"}, document
    error = document["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str)
    assert error["message"]
    assert error["type"] == (
        "invalid_request_error" if response.status < 500 else "server_error"
    ), response
    assert isinstance(error["code"], str)
    return error
