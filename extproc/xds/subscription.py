"""One Envoy's ADS stream as a state machine: requests and snapshots in, responses out.

State of the world (SotW) xDS over one aggregated stream. Rules, from Envoy's xDS protocol page
(https://www.envoyproxy.io/docs/envoy/latest/api-docs/xds_protocol):

* A request with the nonce of our last response of its type acknowledges it, or refuses it when
  ``error_detail`` is set (NACK); after a NACK Envoy keeps what it had, and we do not send the same
  version again.
* A request with an older nonce is stale and gets no answer.
* A request that names other resources than before is a new subscription and is answered at once.
* What is referred to is sent first: clusters, endpoints, secrets, listeners, filters, routes. A cluster that changes warms
  up until its endpoints arrive, and a listener until its routes do, so those follow always.

One rule is our own. A cluster that is new to Envoy is not used before each of its endpoints has been
checked once, and an Envoy that has just started waits for all clusters with its listener: a worker that
hangs would hold up everything for the time-out of a health check. So the first answer for a cluster
holds only endpoints that are known to be healthy, and the rest follows as soon as Envoy has taken it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from extproc.xds.snapshot import (
    CLUSTER_TYPE,
    ENDPOINT_TYPE,
    EXTENSION_TYPE,
    LISTENER_TYPE,
    ROUTE_TYPE,
    TYPES,
    Snapshot,
)
from protos.discovery_pb2 import DiscoveryRequest, DiscoveryResponse

_PARTIAL = "-healthy"
"""Ends the version of endpoints that are not all there yet."""

FirstEndpoints = Callable[[], Mapping[str, bytes]]
"""Returns, by cluster, the endpoints that are known to be healthy, serialised."""

_FOLLOWS = {CLUSTER_TYPE: {ENDPOINT_TYPE}, LISTENER_TYPE: {EXTENSION_TYPE, ROUTE_TYPE}}

_ESSENTIAL = (CLUSTER_TYPE, ENDPOINT_TYPE, LISTENER_TYPE, ROUTE_TYPE)
"""Types without which Envoy can pass nothing on; it asks for others only when those refer to them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Nack:
    """Envoy refused a version."""

    type_url: str
    version: str
    message: str
    """Envoy's own words."""


@dataclasses.dataclass(slots=True)
class _Subscription:
    names: tuple[str, ...]
    sent_version: str = ""
    acked_version: str = ""
    nonce: str = ""


class AdsSession:
    """The subscriptions of one stream."""

    def __init__(self, snapshot: Snapshot, first_endpoints: FirstEndpoints | None = None) -> None:
        """Begin with *snapshot*; without *first_endpoints* every answer is complete."""
        self._snapshot = snapshot
        self._first_endpoints = first_endpoints
        self._settled: set[str] = set()
        """Clusters whose endpoints Envoy has all got, now or in an earlier stream."""
        self._subscriptions: dict[str, _Subscription] = {}
        self._nonce = 0
        self._offered: frozenset[str] = frozenset()
        self.clusters: frozenset[str] = frozenset()
        """The clusters that Envoy has."""

    def on_request(self, request: DiscoveryRequest) -> tuple[list[DiscoveryResponse], Nack | None]:
        """Take a request; return what to send and, if it was one, the refusal."""
        type_url = request.type_url
        if type_url not in TYPES:
            return [], None  # Envoy may ask for types that we do not serve (runtime)
        names = tuple(sorted(set(request.resource_names)))
        subscription = self._subscriptions.get(type_url)
        if subscription is None or not request.response_nonce:
            self._subscriptions[type_url] = _Subscription(names)
            if type_url == ENDPOINT_TYPE and request.version_info:
                self._settled.update(names)  # it had them from an earlier stream
            return [self._respond(type_url)], None
        if request.response_nonce != subscription.nonce:
            return [], None
        nack = None
        if request.HasField("error_detail"):
            nack = Nack(type_url, subscription.sent_version, request.error_detail.message)
        else:
            subscription.acked_version = subscription.sent_version
            if type_url == CLUSTER_TYPE:
                self.clusters = self._offered
        partial = nack is None and subscription.sent_version.endswith(_PARTIAL)
        if partial:
            self._settled.update(subscription.names)
        if names != subscription.names or partial:
            subscription.names = names
            return [self._respond(type_url)], nack
        return [], nack

    def on_snapshot(self, snapshot: Snapshot) -> list[DiscoveryResponse]:
        """Return what must be sent so that Envoy follows *snapshot*, in order."""
        self._snapshot = snapshot
        responses = []
        due: set[str] = set()
        for type_url in TYPES:
            subscription = self._subscriptions.get(type_url)
            if subscription is None:
                continue
            sent = subscription.sent_version.removesuffix(_PARTIAL)
            changed = sent != snapshot.resources[type_url].version
            if changed or type_url in due:
                responses.append(self._respond(type_url))
            if changed:
                due |= _FOLLOWS.get(type_url, set())
        return responses

    def serving(self) -> bool:
        """Tell whether Envoy has accepted some version of every type: it can pass on requests."""
        asked = self._subscriptions
        return all(type_url in asked for type_url in _ESSENTIAL) and all(
            subscription.acked_version for subscription in asked.values()
        )

    def _respond(self, type_url: str) -> DiscoveryResponse:
        subscription = self._subscriptions[type_url]
        resources = self._snapshot.resources[type_url]
        self._nonce += 1
        subscription.nonce = str(self._nonce)
        subscription.sent_version = resources.version
        response = DiscoveryResponse(
            version_info=resources.version, type_url=type_url, nonce=subscription.nonce
        )
        # In CDS and LDS no names means all; EDS and RDS answer what was asked for.
        wildcard = not subscription.names and type_url in (CLUSTER_TYPE, LISTENER_TYPE)
        by_name = resources.by_name
        if type_url == CLUSTER_TYPE:
            self._offered = frozenset(by_name)
        if type_url == ENDPOINT_TYPE:
            by_name = self._cautious(by_name, subscription.names)
            if by_name is not resources.by_name:
                subscription.sent_version += _PARTIAL
                response.version_info = subscription.sent_version
        for name, value in by_name.items():
            if wildcard or name in subscription.names:
                response.resources.add(type_url=type_url, value=value)
        return response

    def _cautious(
        self, complete: Mapping[str, bytes], names: tuple[str, ...]
    ) -> Mapping[str, bytes]:
        """Return *complete* with fewer endpoints in clusters that are new to Envoy, if any are."""
        self._settled.intersection_update(names)
        new = [name for name in names if name not in self._settled and name in complete]
        if self._first_endpoints is None or not new:
            return complete
        first = self._first_endpoints()
        if all(first.get(name) == complete[name] for name in new):
            self._settled.update(new)
            return complete
        return {**complete, **{name: first.get(name, complete[name]) for name in new}}
