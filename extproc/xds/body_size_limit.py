"""413 by size, without buffering the body.

The filter came with Envoy 1.40, and ``envoy-data-plane`` has no class for it yet; the message here has
the shape of ``envoy/extensions/filters/http/body_size_limit/v3/body_size_limit.proto``.
"""

from __future__ import annotations

import betterproto2
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.google.protobuf import Any, UInt64Value
from envoy_data_plane.message_pool import default_message_pool
from pydantic.dataclasses import dataclass


@dataclass(eq=False, repr=False, config={"extra": "forbid"})
class BodySizeLimit(betterproto2.Message):
    """Configuration of the filter."""

    max_request_bytes: int | None = betterproto2.field(
        1, betterproto2.TYPE_MESSAGE, unwrap=lambda: UInt64Value, optional=True
    )
    """Largest body that passes, in bytes; one byte more is answered with 413."""


default_message_pool.register_message(
    "envoy.extensions.filters.http.body_size_limit.v3", "BodySizeLimit", BodySizeLimit
)


def build_body_size_limit(limit_bytes: int) -> HttpFilter:
    """Return the filter that lets bodies of up to *limit_bytes* through."""
    config = BodySizeLimit(max_request_bytes=limit_bytes)
    return HttpFilter(name="envoy.filters.http.body_size_limit", typed_config=Any.pack(config))
