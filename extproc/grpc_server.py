"""The gRPC shell: sockets in front of ``h2.grpc.GrpcConnection``."""

from __future__ import annotations

import asyncio
import typing
from collections.abc import Mapping

import structlog

from extproc.address import Address
from extproc.h2.grpc import GrpcConnection, Method
from extproc.limits import BACKLOG

CLOSE_TIMEOUT_S = 1.0
"""For writing what is queued; a peer that does not read it by then is cut off."""

log = structlog.get_logger(__name__)


class _Peer(asyncio.Protocol):
    """One connection of Envoy."""

    def __init__(self, server: GrpcServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self.grpc = GrpcConnection(
            server.methods,
            max_message_bytes=server.max_message_bytes,
            report=_report,
            flush=self.flush,
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = typing.cast(asyncio.Transport, transport)
        self._server.joined(self)
        self.flush()

    def data_received(self, data: bytes) -> None:
        self.grpc.http.receive(data)
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._server.left(self)
        self.grpc.lost()

    def flush(self) -> None:
        """Write what is queued."""
        transport = self._transport
        if transport is None:
            return
        output = self.grpc.http.output()
        if output:
            transport.write(output)
        if self.grpc.http.closed and not transport.is_closing():
            log.warning(
                "grpc connection closed: its peer is at fault", reason=str(self.grpc.http.fault)
            )
            transport.close()

    def close(self) -> None:
        """Close the connection after what is queued."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()


class GrpcServer:
    """Serves gRPC methods on one address."""

    def __init__(self, methods: Mapping[str, Method], *, max_message_bytes: int) -> None:
        """*methods* by path. *max_message_bytes*: a larger message ends its call."""
        self.methods = methods
        self.max_message_bytes = max_message_bytes
        self.peers: set[_Peer] = set()
        self.all_gone = asyncio.Event()
        self.all_gone.set()
        self._listener: asyncio.Server | None = None
        self._draining = False
        self._stopped = False

    async def start(self, address: Address) -> None:
        """Listen; ``OSError`` when the address cannot be had."""
        loop = asyncio.get_running_loop()

        def peer() -> _Peer:
            return _Peer(self)

        if address.path:
            self._listener = await loop.create_unix_server(peer, address.path, backlog=BACKLOG)
        else:
            self._listener = await loop.create_server(
                peer, address.host, address.port, backlog=BACKLOG
            )

    def joined(self, peer: _Peer) -> None:
        """Note a new connection."""
        self.peers.add(peer)
        self.all_gone.clear()
        # A connection may have been under way when the listener was closed.
        if self._draining:
            peer.grpc.http.drain()
        if self._stopped:
            peer.close()

    def left(self, peer: _Peer) -> None:
        """Note that a connection is gone."""
        self.peers.discard(peer)
        if not self.peers:
            self.all_gone.set()

    def drain(self) -> None:
        """Take no new connections and no new calls; those under way go on."""
        self._draining = True
        if self._listener is not None:
            self._listener.close()
        for peer in self.peers:
            peer.grpc.http.drain()
            peer.flush()

    async def stop(self) -> None:
        """End everything."""
        self.drain()
        self._stopped = True
        for peer in list(self.peers):
            peer.grpc.abort_all()
            peer.flush()
            peer.close()
        if not await self._until_all_gone():
            log.warning("connections cut off at the end", connections=len(self.peers))
            for peer in list(self.peers):
                peer.abort()
            await self._until_all_gone()

    async def _until_all_gone(self) -> bool:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.all_gone.wait()
        except TimeoutError:
            return False
        return True


def _report(method: str, error: Exception) -> None:
    log.error("grpc call failed", method=method, exc_info=error)
