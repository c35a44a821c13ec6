"""gRPC on top of ``ServerConnection``: messages of one method call, still without I/O.

See https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md. A call is a ``Call``; what it does is a
``Handler`` that a method's factory makes for it. Compression is not offered and so not accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Protocol
from urllib.parse import quote

from extproc.h2.connection import HeaderList, ServerConnection

PREFIX_BYTES = 5  # compressed flag, length
SAFE_IN_MESSAGE = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
MAX_STATUS_MESSAGE_CHARS = 512

# HPACK, without touching the peer's table: `:status: 200` is entry 8 of the static table, a literal
# `content-type` has its name there (31).
_RESPONSE_HEADERS = b"\x88\x0f\x10\x10application/grpc"


class Status(IntEnum):
    """The gRPC status codes that this service uses."""

    OK = 0
    INVALID_ARGUMENT = 3
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class Handler(Protocol):
    """One method call, as the service sees it."""

    def on_message(self, message: bytes) -> None:
        """Take a message of the peer."""
        ...

    def on_end(self) -> None:
        """Note that the peer will send no more; usually the moment to ``finish``."""
        ...

    def on_close(self) -> None:
        """Note that the call is over, for whatever reason. Called exactly once."""
        ...


Method = Callable[["Call"], Handler]
"""Makes the handler of a call; it is called before the first message."""

FaultReport = Callable[[str, Exception], None]
"""Called with the method's path and an exception that its handler let through."""


class Call:
    """One call, as its handler uses it."""

    __slots__ = (
        "_connection",
        "_needed",
        "_partial",
        "_server",
        "_started",
        "_stream",
        "handler",
        "path",
    )

    def __init__(self, server: GrpcConnection, stream: int, path: str) -> None:
        self._server = server
        self._connection = server.http
        self._stream = stream
        self._started = False
        self._partial: bytearray | None = None
        """The beginning of a message, with its prefix."""
        self._needed = 0
        """Bytes that it must have before it is worth looking at."""
        self.path = path
        self.handler: Handler | None = None

    def send(self, message: bytes) -> None:
        """Send a message."""
        if not self._started:
            self._started = True
            self._connection.send_headers(self._stream, _RESPONSE_HEADERS)
        self._connection.send_data(
            self._stream, b"\x00" + len(message).to_bytes(4, "big") + message
        )

    def finish(self, status: Status = Status.OK, message: str = "") -> None:
        """End the call; later messages of the peer are dropped."""
        trailers = _trailers(status, message)
        if not self._started:
            trailers = _RESPONSE_HEADERS + trailers
        self._connection.end(self._stream, trailers)
        self._server.close(self._stream)

    def flush(self) -> None:
        """Write what was sent, when that happens outside of a message of the peer."""
        self._server.flush()

    def take(self, data: bytes, max_message_bytes: int) -> None:
        """Cut *data* into messages and hand them over."""
        if self._partial is not None:
            self._partial += data
            if len(self._partial) < self._needed:
                return
            data, self._partial = bytes(self._partial), None
        position, length, needed = 0, len(data), PREFIX_BYTES
        while length - position >= PREFIX_BYTES and self.handler is not None:
            size = int.from_bytes(data[position + 1 : position + PREFIX_BYTES], "big")
            if data[position]:
                self.finish(Status.UNIMPLEMENTED, "compressed messages are not supported")
                return
            if size > max_message_bytes:
                self.finish(
                    Status.RESOURCE_EXHAUSTED,
                    f"message of {size} bytes is larger than {max_message_bytes}",
                )
                return
            end = position + PREFIX_BYTES + size
            if end > length:
                needed = PREFIX_BYTES + size
                break
            message = data[position + PREFIX_BYTES : end]
            if end == length:
                data = b""  # a large message is not kept twice while it is handled
            self.handler.on_message(message)
            position = end
        if position < length and self.handler is not None:
            self._partial, self._needed = bytearray(data[position:]), needed

    @property
    def cut_off(self) -> bool:
        """Whether the end of a message has not come."""
        return self._partial is not None


