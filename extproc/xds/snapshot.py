"""A consistent set of resources.

Versions are hashes of the content: a service that restarts with the same workers offers the same
versions and bytes, and Envoy has nothing to do. Listeners, and with them connections, survive.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Collection, Mapping

from extproc.clusters import ClusterView, EndpointView
from extproc.xds.cluster import build_fixed_clusters, build_worker_cluster
from extproc.xds.endpoint import build_endpoints
from extproc.xds.extensions import build_extensions
from extproc.xds.listener import build_listener
from extproc.xds.model import Access, EnvoyModel, RateLimits
from extproc.xds.prefill_listener import build_prefill_listener, build_prefill_routes
from extproc.xds.route import build_routes
from extproc.xds.secrets import build_secrets
from extproc.xds.worker_tls import tls_addresses

_PREFIX = "type.googleapis.com/envoy.config"
SECRET_TYPE = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"  # noqa: S105  the name of a type
CLUSTER_TYPE = f"{_PREFIX}.cluster.v3.Cluster"
ENDPOINT_TYPE = f"{_PREFIX}.endpoint.v3.ClusterLoadAssignment"
LISTENER_TYPE = f"{_PREFIX}.listener.v3.Listener"
EXTENSION_TYPE = f"{_PREFIX}.core.v3.TypedExtensionConfig"
ROUTE_TYPE = f"{_PREFIX}.route.v3.RouteConfiguration"

TYPES = (
    CLUSTER_TYPE,
    ENDPOINT_TYPE,
    SECRET_TYPE,
    LISTENER_TYPE,
    EXTENSION_TYPE,
    ROUTE_TYPE,
)
"""In the order in which Envoy must get them: what is referred to comes first (make before break)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Resources:
    """All resources of one type, serialised, by name."""

    version: str
    by_name: Mapping[str, bytes]

    @classmethod
    def of(cls, serialised: Mapping[str, bytes]) -> Resources:
        """Hash *serialised* into a version."""
        by_name = {name: serialised[name] for name in sorted(serialised)}
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
    endpoints = {cluster.name: build_endpoints(cluster) for cluster in model.clusters}
    clusters = _clusters(model)
    check_consistent(clusters, endpoints, model)
    views = tuple(dataclasses.replace(c, endpoints=()) for c in model.clusters)
    routes = _routes(dataclasses.replace(model, clusters=views))
    settings = dataclasses.replace(model, clusters=())
    resources = {
        CLUSTER_TYPE: Resources.of(clusters),
        ENDPOINT_TYPE: Resources.of(endpoints),
        SECRET_TYPE: Resources.of(_secrets(settings)),
        LISTENER_TYPE: Resources.of(_listener(_lasting_settings(model))),
        EXTENSION_TYPE: Resources.of(_extensions(settings)),
        ROUTE_TYPE: Resources.of(routes),
    }
    return Snapshot({type_url: resources[type_url] for type_url in TYPES})


# What does not depend on the workers is built once: their coming and going must cost little.


def _clusters(model: EnvoyModel) -> dict[str, bytes]:
    settings = _lasting_settings(model)
    built = dict(_fixed_clusters(settings))
    for view in model.clusters:
        built[view.name] = _cluster(settings, _lasting(view))
    return built


def _lasting_settings(model: EnvoyModel) -> EnvoyModel:
    """Leave of *model* what listeners and clusters depend on: what may change at any time is not of it."""
    return dataclasses.replace(
        model, clusters=(), access=Access(), rate_limits=RateLimits(), certificates=None
    )


def _lasting(view: ClusterView) -> ClusterView:
    """Leave of the endpoints what the cluster itself depends on: addresses that stand for TLS names."""
    endpoints = tuple(EndpointView("", address, tls=True) for address in tls_addresses(view))
    return dataclasses.replace(view, endpoints=endpoints, is_default=False)


@functools.lru_cache(maxsize=1024)
def _cluster(settings: EnvoyModel, view: ClusterView) -> bytes:
    return bytes(build_worker_cluster(settings, view))


@functools.lru_cache(maxsize=4)
def _fixed_clusters(settings: EnvoyModel) -> Mapping[str, bytes]:
    return {cluster.name: bytes(cluster) for cluster in build_fixed_clusters(settings)}


@functools.lru_cache(maxsize=4)
def _listener(settings: EnvoyModel) -> Mapping[str, bytes]:
    listeners = [build_listener(settings)]
    if settings.prefill_address is not None:
        listeners.append(build_prefill_listener(settings))
    return {listener.name: bytes(listener) for listener in listeners}


@functools.lru_cache(maxsize=4)
def _extensions(settings: EnvoyModel) -> Mapping[str, bytes]:
    return {extension.name: bytes(extension) for extension in build_extensions(settings)}


@functools.lru_cache(maxsize=4)
def _secrets(settings: EnvoyModel) -> Mapping[str, bytes]:
    return {secret.name: bytes(secret) for secret in build_secrets(settings)}


@functools.lru_cache(maxsize=16)
def _routes(model: EnvoyModel) -> Mapping[str, bytes]:
    """Return the route table of *model*, whose clusters have no endpoints."""
    tables = [build_routes(model)]
    if model.prefill_address is not None:
        tables.append(build_prefill_routes(model))
    return {table.name: bytes(table) for table in tables}


def check_consistent(
    clusters: Collection[str], endpoints: Collection[str], model: EnvoyModel
) -> None:
    """Every cluster of workers has its endpoints and the other way round, or Envoy would wait for ever."""
    wanted = {view.name for view in model.clusters}
    if wanted != set(endpoints) or not wanted <= set(clusters):
        raise ValueError(f"clusters {sorted(wanted)} but endpoints for {sorted(endpoints)}")
