"""API keys: ``Authorization: Bearer KEY`` or ``x-api-key: KEY``."""

from __future__ import annotations

from envoy_data_plane.envoy.extensions.filters.http.api_key_auth.v3 import (
    ApiKeyAuth,
    Credential,
    Forwarding,
    KeySource,
)
from envoy_data_plane.google.protobuf import Any

from extproc.xds.model import CLIENT_HEADER, ApiKeys

API_KEY_HEADERS = ("authorization", "x-api-key")
"""In this order: the first that a request has is the one that counts."""


def build_api_key_auth(auth: ApiKeys, *, keep: bool) -> Any:
    """Return the filter; *keep*: workers get the key, too."""
    config = ApiKeyAuth(
        credentials=[Credential(key=key.key, client=key.client) for key in auth.keys],
        key_sources=[KeySource(header=name) for name in API_KEY_HEADERS],
        forwarding=Forwarding(header=CLIENT_HEADER, hide_credentials=not keep),
    )
    return Any.pack(config)