class GrpcConnection:
    """The calls of one peer."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        *,
        max_message_bytes: int,
        report: FaultReport,
        flush: Callable[[], None],
    ) -> None:
        """*methods* by path, ``/package.Service/Method``. *flush* writes ``http.output()``."""
        self.http = ServerConnection(self)
        self.flush = flush
        self._methods = methods
        self._max_message_bytes = max_message_bytes
        self._report = report
        self._calls: dict[int, Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def lost(self) -> None:
        """Close every call: the connection is gone."""
        self.http.lost()

    def close(self, stream: int) -> None:
        """Forget a call and tell its handler."""
        call = self._calls.pop(stream, None)
        if call is None or call.handler is None:
            return
        handler, call.handler = call.handler, None
        self._tell_closed(call, handler)

    # Listener of the HTTP/2 connection.

    def on_request(self, stream: int, headers: HeaderList) -> None:
        """Find the method and make its handler."""
        path = next((value for name, value in headers if name == b":path"), b"").decode("latin-1")
        call = Call(self, stream, path)
        self._calls[stream] = call
        method = self._methods.get(path)
        if method is None:
            call.finish(Status.UNIMPLEMENTED, f"unknown method {path[:100]}")
            return
        try:
            handler = method(call)
        except Exception as error:  # noqa: BLE001 - one call's fault must not end the others
            self._report(path, error)
            call.finish(Status.INTERNAL, "internal error")
            return
        if stream in self._calls:
            call.handler = handler
        else:
            self._tell_closed(call, handler)  # it has finished the call at once

    def on_data(self, stream: int, data: bytes) -> None:
        """Hand messages over; a handler that fails ends its call, never with OK."""
        call = self._calls.get(stream)
        if call is None:
            return
        try:
            call.take(data, self._max_message_bytes)
        except Exception as error:  # noqa: BLE001 - see above
            self._report(call.path, error)
            call.finish(Status.INTERNAL, "internal error")

    def on_end(self, stream: int) -> None:
        """Tell the handler that the peer has sent everything."""
        call = self._calls.get(stream)
        if call is None or call.handler is None:
            return
        if call.cut_off:
            call.finish(Status.INTERNAL, "the last message is cut off")
            return
        try:
            call.handler.on_end()
        except Exception as error:  # noqa: BLE001 - see above
            self._report(call.path, error)
            call.finish(Status.INTERNAL, "internal error")

    def on_reset(self, stream: int) -> None:
        """Close the call: the peer has given it up."""
        self.close(stream)

    def abort_all(self) -> None:
        """End every call: the service stops."""
        for call in list(self._calls.values()):
            call.finish(Status.UNAVAILABLE, "the service stops")

    def _tell_closed(self, call: Call, handler: Handler) -> None:
        try:
            handler.on_close()
        except Exception as error:  # noqa: BLE001 - see above
            self._report(call.path, error)


def _trailers(status: Status, message: str) -> bytes:
    block = _literal(b"grpc-status", str(int(status)).encode())
    if message:
        shown = message[:MAX_STATUS_MESSAGE_CHARS]
        text = quote(shown, safe=SAFE_IN_MESSAGE, errors="replace")
        block += _literal(b"grpc-message", text.encode())
    return block


def _literal(name: bytes, value: bytes) -> bytes:
    """Return a header as HPACK literal without indexing."""
    return b"\x00" + _length(name) + name + _length(value) + value


def _length(text: bytes) -> bytes:
    """Return the length of *text* as an HPACK integer with a 7-bit prefix (RFC 7541, 5.1)."""
    size = len(text)
    if size < 127:
        return bytes((size,))
    out, size = bytearray((127,)), size - 127
    while size >= 128:
        out.append(size % 128 + 128)
        size //= 128
    out.append(size)
    return bytes(out)
