"""gRPC health checking (grpc.health.v1), which gateways and Envoy clusters ask for.

The messages are two fields: the answer for a service that serves is one constant, for one that does not
another. Every service name has the same state, as the process serves all of them on one socket.
"""

from __future__ import annotations

from collections.abc import Callable

from extproc.h2.grpc import Call, Method

CHECK = "/grpc.health.v1.Health/Check"
SERVING = b"\x08\x01"
NOT_SERVING = b"\x08\x02"


class HealthService:
    """Serves ``Health.Check``."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready

    def methods(self) -> dict[str, Method]:
        """Return what a server registers."""
        return {CHECK: lambda call: _Check(call, self._ready)}


class _Check:
    __slots__ = ("_call", "_ready")

    def __init__(self, call: Call, ready: Callable[[], bool]) -> None:
        self._call = call
        self._ready = ready

    def on_message(self, message: bytes) -> None:
        """Take the name of a service, which does not matter."""

    def on_end(self) -> None:
        self._call.send(SERVING if self._ready() else NOT_SERVING)
        self._call.finish()

    def on_close(self) -> None:
        """Nothing is kept."""
