"""Small pieces that several builders need."""

from __future__ import annotations

import datetime as dt

from envoy_data_plane.envoy.config.core.v3 import (
    Address as EnvoyAddress,
)
from envoy_data_plane.envoy.config.core.v3 import (
    AggregatedConfigSource,
    ApiVersion,
    ConfigSource,
    Pipe,
    SocketAddress,
)
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    LbEndpoint,
    LocalityLbEndpoints,
)

from extproc.address import Address


def seconds(value: float) -> dt.timedelta:
    """Return a protobuf duration."""
    return dt.timedelta(seconds=value)


def envoy_address(address: Address, *, mode: int = 0) -> EnvoyAddress:
    """Return *address* as Envoy writes it; *mode*: of a socket that it makes, 0 leaves the usual one."""
    if address.path:
        return EnvoyAddress(pipe=Pipe(path=address.path, mode=mode))
    return EnvoyAddress(socket_address=SocketAddress(address=address.host, port_value=address.port))


def from_ads() -> ConfigSource:
    """Say that a resource comes over the ADS stream."""
    return ConfigSource(ads=AggregatedConfigSource(), resource_api_version=ApiVersion.V3)


def load_assignment(cluster: str, addresses: list[Address]) -> ClusterLoadAssignment:
    """Return the endpoints of *cluster*, in one locality."""
    endpoints = [
        LbEndpoint(endpoint=Endpoint(address=envoy_address(address))) for address in addresses
    ]
    return ClusterLoadAssignment(
        cluster_name=cluster,
        endpoints=[LocalityLbEndpoints(lb_endpoints=endpoints)] if endpoints else [],
    )
