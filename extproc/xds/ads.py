"""The ADS shell: one ``AdsSession`` per connected Envoy, fed with requests and snapshots."""

from __future__ import annotations

from collections.abc import Callable

import structlog
from google.protobuf.message import DecodeError

from extproc.h2.grpc import Call, Method, Status
from extproc.metrics import Metrics
from extproc.xds.snapshot import Snapshot
from extproc.xds.subscription import AdsSession, FirstEndpoints, Nack
from protos.discovery_pb2 import DiscoveryRequest, DiscoveryResponse

STREAM_RESOURCES = (
    "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources"
)

log = structlog.get_logger(__name__)


class AdsService:
    """Serves ``AggregatedDiscoveryService.StreamAggregatedResources``."""

    def __init__(
        self, snapshot: Snapshot, metrics: Metrics, first_endpoints: FirstEndpoints | None = None
    ) -> None:
        """Serve *snapshot*; *first_endpoints*: see ``subscription``."""
        self.snapshot = snapshot
        self.first_endpoints = first_endpoints
        self._metrics = metrics
        self._streams: set[_AdsStream] = set()
        self.on_accepted: Callable[[], None] = lambda: None
        """Called when an Envoy has accepted clusters."""

    def methods(self) -> dict[str, Method]:
        """Return what a server registers."""
        return {STREAM_RESOURCES: self.open}

    def open(self, call: Call) -> _AdsStream:
        """Return the handler of one Envoy's stream."""
        stream = _AdsStream(call, self)
        self._streams.add(stream)
        self._count("envoy connected")
        return stream

    def serving(self) -> bool:
        """Tell whether a connected Envoy has a configuration; true when none takes it from here."""
        return not self._streams or any(stream.session.serving() for stream in self._streams)

    def accepts(self, cluster: str) -> bool:
        """Tell whether a connected Envoy has *cluster*."""
        return any(cluster in stream.session.clusters for stream in self._streams)

    def publish(self, snapshot: Snapshot) -> None:
        """Send *snapshot* to every connected Envoy; later ones get it when they come."""
        self.snapshot = snapshot
        for stream in self._streams:
            stream.send(stream.session.on_snapshot(snapshot))
            stream.call.flush()

    def on_nack(self, nack: Nack) -> None:
        """Say that Envoy refused, in its own words."""
        self._metrics.xds_nacks.inc()
        log.error(
            "envoy refused a configuration and keeps the last good one",
            type=nack.type_url.rpartition(".")[2],
            version=nack.version,
            reason=nack.message,
        )

    def forget(self, stream: _AdsStream) -> None:
        """Drop an Envoy that is gone."""
        self._streams.discard(stream)
        self._count("envoy disconnected")

    def _count(self, event: str) -> None:
        self._metrics.envoys.set(len(self._streams))
        log.info(event, envoys=len(self._streams))


class _AdsStream:
    """One Envoy."""

    def __init__(self, call: Call, service: AdsService) -> None:
        self.call = call
        self.session = AdsSession(service.snapshot, service.first_endpoints)
        self._service = service

    def send(self, responses: list[DiscoveryResponse]) -> None:
        for response in responses:
            self.call.send(response.SerializeToString())

    def on_message(self, message: bytes) -> None:
        try:
            request = DiscoveryRequest.FromString(message)
        except DecodeError:
            self.call.finish(Status.INVALID_ARGUMENT, "not a DiscoveryRequest")
            return
        clusters = self.session.clusters
        responses, nack = self.session.on_request(request)
        if self.session.clusters != clusters:
            self._service.on_accepted()
        if nack is not None:
            self._service.on_nack(nack)
        self.send(responses)

    def on_end(self) -> None:
        self.call.finish()

    def on_close(self) -> None:
        self._service.forget(self)
