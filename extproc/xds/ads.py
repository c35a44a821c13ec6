"""The ADS shell: one ``AdsSession`` per connected Envoy, fed with requests and snapshots."""

from __future__ import annotations

import asyncio

import grpc
import structlog
from google.protobuf.message import DecodeError

from extproc.grpc_types import Stream, stream_stream
from extproc.metrics import Metrics
from extproc.xds.snapshot import Snapshot
from extproc.xds.subscription import AdsSession, Nack
from protos.discovery_pb2 import DiscoveryRequest, DiscoveryResponse

SERVICE_NAME = "envoy.service.discovery.v3.AggregatedDiscoveryService"

log = structlog.get_logger(__name__)


class _Stream:
    """One Envoy. Responses of its two sources leave in the order in which they were made."""

    def __init__(self, context: Stream, snapshot: Snapshot) -> None:
        self.session = AdsSession(snapshot)
        self._context = context
        self._writing = asyncio.Lock()

    async def send(self, responses: list[DiscoveryResponse]) -> None:
        async with self._writing:
            for response in responses:
                await self._context.write(response.SerializeToString())


class AdsService:
    """Serves ``AggregatedDiscoveryService.StreamAggregatedResources``."""

    def __init__(self, snapshot: Snapshot, metrics: Metrics) -> None:
        self._snapshot = snapshot
        self._metrics = metrics
        self._streams: set[_Stream] = set()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return what a server registers."""
        return stream_stream(SERVICE_NAME, "StreamAggregatedResources", self.stream)

    def serving(self) -> bool:
        """Tell whether every connected Envoy has a configuration; true when none takes it from here."""
        return all(stream.session.serving() for stream in self._streams)

    async def publish(self, snapshot: Snapshot) -> None:
        """Send *snapshot* to every connected Envoy; later ones get it when they come."""
        self._snapshot = snapshot
        sends = [stream.send(stream.session.on_snapshot(snapshot)) for stream in self._streams]
        # A stream that breaks meanwhile is cleaned up by its own handler.
        await asyncio.gather(*sends, return_exceptions=True)

    async def stream(self, _requests: object, context: Stream) -> None:
        """Serve one Envoy until it goes away."""
        stream = _Stream(context, self._snapshot)
        self._streams.add(stream)
        self._metrics.envoys.set(len(self._streams))
        log.info("envoy connected", envoys=len(self._streams))
        try:
            while isinstance(raw := await context.read(), bytes):  # else EOF
                request = DiscoveryRequest.FromString(raw)
                responses, nack = stream.session.on_request(request)
                if nack is not None:
                    self._on_nack(nack)
                await stream.send(responses)
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a DiscoveryRequest")
        finally:
            self._streams.discard(stream)
            self._metrics.envoys.set(len(self._streams))
            log.info("envoy disconnected", envoys=len(self._streams))

    def _on_nack(self, nack: Nack) -> None:
        self._metrics.xds_nacks.inc()
        log.error(
            "envoy refused a configuration and keeps the last good one",
            type=nack.type_url.rpartition(".")[2],
            version=nack.version,
            reason=nack.message,
        )
