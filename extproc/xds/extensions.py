"""ECDS: filters whose configuration may change without touching the listener.

A listener that changes drains its connections, and long streams on them would be cut when the time for
that is up. So what may be changed while requests are under way stands in resources of its own.
"""

from __future__ import annotations

from envoy_data_plane.envoy.config.core.v3 import TypedExtensionConfig

from extproc.xds.client_auth import build_client_auth
from extproc.xds.model import EnvoyModel
from extproc.xds.rate_limit import build_rate_limit
from extproc.xds.slots import AUTH_SLOT, RATE_SLOT, fill_slot


def build_extensions(model: EnvoyModel) -> list[TypedExtensionConfig]:
    """Return what stands in every slot of the listener."""
    return [
        fill_slot(AUTH_SLOT, build_client_auth(model.access)),
        fill_slot(RATE_SLOT, build_rate_limit(model.rate_limits)),
    ]
