"""Places in the listener's chain for filters that may change while requests are under way.

The listener names a slot, and Envoy gets what stands in it by ECDS: API keys, rates and the like change
without a new listener, which would drain the connections of the old one. A listener that has not got its
slots yet waits for them, and one that never gets them answers 500: nobody slips in meanwhile (ADR 18).
"""

from __future__ import annotations

from envoy_data_plane.envoy.config.core.v3 import (
    ExtensionConfigSource,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import HeaderMutation
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.google.protobuf import Any

from extproc.xds.wire import from_ads

AUTH_SLOT = "client-auth"
RATE_SLOT = "rate-limit"

_FILTERS = "type.googleapis.com/envoy.extensions.filters.http"
_EMPTY = f"{_FILTERS}.header_mutation.v3.HeaderMutation"
SLOT_TYPES = {
    AUTH_SLOT: (
        f"{_FILTERS}.api_key_auth.v3.ApiKeyAuth",
        f"{_FILTERS}.basic_auth.v3.BasicAuth",
        f"{_FILTERS}.ext_authz.v3.ExtAuthz",
        f"{_FILTERS}.fault.v3.HTTPFault",
        _EMPTY,
        f"{_FILTERS}.jwt_authn.v3.JwtAuthentication",
    ),
    RATE_SLOT: (_EMPTY, f"{_FILTERS}.local_ratelimit.v3.LocalRateLimit"),
}
"""What each slot may hold."""


def build_slot(name: str) -> HttpFilter:
    """Return the filter of which the listener knows the name only."""
    source = ExtensionConfigSource(config_source=from_ads(), type_urls=list(SLOT_TYPES[name]))
    return HttpFilter(name=name, config_discovery=source)


def fill_slot(name: str, config: Any) -> TypedExtensionConfig:
    """Return what stands in a slot."""
    return TypedExtensionConfig(name=name, typed_config=config)


def build_empty() -> Any:
    """Return a filter that does nothing."""
    return Any.pack(HeaderMutation())
