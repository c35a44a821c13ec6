"""A consistent set of resources.

Versions are hashes of the content: a service that restarts with the same workers offers the same
versions and bytes, and Envoy has nothing to do. Listeners, and with them connections, survive.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping

import betterproto2
from envoy_data_plane.envoy.config.cluster.v3 import Cluster, ClusterDiscoveryType
from envoy_data_plane.envoy.config.endpoint.v3 import ClusterLoadAssignment

from extproc.xds.cluster import build_clusters
from extproc.xds.endpoint import build_endpoints
from extproc.xds.listener import build_listener
from extproc.xds.model import EnvoyModel
from extproc.xds.route import build_routes

_PREFIX = "type.googleapis.com/envoy.config"
CLUSTER_TYPE = f"{_PREFIX}.cluster.v3.Cluster"
ENDPOINT_TYPE = f"{_PREFIX}.endpoint.v3.ClusterLoadAssignment"
LISTENER_TYPE = f"{_PREFIX}.listener.v3.Listener"
ROUTE_TYPE = f"{_PREFIX}.route.v3.RouteConfiguration"

TYPES = (CLUSTER_TYPE, ENDPOINT_TYPE, LISTENER_TYPE, ROUTE_TYPE)
"""In the order in which Envoy must get them: what is referred to comes first (make before break)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Resources:
    """All resources of one type, serialised, by name."""

    version: str
    by_name: Mapping[str, bytes]

    @classmethod
    def of(cls, messages: Mapping[str, betterproto2.Message]) -> Resources:
        """Serialise *messages* and hash them into a version."""
        by_name = {name: bytes(messages[name]) for name in sorted(messages)}
        digest = hashlib.sha256()
        for name, value in by_name.items():
            digest.update(f"{name} {len(value)} ".encode())
            digest.update(value)
        return cls(version=digest.hexdigest()[:16], by_name=by_name)


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """The resources of every type at one moment."""

    resources: Mapping[str, Resources]
    """By type URL; holds each of ``TYPES``."""


def build_snapshot(model: EnvoyModel) -> Snapshot:
    """Build all resources of *model*. Equal models give equal bytes."""
    endpoints = {pool.name: build_endpoints(pool) for pool in model.pools}
    pools = tuple(dataclasses.replace(pool, endpoints=()) for pool in model.pools)
    lasting = _lasting_resources(dataclasses.replace(model, pools=pools))
    resources = {**lasting, ENDPOINT_TYPE: Resources.of(endpoints)}
    return Snapshot({type_url: resources[type_url] for type_url in TYPES})


@functools.lru_cache(maxsize=4)
def _lasting_resources(model: EnvoyModel) -> Mapping[str, Resources]:
    """Return what does not depend on the workers, so that their coming and going costs little."""
    clusters = {cluster.name: cluster for cluster in build_clusters(model)}
    check_consistent(clusters, {pool.name: build_endpoints(pool) for pool in model.pools})
    listener, routes = build_listener(model), build_routes(model)
    return {
        CLUSTER_TYPE: Resources.of(clusters),
        LISTENER_TYPE: Resources.of({listener.name: listener}),
        ROUTE_TYPE: Resources.of({routes.name: routes}),
    }


def check_consistent(
    clusters: Mapping[str, Cluster], endpoints: Mapping[str, ClusterLoadAssignment]
) -> None:
    """Every EDS cluster has its endpoints and the other way round, or Envoy would wait for ever."""
    wanted = {name for name, c in clusters.items() if c.type is ClusterDiscoveryType.EDS}
    if wanted != set(endpoints):
        raise ValueError(f"EDS clusters {sorted(wanted)} but endpoints for {sorted(endpoints)}")
