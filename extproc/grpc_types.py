"""grpc.aio with raw bytes, in types: handlers get no generated messages from the library."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import grpc
import grpc.aio


class Stream(Protocol):
    """The part of ``grpc.aio.ServicerContext`` that the handlers use."""

    async def read(self) -> bytes | object:
        """Return the next message, or ``grpc.aio.EOF`` when the peer has ended its side."""
        ...

    async def write(self, message: bytes) -> None:
        """Send a message."""
        ...

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        """End the stream with an error; raises."""
        ...


def stream_stream(
    service: str, method: str, handle: Callable[[object, Stream], Awaitable[None]]
) -> grpc.GenericRpcHandler:
    """Return the handler of one bidirectional method, bytes in and bytes out."""
    handler = grpc.stream_stream_rpc_method_handler(handle)  # type: ignore[var-annotated]
    return grpc.method_handlers_generic_handler(service, {method: handler})


def stream_unary(
    service: str, method: str, handle: Callable[[object, Stream], Awaitable[bytes]]
) -> grpc.GenericRpcHandler:
    """Return the handler of one client-streaming method, bytes in and bytes out."""
    handler = grpc.stream_unary_rpc_method_handler(handle)  # type: ignore[var-annotated]
    return grpc.method_handlers_generic_handler(service, {method: handler})
