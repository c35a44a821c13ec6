"""Which lock a path stands under."""

from __future__ import annotations

import pytest

from extproc.admin import ENDPOINTS
from extproc.xds.model import PROBE_PATHS
from extproc.xds.route import (
    GUARDED_PATHS,
    GUARDED_PREFIXES,
    OPEN_PATHS,
    OPEN_PREFIXES,
    build_routes,
)
from extproc.xds.slots import AUTH_SLOT
from tests.extproc.xds.models import read_model

pytestmark = pytest.mark.slow


def lock_of(path):
    """Return the kind of the first route that takes *path*."""
    if path in PROBE_PATHS:
        return "none"
    if path in GUARDED_PATHS or path.startswith(tuple(f"{p}/" for p in GUARDED_PREFIXES)):
        return "guard"
    if path in GUARDED_PREFIXES:
        return "guard"
    if path in OPEN_PATHS or path in OPEN_PREFIXES:
        return "client"
    return "client" if path.startswith(tuple(f"{p}/" for p in OPEN_PREFIXES)) else "worker"


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda e: f"{e.method} {e.path}")
def test_each_endpoint_of_the_service_has_its_lock(endpoint):
    """Those that are open to everybody in the service are for clients, and the others for administrators."""
    lock = lock_of(endpoint.path)

    assert lock != "worker"
    assert (lock == "guard") != endpoint.is_open


@pytest.mark.parametrize("case", ["default", "api_keys", "fail_closed", "base_paths", "cors"])
def test_nothing_but_probes_and_guarded_paths_is_without_authentication(case):
    """Whatever leads to a worker, or is open in the service, passes the slot."""
    (host,) = build_routes(read_model(case)).virtual_hosts

    unlocked = [route for route in host.routes if AUTH_SLOT in route.typed_per_filter_config]

    paths = {route.match.path or route.match.path_separated_prefix for route in unlocked}
    assert paths == {*PROBE_PATHS, *GUARDED_PATHS, *GUARDED_PREFIXES}
    assert all(route.route.cluster == "extproc_admin" for route in unlocked)
    assert not any(route.match.prefix for route in unlocked)
