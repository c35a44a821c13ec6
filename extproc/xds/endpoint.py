"""EDS: the workers of a pool."""

from __future__ import annotations

from envoy_data_plane.envoy.config.endpoint.v3 import ClusterLoadAssignment

from extproc.xds.model import PoolModel
from extproc.xds.wire import endpoint_addresses, load_assignment


def build_endpoints(pool: PoolModel) -> ClusterLoadAssignment:
    """Return the endpoints of *pool*; none means 503 at once for its requests."""
    return load_assignment(pool.name, endpoint_addresses(pool.endpoints))
