"""EDS: the workers of a cluster.

Built with our own protobuf subset: workers come and go while requests run, and building a thousand
endpoints must not take the time of the requests.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

from extproc.address import split_host_port
from extproc.clusters import ClusterView, EndpointView
from protos.endpoint_pb2 import ClusterLoadAssignment, LbEndpoint

TRANSPORT_SOCKET_NAMESPACE = "envoy.transport_socket_match"
TLS_KEY = "tls"
HTTPS_KEY = "https"
HTTPS = "yes"
BY_NAME = "name"
"""Value of ``TLS_KEY``: the certificate carries the endpoint's host name. Else it is an IP address."""


def build_endpoints(
    cluster: ClusterView, *, only: Collection[tuple[str, str]] | None = None
) -> bytes:
    """Return the serialised endpoints of *cluster*; none means 503 at once for its requests.

    *only*: cluster and endpoint of those to include; None takes all.
    """
    name = cluster.name
    assignment = ClusterLoadAssignment(cluster_name=name)
    chosen = [view for view in cluster.endpoints if only is None or (name, view.endpoint) in only]
    if chosen:
        assignment.endpoints.add().lb_endpoints.extend([_endpoint(view) for view in chosen])
    return assignment.SerializeToString(deterministic=True)


@functools.lru_cache(maxsize=8192)
def _endpoint(view: EndpointView) -> LbEndpoint:
    built = LbEndpoint()
    host, port = split_host_port(view.endpoint)
    socket_address = built.endpoint.address.socket_address
    socket_address.address = host
    socket_address.port_value = port
    if view.draining:
        built.health_status = LbEndpoint.DRAINING
    if view.name and not view.name_is_ip:
        # The name that the worker is asked for: as Host, and for TLS.
        built.endpoint.hostname = view.name
        built.endpoint.health_check_config.hostname = view.name
    if view.tls:
        match = built.metadata.filter_metadata[TRANSPORT_SOCKET_NAMESPACE]
        match.fields[TLS_KEY].string_value = view.name if view.name_is_ip else BY_NAME
        match.fields[HTTPS_KEY].string_value = HTTPS
    return built
