"""One HTTP request on its way through the worker, and the replies every handler makes."""

import asyncio
import dataclasses
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import TypeVar

from aiohttp import web

from extproc.sim.api_errors import ApiError
from extproc.sim.recorder import Arrival, Outcome
from extproc.sim.wire import parse_body

T = TypeVar("T")
Body = bytes | bytearray


@dataclasses.dataclass(slots=True)
class Exchange:
    """A request, and its body once it is read."""

    request: web.BaseRequest
    path: str
    """Below the base path of the worker and without query; empty outside of it."""
    arrival: Arrival | None
    """None for requests that are not recorded."""
    body: Body = b""
    """Empty where the route does not keep it."""
    body_bytes: int = 0
    """Length of the body, kept or not."""
    head_sent: bool = False
    """Whether the response can no longer be replaced by another."""

    def started(self, status: int) -> None:
        """Record that the head of the response is sent."""
        self.head_sent = True
        if self.arrival is not None:
            self.arrival.status = status

    def ended(self, status: int) -> None:
        """Record that the response is complete."""
        if self.arrival is not None and self.arrival.outcome is Outcome.OPEN:
            self.arrival.outcome = Outcome.ENDED
            self.arrival.status = status

    def cut(self, outcome: Outcome) -> None:
        """Record that the response is not complete; *outcome* says who cut it."""
        if self.arrival is not None and self.arrival.outcome is Outcome.OPEN:
            self.arrival.outcome = outcome

    def reset_connection(self) -> None:
        """Send a TCP reset; what is not sent yet is lost, and the handler's task gets cancelled."""
        self.cut(Outcome.BROKEN)
        transport = self.request.transport
        if transport is not None:
            reset(transport)


def reset(transport: asyncio.Transport) -> None:
    """Close *transport* with a TCP reset, as the kernel does for a process that died with unread data."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        linger_for_nothing = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_for_nothing)
    transport.abort()


def parse_json(exchange: Exchange, form: type[T]) -> T:
    """Decode the JSON body of *exchange*; ApiError 400 says what is wrong, as vLLM does."""
    media_type = exchange.request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(
            HTTPStatus.BAD_REQUEST,
            "Unsupported Media Type: Only 'application/json' is allowed",
        )
    return parse_body(exchange.body, form)


Handler = Callable[[Exchange], Awaitable[web.StreamResponse]]


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """What one method and path lead to."""

    handler: Handler
    inference: bool = False
    """Whether it counts as load and the faults apply to it."""
    keep_body: bool = True
    """False for uploads that may be larger than memory."""


Routes = Mapping[tuple[str, str], Route]
"""By method and path."""


class Replies:
    """Builds responses that say which worker they come from."""

    def __init__(self, worker_name: str) -> None:
        # uvicorn is what a client of a real vLLM sees
        self.headers = {"server": "uvicorn", "x-sim-worker": worker_name}

    def json(self, body: bytes, *, status: int = HTTPStatus.OK) -> web.Response:
        """Return a JSON response."""
        return self.plain(body, content_type="application/json", status=status)

    def plain(
        self, body: bytes, *, content_type: str = "text/plain", status: int = HTTPStatus.OK
    ) -> web.Response:
        """Return a response of any type."""
        return web.Response(
            body=body, status=status, headers={**self.headers, "content-type": content_type}
        )

    def event_stream(self) -> web.StreamResponse:
        """Return a response for server-sent events, not started."""
        content_type = "text/event-stream; charset=utf-8"
        return web.StreamResponse(headers={**self.headers, "content-type": content_type})
