"""An HTTP/2 client, with prior knowledge or over TLS: many streams on one connection."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Sequence
from typing import Self

import h2.config
import h2.connection
import h2.events

from tests.e2e.client import LIMIT_S, READ_BYTES, Headers, Response


class H2Stream:
    """One request on a connection."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.trailers: list[tuple[str, str]] = []
        self._events: asyncio.Queue[h2.events.Event] = asyncio.Queue()

    def put(self, event: h2.events.Event) -> None:
        self._events.put_nowait(event)

    async def head(self) -> Response:
        """Wait for the head of the response."""
        async with asyncio.timeout(LIMIT_S):
            event = await self._events.get()
        if isinstance(event, h2.events.InformationalResponseReceived):
            return await self.head()
        assert isinstance(event, h2.events.ResponseReceived), event
        headers = [(_text(name), _text(value)) for name, value in event.headers]
        (status,) = [value for name, value in headers if name == ":status"]
        return Response(int(status), "HTTP/2", [h for h in headers if h[0] != ":status"])

    async def piece(self) -> bytes:
        """Return the next piece of the body, b"" at its end."""
        while True:
            async with asyncio.timeout(LIMIT_S):
                event = await self._events.get()
            if isinstance(event, h2.events.StreamEnded):
                return b""
            if isinstance(event, h2.events.TrailersReceived):
                self.trailers = [(_text(name), _text(value)) for name, value in event.headers]
                continue
            if isinstance(event, h2.events.StreamReset) and event.error_code == 0:
                return b""  # a server need not wait for the end of the request
            assert isinstance(event, h2.events.DataReceived), event
            if event.data:
                return event.data

    async def response(self) -> Response:
        """Wait for the whole response."""
        response = await self.head()
        pieces = []
        while piece := await self.piece():
            pieces.append(piece)
        response.body = b"".join(pieces)
        response.headers += self.trailers
        return response


class H2Connection:
    """One connection. Use ``async with``."""

    def __init__(
        self,
        port: int = 0,
        host: str = "127.0.0.1",
        *,
        socket_path: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._address = (host, port)
        self._tls = tls
        self._socket_path = socket_path
        self._h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=True, header_encoding=None)
        )
        self._streams: dict[int, H2Stream] = {}
        self._window = asyncio.Condition()

    async def __aenter__(self) -> Self:
        async with asyncio.timeout(LIMIT_S):
            if self._socket_path is None:
                opened = await asyncio.open_connection(*self._address, ssl=self._tls)
            else:
                opened = await asyncio.open_unix_connection(self._socket_path)
            self._reader, self._writer = opened
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(1 << 24)
        self._flush()
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._reading.cancel()
        self._writer.transport.abort()
        await asyncio.wait([self._reading])
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def send(
        self,
        method: str,
        target: str,
        headers: Headers = (),
        body: bytes = b"",
        *,
        last: bool = True,
    ) -> H2Stream:
        """Send a request; unless *last*, more of its body could follow."""
        number = self._h2.get_next_available_stream_id()
        stream = self._streams[number] = H2Stream(number)
        pseudo: Sequence[tuple[str, str]] = [
            (":method", method),
            (":scheme", "http" if self._tls is None else "https"),
            (":authority", "router.test"),
            (":path", target),
        ]
        self._h2.send_headers(number, [*pseudo, *headers], end_stream=last and not body)
        self._flush()
        left = memoryview(body)
        async with asyncio.timeout(LIMIT_S):
            while left:
                room = min(
                    self._h2.local_flow_control_window(number), self._h2.max_outbound_frame_size
                )
                if not room:
                    async with self._window:
                        await self._window.wait()
                    continue
                part, left = left[:room], left[room:]
                self._h2.send_data(number, part, end_stream=last and not left)
                self._flush()
                await self._writer.drain()
        return stream

    async def ask(
        self, method: str, target: str, headers: Headers = (), body: bytes = b""
    ) -> Response:
        """Send a request and wait for the whole response."""
        stream = await self.send(method, target, headers, body)
        return await stream.response()

    async def reset(self, stream: H2Stream) -> None:
        """Cancel one request."""
        self._h2.reset_stream(stream.number, 8)
        self._flush()

    def _flush(self) -> None:
        self._writer.write(self._h2.data_to_send())

    async def _read(self) -> None:
        while data := await self._reader.read(READ_BYTES):
            for event in self._h2.receive_data(data):
                if isinstance(event, h2.events.DataReceived) and event.flow_controlled_length:
                    self._h2.acknowledge_received_data(
                        event.flow_controlled_length, event.stream_id
                    )
                if isinstance(event, h2.events.WindowUpdated):
                    async with self._window:
                        self._window.notify_all()
                stream = self._streams.get(getattr(event, "stream_id", 0) or 0)
                if stream is not None and isinstance(
                    event,
                    h2.events.ResponseReceived
                    | h2.events.InformationalResponseReceived
                    | h2.events.DataReceived
                    | h2.events.TrailersReceived
                    | h2.events.StreamEnded
                    | h2.events.StreamReset,
                ):
                    stream.put(event)
            self._flush()


def _text(value: bytes | str) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
