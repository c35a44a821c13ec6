"""The pings by which a router finds workers with P2P-NCCL: a ZMQ message every second."""

import asyncio
import contextlib
import importlib
from typing import Any

import msgspec

PERIOD_S = 1.0
"""Time between two pings, in seconds; a router forgets a worker after five."""


class NcclPing:
    """Pings *address*, ``host:port`` of the router's ROUTER socket."""

    def __init__(self, address: str, *, kind: str, http_address: str, zmq_address: str) -> None:
        try:
            self._zmq: Any = importlib.import_module("zmq")
        except ImportError as error:
            raise ValueError("discovery_address needs pyzmq: pip install pyzmq") from error
        self._address = address
        self._message = msgspec.msgpack.encode(
            {"type": kind, "http_address": http_address, "zmq_address": zmq_address}
        )
        self._identity = zmq_address.encode()
        self._context: Any = None
        self._socket: Any = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Ping once and then every second."""
        zmq = self._zmq
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IDENTITY, self._identity)
        self._socket.connect(f"tcp://{self._address}")
        self._send()

    def close(self) -> None:
        """Ping no more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._context is not None:
            self._socket.close()
            self._context.term()
            self._context = None

    def _send(self) -> None:
        with contextlib.suppress(self._zmq.Again):  # nobody has taken the last thousand pings
            self._socket.send(self._message, self._zmq.NOBLOCK)
        self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._send)
